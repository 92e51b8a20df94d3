"""Memory goes when its last use has ended, ranges are used in order of arrival, stale handles say why."""

from __future__ import annotations

import gc
import math
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from simpler import _core
from simpler.buffers import Buffer, HostBuffer
from simpler.errors import BackPressureError, MemoryRangeError, WorkerDiedError, WorkerTimeoutError
from simpler.memory import HOLD, READ, WRITE, HostHeap, MemoryRegistry, Mode, Use

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WATCHDOG_S = 30.0
PAGE = 4096
FRACTIONS = st.floats(0, 1)


class Chips:
    """Device memory of two chips that only counts."""

    def __init__(self) -> None:
        self.next = 1 << 20
        self.live: dict[tuple[int, int], int] = {}
        self.frees: list[tuple[int, int, int]] = []
        self.fail: BaseException | None = None

    def malloc(self, worker: int, nbytes: int) -> int:
        if self.fail is not None:
            raise self.fail
        self.next += 1 << 20
        self.live[(worker, self.next)] = nbytes
        return self.next

    def free(self, worker: int, address: int, generation: int) -> None:
        if self.fail is not None:
            raise self.fail
        del self.live[(worker, address)]
        self.frees.append((worker, address, generation))


class Node:
    """A registry with its chips and heap."""

    def __init__(self, *, maps_peers: bool = False, heap_bytes: int = 16 * PAGE) -> None:
        self.chips = Chips()
        self.heap = HostHeap(_core.SharedRegion(heap_bytes, "test-heap"))
        self.registry = MemoryRegistry(
            malloc=self.chips.malloc, free=self.chips.free, heap=self.heap, maps_peers=maps_peers
        )


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def granted(*uses: Use) -> list[bool]:
    return [use.granted for use in uses]


def waiting(use_of: Callable[[], Use], pool: ThreadPoolExecutor) -> Any:
    """A future of an acquire that runs on another thread."""
    return pool.submit(use_of)


# Handles


def test_a_buffer_knows_its_owner_and_size(node: Node) -> None:
    buffer = node.registry.malloc(1, 100, device_id=6)
    assert (buffer.nbytes, buffer.worker_id, buffer.device_id, buffer.freed) == (100, 1, 6, False)
    assert (1, buffer.address) in node.chips.live


@pytest.mark.parametrize("nbytes", [0, -1])
def test_sizes_below_one_are_refused(node: Node, nbytes: int) -> None:
    for make in (lambda: node.registry.malloc(0, nbytes), lambda: node.registry.create_buffer(nbytes)):
        with pytest.raises(ValueError, match="nbytes"):
            make()


@pytest.mark.parametrize("nbytes", [1.5, "8", True, None])
def test_sizes_are_integers(node: Node, nbytes: Any) -> None:
    with pytest.raises(TypeError, match="nbytes"):
        node.registry.malloc(0, nbytes)


def test_free_gives_the_memory_back_and_ends_the_handle(node: Node) -> None:
    buffer = node.registry.malloc(0, 100)
    tensor = buffer.tensor((4,), "uint8")
    node.registry.free(buffer)
    assert node.chips.live == {}
    assert buffer.freed
    uses: list[Callable[[], object]] = [
        lambda: node.registry.free(buffer),
        lambda: buffer.tensor((4,), "uint8"),
        lambda: buffer.pin("engine"),
        lambda: node.registry.acquire([(tensor, READ)]),
        lambda: node.registry.hold([buffer]),
        lambda: node.registry.hold([tensor]),
    ]
    for use in uses:
        with pytest.raises(MemoryRangeError, match=r"freed by free\(\)"):
            use()


def test_another_workers_memory_is_refused(node: Node) -> None:
    foreign = Node().registry.malloc(0, 8)
    with pytest.raises(MemoryRangeError, match="another Worker"):
        node.registry.acquire([(foreign, READ)])
    with pytest.raises(MemoryRangeError, match="another Worker"):
        node.registry.free(foreign)


def test_another_chips_memory_is_refused_unless_peers_are_mapped(node: Node) -> None:
    buffer, host = node.registry.malloc(0, 8), node.registry.create_buffer(8)
    node.registry.acquire([(buffer, READ), (host, READ)], worker=0).release()
    with pytest.raises(MemoryRangeError, match="worker 1"):
        node.registry.acquire([(buffer, READ)], worker=1)
    mapped = Node(maps_peers=True).registry
    mapped.acquire([(mapped.malloc(0, 8), READ)], worker=1).release()


@pytest.mark.parametrize("memory", [4096, b"bytes", None, np.zeros(3)], ids=repr)
def test_an_address_is_never_accepted(node: Node, memory: Any) -> None:
    with pytest.raises(TypeError, match="Buffer, HostBuffer or Tensor"):
        node.registry.acquire([(memory, READ)])
    with pytest.raises(TypeError, match="Buffer, HostBuffer or Tensor"):
        node.registry.free(memory)


def test_a_refused_use_holds_nothing(node: Node) -> None:
    good, gone = node.registry.malloc(0, 8), node.registry.malloc(0, 8)
    node.registry.free(gone)
    with pytest.raises(MemoryRangeError):
        node.registry.acquire([(good, WRITE), (gone, READ)])
    node.registry.free(good)
    assert node.chips.live == {}


def test_handles_do_not_pickle(node: Node) -> None:
    for handle in (node.registry.malloc(0, 8), node.registry.create_buffer(8)):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(handle)


def test_garbage_collection_frees_nothing(node: Node) -> None:
    node.registry.malloc(0, 8)
    node.registry.create_buffer(8)
    gc.collect()
    assert len(node.chips.live) == 1
    assert node.heap.used_bytes == PAGE
    assert (node.registry.live_bytes(0), node.registry.live_bytes(-1)) == (8, 8)


# Deferred frees


def test_memory_returns_when_its_last_use_has_ended(node: Node) -> None:
    buffer = node.registry.malloc(0, 100)
    first = node.registry.acquire([(buffer, READ)])
    second = node.registry.hold([buffer, buffer.tensor((4,), "uint8")])
    node.registry.free(buffer)
    assert buffer.freed
    first.release()
    assert len(node.chips.live) == 1
    second.release()
    second.release()
    assert node.chips.frees == [(0, buffer.address, 0)]


def test_a_host_block_returns_when_its_last_use_has_ended(node: Node) -> None:
    buffer = node.registry.create_buffer(100)
    use = node.registry.acquire([(buffer, WRITE)])
    node.registry.free(buffer)
    assert node.heap.used_bytes == PAGE
    use.release()
    assert node.heap.used_bytes == 0


def test_a_free_that_never_began_leaves_the_buffer_alive(node: Node) -> None:
    buffer = node.registry.malloc(0, 8)
    node.chips.fail = WorkerTimeoutError("busy", path=(0,), started=False)
    with pytest.raises(WorkerTimeoutError):
        node.registry.free(buffer)
    node.chips.fail = None
    assert not buffer.freed
    node.registry.free(buffer)
    assert node.chips.live == {}


def test_a_free_that_may_have_happened_ends_the_handle(node: Node) -> None:
    buffer = node.registry.malloc(0, 8)
    node.chips.fail = WorkerTimeoutError("slow", path=(0,), started=True)
    with pytest.raises(WorkerTimeoutError):
        node.registry.free(buffer)
    assert buffer.freed


def test_a_deferred_free_that_fails_is_logged(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    buffer = node.registry.malloc(0, 8)
    use = node.registry.hold([buffer])
    node.registry.free(buffer)
    node.chips.fail = WorkerDiedError("chip 0 died: SIGKILL", path=(0,))
    use.release()
    assert "SIGKILL" in caplog.text


# Pins and deaths


def test_a_pinned_buffer_is_not_freed_and_the_error_names_the_pin(node: Node) -> None:
    buffer = node.registry.malloc(0, 8)
    pin, other = buffer.pin("mooncake"), buffer.pin("nixl")
    with pytest.raises(MemoryRangeError, match="'mooncake', 'nixl'"):
        node.registry.free(buffer)
    pin.release()
    pin.release()
    assert (pin.active, other.active) == (False, True)
    with pytest.raises(MemoryRangeError, match="pinned by 'nixl'"):
        node.registry.free(buffer)
    with other:
        pass
    node.registry.free(buffer)


def test_a_dead_chip_loses_its_buffers_and_drops_its_pins(node: Node) -> None:
    lost, kept = node.registry.malloc(0, 8), node.registry.malloc(1, 8)
    pin = lost.pin("mooncake")
    use = node.registry.hold([lost])
    node.registry.worker_lost(0)
    assert not pin.active
    pin.release()
    for action in (lambda: node.registry.free(lost), lambda: node.registry.acquire([(lost, READ)])):
        with pytest.raises(MemoryRangeError, match="lost"):
            action()
    use.release()
    assert node.chips.frees == []
    node.registry.free(kept)
    fresh = node.registry.malloc(0, 8)
    node.registry.free(fresh)
    assert node.chips.frees[-1] == (0, fresh.address, 1)


def test_a_free_deferred_past_a_death_is_not_sent_to_the_next_process(node: Node) -> None:
    buffer = node.registry.malloc(0, 8)
    use = node.registry.hold([buffer])
    node.registry.free(buffer)
    node.registry.worker_lost(0)
    use.release()
    assert node.chips.frees == []


def test_a_malloc_overtaken_by_a_death_hands_out_nothing() -> None:
    registry: MemoryRegistry

    def malloc(worker: int, _nbytes: int) -> int:
        registry.worker_lost(worker)
        return 4096

    registry = MemoryRegistry(malloc=malloc, free=lambda *_: None)
    with pytest.raises(MemoryRangeError, match="lost"):
        registry.malloc(0, 8)


def test_memory_lost_while_waiting_for_it_is_an_error(node: Node, threads: ThreadPoolExecutor) -> None:
    buffer = node.registry.malloc(0, 8)
    first = node.registry.acquire([(buffer, WRITE)])
    entered = threading.Event()

    def until_told(_timeout_s: float) -> None:
        entered.set()
        told.wait(WATCHDOG_S)
        first.release()

    told = threading.Event()
    first.waiter = until_told
    second = waiting(lambda: node.registry.acquire([(buffer, WRITE)]), threads)
    assert entered.wait(WATCHDOG_S)
    node.registry.worker_lost(0)
    told.set()
    with pytest.raises(MemoryRangeError, match="lost"):
        second.result(WATCHDOG_S)


# Order of uses


@pytest.mark.parametrize(
    ("first", "second", "excludes"),
    [
        (READ, READ, False),
        (READ, WRITE, True),
        (WRITE, READ, True),
        (WRITE, WRITE, True),
        (HOLD, WRITE, False),
        (WRITE, HOLD, False),
    ],
)
def test_reads_share_and_writes_exclude(node: Node, first: Mode, second: Mode, excludes: bool) -> None:
    buffer = node.registry.malloc(0, 100)
    held = node.registry.acquire([(buffer, first)])
    use = node.registry.enqueue([(buffer, second)])
    assert use.granted is not excludes
    assert use.wait(0) is not excludes
    held.release()
    assert use.wait(0)


@given(
    a=st.tuples(st.integers(0, 20), st.integers(0, 12)),
    b=st.tuples(st.integers(0, 20), st.integers(0, 12)),
)
def test_only_overlapping_bytes_exclude(a: tuple[int, int], b: tuple[int, int]) -> None:
    registry = Node().registry
    buffer = registry.malloc(0, 32)
    first, second = (buffer.tensor((count,), "uint8", offset=offset) for offset, count in (a, b))
    registry.acquire([(first, WRITE)])
    overlap = bool(set(range(a[0], a[0] + a[1])) & set(range(b[0], b[0] + b[1])))
    assert registry.enqueue([(second, READ)]).granted is not overlap


def test_one_use_may_name_the_same_bytes_twice(node: Node) -> None:
    buffer = node.registry.malloc(0, 8)
    use = node.registry.acquire([(buffer, READ), (buffer, WRITE), (buffer, WRITE)], 0.0)
    assert use.granted
    use.release()
    assert node.registry.enqueue([(buffer, WRITE)]).granted


def test_uses_of_one_group_do_not_wait_for_each_other_but_others_do(node: Node) -> None:
    buffer, run = node.registry.malloc(0, 8), object()
    first = node.registry.acquire([(buffer, WRITE)], group=run)
    second = node.registry.acquire([(buffer, WRITE)], group=run)
    copy = node.registry.enqueue([(buffer, READ)])
    later = node.registry.enqueue([(buffer, WRITE)], group=run)
    first.release()
    assert granted(copy, later) == [False, False]
    second.release()
    assert granted(copy, later) == [True, False]
    copy.release()
    assert granted(copy, later) == [True, True]


def test_a_reader_that_came_after_a_waiting_writer_waits_too(node: Node) -> None:
    buffer = node.registry.malloc(0, 8)
    reader = node.registry.acquire([(buffer, READ)])
    writer = node.registry.enqueue([(buffer, WRITE)])
    late = node.registry.enqueue([(buffer, READ)])
    reader.release()
    assert (writer.granted, late.granted) == (True, False)
    writer.release()
    assert late.granted


def test_a_waiter_wakes_when_the_blocker_is_released(node: Node, threads: ThreadPoolExecutor) -> None:
    buffer = node.registry.malloc(0, 8)
    held = node.registry.acquire([(buffer, WRITE)])
    waiters = [waiting(lambda: node.registry.acquire([(buffer, READ)]), threads) for _ in range(4)]
    held.release()
    for waiter in waiters:
        waiter.result(WATCHDOG_S).release()
    node.registry.free(buffer)
    assert node.chips.live == {}


def test_a_waiter_drives_the_work_it_waits_for(node: Node) -> None:
    buffer = node.registry.malloc(0, 8)
    held = node.registry.acquire([(buffer, WRITE)])
    seen: list[float] = []

    def finish(timeout_s: float) -> None:
        seen.append(timeout_s)
        held.release()

    held.waiter = finish
    node.registry.acquire([(buffer, WRITE)], 5.0).release()
    assert len(seen) == 1
    assert 0 < seen[0] <= 5.0


@pytest.mark.parametrize("drives", [True, False])
def test_a_turn_that_does_not_come_in_time_is_given_up(node: Node, drives: bool) -> None:
    buffer = node.registry.malloc(0, 8)
    held = node.registry.acquire([(buffer, WRITE)], what="task 3 of run 7")
    if drives:
        held.waiter = lambda _timeout_s: None
    with pytest.raises(WorkerTimeoutError, match="task 3 of run 7") as caught:
        node.registry.acquire([(buffer, READ)], 1e-3, worker=0, what="a copy")
    assert (caught.value.started, caught.value.path, caught.value.timeout_s) == (False, (0,), 1e-3)
    held.release()
    assert node.registry.enqueue([(buffer, WRITE)]).granted


def test_an_interrupted_wait_leaves_the_queue(node: Node) -> None:
    buffer = node.registry.malloc(0, 8)
    held = node.registry.acquire([(buffer, WRITE)])

    def interrupt(_timeout_s: float) -> None:
        raise KeyboardInterrupt

    held.waiter = interrupt
    with pytest.raises(KeyboardInterrupt):
        node.registry.acquire([(buffer, WRITE)])
    held.release()
    assert node.registry.enqueue([(buffer, WRITE)]).granted


def test_memory_freed_while_waiting_for_it_is_still_there(node: Node) -> None:
    buffer = node.registry.malloc(0, 8)
    held = node.registry.acquire([(buffer, WRITE)])

    def finish(_timeout_s: float) -> None:
        node.registry.free(buffer)
        held.release()

    held.waiter = finish
    use = node.registry.acquire([(buffer, READ)])
    assert len(node.chips.live) == 1
    use.release()
    assert node.chips.live == {}


def test_many_threads_never_write_the_same_bytes_at_once(node: Node, threads: ThreadPoolExecutor) -> None:
    buffer = node.registry.malloc(0, 8)
    inside = [0, 0]  # readers, writers
    seen: list[tuple[int, int]] = []
    guard = threading.Lock()

    def work(index: int) -> None:
        for step in range(50):
            mode = WRITE if (index + step) % 3 == 0 else READ
            with node.registry.acquire([(buffer, mode)], WATCHDOG_S):
                with guard:
                    inside[mode] += 1
                    seen.append((inside[0], inside[1]))
                with guard:
                    inside[mode] -= 1

    for done in [threads.submit(work, index) for index in range(8)]:
        done.result(WATCHDOG_S)
    assert all(writers == 0 or (readers, writers) == (0, 1) for readers, writers in seen)
    assert len(seen) == 400


# Host buffers


def test_a_host_buffer_is_one_memory_for_all_its_views(node: Node) -> None:
    buffer = node.registry.create_buffer(64)
    array = buffer.array((4, 4), "float32")
    array[:] = np.arange(16).reshape(4, 4)
    assert np.frombuffer(memoryview(buffer), np.float32).tolist() == list(range(16))
    assert np.from_dlpack(buffer).view(np.float32)[3] == 3.0
    assert np.from_dlpack(array)[0, 1] == 1.0
    assert bytes(buffer)[:4] == b"\0\0\0\0"
    assert buffer.address == node.heap.region.address
    assert buffer.tensor((2,), "float32", offset=8).span == (8, 8)


def test_host_arrays_can_be_read_only_for_good(node: Node) -> None:
    array = node.registry.create_buffer(64).array((4,), "float32", offset=16, readonly=True)
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True


@pytest.mark.parametrize(("shape", "offset"), [((17,), 0), ((16,), 4), ((1,), 64), ((1,), -4)])
def test_host_arrays_stay_inside(node: Node, shape: tuple[int, ...], offset: int) -> None:
    with pytest.raises(MemoryRangeError):
        node.registry.create_buffer(64).array(shape, "float32", offset=offset)


def test_a_host_buffer_with_live_views_is_not_freed(node: Node) -> None:
    buffer = node.registry.create_buffer(64)
    array = buffer.array((16,), "float32")
    part = array[3:5]
    del array
    with pytest.raises(BufferError):
        node.registry.free(buffer)
    assert not buffer.freed
    del part
    gc.collect()
    node.registry.free(buffer)
    assert node.heap.used_bytes == 0
    with pytest.raises(MemoryRangeError, match="freed"):
        buffer.array((1,), "uint8")
    with pytest.raises(BufferError):
        memoryview(buffer)


def test_an_exhausted_heap_names_heap_bytes_and_recovers(node: Node) -> None:
    blocks = [node.registry.create_buffer(PAGE) for _ in range(16)]
    with pytest.raises(BackPressureError, match="heap_bytes"):
        node.registry.create_buffer(1)
    for block in blocks:
        node.registry.free(block)
    node.registry.free(node.registry.create_buffer(16 * PAGE))


def test_a_worker_without_a_heap_says_so() -> None:
    registry = MemoryRegistry(malloc=lambda *_: 0, free=lambda *_: None)
    with pytest.raises(BackPressureError, match="heap"):
        registry.create_buffer(8)


def test_freed_host_memory_goes_back_to_the_kernel(node: Node) -> None:
    buffer = node.registry.create_buffer(8 * PAGE)
    buffer.array((8 * PAGE,), "uint8").fill(7)
    gc.collect()
    assert node.heap.region.resident_bytes >= 8 * PAGE
    node.registry.free(buffer)
    assert node.heap.region.resident_bytes == 0


def test_views_stay_readable_after_close() -> None:
    node = Node()
    viewed, idle = node.registry.create_buffer(64), node.registry.create_buffer(64)
    device, pinned = node.registry.malloc(0, 8), node.registry.malloc(0, 8)
    pinned.pin("engine")
    array = viewed.array((16,), "float32")
    array.fill(3.0)
    node.registry.close()
    del node
    gc.collect()
    assert array.tolist() == [3.0] * 16
    for handle in (viewed, idle, device, pinned):
        assert handle.freed
        with pytest.raises(MemoryRangeError, match="closed"):
            handle.tensor((1,), "uint8")


# Against a model


class RegistryMachine(RuleBasedStateMachine):
    """Buffers, uses and deaths in any order: the chips and the heap hold exactly what the model says."""

    buffers: Bundle[Buffer | HostBuffer] = Bundle("buffers")
    uses: Bundle[Use] = Bundle("uses")

    def __init__(self) -> None:
        super().__init__()
        self.node = Node(heap_bytes=1 << 20)
        self.alive: set[Buffer | HostBuffer] = set()
        self.dying: set[Buffer | HostBuffer] = set()  # freed, waiting for uses
        self.held: dict[Use, list[tuple[Buffer | HostBuffer, int, int, bool]]] = {}

    @initialize()
    def start(self) -> None:
        assert self.node.chips.live == {}

    @rule(target=buffers, worker=st.integers(-1, 1), nbytes=st.integers(1, 3 * PAGE))
    def allocate(self, worker: int, nbytes: int) -> Buffer | HostBuffer:
        registry = self.node.registry
        made = registry.create_buffer(nbytes) if worker < 0 else registry.malloc(worker, nbytes)
        self.alive.add(made)
        return made

    @rule(buffer=buffers)
    def free(self, buffer: Buffer | HostBuffer) -> None:
        if buffer not in self.alive:
            with pytest.raises(MemoryRangeError):
                self.node.registry.free(buffer)
            return
        self.node.registry.free(buffer)
        self.alive.discard(buffer)
        if self._used(buffer):
            self.dying.add(buffer)

    @rule(
        target=uses,
        parts=st.lists(
            st.tuples(buffers, st.floats(0, 1), st.floats(0, 1), st.sampled_from(Mode)),
            max_size=4,
        ),
    )
    def use(self, parts: list[tuple[Buffer | HostBuffer, float, float, Mode]]) -> Any:
        if any(buffer not in self.alive for buffer, *_ in parts):
            buffer = next(buffer for buffer, *_ in parts if buffer not in self.alive)
            with pytest.raises(MemoryRangeError):
                self.node.registry.hold([buffer])
            return multiple()
        ranges, items = [], []
        for buffer, a, b, mode in parts:
            low, high = sorted((math.floor(a * buffer.nbytes), math.floor(b * buffer.nbytes)))
            items.append((buffer.tensor((high - low,), "uint8", offset=low), mode))
            ranges.append((buffer, low, low if mode == HOLD else high, mode == WRITE))
        use = self.node.registry.enqueue(items)
        assert use.granted is not any(self._conflict(ranges, other) for other in self.held.values())
        self.held[use] = ranges
        return use

    @rule(use=consumes(uses))
    def release(self, use: Use) -> None:
        use.release()
        self.held.pop(use, None)
        self.dying = {buffer for buffer in self.dying if self._used(buffer)}

    @rule(worker=st.integers(0, 1))
    def lose(self, worker: int) -> None:
        self.node.registry.worker_lost(worker)
        gone = [key for key in self.node.chips.live if key[0] == worker]
        for key in gone:
            del self.node.chips.live[key]
        self.alive = {b for b in self.alive if isinstance(b, HostBuffer) or b.worker_id != worker}
        self.dying = {b for b in self.dying if isinstance(b, HostBuffer) or b.worker_id != worker}

    @invariant()
    def memory_is_what_the_model_says(self) -> None:
        device = {b for b in self.alive | self.dying if isinstance(b, Buffer)}
        assert self.node.chips.live == {(b.worker_id, b.address): b.nbytes for b in device}
        host = [b for b in self.alive | self.dying if isinstance(b, HostBuffer)]
        assert self.node.heap.used_bytes == sum(-(-b.nbytes // PAGE) * PAGE for b in host)

    def _used(self, buffer: Buffer | HostBuffer) -> bool:
        return any(buffer is used for ranges in self.held.values() for used, *_ in ranges)

    @staticmethod
    def _conflict(a: list[tuple[Any, int, int, bool]], b: list[tuple[Any, int, int, bool]]) -> bool:
        return any(
            x[0] is y[0] and (x[3] or y[3]) and max(x[1], y[1]) < min(x[2], y[2]) for x in a for y in b
        )


RegistryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRegistryAgainstAModel = RegistryMachine.TestCase
