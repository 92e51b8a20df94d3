"""The registry of every allocation of a Worker: who owns it, who uses it, when it goes.

Every copy, task argument and extension buffer is checked here before anything is touched. The order of uses
is the task graph's: reads share, writes exclude, and whoever came first goes first. `free` ends the handle at
once; the memory goes when the last use has ended.

Thread safety: all methods may be called from any thread.
Fork: parent side only.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections import deque
from typing import TYPE_CHECKING

from simpler.buffers import HOST, Allocation, Buffer, HostBuffer, ScratchBuffer
from simpler.errors import ClosedError, MemoryRangeError, WorkerError, WorkerTimeoutError
from simpler.host_blocks import HostBlocks
from simpler.host_heap import HostHeap
from simpler.memory_checks import (
    Memory,
    accesses_of,
    nothing_to_free,
    refuse_malloc,
    size_of,
)
from simpler.pins import Pins, refuse_pieces, refuse_unconfirmed
from simpler.states import State
from simpler.tensor import Tensor
from simpler.transfer_ranges import records_of
from simpler.uses import HOLD, READ, WRITE, Mode, Use

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from simpler import _core
    from simpler.pins import Access
    from simpler.transfer_ranges import Piece

__all__ = ["HOLD", "READ", "WRITE", "HostHeap", "Memory", "MemoryRegistry", "Mode", "Use"]

_log = logging.getLogger("simpler.memory")


class MemoryRegistry:
    """Every allocation of one Worker."""

    def __init__(
        self,
        *,
        malloc: Callable[[int, int], int],
        free: Callable[[int, int, int], None],
        heap: HostHeap | None = None,
        maps_peers: bool = False,
        engine: _core.TaskEngine | None = None,
    ) -> None:
        """Start empty.

        Args:
            malloc: ``malloc(worker, nbytes) -> address``: device memory. Its errors pass through.
            free: ``free(worker, address, generation)``: gives it back. The generation is the number of times
                the chip had died when the memory was made: a later process of that chip must refuse.
            heap: Host memory; None when there is none.
            maps_peers: Whether chips can address each other's memory.
            engine: Orders uses, and knows which buffers tasks name. May be set later, before anything else.
        """
        self.engine = engine
        self._malloc = malloc
        self._free = free
        self._host = HostBlocks(heap)
        self._maps_peers = maps_peers
        self._lock = threading.Lock()
        self.pins = Pins(self._lock)
        self._reclaimed = threading.Condition(self._lock)
        self._reclaiming = 0
        self._keys = itertools.count(1)
        self._live: dict[int, Buffer | HostBuffer] = {}
        self._dropped: deque[Allocation] = deque()  # scratch whose handle was collected
        self._released: dict[int, Allocation] = {}  # by graph id: what the engine will call idle
        self._generations: dict[int, int] = {}

    def malloc(self, worker: int, nbytes: int, *, device_id: int = 0) -> Buffer:
        """Device memory of one chip.

        Raises:
            ValueError: `nbytes` is below 1.
            MemoryRangeError: The chip died before the memory could be handed out.
        """
        nbytes = size_of(nbytes)
        self.collect()
        with self._lock:
            generation = self._generations.get(worker, 0)
        address = self._malloc(worker, nbytes)
        with self._lock:
            record = self._new_record(worker, device_id, address, nbytes, generation)
            if self._generations.get(worker, 0) != generation:
                record.state = State.LOST
                self._release(record)
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
        nbytes = size_of(nbytes)
        self.collect()
        with self._lock:
            buffer = self._host.take(HostBuffer, nbytes, self._new_host_record)
            self._live[buffer.allocation.key] = buffer
            return buffer

    def scratch(self, nbytes: int) -> ScratchBuffer:
        """Host memory that goes when its owner lets go of it, its handle is collected, or the Worker closes.

        Raises:
            BackPressureError: The heap has no such block now.
        """
        nbytes = size_of(nbytes)
        self.collect()
        with self._lock:
            return self._host.take(ScratchBuffer, nbytes, self._new_host_record)

    def drop(self, record: Allocation) -> None:
        """End scratch memory; nothing if that has happened."""
        with self._lock:
            if self._host.views_have_gone(record):
                return
            if record.state is not State.LIVE:
                return
            record.state = State.FREED
            if not record.holds:
                self._release(record)
        self.collect()

    def drop_later(self, record: Allocation) -> None:
        """As `drop`, at the next call here: from the garbage collector, which may run anywhere."""
        self._dropped.append(record)

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
            if not record.holds:
                self._release(record)
        self.collect(buffer)

    def resolve(
        self, items: Sequence[tuple[Memory, Mode]], worker: int | None = None
    ) -> tuple[list[Access], list[int]]:
        """What a task does to memory, as the engine takes it: accesses, and the buffers that it keeps.

        Args:
            items: What is used, and how.
            worker: The chip that will touch it: another chip's memory is an error unless peers are mapped.

        Raises:
            MemoryRangeError: Something is dead, another Worker's or another chip's.
        """
        accesses: list[Access] = []
        buffers: list[int] = []
        with self._lock:
            for memory, mode in items:
                record = self._visible(memory, worker)
                if record.graph_id not in buffers:
                    buffers.append(record.graph_id)
                if mode != HOLD:
                    accesses += self._orderly(record, memory, mode)
        return accesses, buffers

    def enqueue(
        self, items: Sequence[tuple[Memory, Mode]], *, worker: int | None = None, what: str = "a call"
    ) -> Use:
        """Check memory and take its place in the order; `Use.wait` says when it may be touched.

        Args:
            items: What is used, and how.
            worker: As in `resolve`.
            what: For messages.

        Raises:
            MemoryRangeError: As `resolve`; nothing is held.
        """
        held: list[Allocation] = []
        accesses: list[Access] = []
        with self._lock:
            for memory, mode in items:
                record = self._visible(memory, worker)
                if record not in held:
                    held.append(record)
                if mode != HOLD:
                    accesses += self._orderly(record, memory, mode)
            for record in held:
                record.holds += 1
        return self._queue(what, held, accesses)

    def enqueue_pieces(self, pieces: Sequence[Piece], *, worker: int, what: str) -> Use:
        """`enqueue` for bytes that are known to be inside their allocations."""
        held = records_of(pieces)
        with self._lock:
            for record in held:
                self._check(record, worker)
            accesses = [
                (record.worker + 1, int(writes), record.address + begin, record.address + end)
                for record, begin, end, writes in pieces
            ]
            if any(record.unconfirmed for record in held):
                refuse_pieces(pieces)
            for record in held:
                record.holds += 1
        return self._queue(what, held, accesses)

    def acquire(
        self,
        items: Sequence[tuple[Memory, Mode]],
        timeout_s: float = math.inf,
        *,
        worker: int | None = None,
        what: str = "a call",
    ) -> Use:
        """`enqueue`, then wait for the turn. Also a context manager: ``with registry.acquire(...):``.

        Raises:
            MemoryRangeError: As `enqueue`, or the memory was lost while waiting; nothing is held.
            WorkerTimeoutError: The turn did not come in time; nothing is held.
        """
        use = self.enqueue(items, worker=worker, what=what)
        use.wait_turn(timeout_s, worker)
        return use

    def hold(self, memories: Iterable[Memory], *, worker: int | None = None, what: str = "a call") -> Use:
        """Keep memory from being reclaimed until released; orders nothing."""
        return self.enqueue([(memory, HOLD) for memory in memories], worker=worker, what=what)

    def let_go(self, records: Sequence[Allocation]) -> None:
        """The end of a `Use`."""
        if not records:
            return
        is_free = False
        with self._lock:
            for record in records:
                record.holds -= 1
                if not record.holds and record.state in (State.FREED, State.LOST):
                    self._release(record)
                    is_free = True
        if is_free:
            self.collect()

    def collect(self, buffer: Buffer | HostBuffer | None = None) -> None:
        """Give back what nothing uses any more.

        Args:
            buffer: What happens to it is the caller's to know: its errors pass through.
        """
        while self._dropped:
            self.drop(self._dropped.popleft())
        engine = self.engine
        if engine is None or not self._released:
            return
        idle = []
        with self._lock:
            for number in engine.take_idle_buffers():
                record = self._released.pop(number, None)
                if record is not None:
                    idle.append(record)
            self._reclaiming += len(idle)
        own = None if buffer is None else buffer.allocation
        idle.sort(key=lambda record: record is own)  # last: its error ends this
        for record in idle:
            try:
                if buffer is not None and record is own:
                    self._reclaim_now(buffer)
                else:
                    self._reclaim_later(record)
            finally:
                with self._lock:
                    self._reclaiming -= 1
                    self._reclaimed.notify_all()

    def settle(self, timeout_s: float) -> None:
        """`collect`, also what other threads are giving back at this moment."""
        self.collect()
        with self._lock:
            self._reclaimed.wait_for(lambda: not self._reclaiming, min(timeout_s, threading.TIMEOUT_MAX))

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
                    if not record.holds:
                        self._release(record)
        self.collect()

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
                    self._host.close_buffer(buffer)
            self._live.clear()
            self._host.close()
            self._released.clear()
            self.engine = None
            self._malloc, self._free = refuse_malloc, nothing_to_free

    def live_bytes(self, worker: int) -> int:
        """Bytes in live buffers of one chip (`HOST`: of the heap), as asked for."""
        with self._lock:
            records = [buffer.allocation for buffer in self._live.values()]
        return sum(record.nbytes for record in records if record.worker == worker)

    def _usable(self, memory: Memory) -> Allocation:
        record = getattr(memory.buffer if isinstance(memory, Tensor) else memory, "allocation", None)
        if not isinstance(record, Allocation):
            raise TypeError(f"memory is named by a Buffer, HostBuffer or Tensor, not by {memory!r}")
        self._check(record)
        return record

    def _visible(self, memory: Memory, worker: int | None) -> Allocation:
        record = self._usable(memory)
        self._check(record, worker)
        return record

    def _check(self, record: Allocation, worker: int | None = None) -> None:
        if record.registry is not self:
            raise MemoryRangeError(f"{record.text} belongs to another Worker")
        if record.state is not State.LIVE:
            raise record.unusable()
        if not self._maps_peers and worker is not None and record.worker not in (worker, HOST):
            raise MemoryRangeError(
                f"{record.text} cannot be reached from worker {worker}: this platform does not map peers"
            )

    def _queue(self, what: str, held: list[Allocation], accesses: list[Access]) -> Use:
        if not accesses:
            return Use(self, what, held, None)
        try:
            turn = self._engine().host_task(accesses, [])
        except BaseException:  # whatever it is, nothing is held
            self.let_go(held)
            raise
        return Use(self, what, held, turn)

    def _orderly(self, record: Allocation, memory: Memory, mode: Mode) -> list[Access]:
        accesses = accesses_of(memory, mode)
        if record.unconfirmed:
            refuse_unconfirmed(record, accesses)
        return accesses

    def _engine(self) -> _core.TaskEngine:
        engine = self.engine
        if engine is None:
            raise ClosedError("the Worker was closed")
        return engine

    def _new_record(
        self, worker: int, device_id: int, address: int, nbytes: int, generation: int
    ) -> Allocation:
        graph_id = self.engine.open_buffer() if self.engine is not None else 0
        return Allocation(self, next(self._keys), worker, device_id, address, nbytes, generation, graph_id)

    def _new_host_record(self, address: int, nbytes: int) -> Allocation:
        return self._new_record(HOST, -1, address, nbytes, 0)

    def _release(self, record: Allocation) -> None:
        """Its owner has let go: it goes when no task names it. REQUIRES: the lock."""
        if self.engine is not None and record.graph_id not in self._released:
            self._released[record.graph_id] = record
            self.engine.release_buffer(record.graph_id)

    def _reclaim_now(self, buffer: Buffer | HostBuffer) -> None:
        record = buffer.allocation
        try:
            self._reclaim(record)
        except WorkerTimeoutError as error:
            if not error.started:
                with self._lock:
                    if self._generations.get(record.worker, 0) == record.generation:
                        record.state = State.LIVE
                        record.graph_id = self._engine().open_buffer()
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
            return
        with self._lock:
            self._host.give_back(record)
