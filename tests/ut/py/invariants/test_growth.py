"""No growth of descriptors, threads, mappings or memory over many calls, time-outs, restarts and lives."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import simpler
from invariants.gate import Gate, wait_handler
from invariants.nodes import WATCHDOG_S, node, run_task
from invariants.processes import Census, memfds_mapped, open_files, status_field, threads_of
from registered import extension
from simpler import ControlOp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.no_asan("its allocator keeps what is freed for a while, which looks like growth")

KIB = 1 << 10
MIB = 1 << 20
# What one interpreter may grow by for reasons of its own: free lists, caches, the allocator's arenas.
NOISE_BYTES = 8 * MIB
# The main thread, the one that watches the parent, and up to four for concurrent handlers, started as needed.
MOST_CHILD_THREADS = 6

Shape = list[tuple[int, int, int]]


def shape_of(pids: Sequence[int | str]) -> Shape:
    """Descriptors, threads and mappings of each process."""
    return [(len(open_files(pid)), len(threads_of(pid)), len(memfds_mapped(pid))) for pid in pids]


def anonymous_bytes(pids: Sequence[int | str]) -> int:
    return sum(status_field(pid, "RssAnon") for pid in pids) * KIB


def assert_steady(worker: simpler.Worker, use: Callable[[], object]) -> None:
    """After a first use of all, a thousand uses more grow nothing in any process."""
    pids: list[int | str] = ["self", *(record.pid for record in worker.status())]
    use()
    gc.collect()
    shape, memory = shape_of(pids), anonymous_bytes(pids)
    use()
    gc.collect()
    for (files, threads, maps), (files_before, threads_before, maps_before) in zip(
        shape_of(pids), shape, strict=True
    ):
        assert (files, maps) == (files_before, maps_before)
        assert threads == threads_before or threads <= MOST_CHILD_THREADS
    assert anonymous_bytes(pids) - memory < NOISE_BYTES


def test_no_growth_over_100_000_calls() -> None:
    with extension("wait", wait_handler), node(device_ids=[0, 1]) as worker:

        def fifty_thousand_calls() -> None:
            call, run = worker.control_payload, worker.run_chip_control_extension
            for _ in range(25_000):
                call(0, ControlOp.PING)
                run("wait", worker_id=1)

        assert_steady(worker, fifty_thousand_calls)
        assert sum(stats.calls for stats in worker.stats()) >= 100_000


def test_no_growth_over_1_000_time_outs(gate: Gate) -> None:
    with extension("wait", wait_handler), node(device_ids=[0]) as worker:
        stuck = worker.submit_chip_control_extension("wait", gate.name, worker_id=0)
        with gate:

            def five_hundred_time_outs() -> None:
                for number in range(500):
                    with contextlib.suppress(simpler.WorkerTimeoutError):
                        worker.run_chip_control_extension(
                            "wait", bytes(number * 100), worker_id=0, timeout_s=5e-4
                        )

            assert_steady(worker, five_hundred_time_outs)
            assert worker.stats()[0].timeouts == 1000
        assert stuck.result(WATCHDOG_S) == b"done"
        assert worker.control_payload(0, ControlOp.ECHO, b"fine") == b"fine"


def test_no_growth_over_tasks_memory_submitted_calls_and_errors() -> None:
    def fail(_chip: object, payload: bytes, _device: int) -> bytes:
        raise ValueError("no " + "x" * 1000)

    with extension("wait", wait_handler), extension("fail", fail), node(device_ids=[0, 1]) as worker:
        handle = worker.register(lambda: [1, 2, 3])
        payload = bytes(100_000)

        def everything() -> None:
            for _ in range(300):
                run_task(worker, handle, chip=1)
                device, host = worker.malloc(10_000), worker.create_buffer(10_000)
                worker.copy_to(device, host)
                worker.run_chip_control_extension("wait", worker_id=0, buffers=[device, host])
                worker.free(device)
                worker.free(host)
                with contextlib.suppress(simpler.ChipControlError):
                    worker.run_chip_control_extension("fail")
                worker.submit_chip_control_extension("wait").result(WATCHDOG_S)
                worker.control_payload(0, ControlOp.ECHO, payload)

        assert_steady(worker, everything)


def test_no_growth_over_restarts() -> None:
    with node(device_ids=[0, 1]) as worker:

        def restarts(count: int) -> None:
            for _ in range(count):
                worker.kill(0)
                worker.restart(0)
                worker.control_payload(0, ControlOp.PING)

        def here() -> list[int | str]:
            return ["self", *(record.pid for record in worker.status())]

        def settled_shape() -> Shape:
            """Without the threads of new children, which may still be on their way."""
            return [
                (files, tasks if pid == "self" else 0, maps)
                for pid, (files, tasks, maps) in zip(here(), shape_of(here()), strict=True)
            ]

        restarts(5)
        before, memory = settled_shape(), anonymous_bytes(here())
        restarts(20)
        assert settled_shape() == before
        assert anonymous_bytes(here()) - memory < NOISE_BYTES


def count_mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def lives(count: int) -> None:
    with extension("wait", wait_handler):
        for _ in range(count):
            with node(device_ids=[0, 1], num_sub_workers=1) as worker:
                worker.run_chip_control_extension("wait")
                worker.copy_to(worker.malloc(100_000), bytes(100_000))
                worker.submit_chip_control_extension("wait").result(WATCHDOG_S)


@pytest.mark.parametrize("count", [25, pytest.param(200, marks=pytest.mark.soak)])
def test_no_growth_over_cycles_of_init_and_close(count: int) -> None:
    lives(5)
    gc.collect()
    before = Census.take()
    mappings = count_mappings()
    memory = anonymous_bytes(["self"])
    lives(count)
    gc.collect()
    before.assert_not_grown()
    assert count_mappings() <= mappings + 4
    assert anonymous_bytes(["self"]) - memory < NOISE_BYTES


@pytest.mark.soak
def test_no_growth_over_a_million_calls_and_10_000_time_outs(gate: Gate) -> None:
    with extension("wait", wait_handler), node(device_ids=[0, 1]) as worker:
        stuck = worker.submit_chip_control_extension("wait", gate.name, worker_id=0)
        with gate:

            def many() -> None:
                for _ in range(5_000):
                    with contextlib.suppress(simpler.WorkerTimeoutError):
                        worker.run_chip_control_extension("wait", worker_id=0, timeout_s=5e-4)
                for _ in range(500_000):
                    worker.run_chip_control_extension("wait", worker_id=1)

            assert_steady(worker, many)
        stuck.result(WATCHDOG_S)


def test_descriptors_are_few_in_the_parent_and_in_each_child() -> None:
    before = len(open_files())
    with node(device_ids=[0]) as one:
        first = len(open_files()) - before
        assert first <= 16
        with node(device_ids=range(8), num_sub_workers=2) as many:
            second = len(open_files()) - before - first
            assert second <= 16 + 9 * 3
            inherited = {fd for fd, target in open_files().items() if target != "/dev/null"}
            for record in many.status():
                own = {fd: target for fd, target in open_files(record.pid).items() if target != "/dev/null"}
                extra = {fd: target for fd, target in own.items() if fd not in inherited}
                assert len(extra) <= 12, extra
        assert one.control_payload(0, ControlOp.PING) == b""
    assert len(open_files()) == before
