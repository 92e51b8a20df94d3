"""CP-2: one deadline covers waiting for a slot, for the child, for the work and for the reply."""

from __future__ import annotations

import functools
import math
import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest

import simpler
from invariants.gate import Gate, wait_handler
from invariants.nodes import WATCHDOG_S, Background, node
from registered import extension
from simpler import ControlOp

if TYPE_CHECKING:
    from collections.abc import Callable

SHORT_S = 0.1


def repeat(call: Callable[[], object]) -> None:
    while True:
        call()


def test_cp2_the_deadline_covers_waiting_for_a_slot(gate: Gate) -> None:
    callers = 40  # more than a child has slots
    with extension("wait", wait_handler), node() as worker:
        stuck = worker.submit_chip_control_extension("wait", gate.name, worker_id=0)
        with gate:
            waiting = [
                Background(lambda: worker.run_chip_control_extension("wait", b"", worker_id=0))
                for _ in range(callers)
            ]
            queued = [worker.submit_chip_control_extension("wait", b"", worker_id=0) for _ in range(callers)]
            with pytest.raises(simpler.WorkerTimeoutError) as caught:
                worker.run_chip_control_extension("wait", b"", worker_id=0, timeout_s=SHORT_S)
            assert not caught.value.started
            late = worker.submit_chip_control_extension("wait", b"", worker_id=0, timeout_s=SHORT_S)
            error = late.exception(WATCHDOG_S)
            assert isinstance(error, simpler.WorkerTimeoutError)
            assert not error.started
        assert stuck.result(WATCHDOG_S) == b"done"
        assert [call.result() for call in waiting] == [b"done"] * callers
        assert [future.result(WATCHDOG_S) for future in queued] == [b"done"] * callers


def test_cp2_the_deadline_covers_waiting_for_a_child_that_does_not_run() -> None:
    with node(device_ids=[0, 1], control_timeout_s=SHORT_S) as worker:
        pid = worker.status()[0].pid
        os.kill(pid, signal.SIGSTOP)
        uses: list[Callable[[], object]] = [
            lambda: worker.control_payload(0, ControlOp.PING, timeout_s=SHORT_S),
            lambda: worker.control_payload(0, ControlOp.PING),
            lambda: worker.committed_device_memory(0),
            lambda: worker.malloc(8),
        ]
        try:
            for use in uses:
                with pytest.raises(simpler.WorkerTimeoutError) as caught:
                    use()
                assert caught.value.path == (0,)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert worker.control_payload(0, ControlOp.ECHO, b"again", timeout_s=WATCHDOG_S) == b"again"
        assert worker.control_payload(1, ControlOp.ECHO, b"other", timeout_s=WATCHDOG_S) == b"other"


def test_cp2_none_means_control_timeout_s_and_inf_means_for_ever(gate: Gate) -> None:
    with extension("wait", wait_handler), node(control_timeout_s=SHORT_S) as worker:
        for_ever = Background(
            lambda: worker.run_chip_control_extension("wait", gate.name, worker_id=0, timeout_s=math.inf)
        )
        with gate:
            with pytest.raises(simpler.WorkerTimeoutError):
                worker.run_chip_control_extension("wait", b"", worker_id=0)
            assert for_ever.running
        assert for_ever.result() == b"done"


@pytest.mark.parametrize("timeout_s", [0, 0.0, -1, -math.inf, math.nan])
def test_cp2_a_limit_of_zero_a_negative_one_and_nan_are_value_errors(timeout_s: float) -> None:
    with extension("wait", wait_handler), node() as worker:
        uses: list[Callable[[], object]] = [
            lambda: worker.control_payload(0, ControlOp.PING, timeout_s=timeout_s),
            lambda: worker.run_chip_control_extension("wait", worker_id=0, timeout_s=timeout_s),
            lambda: worker.run_chip_control_extension("wait", timeout_s=timeout_s),
            lambda: worker.submit_chip_control_extension("wait", worker_id=0, timeout_s=timeout_s),
            lambda: worker.submit_chip_control_extension("wait", timeout_s=timeout_s),
        ]
        for use in uses:
            with pytest.raises(ValueError, match="timeout_s"):
                use()
        assert worker.stats()[0].timeouts == 0


def test_cp2_the_deadline_covers_waiting_for_room_for_the_reply(gate: Gate) -> None:
    size = 1 << 20

    def reply_large(_chip: object, payload: bytes, _device: int) -> bytes:
        return bytes(size) if payload else b""

    with (
        extension("wait", wait_handler),
        extension("large", reply_large, concurrent=True),
        node(max_control_payload=size) as worker,
    ):
        held = threading.Event()
        inside = threading.Event()

        def hold_the_dispatcher(_future: object) -> None:
            inside.set()
            held.wait(WATCHDOG_S)

        # While a callback keeps the thread that takes replies of submitted calls, they stay where they are.
        first = worker.submit_chip_control_extension("wait", gate.name, worker_id=0)
        with gate:
            first.add_done_callback(hold_the_dispatcher)
        assert inside.wait(WATCHDOG_S)
        try:
            unread = [worker.submit_chip_control_extension("large", b"1", worker_id=0) for _ in range(4)]
            call = functools.partial(
                worker.run_chip_control_extension, "large", b"1", worker_id=0, timeout_s=SHORT_S
            )
            with pytest.raises((simpler.WorkerTimeoutError, simpler.BackPressureError)):
                repeat(call)
        finally:
            held.set()
        assert [future.result(WATCHDOG_S) for future in unread] == [bytes(size)] * 4
        assert worker.run_chip_control_extension("large", b"1", worker_id=0) == bytes(size)


def test_cp2_the_deadline_covers_waiting_for_room_for_the_request(make_gate: Callable[[], Gate]) -> None:
    size = 1 << 20
    gate = make_gate()
    with extension("wait", wait_handler), node(max_control_payload=size) as worker:
        stuck = worker.submit_chip_control_extension("wait", gate.name, worker_id=0)
        with gate:
            waiting = [
                Background(lambda: worker.control_payload(0, ControlOp.COMMITTED, bytes(size)))
                for _ in range(6)
            ]
            call = functools.partial(
                worker.control_payload, 0, ControlOp.ECHO, bytes(size), timeout_s=SHORT_S
            )
            with pytest.raises((simpler.WorkerTimeoutError, simpler.BackPressureError)):
                repeat(call)
        assert stuck.result(WATCHDOG_S) == b"done"
        assert [len(call.result()) for call in waiting] == [8] * 6
        assert worker.control_payload(0, ControlOp.ECHO, bytes(size)) == bytes(size)
