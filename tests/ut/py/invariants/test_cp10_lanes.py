"""CP-10: exclusive work runs on one thread, one at a time and in turn; concurrent work beside it."""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING

import pytest

import simpler
from invariants.gate import Gate, gate_args, native, wait_at, wait_handler
from invariants.nodes import WATCHDOG_S, Background, node, run_task
from registered import extension
from simpler import ControlOp

if TYPE_CHECKING:
    from collections.abc import Callable

AT_ONCE = 4

order: list[str] = []  # in each child its own


def thread_id(_chip: object, _payload: bytes, _device: int) -> bytes:
    return b"%d" % threading.get_native_id()


def thread_id_beside(chip: object, payload: bytes, device: int) -> bytes:
    return thread_id(chip, payload, device)


def note(_chip: object, payload: bytes, _device: int) -> bytes:
    """Note the payload's name; tell all names without one."""
    if payload:
        order.append(payload.decode())
    return " ".join(order).encode()


def test_cp10_kernels_and_exclusive_handlers_run_on_the_childs_main_thread() -> None:
    with (
        extension("thread", thread_id),
        extension("beside", thread_id_beside, concurrent=True),
        node(device_ids=[0, 1], num_sub_workers=1) as worker,
    ):
        early = worker.register(threading.get_native_id)
        late = worker.register(threading.get_native_id, name="late")
        for chip in (0, 1):
            pid = worker.status()[chip].pid  # a process's first thread has its number
            for _ in range(3):
                assert int(worker.run_chip_control_extension("thread", worker_id=chip)) == pid
                future = worker.submit_chip_control_extension("thread", worker_id=chip)
                assert int(future.result(WATCHDOG_S)) == pid
                assert run_task(worker, early, chip=chip) == pid
                assert run_task(worker, late, chip=chip) == pid
                assert int(worker.run_chip_control_extension("beside", worker_id=chip)) != pid
            replies = worker.run_chip_control_extension("thread")
            assert int(replies[chip]) == pid

        def on_sub(orch: simpler.Orchestrator, _args: object, _config: object) -> object:
            return orch.submit_sub(early).result()

        assert worker.run(on_sub) == worker.status()[2].pid


def test_cp10_a_waiting_handler_runs_between_tasks_and_then_a_task_has_its_turn(gate: Gate) -> None:
    name = gate.name

    def first() -> None:
        wait_at(name)
        order.append("task0")

    # Registered before the fork: what is registered later has globals of its own.
    worker = node()
    start = worker.register(first)
    tasks = [worker.register(functools.partial(order.append, f"task{number}")) for number in range(1, 5)]
    with extension("note", note), worker:

        def fn(orch: simpler.Orchestrator, _args: object, _config: object) -> None:
            orch.submit_next_level(start, worker=0)
            with gate:
                for task in tasks:
                    orch.submit_next_level(task, worker=0)
                futures = [
                    worker.submit_chip_control_extension("note", b"handler%d" % number, worker_id=0)
                    for number in range(1, 4)
                ]
            for future in futures:
                future.result(WATCHDOG_S)

        worker.run(fn)
        said = worker.run_chip_control_extension("note", worker_id=0)
        assert isinstance(said, bytes)
        noted = said.decode().split()
        assert sorted(noted) == sorted(
            [f"task{number}" for number in range(5)] + [f"handler{number}" for number in range(1, 4)]
        )
        kinds = [name.rstrip("0123456789") for name in noted]
        # A handler after the running task, then turn and turn about while both wait.
        assert kinds == ["task", "handler", "task", "handler", "task", "handler", "task", "task"]
        assert [name for name in noted if name.startswith("task")] == [f"task{number}" for number in range(5)]


def test_cp10_exclusive_handlers_run_one_at_a_time() -> None:
    def overlap(chip: simpler.ChipView, _payload: bytes, _device: int) -> bytes:
        inside = chip.state["inside"] = chip.state.get("inside", 0) + 1
        os.sched_yield()
        chip.state["most"] = max(chip.state.get("most", 0), inside)
        chip.state["inside"] -= 1
        return b"%d" % chip.state["most"]

    with extension("overlap", overlap), node() as worker:

        def call() -> bytes:
            replies = [worker.run_chip_control_extension("overlap", worker_id=0) for _ in range(200)]
            assert isinstance(replies[-1], bytes)
            return replies[-1]

        assert [thread.result() for thread in [Background(call) for _ in range(4)]] == [b"1"] * 4


@pytest.mark.parametrize("stuck", ["native kernel", "python kernel", "exclusive handler"])
def test_cp10_concurrent_handlers_run_while_the_main_thread_is_stuck(gate: Gate, stuck: str) -> None:
    name = gate.name
    with (
        extension("wait", wait_handler),
        extension("beside", thread_id_beside, concurrent=True),
        node(device_ids=[0, 1]) as worker,
    ):
        if stuck == "native kernel":
            native_wait = worker.register(native("wait_at_gate"))
            call = Background(lambda: run_task(worker, native_wait, gate_args(worker, gate)))
        elif stuck == "python kernel":
            python_wait = worker.register(lambda: wait_at(name))
            call = Background(lambda: run_task(worker, python_wait))
        else:
            call = Background(lambda: worker.run_chip_control_extension("wait", name, worker_id=0))
        with gate:
            pid = worker.status()[0].pid
            for _ in range(50):
                reply = worker.run_chip_control_extension("beside", worker_id=0)
                assert int(reply if isinstance(reply, bytes) else b"0") != pid
            assert worker.control_payload(0, ControlOp.ECHO, bytes(100_000)) == bytes(100_000)
            assert len(worker.run_chip_control_extension("beside")) == 2
            with pytest.raises(simpler.WorkerTimeoutError) as caught:
                worker.run_chip_control_extension("wait", worker_id=0, timeout_s=0.1)
            assert not caught.value.started
            running = worker.status()[0].running
            assert running is not None
            assert running.lane == "main"
            assert running.seconds > 0
            assert call.running
        call.result()
        assert worker.run_chip_control_extension("wait", worker_id=0) == b"done"


def test_cp10_four_concurrent_handlers_run_at_once_and_the_rest_wait(
    make_gate: Callable[[], Gate],
) -> None:
    gates = [make_gate() for _ in range(AT_ONCE + 3)]
    lock = threading.Lock()

    def count_inside(chip: simpler.ChipView, payload: bytes, _device: int) -> bytes:
        with lock:
            inside = chip.state["inside"] = chip.state.get("inside", 0) + 1
            chip.state["most"] = max(chip.state.get("most", 0), inside)
        wait_at(payload)
        with lock:
            chip.state["inside"] -= 1
            return b"%d" % chip.state["most"]

    with extension("count", count_inside, concurrent=True), node() as worker:
        futures = [worker.submit_chip_control_extension("count", gate.name, worker_id=0) for gate in gates]
        for gate in gates[:AT_ONCE]:
            gate.wait_reached()
        record = worker.status()[0]
        assert record.running is not None
        running = (record.running, *record.also_running)
        assert [(item.name, item.lane) for item in running] == [("count", "service")] * AT_ONCE
        with pytest.raises(simpler.WorkerTimeoutError) as caught:
            worker.run_chip_control_extension("count", b"", worker_id=0, timeout_s=0.1)
        assert not caught.value.started
        for number, gate in enumerate(gates):
            gate.open()
            if number + AT_ONCE < len(gates):
                gates[number + AT_ONCE].wait_reached()
        assert max(int(future.result(WATCHDOG_S)) for future in futures) == AT_ONCE


def test_cp10_a_poll_waits_for_a_python_kernel_only_for_the_gil() -> None:
    read_end, write_end = os.pipe()
    try:

        def compute() -> int:
            total = 0
            while not os.get_blocking(read_end) or total < 1000:
                total += 1
            return total

        def stop(_chip: object, _payload: bytes, _device: int) -> bytes:
            os.set_blocking(read_end, True)
            return b"stopped"

        os.set_blocking(read_end, False)
        with extension("stop", stop, concurrent=True), node(keep_fds=[read_end]) as worker:
            handle = worker.register(compute)
            call = Background(lambda: run_task(worker, handle))
            assert worker.run_chip_control_extension("stop", worker_id=0) == b"stopped"
            assert call.result() >= 1000
    finally:
        os.close(read_end)
        os.close(write_end)
