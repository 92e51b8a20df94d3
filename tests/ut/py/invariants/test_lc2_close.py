"""LC-2: close() from anywhere, any number of times, with anything in flight, within its budget."""

from __future__ import annotations

import gc
import math
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

import simpler
from invariants.bounds import BUDGET_SLACK_S
from invariants.gate import Gate, gate_args, native, wait_at, wait_handler
from invariants.nodes import WATCHDOG_S, Background, error_of, node, run_task
from invariants.processes import Census, is_gone
from invariants.program import run_program
from registered import extension
from simpler import ControlOp

if TYPE_CHECKING:
    from collections.abc import Callable

BUDGET_S = 0.5


def spin_in_python(name: bytes) -> None:
    with open(name, "rb"):  # noqa: PTH123 - bytes as they came
        while True:
            pass


def ignore_sigterm(name: bytes) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait_at(name)
    while True:
        signal.pause()


def close_within_budget(worker: simpler.Worker) -> None:
    pids = [record.pid for record in worker.status()]
    began = time.monotonic()
    worker.close()
    assert time.monotonic() - began < BUDGET_S + BUDGET_SLACK_S
    assert worker.state == "CLOSED"
    assert [pid for pid in pids if not is_gone(pid)] == []


@pytest.mark.parametrize("symbol", ["wait_at_gate", "spin_for_ever", "ignore_sigterm_for_ever"])
def test_lc2_a_chip_stuck_in_a_native_kernel_dies_within_the_budget(gate: Gate, symbol: str) -> None:
    worker = node(device_ids=[0, 1], shutdown_timeout_s=BUDGET_S)
    worker.init()
    handle = worker.register(native(symbol))
    call = Background(lambda: run_task(worker, handle, gate_args(worker, gate)))
    with gate:
        assert worker.control_payload(1, ControlOp.PING) == b""
        close_within_budget(worker)
        assert isinstance(call.error(), simpler.ClosedError)


@pytest.mark.parametrize("work", [wait_at, spin_in_python, ignore_sigterm])
@pytest.mark.parametrize("concurrent", [False, True])
def test_lc2_a_chip_stuck_in_a_handler_dies_within_the_budget(
    gate: Gate, work: Callable[[bytes], None], concurrent: bool
) -> None:
    if concurrent and work is ignore_sigterm:
        pytest.skip("Python sets signal handlers on the main thread only")

    def stick(_chip: object, payload: bytes, _device: int) -> None:
        work(payload)

    with extension("stick", stick, concurrent=concurrent):
        worker = node(device_ids=[0, 1], shutdown_timeout_s=BUDGET_S)
        worker.init()
        call = Background(
            lambda: worker.run_chip_control_extension("stick", gate.name, worker_id=0, timeout_s=math.inf)
        )
        with gate:
            if work is not ignore_sigterm:
                close_within_budget(worker)
        if work is ignore_sigterm:
            close_within_budget(worker)
        assert isinstance(call.error(), simpler.ClosedError)


def test_lc2_a_stuck_on_close_is_ended_within_the_budget(gate: Gate) -> None:
    with extension("wait", wait_handler, on_close=lambda _chip: wait_at(gate.name)):
        worker = node(device_ids=[0], shutdown_timeout_s=BUDGET_S)
        worker.init()
        close_within_budget(worker)


def test_lc2_every_call_in_flight_fails_with_closed_error(gate: Gate) -> None:
    with extension("wait", wait_handler), extension("beside", wait_handler, concurrent=True):
        worker = node(device_ids=[0, 1], shutdown_timeout_s=BUDGET_S)
        worker.init()
        handle = worker.register(native("nothing"))
        stuck = worker.submit_chip_control_extension("wait", gate.name, worker_id=0, timeout_s=math.inf)
        with gate:
            futures = [stuck] + [
                worker.submit_chip_control_extension("wait", b"", worker_id=0, timeout_s=math.inf)
                for _ in range(60)
            ]
            calls = [
                Background(
                    lambda: worker.run_chip_control_extension("wait", b"", worker_id=0, timeout_s=math.inf)
                )
                for _ in range(30)
            ]
            calls += [
                Background(lambda: worker.run_chip_control_extension("wait", b"", timeout_s=math.inf)),
                Background(lambda: worker.control_payload(0, ControlOp.COMMITTED, timeout_s=math.inf)),
                Background(lambda: run_task(worker, handle)),
                Background(lambda: worker.malloc(64)),
            ]
            closer = Background(worker.close)
            errors = [call.error() for call in calls]
            errors += [error for future in futures if (error := future.exception(WATCHDOG_S)) is not None]
            closer.result()
        assert [type(error) for error in errors] == [simpler.ClosedError] * (len(calls) + len(futures))


def test_lc2_calls_that_race_with_close_end_one_way_or_the_other() -> None:
    with extension("wait", wait_handler):
        for _ in range(20):
            worker = node(device_ids=[0, 1])
            worker.init()

            def call_until_closed(worker: simpler.Worker = worker) -> None:
                while True:
                    assert worker.run_chip_control_extension("wait", b"") == [b"done"] * 2
                    assert worker.control_payload(0, ControlOp.ECHO, bytes(20_000)) == bytes(20_000)
                    worker.free(worker.malloc(64))

            calls = [Background(call_until_closed) for _ in range(4)]
            worker.run_chip_control_extension("wait", b"")
            closers = [Background(worker.close) for _ in range(3)]
            for closer in closers:
                closer.result()
            assert {type(call.error()) for call in calls} == {simpler.ClosedError}


def test_lc2_close_while_init_runs_ends_both(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    from simpler.chips.cpu import CpuChip

    monkeypatch.setattr(CpuChip, "open", lambda _self, _shared: wait_at(gate.name))
    before = Census.take().children
    worker = node()
    starter = Background(worker.init)
    with gate:
        closer = Background(worker.close)
    assert isinstance(starter.error(), simpler.ClosedError)
    closer.result()
    assert worker.state == "CLOSED"
    assert Census.take().children == before


def test_lc2_a_worker_collected_without_close_leaves_nothing() -> None:
    with node(device_ids=[0]):  # what the first Worker loads
        pass
    gc.collect()
    before = Census.take()
    worker = node(device_ids=[0, 1], num_sub_workers=1)
    worker.init()
    pids = [record.pid for record in worker.status()]
    del worker
    gc.collect()
    assert [pid for pid in pids if not is_gone(pid)] == []
    before.assert_not_grown()


AT_EXIT = """
worker = node(device_ids=[0, 1], shutdown_timeout_s=0.5)
simpler.register_chip_control_extension("wait", wait_handler)
worker.init()
handle = worker.register(native("{symbol}"))
pids = [record.pid for record in worker.status()]
threading.Thread(target=lambda: error_of(lambda: run_task(worker, handle)), daemon=True).start()
while worker.status()[0].running is None:
    pass
future = worker.submit_chip_control_extension("wait", worker_id=0)
say(*pids)
"""


@pytest.mark.parametrize("symbol", ["spin_for_ever", "ignore_sigterm_for_ever"])
@pytest.mark.parametrize("end", ["", "worker.close()", "del worker, handle"])
def test_lc2_a_program_that_exits_while_a_kernel_is_stuck_ends_well(symbol: str, end: str) -> None:
    began = time.monotonic()
    said = run_program(AT_EXIT.format(symbol=symbol) + end)
    assert time.monotonic() - began < WATCHDOG_S
    assert [pid for pid in map(int, said.split()) if not is_gone(pid)] == []


def test_lc2_close_from_many_threads_many_times() -> None:
    worker = node(device_ids=[0, 1])
    worker.init()
    barrier = threading.Barrier(8)

    def close() -> str:
        barrier.wait()
        worker.close()
        return str(worker.state)

    assert [call.result() for call in [Background(close) for _ in range(8)]] == ["CLOSED"] * 8
    worker.close()
    error = error_of(lambda: worker.control_payload(0, ControlOp.PING))
    assert isinstance(error, simpler.ClosedError)
    assert "CLOSED" in str(error)


@pytest.mark.parametrize("level", [2, 3])
def test_lc2_after_close_nothing_is_left_though_handles_are_kept(level: int) -> None:
    with extension("wait", wait_handler):
        with node(device_ids=[0]):  # what the first Worker loads
            pass
        gc.collect()
        before = Census.take()
        worker = simpler.Worker(level=level, hbm_bytes=1 << 20, heap_bytes=1 << 20)
        worker.init()
        device, host = worker.malloc(64), worker.create_buffer(64)
        handle = worker.register(native("nothing"))
        future = worker.submit_chip_control_extension("wait", worker_id=0)
        assert future.result(WATCHDOG_S) == b"done"
        tensor = device.tensor((64,), "uint8")
        worker.close()
        kept = (worker, device, handle, future, tensor)
        # The host buffer's views may still be asked for: its mapping goes with it.
        before._replace(memfds=before.memfds + 1).assert_not_grown()
        del host
        before.assert_not_grown()
        assert len(kept) == 5


def test_lc2_with_closes_also_when_its_body_raises() -> None:
    worker = node()
    pids: list[int] = []

    def body() -> None:
        with worker:
            pids.extend(record.pid for record in worker.status())
            raise ZeroDivisionError

    assert isinstance(error_of(body), ZeroDivisionError)
    assert len(pids) == 2
    assert worker.state == "CLOSED"
    assert [pid for pid in pids if not is_gone(pid)] == []
