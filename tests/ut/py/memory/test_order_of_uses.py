"""Ranges are used in order of arrival: reads share, writes exclude."""

from __future__ import annotations

import math
import signal
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.registry import WATCHDOG_S, Node, waiting
from simpler.errors import WorkerTimeoutError
from simpler.memory import HOLD, READ, WRITE, Mode

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor


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
    held = registry.acquire([(first, WRITE)])
    overlap = bool(set(range(a[0], a[0] + a[1])) & set(range(b[0], b[0] + b[1])))
    assert registry.enqueue([(second, READ)]).granted is not overlap
    held.release()


def test_one_use_may_name_the_same_bytes_twice(node: Node) -> None:
    buffer = node.registry.malloc(0, 8)
    use = node.registry.acquire([(buffer, READ), (buffer, WRITE), (buffer, WRITE)], 0.0)
    assert use.granted
    use.release()
    assert node.registry.enqueue([(buffer, WRITE)]).granted


@given(
    data=st.data(),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_strided_parts_exclude_by_the_bytes_of_their_elements(data: st.DataObject, shape: list[int]) -> None:
    registry = Node().registry
    whole = registry.malloc(0, 64).tensor(shape, "uint8")
    parts = []
    for _ in range(2):
        index = tuple(
            slice(data.draw(st.integers(0, n - 1)), n, data.draw(st.sampled_from([-1, 1, 2, 3])))
            for n in shape
        )
        parts.append(whole[index])
    numbers = np.arange(64)[: math.prod(shape)].reshape(shape)
    covered = [
        set(
            np.lib.stride_tricks.as_strided(
                numbers.ravel()[part.offset :], part.shape, np.multiply(part.strides, 8)
            ).ravel()
        )
        if part.nbytes
        else set()
        for part in parts
    ]
    held = registry.acquire([(parts[0], WRITE)])
    assert registry.enqueue([(parts[1], READ)]).granted is not bool(covered[0] & covered[1])
    held.release()


def test_parts_of_very_many_pieces_count_as_all_that_lies_between(node: Node) -> None:
    whole = node.registry.malloc(0, 4096).tensor((2048, 2), "uint8")
    held = node.registry.acquire([(whole[:, 0], WRITE)])
    assert not node.registry.enqueue([(whole[:, 1], READ)]).granted
    held.release()


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


def test_a_turn_that_does_not_come_in_time_is_given_up(node: Node) -> None:
    buffer = node.registry.malloc(0, 8)
    held = node.registry.acquire([(buffer, WRITE)])
    with pytest.raises(WorkerTimeoutError, match="a copy waited") as caught:
        node.registry.acquire([(buffer, READ)], 1e-3, worker=0, what="a copy")
    assert (caught.value.started, caught.value.path, caught.value.timeout_s) == (False, (0,), 1e-3)
    held.release()
    assert node.registry.enqueue([(buffer, WRITE)]).granted


def test_an_interrupted_wait_leaves_the_queue(node: Node) -> None:
    buffer = node.registry.malloc(0, 8)
    held = node.registry.acquire([(buffer, WRITE)])
    timer = threading.Timer(0.05, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        node.registry.acquire([(buffer, WRITE)])
    timer.join()
    held.release()
    assert node.registry.enqueue([(buffer, WRITE)]).granted


def test_memory_freed_while_waiting_for_it_is_still_there(node: Node, threads: ThreadPoolExecutor) -> None:
    buffer = node.registry.malloc(0, 8)
    held = node.registry.acquire([(buffer, WRITE)])
    waiter = node.registry.enqueue([(buffer, READ)])
    turn = waiting(lambda: waiter.wait(WATCHDOG_S), threads)
    node.registry.free(buffer)
    held.release()
    assert turn.result(WATCHDOG_S)
    assert len(node.chips.live) == 1
    waiter.release()
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
