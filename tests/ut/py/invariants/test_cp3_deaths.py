"""CP-3 and CP-4: a child's death at every phase, told truly and at once, and for ever after."""

from __future__ import annotations

import functools
import math
import os
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest

import simpler
from invariants.deaths import DESCRIPTIONS, WAYS, bytes_that_fault, die_handler
from invariants.gate import Gate, gate_args, native, wait_handler
from invariants.nodes import WATCHDOG_S, Background, error_of, node, run_task
from invariants.processes import wait_ended
from registered import extension
from simpler import ControlOp
from simpler.chips.cpu import CpuChip

if TYPE_CHECKING:
    from collections.abc import Callable

ways = pytest.mark.parametrize("way", WAYS)


def assert_told(error: BaseException, way: str, *, pid: int, doing: str) -> None:
    assert isinstance(error, simpler.WorkerDiedError)
    text = str(error)
    assert [name for name in DESCRIPTIONS if DESCRIPTIONS[name] in text] == [way]
    assert f"pid {pid}" in text
    assert "device 5" in text
    assert doing in text
    assert (error.path, error.device_id, error.pid) == ((0,), 5, pid)


@ways
def test_cp3_death_before_ready_is_the_error_of_init(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuChip, "open", lambda _self, _shared: WAYS[way]())
    worker = node(device_ids=[5, 6])
    with pytest.raises(simpler.StartupError) as caught:
        worker.init()
    assert isinstance(caught.value.cause, simpler.WorkerDiedError)
    assert DESCRIPTIONS[way] in str(caught.value)
    assert caught.value.cause.device_id in (5, 6)
    assert worker.state == "CLOSED"


@ways
@pytest.mark.parametrize("concurrent", [False, True])
def test_cp3_death_in_a_handler(way: str, concurrent: bool) -> None:
    with extension("die", die_handler, concurrent=concurrent), node(device_ids=[5, 6]) as worker:
        pid = worker.status()[0].pid
        error = error_of(
            lambda: worker.run_chip_control_extension("die", way.encode(), worker_id=0, timeout_s=math.inf)
        )
        assert_told(error, way, pid=pid, doing="running extension 'die'")
        assert worker.run_chip_control_extension("die", worker_id=1) == b""


@ways
def test_cp3_death_in_a_submitted_handler(way: str) -> None:
    with extension("die", die_handler), node(device_ids=[5, 6]) as worker:
        pid = worker.status()[0].pid
        future = worker.submit_chip_control_extension("die", way.encode(), worker_id=0, timeout_s=math.inf)
        error = future.exception(WATCHDOG_S)
        assert error is not None
        assert_told(error, way, pid=pid, doing="running extension 'die'")


@ways
def test_cp3_death_in_a_python_kernel(way: str) -> None:
    with node(device_ids=[5, 6]) as worker:
        handle = worker.register(WAYS[way], name="doomed")
        fine = worker.register(os.getpid)
        pid = worker.status()[0].pid
        error = error_of(lambda: run_task(worker, handle))
        assert isinstance(error, simpler.TaskError)
        assert_told(error.cause, way, pid=pid, doing="'doomed'")
        assert run_task(worker, fine, chip=1) == worker.status()[1].pid


def test_cp3_death_in_a_native_kernel_by_itself() -> None:
    with node(device_ids=[5]) as worker:
        handle = worker.register(native("crash"))
        pid = worker.status()[0].pid
        error = error_of(lambda: run_task(worker, handle))
        assert isinstance(error, simpler.TaskError)
        assert_told(error.cause, "segfault", pid=pid, doing="'crash'")


def test_cp3_death_in_a_native_kernel_from_outside(gate: Gate) -> None:
    with node(device_ids=[5]) as worker:
        handle = worker.register(native("wait_at_gate"))
        pid = worker.status()[0].pid
        call = Background(lambda: run_task(worker, handle, gate_args(worker, gate)))
        with gate:
            os.kill(pid, signal.SIGKILL)
            error = call.error()
        assert isinstance(error, simpler.TaskError)
        assert_told(error.cause, "kill", pid=pid, doing="'wait_at_gate'")


def test_cp3_death_while_replying_a_large_payload() -> None:
    def reply(_chip: object, _payload: bytes, _device: int) -> memoryview:
        return bytes_that_fault(8 << 20)

    with extension("fault", reply), node(device_ids=[5, 6]) as worker:
        error = error_of(lambda: worker.run_chip_control_extension("fault", worker_id=0))
        assert isinstance(error, simpler.WorkerDiedError)
        assert "SIGBUS" in str(error)
        assert "extension 'fault'" in str(error)
        assert worker.control_payload(1, ControlOp.ECHO, b"fine") == b"fine"


@pytest.mark.parametrize(
    ("way", "number"),
    [
        ("kill", signal.SIGKILL),
        ("terminate", signal.SIGTERM),
        ("abort", signal.SIGABRT),
        ("segfault", signal.SIGSEGV),
    ],
)
def test_cp3_death_of_an_idle_child(way: str, number: int) -> None:
    with node(device_ids=[5]) as worker:
        pid = worker.status()[0].pid
        os.kill(pid, number)
        wait_ended(pid)
        error = error_of(lambda: worker.control_payload(0, ControlOp.PING, timeout_s=math.inf))
        assert_told(error, way, pid=pid, doing="")
        assert "running" not in str(error)


@ways
def test_cp3_death_at_close_is_no_error_of_close_and_leaves_nothing(way: str) -> None:
    def on_close(_chip: object) -> None:
        WAYS[way]()

    with extension("closing", wait_handler, on_close=on_close):
        worker = node(device_ids=[5, 6])
        worker.init()
        worker.close()
        assert worker.state == "CLOSED"


def test_cp3_every_call_and_task_that_the_child_owes_fails_at_once(make_gate: Callable[[], Gate]) -> None:
    gate, beside = make_gate(), make_gate()
    with (
        extension("wait", wait_handler),
        extension("beside", wait_handler, concurrent=True),
        node(device_ids=[5, 6]) as worker,
    ):
        handle = worker.register(native("wait_at_gate"))
        pid = worker.status()[0].pid
        for_ever = functools.partial(
            worker.run_chip_control_extension, "wait", b"", worker_id=0, timeout_s=math.inf
        )
        calls = [Background(lambda: run_task(worker, handle, gate_args(worker, gate)))]
        with gate:
            service = worker.submit_chip_control_extension(
                "beside", beside.name, worker_id=0, timeout_s=math.inf
            )
            with beside:
                calls += [Background(for_ever) for _ in range(30)]
                futures = [service] + [
                    worker.submit_chip_control_extension("wait", b"", worker_id=0, timeout_s=math.inf)
                    for _ in range(60)
                ]
                os.kill(pid, signal.SIGKILL)
                errors: list[Any] = [call.error() for call in calls]
                errors += [future.exception(WATCHDOG_S) for future in futures]
        assert isinstance(errors[0], simpler.TaskError)
        errors[0] = errors[0].cause
        for error in errors:
            assert_told(error, "kill", pid=pid, doing="'wait_at_gate'")


def test_cp4_the_first_cause_is_repeated_by_each_later_use_and_the_others_go_on() -> None:
    with extension("die", die_handler), node(device_ids=[5, 6], num_sub_workers=1) as worker:
        handle = worker.register(os.getpid)
        buffer, other = worker.malloc(64, worker_id=0), worker.malloc(64, worker_id=1)
        first = str(error_of(lambda: worker.run_chip_control_extension("die", b"abort", worker_id=0)))
        uses: list[Callable[[], object]] = [
            lambda: worker.control_payload(0, ControlOp.PING),
            lambda: worker.run_chip_control_extension("die", b"kill", worker_id=0),
            lambda: worker.submit_chip_control_extension("die", worker_id=0).result(WATCHDOG_S),
            lambda: worker.run_chip_control_extension("die"),
            lambda: worker.malloc(8, worker_id=0),
            lambda: worker.committed_device_memory(0),
            lambda: run_task(worker, handle, chip=0),
        ]
        for use in uses * 2:
            assert first in str(error_of(use))
        assert worker.status()[0].first_error is not None
        assert str(worker.status()[0].first_error) in first
        assert "SIGABRT" in first
        for use in (lambda: worker.copy_to(buffer, bytes(64)), lambda: worker.copy(other, buffer)):
            with pytest.raises(simpler.SimplerError):
                use()
        assert run_task(worker, handle, chip=1) == worker.status()[1].pid
        worker.copy_to(other, bytes(range(64)))
        assert worker.control_payload(1, ControlOp.ECHO, b"x") == b"x"
        assert worker.control_payload(2, ControlOp.ECHO, b"y") == b"y"


def test_cp3_each_way_of_dying_has_a_text_of_its_own() -> None:
    texts = {}
    for way in WAYS:
        with extension("die", die_handler), node() as worker:
            error = error_of(
                functools.partial(worker.run_chip_control_extension, "die", way.encode(), worker_id=0)
            )
            texts[way] = re.sub(r"pid \d+|[\d.]+ m?s", "", str(error))
    assert len(set(texts.values())) == len(WAYS), texts


def test_a_killed_childs_death_does_not_blame_memory_when_no_memory_ran_out() -> None:
    with extension("die", die_handler), node() as worker:
        error = error_of(lambda: worker.run_chip_control_extension("die", b"kill", worker_id=0))
        assert "out-of-memory" not in str(error)
