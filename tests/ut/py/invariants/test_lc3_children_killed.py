"""LC-3: children and the spare are killed; the tree goes on, and restart() brings back what can be."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from typing import TYPE_CHECKING

import pytest

import simpler
from invariants.bounds import NOTHING_LEFT_S
from invariants.gate import Gate, wait_handler
from invariants.nodes import Background, error_of, node, run_task
from invariants.processes import Watched, eventually, is_gone, wait_ended
from registered import extension
from simpler import ControlOp

if TYPE_CHECKING:
    from simpler.status import ChildStatus


def spare_of(worker: simpler.Worker) -> ChildStatus:
    return next(record for record in worker.status() if record.kind == "spare")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_ended(pid)


def wait_dead(worker: simpler.Worker, child: int) -> None:
    eventually(lambda: worker.status()[child].state == "dead", f"child {child} is dead")


def test_lc3_a_killed_child_leaves_no_zombie() -> None:
    with node(device_ids=[0, 1], num_sub_workers=1) as worker:
        for child in range(3):
            pid = worker.status()[child].pid
            kill(pid)
            wait_dead(worker, child)
            eventually(functools.partial(is_gone, pid), "it is reaped")


def test_lc3_the_tree_goes_on_without_its_spare_and_restart_says_why_it_cannot() -> None:
    with extension("wait", wait_handler), node(device_ids=[0, 1], num_sub_workers=1) as worker:
        handle = worker.register(os.getpid)
        kill(spare_of(worker).pid)
        eventually(lambda: spare_of(worker).state == "dead", "the spare is dead")
        assert "SIGKILL" in str(spare_of(worker).first_error)
        assert worker.run_chip_control_extension("wait") == [b"done"] * 2
        assert run_task(worker, handle, chip=1) == worker.status()[1].pid
        worker.copy_to(worker.malloc(64), bytes(64))
        worker.kill(0)
        for _ in range(2):
            error = error_of(lambda: worker.restart(0))
            assert isinstance(error, simpler.StartupError)
            assert "spare" in str(error)
        assert worker.control_payload(1, ControlOp.ECHO, b"on") == b"on"


def test_lc3_a_replacement_outlives_the_spare_that_forked_it() -> None:
    with node(device_ids=[0, 1]) as worker:
        worker.kill(0)
        worker.restart(0)
        pid = worker.status()[0].pid
        kill(spare_of(worker).pid)
        assert worker.control_payload(0, ControlOp.ECHO, b"on") == b"on"
        assert worker.status()[0].pid == pid
        os.kill(pid, signal.SIGKILL)
        error = error_of(lambda: worker.control_payload(0, ControlOp.PING))
        assert isinstance(error, simpler.WorkerDiedError)


def test_lc3_all_children_are_killed_and_brought_back_several_times() -> None:
    with extension("wait", wait_handler), node(device_ids=[0, 1], num_sub_workers=1) as worker:
        early = worker.register(os.getpid)
        late = worker.register(lambda: "shipped")
        for generation in range(1, 5):
            for child in range(3):
                kill(worker.status()[child].pid)
            for child in range(3):
                wait_dead(worker, child)
                worker.restart(child)
                assert worker.status()[child].generation == generation
            assert worker.run_chip_control_extension("wait") == [b"done"] * 2
            assert run_task(worker, early, chip=1) == worker.status()[1].pid
            assert run_task(worker, late, chip=0) == "shipped"
            assert worker.committed_device_memory(0) == 0
            assert [stats.restarts for stats in worker.stats()] == [generation] * 3


def test_lc3_a_replacement_that_dies_is_told_like_any_other() -> None:
    def leave(_chip: object, payload: bytes, _device: int) -> bytes:
        if payload:
            os._exit(int(payload))
        return b"alive"

    with extension("leave", leave), node(device_ids=[5]) as worker:
        for code in (3, 4, 5):
            error = error_of(functools.partial(worker.run_chip_control_extension, "leave", b"%d" % code))
            assert f"exited with code {code}" in str(error)
            wait_dead(worker, 0)
            worker.restart(0)
            assert worker.run_chip_control_extension("leave") == [b"alive"]
            assert worker.status()[0].first_error is None


def test_lc3_calls_of_other_threads_end_while_a_chip_is_killed_and_restarted() -> None:
    with extension("wait", wait_handler), node(device_ids=[0, 1]) as worker:
        stop = False

        def call(chip: int) -> int:
            good = 0
            while not stop:
                with contextlib.suppress(simpler.WorkerDiedError):
                    good += worker.run_chip_control_extension("wait", b"", worker_id=chip) == b"done"
            return good

        calls = [Background(functools.partial(call, chip)) for chip in (0, 0, 0, 1)]
        for _ in range(10):
            worker.kill(0)
            worker.restart(0)
            assert worker.control_payload(0, ControlOp.ECHO, b"new") == b"new"
        stop = True
        assert all(thread.result() >= 0 for thread in calls)
        assert worker.stats()[1].timeouts == 0


def test_lc3_only_a_dead_child_is_restarted_and_a_living_one_is_told_so() -> None:
    with node(device_ids=[0, 1]) as worker:
        with pytest.raises(ValueError, match="alive"):
            worker.restart(0)
        worker.kill(0)
        worker.kill(0)
        worker.restart(0)
        assert worker.control_payload(0, ControlOp.PING) == b""


def test_lc3_close_after_everything_was_killed(gate: Gate) -> None:
    with extension("wait", wait_handler):
        worker = node(device_ids=[0, 1], num_sub_workers=1)
        worker.init()
        call = Background(lambda: worker.run_chip_control_extension("wait", gate.name, worker_id=0))
        with gate:
            tree = Watched([record.pid for record in worker.status()])
            for record in worker.status():
                os.kill(record.pid, signal.SIGKILL)
            assert tree.still_there(NOTHING_LEFT_S) == []
            tree.close()
        assert isinstance(call.error(), simpler.WorkerDiedError)
        worker.close()
        assert worker.state == "CLOSED"
