"""A killed child: from os.kill(pid, SIGKILL) until its parent knows.

The kernel tears the process down in between, which every contender pays.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any

from benchmarks import ours
from benchmarks.figures import OURS, Row, Samples, Target, figure_of
from benchmarks.peers import PIPE, POOL, fork
from simpler import SimplerError, TaskArgs, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.sampling import Effort

    Trial = Callable[[], int]

BARE = "os.fork, a pidfd"
SETTLE_S = 5e-3
POLL_S = 20e-6  # asking without a pause would hold the GIL and a core that the news has to come through


def death(effort: Effort) -> Iterator[Row]:
    """The error in a blocked caller, and status() of an idle child."""
    logging.getLogger("simpler").addHandler(logging.NullHandler())  # not a line for each child killed here
    bare: dict[str, Trial] = {BARE: _bare, PIPE: _pipe}
    rows: tuple[tuple[str, Trial, dict[str, Trial]], ...] = (
        ("killed in a handler: error in the blocked caller", _in_handler, {**bare, POOL: _pool}),
        ("killed in a native kernel: error in the blocked caller", _in_kernel, {**bare, POOL: _pool}),
        ("killed while idle: status() says dead", _idle, bare),
        ("killed while idle, after a restart: status() says dead", _idle_again, bare),
    )
    for name, trial, others in rows:
        contenders = {OURS: trial, **others}
        taken: dict[str, list[Samples]] = {contender: [] for contender in contenders}
        for _ in range(effort.samples(60)):
            for contender, take in contenders.items():
                taken[contender].append([take()])
        yield Row(name, "time", {key: figure_of(value) for key, value in taken.items()}, Target(1e6))


def _in_handler() -> int:
    with ours.tree() as worker:
        return _in_caller(worker, lambda: worker.run_chip_control_extension("benchmark-hang", worker_id=0))


def _in_kernel() -> int:
    with ours.tree() as worker:
        handle = worker.register(ours.kernel("busy"))
        return _in_caller(worker, lambda: worker.run(handle, TaskArgs().add_scalar(3600.0)))


def _in_caller(worker: Worker, call: Callable[[], object]) -> int:
    noticed: list[int] = []

    def blocked() -> None:
        try:
            call()
        except SimplerError:
            noticed.append(time.perf_counter_ns())

    thread = threading.Thread(target=blocked)
    thread.start()
    while worker.status()[0].running is None:
        time.sleep(1e-3)
    time.sleep(SETTLE_S)  # past the caller's spinning: it sleeps, as one that waits long does
    pid = worker.status()[0].pid
    killed = time.perf_counter_ns()
    os.kill(pid, signal.SIGKILL)
    thread.join()
    return noticed[0] - killed


def _idle() -> int:
    with ours.tree() as worker:
        return _in_status(worker)


def _idle_again() -> int:
    """The replacement is the spare process's child: its end comes by way of that."""
    with ours.tree() as worker:
        worker.kill(0)
        worker.restart(0)
        return _in_status(worker)


def _in_status(worker: Worker) -> int:
    pid = worker.status()[0].pid
    time.sleep(SETTLE_S)
    killed = time.perf_counter_ns()
    os.kill(pid, signal.SIGKILL)
    while worker.status()[0].state != "dead":
        time.sleep(POLL_S)
    return time.perf_counter_ns() - killed


def _bare() -> int:
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    time.sleep(SETTLE_S)
    killed = time.perf_counter_ns()
    os.kill(pid, signal.SIGKILL)
    poll.poll()
    noticed = time.perf_counter_ns()
    os.close(pidfd)
    os.waitpid(pid, 0)
    return noticed - killed


def _pipe() -> int:
    mine, theirs = fork.Pipe()
    process = fork.Process(target=_say_hello_and_wait, args=(theirs,))
    process.start()
    theirs.close()
    mine.recv_bytes()
    time.sleep(SETTLE_S)
    killed = time.perf_counter_ns()
    os.kill(process.pid or 0, signal.SIGKILL)
    try:
        mine.recv_bytes()
    except (EOFError, ConnectionResetError):
        noticed = time.perf_counter_ns()
    process.join()
    mine.close()
    return noticed - killed


def _say_hello_and_wait(link: Any) -> None:
    link.send_bytes(b"x")
    signal.pause()


def _pool() -> int:
    noticed: list[int] = []

    def done(_future: Future[Any]) -> None:
        noticed.append(time.perf_counter_ns())

    with ProcessPoolExecutor(1, mp_context=fork) as pool:
        pid = pool.submit(os.getpid).result()
        future = pool.submit(time.sleep, 3600)
        future.add_done_callback(done)
        time.sleep(SETTLE_S)
        killed = time.perf_counter_ns()
        os.kill(pid, signal.SIGKILL)
        try:
            future.result()
        except BrokenProcessPool:
            return noticed[0] - killed
    raise RuntimeError("the pool did not break")
