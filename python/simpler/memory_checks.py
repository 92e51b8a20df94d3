"""What the registry checks and says, without its lock."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, SupportsIndex

from simpler.buffers import Buffer, HostBuffer
from simpler.errors import ClosedError
from simpler.ranges import byte_ranges
from simpler.tensor import Tensor
from simpler.uses import WRITE, Mode

if TYPE_CHECKING:
    from simpler.pins import Access

Memory = Buffer | HostBuffer | Tensor


def refuse_malloc(worker: int, nbytes: int) -> int:
    """The `malloc` of a closed Worker."""
    raise ClosedError(f"malloc of {nbytes} bytes on worker {worker}: the Worker was closed")


def nothing_to_free(worker: int, address: int, generation: int) -> None:
    """The device memory of a closed Worker has gone with its chips."""


def size_of(nbytes: object) -> int:
    """`nbytes` as an int of at least 1.

    Raises:
        TypeError: No integer.
        ValueError: Below 1.
    """
    if isinstance(nbytes, bool) or not isinstance(nbytes, SupportsIndex):
        raise TypeError(f"nbytes must be an integer: {nbytes!r}")
    size = operator.index(nbytes)
    if size < 1:
        raise ValueError(f"nbytes must be at least 1: {size}")
    return size


def accesses_of(memory: Memory, mode: Mode) -> list[Access]:
    """The bytes that a use touches."""
    buffer = memory if isinstance(memory, Buffer | HostBuffer) else memory.buffer
    record = buffer.allocation
    region, base, write = record.worker + 1, record.address, int(mode == WRITE)
    if isinstance(memory, Tensor):
        return [(region, write, base + low, base + high) for low, high in byte_ranges(memory)]
    return [(region, write, base, base + record.nbytes)]
