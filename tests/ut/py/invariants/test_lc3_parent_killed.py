"""LC-3: after SIGKILL of the parent, at whatever moment, every process of its tree is gone within a second.

What is left in /dev/shm is looked at after each test (conftest.py of the tests).
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from invariants.bounds import NOTHING_LEFT_S
from invariants.processes import Watched, children_of, eventually
from invariants.program import Program

if TYPE_CHECKING:
    from collections.abc import Callable

    from invariants.gate import Gate

READY = """
gate = os.fsencode(sys.argv[1])
def on_close(chip):
    if len(sys.argv) > 2:
        wait_at(gate)
simpler.register_chip_control_extension("wait", wait_handler, on_close=on_close)
simpler.register_chip_control_extension("beside", lambda c, p, d: wait_at(p), concurrent=True)
worker = node(device_ids=[0, 1], num_sub_workers=1)
kernel = worker.register(lambda: wait_at(gate))
worker.init()
say(len(worker.status()))
"""

PHASES = {
    "idle": "sys.stdin.read()",
    "in a call": "worker.run_chip_control_extension('wait', gate, worker_id=0)",
    "in a concurrent call": "worker.run_chip_control_extension('beside', gate, worker_id=0)",
    "in a submitted call": """
future = worker.submit_chip_control_extension('wait', gate, worker_id=0)
future.result()
""",
    "in a python kernel": "run_task(worker, kernel)",
    "in a native kernel": """
class Named: name = gate
handle = worker.register(native("wait_at_gate"))
run_task(worker, handle, gate_args(worker, Named))
""",
    "in a native kernel that never ends": """
class Named: name = gate
handle = worker.register(native("ignore_sigterm_for_ever"))
run_task(worker, handle, gate_args(worker, Named))
""",
    "in a native kernel that spins": """
class Named: name = gate
handle = worker.register(native("spin_for_ever"))
run_task(worker, handle, gate_args(worker, Named))
""",
}


def kill_and_look(program: Program, *, processes: int) -> None:
    tree = program.children()
    try:
        assert len(tree.still_there(0.0)) == processes
        program.signal(signal.SIGKILL)
        assert tree.still_there(NOTHING_LEFT_S) == []
    finally:
        tree.close()


@pytest.mark.parametrize("phase", PHASES)
def test_lc3_the_parent_is_killed(gate: Gate, phase: str) -> None:
    with Program(READY + PHASES[phase], gate.path) as program:
        processes = int(program.line())
        if phase != "idle":
            gate.wait_reached()
        kill_and_look(program, processes=processes)


def test_lc3_the_parent_is_killed_during_close(gate: Gate) -> None:
    with Program(READY + "worker.close()", gate.path, "wait in on_close") as program:
        program.line()
        gate.wait_reached()  # one of the two chips waits in on_close
        tree = program.children()
        program.signal(signal.SIGKILL)
        assert tree.still_there(NOTHING_LEFT_S) == []
        tree.close()


def test_lc3_the_parent_is_killed_during_init(make_gate: Callable[[], Gate]) -> None:
    gate = make_gate()
    body = """
    from simpler.chips.cpu import CpuChip
    def open_slowly(chip, shared):
        if chip._device_id == 1:
            wait_at(os.fsencode(sys.argv[1]))
    CpuChip.open = open_slowly
    node(device_ids=[0, 1, 2], num_sub_workers=1).init()
    """
    with Program(body, gate.path) as program:
        gate.wait_reached()
        eventually(lambda: len(children_of(program.pid)) == 5, "all are forked")
        kill_and_look(program, processes=5)


@pytest.mark.parametrize("round_number", range(6))
def test_lc3_the_parent_is_killed_while_it_forks(round_number: int) -> None:
    body = """
    pid = os.getpid()
    forks = []
    def after_fork():
        forks.append(1)
        if len(forks) == int(sys.argv[1]):
            os.kill(pid, signal.SIGKILL)
    os.register_at_fork(after_in_parent=after_fork)
    say("begins")
    worker = node(device_ids=[0, 1, 2], num_sub_workers=1)
    worker.init()
    say("ready")
    sys.stdin.read()
    """
    with Program(body, round_number + 1) as program:
        assert program.line() == "begins"
        if round_number < 5:
            # All that writes to the program's output has ended when nothing more comes.
            assert program.rest() == ""
        else:
            assert program.line() == "ready"
            kill_and_look(program, processes=5)


@pytest.mark.parametrize("stopped", ["one chip", "all but the spare"])
def test_lc3_the_parent_is_killed_while_children_are_stopped(gate: Gate, stopped: str) -> None:
    body = READY + "say(*[record.pid for record in worker.status()])\nsys.stdin.read()"
    with Program(body, gate.path) as program:
        processes = int(program.line())
        pids = [int(pid) for pid in program.line().split()]
        for pid in pids[:1] if stopped == "one chip" else pids[:-1]:
            os.kill(pid, signal.SIGSTOP)
        kill_and_look(program, processes=processes)


def test_lc3_the_whole_group_is_killed(gate: Gate) -> None:
    with Program(READY + PHASES["in a call"], gate.path) as program:
        program.line()
        gate.wait_reached()
        tree = program.children()
        program.signal_group(signal.SIGKILL)
        assert tree.still_there(NOTHING_LEFT_S) == []
        tree.close()


def test_lc3_the_parent_is_killed_after_a_restart(gate: Gate) -> None:
    body = """
    worker = node(device_ids=[0, 1])
    worker.init()
    worker.kill(1)
    worker.restart(1)
    say(*[record.pid for record in worker.status()])
    sys.stdin.read()
    """
    with Program(body) as program:
        pids = [int(pid) for pid in program.line().split()]
        spare = pids[-1]
        assert children_of(spare) == [pids[1]]
        tree = Watched(pids)
        program.signal(signal.SIGKILL)
        assert tree.still_there(NOTHING_LEFT_S) == []
        tree.close()


def test_lc3_the_replacement_is_stopped_and_the_parent_killed() -> None:
    body = """
    worker = node(device_ids=[0, 1])
    worker.init()
    worker.kill(1)
    worker.restart(1)
    say(*[record.pid for record in worker.status()])
    sys.stdin.read()
    """
    with Program(body) as program:
        pids = [int(pid) for pid in program.line().split()]
        tree = Watched(pids)
        os.kill(pids[1], signal.SIGSTOP)
        program.signal(signal.SIGKILL)
        assert tree.still_there(NOTHING_LEFT_S) == []
        tree.close()


def test_lc3_the_thread_that_forked_has_ended_and_the_parent_is_killed() -> None:
    body = """
    worker = node(device_ids=[0, 1])
    starter = threading.Thread(target=worker.init)
    starter.start()
    starter.join()
    say(worker.control_payload(1, ControlOp.ECHO, b"alive"))
    sys.stdin.read()
    """
    with Program(body) as program:
        assert program.line() == "b'alive'"
        kill_and_look(program, processes=3)


def test_lc3_two_workers_of_one_parent_go_with_it() -> None:
    body = """
    workers = [node(device_ids=[number]) for number in range(3)]
    for worker in workers:
        worker.init()
    say(len(workers))
    sys.stdin.read()
    """
    with Program(body) as program:
        program.line()
        kill_and_look(program, processes=6)
