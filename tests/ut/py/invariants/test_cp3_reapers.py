"""CP-3 in programs that take the exit status away, or never want it."""

from __future__ import annotations

import re

from invariants.program import run_program

# The kernel may have said how before the status was gone.
CAUSE = re.compile("exited with code 3|exit status taken by another waiter")
DEATH = """
from invariants.deaths import die_handler
simpler.register_chip_control_extension("die", die_handler)
with node(device_ids=[0, 1]) as worker:
    pid = worker.status()[0].pid
    error = error_of(lambda: worker.run_chip_control_extension("die", b"exit", worker_id=0, timeout_s=60))
    say(type(error).__name__, "|", str(error).replace(str(pid), "PID"))
    say(worker.control_payload(1, ControlOp.ECHO, b"fine"))
    worker.kill(1)
    say(type(error_of(lambda: worker.control_payload(1, ControlOp.PING, timeout_s=60))).__name__)
say(worker.state)
"""


def test_cp3_a_program_that_ignores_sigchld_learns_of_a_death_at_once() -> None:
    said = run_program("signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n" + DEATH).splitlines()
    assert said[0].startswith("WorkerDiedError | ")
    assert "PID" in said[0]
    assert CAUSE.search(said[0])
    assert said[1:] == ["b'fine'", "WorkerDiedError", "CLOSED"]


def test_cp3_a_program_that_reaps_every_child_learns_of_a_death_at_once() -> None:
    said = run_program(
        """
        def reap_all():
            while True:
                try:
                    os.waitpid(-1, 0)
                except ChildProcessError:
                    if ended.wait(0.001):
                        return

        ended = threading.Event()
        reaper = threading.Thread(target=reap_all)
        reaper.start()
        """
        + DEATH.replace("\n", "\n        ")
        + """
        ended.set()
        reaper.join()
        """
    ).splitlines()
    assert said[0].startswith("WorkerDiedError | ")
    assert CAUSE.search(said[0])
    assert said[1:] == ["b'fine'", "WorkerDiedError", "CLOSED"]


def test_a_program_that_ignores_sigchld_opens_and_closes_workers() -> None:
    said = run_program(
        """
        from invariants.processes import eventually, is_gone
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        for _ in range(5):
            with node(device_ids=[0, 1], num_sub_workers=1) as worker:
                pids = [record.pid for record in worker.status()]
                worker.kill(0)
                worker.restart(0)
                assert worker.control_payload(0, ControlOp.ECHO, b"x") == b"x"
            for pid in pids:  # the kernel reaps them, a moment after they have ended (LC-3: within a second)
                eventually(lambda: is_gone(pid), f"process {pid} is left")
        say("done")
        """
    )
    assert said == "done\n"
