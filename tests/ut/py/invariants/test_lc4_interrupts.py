"""LC-4: Ctrl-C interrupts a blocked call at once and harms no child."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

from invariants.bounds import INTERRUPT_S
from invariants.program import Program

if TYPE_CHECKING:
    from invariants.gate import Gate

PROGRAM = """
gate = os.fsencode(sys.argv[1])
class Named: name = gate
simpler.register_chip_control_extension("wait", wait_handler)
simpler.register_chip_control_extension("beside", lambda c, p, d: wait_at(p), concurrent=True)
worker = node(device_ids=[0, 1], num_sub_workers=1, shutdown_timeout_s=5)
kernel = worker.register(lambda: wait_at(gate))
worker.init()
native_kernel = worker.register(native("wait_at_gate"))
pids = [record.pid for record in worker.status()]
def in_run(orch, args, config):
    task = orch.submit_next_level(kernel, worker=0)
    task.result()
def many_tasks(orch, args, config):
    orch.submit_next_level(kernel, worker=0)
    for _ in range(200):
        orch.submit_next_level(native_kernel, gate_args(worker, Named), worker=0)
def stuck_then(call):
    worker.submit_chip_control_extension("wait", gate, worker_id=0)
    call()
def blocked():
    {blocked}
try:
    blocked()
except KeyboardInterrupt:
    say(time.monotonic())
sys.stdin.readline()
assert worker.run_chip_control_extension("wait", worker_id=1) == b"done"
assert worker.control_payload(2, ControlOp.ECHO, b"x") == b"x"
assert worker.control_payload(0, ControlOp.ECHO, b"y") == b"y"
assert worker.run_chip_control_extension("wait", timeout_s=30) == [b"done", b"done"]
assert [record.pid for record in worker.status()] == pids
assert all(record.first_error is None for record in worker.status())
worker.close()
say("closed")
"""

BLOCKED = {
    "directed call": "worker.run_chip_control_extension('wait', gate, worker_id=0)",
    "call for ever": "worker.run_chip_control_extension('wait', gate, worker_id=0, timeout_s=float('inf'))",
    "concurrent call": "worker.run_chip_control_extension('beside', gate, worker_id=0)",
    "call with memory": (
        "worker.run_chip_control_extension('wait', gate, worker_id=0, buffers=[worker.create_buffer(8)])"
    ),
    "broadcast": ("stuck_then(lambda: worker.run_chip_control_extension('wait'))"),
    "future": "worker.submit_chip_control_extension('wait', gate, worker_id=0).result()",
    "task": "worker.run(in_run)",
    "handle": "worker.run(kernel)",
    "native kernel": "run_task(worker, native_kernel, gate_args(worker, Named))",
    "call behind": "stuck_then(lambda: worker.run_chip_control_extension('wait', worker_id=0))",
    "malloc behind": "stuck_then(lambda: worker.malloc(64))",
    "committed behind": "stuck_then(lambda: worker.committed_device_memory(0))",
    "register behind": "stuck_then(lambda: worker.register(lambda: 1))",
}


@pytest.mark.parametrize("whom", ["program", "group"])
@pytest.mark.parametrize("blocked", BLOCKED)
def test_lc4_ctrl_c_interrupts_a_blocked_call_and_the_children_live_on(
    gate: Gate, blocked: str, whom: str
) -> None:
    with Program(PROGRAM.replace("{blocked}", BLOCKED[blocked]), gate.path) as program:
        gate.wait_reached()
        sent = time.monotonic()
        if whom == "program":
            program.signal(signal.SIGINT)
        else:
            program.signal_group(signal.SIGINT)
        raised = float(program.line())
        assert raised - sent < INTERRUPT_S
        gate.open()
        program.tell()
        assert program.line() == "closed"
        assert program.wait() == 0


def test_lc4_ctrl_c_interrupts_a_run_that_waits_for_room_in_the_ring(gate: Gate) -> None:
    body = PROGRAM.replace("{blocked}", "worker.run(many_tasks)").split("sys.stdin.readline()")[0]
    with Program(body + "worker.close()\nsay('closed')", gate.path) as program:
        gate.wait_reached()
        sent = time.monotonic()
        program.signal(signal.SIGINT)
        assert float(program.line()) - sent < INTERRUPT_S
        assert program.line() == "closed"


def test_lc4_ctrl_c_interrupts_init_and_nothing_is_left(gate: Gate) -> None:
    body = """
    from simpler.chips.cpu import CpuChip
    def open_slowly(chip, shared):
        if chip._device_id == 1:
            wait_at(os.fsencode(sys.argv[1]))
    CpuChip.open = open_slowly
    worker = node(device_ids=[0, 1, 2])
    try:
        worker.init()
    except KeyboardInterrupt:
        say(time.monotonic())
    say(worker.state)
    from invariants.processes import children_of
    say(children_of(os.getpid()))
    """
    with Program(body, gate.path) as program:
        gate.wait_reached()
        sent = time.monotonic()
        program.signal_group(signal.SIGINT)
        assert float(program.line()) - sent < INTERRUPT_S + 1  # what has been forked is ended first
        assert [program.line(), program.line()] == ["CLOSED", "[]"]


def test_lc4_children_ignore_the_terminals_sigint_in_every_state(gate: Gate) -> None:
    body = """
    simpler.register_chip_control_extension("wait", wait_handler)
    worker = node(device_ids=[0, 1], num_sub_workers=1)
    worker.init()
    worker.kill(1)
    worker.restart(1)
    signal.signal(signal.SIGINT, lambda *_: say("interrupted"))
    future = worker.submit_chip_control_extension("wait", os.fsencode(sys.argv[1]), worker_id=0)
    future.result()
    sys.stdin.readline()
    say(worker.run_chip_control_extension("wait"), [record.state for record in worker.status()])
    """
    with Program(body, gate.path) as program:
        gate.wait_reached()
        for _ in range(3):
            program.signal_group(signal.SIGINT)
            assert program.line() == "interrupted"
        gate.open()
        program.tell()
        assert program.line() == "[b'done', b'done'] ['ready', 'ready', 'ready', 'ready']"


def test_lc4_runtime_threads_take_no_signals() -> None:
    body = """
    worker = node(device_ids=[0, 1])
    worker.init()
    worker.submit_chip_control_extension  # the dispatcher is Python's own thread
    python = {thread.native_id for thread in threading.enumerate()}
    for tid in os.listdir("/proc/self/task"):
        if int(tid) not in python:
            blocked = [line for line in open(f"/proc/self/task/{tid}/status") if line.startswith("SigBlk")]
            say(blocked[0].split()[1])
    say("end")
    """
    with Program(body) as program:
        masks = []
        while (line := program.line()) != "end":
            masks.append(int(line, 16))
        assert masks
        for mask in masks:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM, signal.SIGCHLD):
                assert mask & (1 << (number - 1))


def test_lc4_an_interrupted_call_is_withdrawn_or_goes_on_and_the_next_ones_work(gate: Gate) -> None:
    body = """
    gate = os.fsencode(sys.argv[1])
    simpler.register_chip_control_extension("wait", wait_handler)
    noted = []
    simpler.register_chip_control_extension("note", lambda c, p, d: (noted.append(p), b",".join(noted))[1])
    worker = node()
    worker.init()
    stuck = worker.submit_chip_control_extension("wait", gate, worker_id=0)
    while worker.status()[0].running is None:
        pass
    for number in range(5):
        try:
            say("calling")
            worker.run_chip_control_extension("note", b"%d" % number, worker_id=0)
        except KeyboardInterrupt:
            say("interrupted")
    sys.stdin.readline()
    say(stuck.result(), worker.run_chip_control_extension("note", b"last", worker_id=0))
    """
    with Program(body, gate.path) as program:
        gate.wait_reached()
        for _ in range(5):
            assert program.line() == "calling"
            program.signal(signal.SIGINT)
            assert program.line() == "interrupted"
        gate.open()
        program.tell()
        assert program.line() == "b'done' b'last'"
