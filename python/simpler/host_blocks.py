"""Which blocks of the host heap are whose, and when a block that is done with can go."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, TypeVar

from simpler.buffers import Allocation, HostBuffer, ScratchBuffer
from simpler.errors import BackPressureError
from simpler.states import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from simpler.host_heap import HostHeap

_Host = TypeVar("_Host", HostBuffer, ScratchBuffer)


class HostBlocks:
    """The host's side of the registry, which holds its lock around every call."""

    def __init__(self, heap: HostHeap | None) -> None:
        self._heap = heap
        self._scratch: dict[int, weakref.ref[ScratchBuffer]] = {}
        self._viewed: set[int] = set()  # scratch that has gone but for views: until its handle goes too

    def take(self, kind: type[_Host], nbytes: int, make_record: Callable[[int, int], Allocation]) -> _Host:
        """A block of the heap.

        Raises:
            BackPressureError: there is none of that size.
        """
        heap = self._heap
        if heap is None:
            raise BackPressureError("this worker has no host heap")
        offset = heap.allocate(nbytes)
        record = make_record(heap.region.address + offset, nbytes)
        buffer = kind(heap.region, offset, record)
        if isinstance(buffer, ScratchBuffer):
            self._scratch[record.key] = weakref.ref(buffer)
        return buffer

    def give_back(self, record: Allocation) -> None:
        """Nothing uses it any more. Scratch that something views stays until its handle goes."""
        reference = self._scratch.pop(record.key, None)
        scratch = reference() if reference is not None else None
        if scratch is not None and not scratch.retire_unless_viewed():
            self._viewed.add(record.key)
        else:
            self._release(record)

    def views_have_gone(self, record: Allocation) -> bool:
        """Its handle was collected: gives the block back if only that was waited for."""
        if record.key not in self._viewed:
            return False
        self._viewed.discard(record.key)
        self._release(record)
        return True

    def close_buffer(self, buffer: HostBuffer) -> None:
        """The Worker closes: the block goes unless something views it."""
        try:
            buffer.retire()
        except BufferError:
            return
        if not buffer.allocation.holds:
            self._release(buffer.allocation)

    def close(self) -> None:
        """The Worker closes: what is left is scratch."""
        for reference in self._scratch.values():
            if (scratch := reference()) is not None:
                scratch.allocation.state = State.CLOSED
                self.close_buffer(scratch)
        self._scratch.clear()
        self._heap = None

    def _release(self, record: Allocation) -> None:
        if self._heap is not None:
            self._heap.release(record.address - self._heap.region.address)
