"""CP-11: a tree with nothing in flight sleeps in the kernel; a blocked call wakes only for signals."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import simpler
from invariants.gate import Gate, wait_handler
from invariants.nodes import WATCHDOG_S, node, run_task
from invariants.processes import Watched, eventually, status_field, threads_of
from registered import extension
from simpler import ControlOp

if TYPE_CHECKING:
    from collections.abc import Sequence

IDLE_S = 2.0
TIDIED_S = 1.5
SIGNAL_CHECK_S = 0.1

Wakes = dict[tuple[int, int], int]


def our_threads(pids: Sequence[int]) -> list[tuple[int, int]]:
    """Every thread of the children, and what the Worker runs in this process beside Python's own threads."""
    own = [
        (os.getpid(), tid)
        for tid in threads_of()
        if tid not in {thread.native_id for thread in threading.enumerate()}
        or any(
            thread.native_id == tid and thread.name.startswith("simpler") for thread in threading.enumerate()
        )
    ]
    return [(pid, tid) for pid in pids for tid in threads_of(pid)] + own


def wakes(threads: Sequence[tuple[int, int]]) -> Wakes:
    """How often each thread has left its processor so far: each wake-up ends with one."""
    return {
        (pid, tid): status_field(pid, "voluntary_ctxt_switches", tid)
        + status_field(pid, "nonvoluntary_ctxt_switches", tid)
        for pid, tid in threads
    }


def all_asleep(threads: Sequence[tuple[int, int]]) -> bool:
    """Whether the kernel shows every thread as sleeping."""
    for pid, tid in threads:
        text = Path(f"/proc/{pid}/task/{tid}/stat").read_text()
        if text[text.rindex(")") + 2] != "S":
            return False
    return True


def woken_within(worker: simpler.Worker, seconds: float) -> Wakes:
    """The threads that woke while nothing was in flight, and how often."""
    pids = [record.pid for record in worker.status()]
    threads = our_threads(pids)
    eventually(lambda: all_asleep(threads), "all threads sleep")
    watched = Watched(pids)
    try:
        before = wakes(threads)
        assert watched.still_there(seconds) == pids
        after = wakes(threads)
    finally:
        watched.close()
    assert our_threads(pids) == threads
    return {key: count - before[key] for key, count in after.items() if count != before[key]}


def use_everything(worker: simpler.Worker) -> None:
    """So that whatever starts late has started."""
    handle = worker.register(lambda: None)
    worker.run_chip_control_extension("wait")
    worker.submit_chip_control_extension("wait").result(WATCHDOG_S)
    for chip in range(len(worker.worker_ids)):
        worker.control_payload(chip, ControlOp.ECHO, bytes(1 << 20))
        run_task(worker, handle, chip=chip)
    with contextlib.suppress(simpler.WorkerTimeoutError):
        worker.run_chip_control_extension("wait", worker_id=0, timeout_s=1e-6)
    worker.control_payload(0, ControlOp.PING)


@pytest.mark.parametrize("spin_us", [50.0, 0.0])
def test_cp11_no_thread_of_an_idle_tree_wakes(spin_us: float) -> None:
    with (
        extension("wait", wait_handler),
        node(device_ids=range(8), num_sub_workers=1, spin_us=spin_us) as worker,
    ):
        use_everything(worker)
        # The pages of the large payloads go back to the kernel once, about a second after their last use.
        while woken_within(worker, TIDIED_S):
            pass
        assert woken_within(worker, IDLE_S) == {}


def test_cp11_a_tree_that_was_never_used_sleeps() -> None:
    with node(device_ids=[0, 1]) as worker:
        assert woken_within(worker, IDLE_S / 2) == {}


def test_cp11_only_the_main_thread_of_a_blocked_call_wakes_to_look_for_signals(gate: Gate) -> None:
    with extension("wait", wait_handler), node(device_ids=[0, 1]) as worker:
        future = worker.submit_chip_control_extension("wait", gate.name, worker_id=0)
        with gate:
            pids = [record.pid for record in worker.status()]
            threads = our_threads(pids)
            eventually(lambda: all_asleep(threads), "all threads sleep")
            main = (os.getpid(), threading.main_thread().native_id or 0)
            before = wakes([*threads, main])
            with pytest.raises(simpler.WorkerTimeoutError):
                worker.run_chip_control_extension("wait", worker_id=0, timeout_s=IDLE_S)
            after = wakes([*threads, main])
            woke = {key: count - before[key] for key, count in after.items() if count != before[key]}
            # Posting the call may wake the child once; the caller looks for signals ten times a second.
            assert woke.pop(main) <= 2 * IDLE_S / SIGNAL_CHECK_S + 10
            assert all(count <= 3 for count in woke.values()), woke
        assert future.result(WATCHDOG_S) == b"done"


def test_cp11_a_blocked_call_in_another_thread_wakes_for_nothing(gate: Gate) -> None:
    with extension("wait", wait_handler), node(device_ids=[0, 1]) as worker:
        future = worker.submit_chip_control_extension("wait", gate.name, worker_id=0)
        with gate:
            woken: list[int] = []

            def call() -> None:
                own = [(os.getpid(), threading.get_native_id())]
                before = sum(wakes(own).values())
                with contextlib.suppress(simpler.WorkerTimeoutError):
                    worker.run_chip_control_extension("wait", worker_id=0, timeout_s=IDLE_S)
                woken.append(sum(wakes(own).values()) - before)

            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            assert woken[0] <= 8  # going to sleep, the deadline, the GIL; not ten a second
        assert future.result(WATCHDOG_S) == b"done"


def test_cp11_with_spin_us_0_everything_works() -> None:
    with extension("wait", wait_handler), node(device_ids=[0, 1], spin_us=0.0) as worker:
        handle = worker.register(lambda: 7)
        for number in range(200):
            payload = b"%d" % number
            assert worker.control_payload(number % 2, ControlOp.ECHO, payload) == payload
        assert worker.run_chip_control_extension("wait") == [b"done", b"done"]
        assert run_task(worker, handle, chip=1) == 7
