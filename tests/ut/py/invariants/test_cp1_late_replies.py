"""CP-1 and CP-8: what becomes of calls that were given up, and of the calls after them."""

from __future__ import annotations

import functools
import os
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

import pytest

import simpler
from invariants.gate import Gate, wait_at, wait_handler
from invariants.nodes import WATCHDOG_S, Background, node
from registered import extension
from simpler import ControlOp

if TYPE_CHECKING:
    from collections.abc import Callable

SHORT_S = 0.05
LONGER_S = 0.5  # long enough that the handler has begun


def note_or_wait(chip: simpler.ChipView, payload: bytes, _device: int) -> bytes:
    """Note every payload; wait at the gate that one names; reply with all that were noted."""
    noted = chip.state.setdefault("noted", [])
    if payload.startswith(b"/"):
        wait_at(payload)
        return b"late reply"
    noted.append(payload)
    return b",".join(noted)


@pytest.mark.parametrize("concurrent", [False, True])
def test_cp1_a_late_reply_never_answers_the_next_call_and_is_counted(gate: Gate, concurrent: bool) -> None:
    with extension("note", note_or_wait, concurrent=concurrent), node() as worker:
        with pytest.raises(simpler.WorkerTimeoutError) as caught:
            worker.run_chip_control_extension("note", gate.name, worker_id=0, timeout_s=SHORT_S)
        error = caught.value
        started = error.started
        if started:
            with gate:
                assert worker.stats()[0].late_replies == 0
        assert isinstance(error, TimeoutError)
        assert (error.path, error.device_id, error.pid) == ((0,), 0, worker.status()[0].pid)
        # The main thread of the child takes one after the other: the late one has ended before these.
        for number in range(40):
            assert worker.control_payload(0, ControlOp.ECHO, b"%d" % number) == b"%d" % number
        assert worker.run_chip_control_extension("note", b"next", worker_id=0) == b"next"
        while worker.stats()[0].late_replies < started:
            assert worker.control_payload(0, ControlOp.PING) == b""
        stats = worker.stats()[0]
        assert (stats.timeouts, stats.late_replies) == (1, int(started))


def test_cp1_a_late_reply_of_a_megabyte_gives_its_space_back(gate: Gate) -> None:
    size = 1 << 20

    def wait_and_reply(_chip: object, payload: bytes, _device: int) -> bytes:
        if payload.startswith(b"/"):
            wait_at(payload)
        return bytes(size)

    with extension("big", wait_and_reply, concurrent=True), node(max_control_payload=size) as worker:
        for number in range(8):
            again = Gate(gate.path.with_name(f"round{number}"))
            call = Background(
                functools.partial(
                    worker.run_chip_control_extension, "big", again.name, worker_id=0, timeout_s=LONGER_S
                )
            )
            error = call.error()
            assert isinstance(error, simpler.WorkerTimeoutError)
            if error.started:
                with again:
                    pass
            assert worker.run_chip_control_extension("big", b"", worker_id=0) == bytes(size)


def test_cp8_a_withdrawn_request_never_runs_and_a_started_one_runs_to_its_end(gate: Gate) -> None:
    with extension("note", note_or_wait), node() as worker:
        running = worker.submit_chip_control_extension("note", gate.name, worker_id=0, timeout_s=LONGER_S)
        with gate:
            with pytest.raises(simpler.WorkerTimeoutError) as withdrawn:
                worker.run_chip_control_extension("note", b"withdrawn", worker_id=0, timeout_s=SHORT_S)
            assert not withdrawn.value.started
            with pytest.raises(simpler.WorkerTimeoutError) as begun:
                running.result(WATCHDOG_S)
            assert begun.value.started
            assert "extension 'note'" in str(begun.value)
            record = worker.status()[0]
            assert record.running is not None  # it goes on
            assert (record.state, record.running.name) == ("ready", "note")
        assert worker.run_chip_control_extension("note", b"after", worker_id=0) == b"after"


def test_cp8_submitted_calls_that_time_out_or_are_cancelled_before_they_begin_never_run(gate: Gate) -> None:
    with extension("note", note_or_wait), node() as worker:
        stuck = worker.submit_chip_control_extension("note", gate.name, worker_id=0)
        with gate:
            late = worker.submit_chip_control_extension("note", b"late", worker_id=0, timeout_s=SHORT_S)
            cancelled = worker.submit_chip_control_extension("note", b"cancelled", worker_id=0)
            error = late.exception(WATCHDOG_S)
            assert isinstance(error, simpler.WorkerTimeoutError)
            assert not error.started
            assert cancelled.cancel()
            assert not stuck.cancel()
        assert stuck.result(WATCHDOG_S) == b"late reply"
        with pytest.raises(CancelledError):
            cancelled.result(WATCHDOG_S)
        assert worker.run_chip_control_extension("note", b"after", worker_id=0) == b"after"


def test_cp8_a_timed_out_broadcast_withdraws_it_where_it_has_not_begun(make_gate: Callable[[], Gate]) -> None:
    gate, inner = make_gate(), make_gate()
    with extension("note", note_or_wait), extension("wait", wait_handler), node(device_ids=[0, 1]) as worker:
        stuck = worker.submit_chip_control_extension("wait", gate.name, worker_id=0)
        with gate:
            with pytest.raises(TimeoutError) as caught:
                worker.run_chip_control_extension("note", inner.name, timeout_s=LONGER_S)
            assert isinstance(caught.value, simpler.ChipControlError)
            errors = caught.value.errors
            assert [
                isinstance(error, simpler.WorkerTimeoutError) and error.started
                for error in (errors[(0,)], errors[(1,)])
            ] == [False, True]
            with inner:
                pass
        assert stuck.result(WATCHDOG_S) == b"done"
        assert worker.run_chip_control_extension("note", b"after") == [b"after", b"after"]
        assert worker.stats()[0].late_replies == 0


def test_cp1_a_thousand_time_outs_cost_nothing_and_each_started_one_is_counted() -> None:
    read_end, write_end = os.pipe()
    try:

        def take_a_byte(_chip: object, payload: bytes, _device: int) -> bytes:
            return os.read(read_end, 1) + payload

        with extension("byte", take_a_byte), node(keep_fds=[read_end]) as worker:
            started = 0
            for number in range(1000):
                with pytest.raises(simpler.WorkerTimeoutError) as caught:
                    worker.run_chip_control_extension("byte", b"%d" % number, worker_id=0, timeout_s=0.0005)
                if caught.value.started:
                    started += 1
                    os.write(write_end, b"x")
                if number % 100 == 0:
                    assert worker.control_payload(0, ControlOp.ECHO, b"%d" % number) == b"%d" % number
            os.write(write_end, b"!")
            assert worker.run_chip_control_extension("byte", b"next", worker_id=0) == b"!next"
            stats = worker.stats()[0]
            assert stats.timeouts == 1000
            while worker.stats()[0].late_replies < started:
                worker.control_payload(0, ControlOp.PING)
            assert worker.stats()[0].late_replies == started
    finally:
        os.close(read_end)
        os.close(write_end)
