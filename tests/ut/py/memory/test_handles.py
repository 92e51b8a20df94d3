"""Memory goes when its last use has ended, and stale handles say why."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from memory.registry import PAGE, WATCHDOG_S, Node, waiting
from simpler.errors import MemoryRangeError, WorkerDiedError, WorkerTimeoutError
from simpler.memory import READ, WRITE, MemoryRegistry

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import ThreadPoolExecutor

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
    begun = threading.Event()

    def second() -> None:
        begun.set()
        node.registry.acquire([(buffer, WRITE)], WATCHDOG_S)

    waiter = waiting(second, threads)
    assert begun.wait(WATCHDOG_S)
    engine = node.registry.engine
    assert engine is not None
    while engine.counts()["unfinished"] < 2:  # until the second is in the queue
        os.sched_yield()
    node.registry.worker_lost(0)
    first.release()
    with pytest.raises(MemoryRangeError, match="lost"):
        waiter.result(WATCHDOG_S)
