"""How transfers travel between a Worker and its chips: the meta bytes, the answers, the control verbs."""

from __future__ import annotations

import enum
import struct
from typing import TYPE_CHECKING, NamedTuple

from simpler.buffers import HOST
from simpler.control.transfers import TransferOutcome
from simpler.transfer_ranges import records_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simpler.transfer_ranges import Piece

_HEAD = struct.Struct("<Q")  # the id of the transfer
_RANGE = struct.Struct("<QQQ")  # address, nbytes, flags
_HOST_VISIBLE = 1
_WRITE = 2


class WireRange(NamedTuple):
    """One range as it is named to a chip; the address is that of the chip's process."""

    address: int
    nbytes: int
    host_visible: bool
    writes: bool


class Verb(enum.IntEnum):
    """What TRANSFER_CONTROL asks for; ids follow."""

    CANCEL = 1
    CONFIRM = 2
    RESET = 3


def pack_control(verb: Verb, ids: Sequence[int]) -> bytes:
    """The payload of TRANSFER_CONTROL."""
    return bytes([verb]) + pack_ids(ids)


def unpack_control(payload: bytes) -> tuple[Verb, list[int]]:
    """The reverse of `pack_control`.

    Raises:
        ValueError: The bytes do not decode.
    """
    if not payload:
        raise ValueError("a transfer control without a verb")
    return Verb(payload[0]), unpack_ids(payload[1:])


def pack_ids(ids: Sequence[int]) -> bytes:
    """Transfer ids, 8 bytes each."""
    return struct.pack(f"<{len(ids)}Q", *ids)


def unpack_ids(data: bytes) -> list[int]:
    """The reverse of `pack_ids`.

    Raises:
        ValueError: The bytes do not decode.
    """
    if len(data) % 8:
        raise ValueError(f"transfer ids end in the middle: {len(data)} bytes")
    return list(struct.unpack(f"<{len(data) // 8}Q", data))


def pack_answer(outcome: TransferOutcome, payload: bytes) -> bytes:
    """A provider's answer: the outcome in one byte, then the payload or the message."""
    return bytes([outcome]) + payload


def unpack_answer(data: bytes) -> tuple[TransferOutcome, bytes]:
    """The reverse of `pack_answer`. What is no answer is UNCONFIRMED: it certifies nothing."""
    if not data or data[0] not in TransferOutcome.__members__.values():
        return TransferOutcome.UNCONFIRMED, b"the chip's answer does not decode"
    return TransferOutcome(data[0]), data[1:]


def request_bytes(ranges: int) -> int:
    """The size of what `pack_request` makes."""
    return _HEAD.size + ranges * _RANGE.size


def pack_request(number: int, pieces: Sequence[Piece], host_visible: Sequence[bool]) -> bytes:
    """The meta bytes of TRANSFER.

    Args:
        number: The transfer's.
        pieces: What it may touch.
        host_visible: For each chip whether the host can touch its memory.
    """
    visible = {
        id(record): _HOST_VISIBLE if record.worker == HOST or host_visible[record.worker] else 0
        for record in records_of(pieces)
    }
    packed = [
        _RANGE.pack(record.address + begin, end - begin, visible[id(record)] | (_WRITE if writes else 0))
        for record, begin, end, writes in pieces
    ]
    return _HEAD.pack(number) + b"".join(packed)


def unpack_request(meta: bytes) -> tuple[int, list[WireRange]]:
    """The reverse of `pack_request`.

    Raises:
        ValueError: The bytes do not decode.
    """
    if len(meta) < _HEAD.size or (len(meta) - _HEAD.size) % _RANGE.size:
        raise ValueError(f"the ranges of a transfer end in the middle: {len(meta)} bytes")
    ranges = [
        WireRange(address, nbytes, bool(flags & _HOST_VISIBLE), bool(flags & _WRITE))
        for address, nbytes, flags in _RANGE.iter_unpack(memoryview(meta)[_HEAD.size :])
    ]
    return _HEAD.unpack_from(meta)[0], ranges
