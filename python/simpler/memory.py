"""The registry of every allocation of a Worker: who owns it, who uses it, when it goes.

Every copy, task argument and extension buffer is checked here before anything is touched. A use of a
byte range is a place in the order of arrival: reads share, writes exclude, and whoever came first goes
first. `free` ends the handle at once; the memory goes when the last use has ended.

Thread safety: all methods may be called from any thread.
Fork: parent side only.
"""

from __future__ import annotations

import itertools
import logging
import math
import operator
import threading
import time
from typing import TYPE_CHECKING, SupportsIndex

from simpler.buffers import HOST, Allocation, Buffer, HostBuffer, Pin, State
from simpler.errors import BackPressureError, ClosedError, MemoryRangeError, WorkerError, WorkerTimeoutError
from simpler.host_heap import HostHeap
from simpler.tensor import Tensor
from simpler.uses import HOLD, READ, WRITE, Mode, Use

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["HOLD", "READ", "WRITE", "HostHeap", "Memory", "MemoryRegistry", "Mode", "Use"]

_log = logging.getLogger("simpler.memory")

Memory = Buffer | HostBuffer | Tensor


class MemoryRegistry:
    """Every allocation of one Worker."""

    def __init__(
        self,
        *,
        malloc: Callable[[int, int], int],
        free: Callable[[int, int, int], None],
        heap: HostHeap | None = None,
        maps_peers: bool = False,
    ) -> None:
        """Start empty.

        Args:
            malloc: ``malloc(worker, nbytes) -> address``: device memory. Its errors pass through.
            free: ``free(worker, address, generation)``: gives it back. The generation is the number of times
                the chip had died when the memory was made: a later process of that chip must refuse.
            heap: Host memory; None when there is none.
            maps_peers: Whether chips can address each other's memory.
        """
        self._malloc = malloc
        self._free = free
        self._heap = heap
        self._maps_peers = maps_peers
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        self._waiting = 0
        self._keys = itertools.count(1)
        self._live: dict[int, Buffer | HostBuffer] = {}
        self._generations: dict[int, int] = {}

    def malloc(self, worker: int, nbytes: int, *, device_id: int = 0) -> Buffer:
        """Device memory of one chip.

        Raises:
            ValueError: `nbytes` is below 1.
            MemoryRangeError: The chip died before the memory could be handed out.
        """
        nbytes = _size(nbytes)
        with self._lock:
            generation = self._generations.get(worker, 0)
        address = self._malloc(worker, nbytes)
        with self._lock:
            record = Allocation(self, next(self._keys), worker, device_id, address, nbytes, generation)
            if self._generations.get(worker, 0) != generation:
                record.state = State.LOST
                raise record.unusable()
            buffer = Buffer(record)
            self._live[record.key] = buffer
            return buffer

    def create_buffer(self, nbytes: int) -> HostBuffer:
        """Host memory that all children share.

        Raises:
            ValueError: `nbytes` is below 1.
            BackPressureError: The heap has no such block.
        """
        nbytes = _size(nbytes)
        with self._lock:
            heap = self._heap
            if heap is None:
                raise BackPressureError("this worker has no host heap")
            offset = heap.allocate(nbytes)
            address = heap.region.address + offset
            record = Allocation(self, next(self._keys), HOST, -1, address, nbytes, 0)
            buffer = HostBuffer(heap.region, offset, record)
            self._live[record.key] = buffer
            return buffer

    def free(self, buffer: Buffer | HostBuffer) -> None:
        """End the handle now, and give the memory back when its last use has ended.

        Raises:
            MemoryRangeError: Dead already, pinned, or another Worker's.
            BufferError: A HostBuffer has live views.
            WorkerTimeoutError: The chip did not take the request; unless `.started`, the buffer lives on.
        """
        if isinstance(buffer, Tensor):
            raise TypeError(
                "free() takes a Buffer or HostBuffer, not a Tensor, which holds no memory of its own"
            )
        with self._lock:
            record = self._usable(buffer)
            if record.pins:
                names = ", ".join(repr(pin.name) for pin in record.pins)
                raise MemoryRangeError(f"{record.text} is pinned by {names}: release the pin before free()")
            if isinstance(buffer, HostBuffer):
                buffer.retire()
            record.state = State.FREED
            del self._live[record.key]
            in_use = bool(record.uses)
        if not in_use:
            self._reclaim_now(buffer)

    def pin(self, record: Allocation, name: str) -> Pin:
        """See `Buffer.pin`."""
        if not isinstance(name, str) or not name:
            raise TypeError(f"a pin's name is a str that is not empty: {name!r}")
        with self._lock:
            if record.state is not State.LIVE:
                raise record.unusable()
            pin = Pin(record, name)
            record.pins.append(pin)
            return pin

    def unpin(self, record: Allocation, pin: Pin) -> None:
        """See `Pin.release`."""
        with self._lock:
            if pin in record.pins:
                record.pins.remove(pin)

    def enqueue(
        self,
        items: Sequence[tuple[Memory, Mode]],
        *,
        worker: int | None = None,
        what: str = "a call",
        group: object | None = None,
    ) -> Use:
        """Check memory and take its place in the order; `Use.wait` says when it may be touched.

        Args:
            items: What is used, and how.
            worker: The chip that will touch it: another chip's memory is an error unless peers are mapped.
            what: For messages.
            group: Uses of the same group do not wait for each other: their owner orders them.

        Raises:
            MemoryRangeError: Something is dead, another Worker's or another chip's; nothing is held.
        """
        use = Use(self, what, group)
        if not items:
            return use
        blockers = use.blockers
        with self._lock:
            plan = [(self._visible(memory, worker), memory, mode) for memory, mode in items]
            for record, memory, mode in plan:
                low, high = _range(memory, record, mode)
                write = mode == WRITE
                for other, other_low, other_high, other_write in record.uses:
                    if (
                        (write or other_write)
                        and low < other_high
                        and other_low < high
                        and other is not use
                        and (group is None or other.group is not group)
                    ):
                        blockers.append(other)
                record.uses.append((use, low, high, write))
                use.entries.append(record)
        return use

    def acquire(
        self,
        items: Sequence[tuple[Memory, Mode]],
        timeout_s: float = math.inf,
        *,
        worker: int | None = None,
        what: str = "a call",
        group: object | None = None,
    ) -> Use:
        """`enqueue`, then wait for the turn. Also a context manager: ``with registry.acquire(...):``.

        Raises:
            MemoryRangeError: As `enqueue`, or the memory was lost while waiting; nothing is held.
            WorkerTimeoutError: The turn did not come in time; nothing is held.
        """
        use = self.enqueue(items, worker=worker, what=what, group=group)
        if not use.blockers:
            return use
        try:
            if not use.wait(timeout_s):
                raise self._late(use, worker, timeout_s)
            for record in use.entries:
                if record.state in (State.LOST, State.CLOSED):
                    raise record.unusable()
        except BaseException:
            use.release()
            raise
        return use

    def hold(self, memories: Iterable[Memory], *, worker: int | None = None, what: str = "a call") -> Use:
        """Keep memory from being reclaimed until released; orders nothing."""
        return self.enqueue([(memory, HOLD) for memory in memories], worker=worker, what=what)

    def wait_turn(self, use: Use, timeout_s: float) -> bool:
        """See `Use.wait`."""
        deadline = time.monotonic() + timeout_s
        for blocker in use.blockers:
            while not blocker.released:
                if not self._wait_for(blocker, deadline - time.monotonic()):
                    return False
        return True

    def release(self, use: Use) -> None:
        """See `Use.release`."""
        if not use.entries:
            use.released = True
            return
        idle: list[Allocation] = []
        with self._lock:
            if use.released:
                return
            use.released = True
            use.blockers = []
            for record in use.entries:
                if len(record.uses) == 1 and record.uses[0][0] is use:
                    record.uses.clear()
                else:
                    record.uses = [entry for entry in record.uses if entry[0] is not use]
                if not record.uses and record.state is State.FREED and record not in idle:
                    idle.append(record)
            if self._waiting:
                self._turn.notify_all()
        for record in idle:
            self._reclaim_later(record)

    def worker_lost(self, worker: int) -> None:
        """A chip died, before any restart: its buffers say so from now on and their pins are dropped."""
        with self._lock:
            self._generations[worker] = self._generations.get(worker, 0) + 1
            for key, buffer in list(self._live.items()):
                record = buffer.allocation
                if record.worker == worker:
                    record.state = State.LOST
                    record.pins.clear()
                    del self._live[key]
            self._turn.notify_all()

    def close(self) -> None:
        """Every handle is dead from now on. Host memory without views goes back; views stay readable.

        Handles that are kept from now on keep nothing else alive.
        """
        with self._lock:
            for buffer in self._live.values():
                record = buffer.allocation
                record.state = State.CLOSED
                record.pins.clear()
                if isinstance(buffer, HostBuffer):
                    self._close_host(buffer)
            self._live.clear()
            self._heap = None
            self._malloc, self._free = _refuse_malloc, _nothing_to_free
            self._turn.notify_all()

    def live_bytes(self, worker: int) -> int:
        """Bytes in live buffers of one chip (`HOST`: of the heap), as asked for."""
        with self._lock:
            records = [buffer.allocation for buffer in self._live.values()]
        return sum(record.nbytes for record in records if record.worker == worker)

    def _usable(self, memory: Memory) -> Allocation:
        record = getattr(memory.buffer if isinstance(memory, Tensor) else memory, "allocation", None)
        if not isinstance(record, Allocation):
            raise TypeError(f"memory is named by a Buffer, HostBuffer or Tensor, not by {memory!r}")
        if record.registry is not self:
            raise MemoryRangeError(f"{record.text} belongs to another Worker")
        if record.state is not State.LIVE:
            raise record.unusable()
        return record

    def _visible(self, memory: Memory, worker: int | None) -> Allocation:
        record = self._usable(memory)
        if self._maps_peers or worker is None or record.worker in (worker, HOST):
            return record
        raise MemoryRangeError(
            f"{record.text} cannot be reached from worker {worker}: this platform does not map peers"
        )

    def _wait_for(self, blocker: Use, timeout_s: float) -> bool:
        """One wait; false when the time is over and the blocker still holds."""
        if blocker.waiter is not None:
            blocker.waiter(max(timeout_s, 0.0))
            return blocker.released or timeout_s > 0
        if timeout_s <= 0:
            return False
        with self._lock:
            self._waiting += 1
            try:
                if not blocker.released:
                    self._turn.wait(min(timeout_s, threading.TIMEOUT_MAX))
            finally:
                self._waiting -= 1
        return True

    def _late(self, use: Use, worker: int | None, timeout_s: float) -> WorkerTimeoutError:
        blocker = next((other for other in use.blockers if not other.released), use)
        return WorkerTimeoutError(
            f"{use.what} waited {timeout_s:g} s for {blocker.what} to end with the same memory",
            path=() if worker is None else (worker,),
            started=False,
            waited_for=blocker.what,
            timeout_s=timeout_s,
        )

    def _reclaim_now(self, buffer: Buffer | HostBuffer) -> None:
        record = buffer.allocation
        try:
            self._reclaim(record)
        except WorkerTimeoutError as error:
            if not error.started:
                with self._lock:
                    if self._generations.get(record.worker, 0) == record.generation:
                        record.state = State.LIVE
                        self._live[record.key] = buffer
            raise

    def _reclaim_later(self, record: Allocation) -> None:
        try:
            self._reclaim(record)
        except WorkerError as error:
            _log.warning("%s was not given back: %s", record.text, error)

    def _reclaim(self, record: Allocation) -> None:
        if record.worker != HOST:
            if self._generations.get(record.worker, 0) == record.generation:
                self._free(record.worker, record.address, record.generation)
        else:
            with self._lock:
                if self._heap is not None:
                    self._heap.release(record.address - self._heap.region.address)

    def _close_host(self, buffer: HostBuffer) -> None:
        try:
            buffer.retire()
        except BufferError:
            return
        if self._heap is not None and not buffer.allocation.uses:
            self._heap.release(buffer.address - self._heap.region.address)


def _refuse_malloc(worker: int, nbytes: int) -> int:
    raise ClosedError(f"malloc of {nbytes} bytes on worker {worker}: the Worker was closed")


def _nothing_to_free(worker: int, address: int, generation: int) -> None:
    """The device memory of a closed Worker has gone with its chips."""


def _size(nbytes: object) -> int:
    if isinstance(nbytes, bool) or not isinstance(nbytes, SupportsIndex):
        raise TypeError(f"nbytes must be an integer: {nbytes!r}")
    size = operator.index(nbytes)
    if size < 1:
        raise ValueError(f"nbytes must be at least 1: {size}")
    return size


def _range(memory: Memory, record: Allocation, mode: Mode) -> tuple[int, int]:
    """Bytes [low, high) of the allocation; an empty range at 0 conflicts with nothing."""
    if mode == HOLD:
        return 0, 0
    if isinstance(memory, Tensor):
        low, nbytes = memory.span
        return low, low + nbytes
    return 0, record.nbytes
