"""What keeps memory from being freed or touched: engines that have it registered, transfers not certified."""

from __future__ import annotations

import bisect
import itertools
from typing import TYPE_CHECKING, NamedTuple

from simpler.buffers import Allocation, Pin
from simpler.errors import MemoryRangeError
from simpler.states import State

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Sequence

    from simpler.transfer_ranges import Piece

Access = tuple[int, int, int, int]
"""(region, mode, begin, end): region 0 is the host's, worker i has region i + 1; mode 1 writes."""


class Unconfirmed(NamedTuple):
    """Addresses [begin, end) that a transfer may still touch."""

    transfer: int
    text: str
    begin: int
    end: int
    is_write: bool


class Pins:
    """The pins on one registry's allocations.

    Thread safety: any thread; all state is the allocations', under the registry's lock.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def pin(self, record: Allocation, name: str) -> Pin:
        """See `Buffer.pin`."""
        if not isinstance(name, str) or not name:
            raise TypeError(f"a pin's name is a str that is not empty: {name!r}")
        with self._lock:
            if record.state is not State.LIVE:
                raise record.unusable()
            if record.pin_refusal is not None:
                raise MemoryRangeError(record.pin_refusal)
            pin = Pin(record, name)
            record.pins.append(pin)
            return pin

    def unpin(self, record: Allocation, pin: Pin) -> None:
        """See `Pin.release`."""
        with self._lock:
            if pin in record.pins:
                record.pins.remove(pin)

    def block(self, transfer: int, text: str, pieces: Sequence[Piece]) -> list[tuple[Allocation, Pin]]:
        """Keep bytes that a transfer may still touch from everybody; the pins, for `unblock`."""
        kept = [(record, merged(transfer, text, record.address, own)) for record, own in by_record(pieces)]
        pinned = [(record, Pin(record, text)) for record, _ in kept]
        with self._lock:
            for record, parts in kept:
                record.unconfirmed += parts
            for record, pin in pinned:
                record.pins.append(pin)
        return pinned

    def unblock(self, transfer: int, pinned: Sequence[tuple[Allocation, Pin]]) -> None:
        """The transfer no longer touches them."""
        with self._lock:
            for record, pin in pinned:
                record.unconfirmed = tuple(
                    piece for piece in record.unconfirmed if piece.transfer != transfer
                )
                if pin in record.pins:
                    record.pins.remove(pin)


def by_record(pieces: Iterable[Piece]) -> list[tuple[Allocation, list[Piece]]]:
    """The pieces of each allocation."""
    found: dict[int, tuple[Allocation, list[Piece]]] = {}
    for piece in pieces:
        found.setdefault(id(piece[0]), (piece[0], []))[1].append(piece)
    return list(found.values())


def merged(transfer: int, text: str, address: int, pieces: Iterable[Piece]) -> tuple[Unconfirmed, ...]:
    """Pieces of one allocation; those that touch or overlap, and are used alike, as one."""
    parts: list[tuple[bool, int, int]] = []
    for writes, begin, end in sorted((writes, begin, end) for _, begin, end, writes in pieces):
        if parts and parts[-1][0] == writes and begin <= parts[-1][2]:
            parts[-1] = (writes, parts[-1][1], max(end, parts[-1][2]))
        else:
            parts.append((writes, begin, end))
    return tuple(
        Unconfirmed(transfer, text, address + begin, address + end, writes) for writes, begin, end in parts
    )


class _Reach:
    """Byte ranges, asked many times whether one of them overlaps."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        ordered = sorted(ranges)
        self._begins = [begin for begin, _ in ordered]
        self._ends = list(itertools.accumulate((end for _, end in ordered), max))

    def overlaps(self, begin: int, end: int) -> bool:
        before = bisect.bisect_left(self._begins, end)
        return before > 0 and self._ends[before - 1] > begin


def refuse_unconfirmed(record: Allocation, accesses: Sequence[Access]) -> None:
    """Raise MemoryRangeError when an access conflicts with a transfer that may still touch the memory."""
    touched = _Reach((begin, end) for _, _, begin, end in accesses)
    written = _Reach((begin, end) for _, writes, begin, end in accesses if writes)
    for piece in record.unconfirmed:
        if (touched if piece.is_write else written).overlaps(piece.begin, piece.end):
            low, high = piece.begin - record.address, piece.end - record.address
            raise MemoryRangeError(
                f"bytes {low} to {high} of {record.text} may still be "
                f"{'written' if piece.is_write else 'read'} by {piece.text}: confirm_transfers() or "
                "reset_provider() first"
            )


def refuse_pieces(pieces: Iterable[Piece]) -> None:
    """`refuse_unconfirmed` for the pieces of a transfer."""
    for record, own in by_record(pieces):
        if record.unconfirmed:
            base = record.address
            refuse_unconfirmed(
                record,
                [(record.worker + 1, int(writes), base + begin, base + end) for _, begin, end, writes in own],
            )
