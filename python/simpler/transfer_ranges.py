"""The memory that a transfer names: ranges as users give them, pieces as the runtime keeps them."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex

from simpler.access import TransferAccess
from simpler.buffers import Allocation, Buffer, HostBuffer
from simpler.errors import MemoryRangeError
from simpler.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from simpler.memory_checks import Memory

Piece = tuple[Allocation, int, int, bool]
"""(record, begin, end, whether it is written): bytes [begin, end) of an allocation."""

_READ, _WRITE = TransferAccess.READ, TransferAccess.WRITE


class TransferRange(NamedTuple):
    """Bytes of a buffer that a transfer touches.

    Attributes:
        memory: A Buffer, HostBuffer or contiguous Tensor.
        access: What the provider does with them.
        offset: Bytes from the start of `memory`.
        nbytes: None is all from there on.
    """

    memory: Memory
    access: TransferAccess
    offset: int = 0
    nbytes: int | None = None


def checked_pieces(ranges: Iterable[object]) -> list[Piece]:
    """The ranges given to `submit_transfer`; thousands of them are usual, so each costs little.

    Raises:
        TypeError: No TransferRange, or no memory.
        ValueError: A tensor that is not contiguous, or no access.
        MemoryRangeError: Out of range, or empty.
    """
    items = list(ranges)  # keeps what the ids below belong to
    places: dict[int, tuple[Allocation, int, int]] = {}
    pieces = []
    for item in items:
        memory, access, offset, nbytes = item if item.__class__ is TransferRange else _as_range(item)
        place = places.get(id(memory))
        if place is None:
            place = places[id(memory)] = _place_of(memory)
        record, start, size = place
        if offset.__class__ is not int:
            offset = _integer("offset", offset)
        if nbytes is None:
            nbytes = size - offset
        elif nbytes.__class__ is not int:
            nbytes = _integer("nbytes", nbytes)
        if access is not _READ and access is not _WRITE:
            access = _as_access(access)
        if offset < 0 or nbytes < 1 or offset + nbytes > size:
            raise MemoryRangeError(
                f"{nbytes} bytes from offset {offset} are not inside {size} bytes of {memory!r}"
            )
        pieces.append((record, start + offset, start + offset + nbytes, access is _WRITE))
    return pieces


def records_of(pieces: Iterable[Piece]) -> list[Allocation]:
    """The allocations, each once, in order."""
    return list({id(piece[0]): piece[0] for piece in pieces}.values())


def _as_range(item: object) -> TransferRange:
    if not isinstance(item, tuple) or not 2 <= len(item) <= 4:
        raise TypeError(
            f"a range is a TransferRange(memory, access, offset, nbytes), not {type(item).__name__}"
        )
    return TransferRange(*item)


def _as_access(access: object) -> TransferAccess:
    try:
        return TransferAccess(access)  # type: ignore[arg-type]  # it says whether it is one
    except ValueError:
        raise ValueError(f"a range's access is TransferAccess.READ or WRITE: {access!r}") from None


def _place_of(memory: object) -> tuple[Allocation, int, int]:
    """(record, first byte, bytes) of a whole buffer or tensor."""
    if isinstance(memory, Tensor):
        if not memory.contiguous:
            raise ValueError("a tensor in a transfer must be contiguous: name its pieces as ranges")
        return memory.buffer.allocation, memory.offset, memory.nbytes
    if isinstance(memory, Buffer | HostBuffer):
        return memory.allocation, 0, memory.nbytes
    raise TypeError(f"a range names a Buffer, HostBuffer or Tensor, not {type(memory).__name__}")


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"a range's {name} is an integer: {value!r}")
    return operator.index(value)
