"""CP-7: a broadcast starts everywhere first, is seen in one order, and tells of every chip."""

from __future__ import annotations

import functools
import logging
import os
import queue
import signal
from typing import TYPE_CHECKING

import pytest

import simpler
from invariants.gate import Gate, wait_at, wait_handler
from invariants.nodes import WATCHDOG_S, Background, error_of, node
from invariants.processes import wait_ended
from registered import extension

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LIMIT_S = 0.5


def test_cp7_it_starts_on_all_children_before_it_waits_for_any(tmp_path: Path) -> None:
    ring = [tmp_path / f"between{number}" for number in range(3)]
    for path in ring:
        os.mkfifo(path)

    def meet_neighbours(chip: simpler.ChipView, _payload: bytes, _device: int) -> bytes:
        """Both ends of a fifo wait for each other to be opened."""
        position = chip.worker_id[0]
        if position > 0:
            ring[position - 1].open("rb").close()
        if position < len(ring):
            ring[position].open("wb").close()
        return b"met"

    with extension("meet", meet_neighbours), node(device_ids=range(4)) as worker:
        assert worker.run_chip_control_extension("meet") == [b"met"] * 4
        assert worker.submit_chip_control_extension("meet").result(WATCHDOG_S) == [b"met"] * 4


def append(chip: simpler.ChipView, payload: bytes, _device: int) -> bytes:
    order = chip.state.setdefault("order", [])
    if payload:
        order.append(payload)
        return b""
    return b" ".join(order)


@pytest.mark.parametrize("submit", [False, True])
def test_cp7_every_child_sees_broadcasts_of_several_threads_in_one_order(submit: bool) -> None:
    rounds, threads = 100, 4
    with extension("append", append), node(device_ids=range(4)) as worker:

        def broadcast(name: bytes) -> None:
            for number in range(rounds):
                payload = name + b"%d" % number + b"." * (9000 if number % 10 == 0 else 0)
                if submit and number % 2:
                    worker.submit_chip_control_extension("append", payload).result(WATCHDOG_S)
                else:
                    worker.run_chip_control_extension("append", payload)

        calls = [Background(functools.partial(broadcast, name)) for name in (b"a", b"b", b"c", b"d")]
        for call in calls:
            call.result()
        seen = worker.run_chip_control_extension("append")
        assert len(seen[0].split()) == rounds * threads
        assert set(seen) == {seen[0]}


def test_cp7_one_good_one_failing_one_slow_and_one_dead_chip(gate: Gate) -> None:
    def mixed(chip: simpler.ChipView, payload: bytes, _device: int) -> bytes | str:
        if not payload:
            return b"alive"
        if chip.worker_id == (1,):
            raise ValueError("chip 1 cannot")
        if chip.worker_id == (2,):
            wait_at(payload)
        return b"good"

    with extension("mixed", mixed), node(device_ids=[10, 11, 12, 13]) as worker:
        pid = worker.status()[3].pid
        os.kill(pid, signal.SIGKILL)
        wait_ended(pid)
        call = Background(lambda: worker.run_chip_control_extension("mixed", gate.name, timeout_s=LIMIT_S))
        with gate:
            error = call.error()
        assert isinstance(error, simpler.ChipControlError)
        assert not isinstance(error, TimeoutError)
        assert error.results == {(0,): b"good"}
        assert {path: type(each) for path, each in error.errors.items()} == {
            (1,): simpler.RemoteError,
            (2,): simpler.WorkerTimeoutError,
            (3,): simpler.WorkerDiedError,
        }
        assert error.pending == ()
        slow = error.errors[(2,)]
        assert isinstance(slow, simpler.WorkerTimeoutError)
        assert slow.started
        text = str(error)
        assert text.index("chip 1 cannot") < text.index("chip 2") < text.index("SIGKILL")
        for chip in range(3):
            assert worker.run_chip_control_extension("mixed", worker_id=chip) == b"alive"


def test_cp7_one_that_dies_meanwhile_and_one_slow_one_that_ends_in_time(gate: Gate) -> None:
    def mixed(chip: simpler.ChipView, payload: bytes, _device: int) -> bytes:
        if chip.worker_id == (0,):
            os._exit(7)
        if chip.worker_id == (1,):
            wait_at(payload)
        return b"good"

    with extension("mixed", mixed), node(device_ids=[0, 1, 2]) as worker:
        call = Background(lambda: worker.run_chip_control_extension("mixed", gate.name))
        with gate:
            assert call.running
        error = call.error()
        assert isinstance(error, simpler.ChipControlError)
        assert error.results == {(1,): b"good", (2,): b"good"}
        assert "exited with code 7" in str(error.errors[(0,)])


class Queue(logging.Handler):
    """Puts what is logged into a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.records: queue.Queue[str] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.put(record.getMessage())


def test_cp7_a_death_shows_in_status_and_log_while_the_broadcast_still_waits(gate: Gate) -> None:
    handler = Queue()
    logger = logging.getLogger("simpler")
    logger.addHandler(handler)

    def mixed(chip: simpler.ChipView, payload: bytes, _device: int) -> bytes:
        if chip.worker_id == (1,):
            os._exit(7)
        wait_at(payload)
        return b"good"

    try:
        with extension("mixed", mixed), node(device_ids=[0, 1]) as worker:
            call = Background(lambda: worker.run_chip_control_extension("mixed", gate.name))
            with gate:
                while "exited with code 7" not in handler.records.get(timeout=WATCHDOG_S):
                    pass
                record = worker.status()[1]
                assert record.state == "dead"
                assert "exited with code 7" in str(record.first_error)
                assert call.running
            assert isinstance(call.error(), simpler.ChipControlError)
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("submit", [False, True])
def test_cp7_fail_fast_raises_at_the_first_error_and_drops_later_replies(gate: Gate, submit: bool) -> None:
    def mixed(chip: simpler.ChipView, payload: bytes, _device: int) -> bytes | str:
        if not payload:
            return b"fine"
        if chip.worker_id == (2,):
            return "chip 2 failed first"
        if chip.worker_id == (1,):
            wait_at(payload)
            return b"too late"
        return b"good"

    with extension("mixed", mixed), node(device_ids=[0, 1, 2]) as worker:
        if submit:
            future = worker.submit_chip_control_extension("mixed", gate.name, fail_fast=True)
            call = Background(lambda: future.result(WATCHDOG_S))
        else:
            call = Background(lambda: worker.run_chip_control_extension("mixed", gate.name, fail_fast=True))
        with gate:
            error = call.error()
            assert isinstance(error, simpler.ChipControlError)
            assert "chip 2 failed first" in str(error)
            assert (1,) in error.pending
            assert set(error.errors) == {(2,)}
            assert set(error.results) | set(error.pending) == {(0,), (1,)}
        assert worker.run_chip_control_extension("mixed") == [b"fine"] * 3
        while not submit and worker.stats()[1].late_replies == 0:
            worker.control_payload(1, simpler.ControlOp.PING)
        assert worker.run_chip_control_extension("mixed") == [b"fine"] * 3


def test_cp7_fail_fast_at_a_death(gate: Gate) -> None:
    with extension("wait", wait_handler), node(device_ids=[0, 1]) as worker:
        pid = worker.status()[1].pid
        os.kill(pid, signal.SIGKILL)
        wait_ended(pid)
        error = error_of(
            lambda: worker.run_chip_control_extension("wait", gate.name, fail_fast=True, timeout_s=WATCHDOG_S)
        )
        assert isinstance(error, simpler.ChipControlError)
        assert "SIGKILL" in str(error.errors[(1,)])
        assert error.pending == ((0,),)
        with gate:
            pass


def test_cp7_all_replies_come_in_worker_order_however_they_end(make_gate: Callable[[], Gate]) -> None:
    gates = [make_gate() for _ in range(4)]
    names = [gate.name for gate in gates]

    def wait_in_turn(chip: simpler.ChipView, _payload: bytes, device: int) -> bytes:
        wait_at(names[chip.worker_id[0]])
        return b"%d" % device

    with extension("turn", wait_in_turn), node(device_ids=[9, 7, 5, 3]) as worker:
        call = Background(lambda: worker.run_chip_control_extension("turn"))
        for gate in gates:
            gate.wait_reached()
        for gate in reversed(gates):
            assert call.running
            gate.open()
        assert call.result() == [b"9", b"7", b"5", b"3"]


def test_a_broadcast_of_which_all_chips_are_dead_tells_of_each() -> None:
    with extension("wait", wait_handler), node(device_ids=[0, 1]) as worker:
        worker.kill(0)
        worker.kill(1)
        error = error_of(lambda: worker.run_chip_control_extension("wait"))
        assert isinstance(error, simpler.ChipControlError)
        assert [type(each) for each in error.errors.values()] == [simpler.WorkerDiedError] * 2
        assert not isinstance(error, TimeoutError)
