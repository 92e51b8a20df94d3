"""One killed child, and when it was known: see benchmarks.fresh."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import simpler
from simpler import SimplerError, TaskArgs, Worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

SETTLE_S = 5e-3
POLL_S = 20e-6  # asking without a pause would hold the GIL and a core that the news has to come through


def _hang(_chip: object, _payload: bytes, _device: int) -> bytes:
    time.sleep(3600)
    return b""


simpler.register_chip_control_extension("hang", _hang)
logging.getLogger("simpler").addHandler(logging.NullHandler())  # not a line for each child killed here


def _tree() -> Worker:
    return Worker(level=3, device_ids=[0])


def in_handler() -> tuple[int]:
    with _tree() as worker:
        return (_in_caller(worker, lambda: worker.run_chip_control_extension("hang", worker_id=0)),)


def in_kernel(library: str, symbol: str) -> tuple[int]:
    with _tree() as worker:
        handle = worker.register(simpler.NativeKernel.load(library, symbol))
        return (_in_caller(worker, lambda: worker.run(handle, TaskArgs().add_scalar(3600.0))),)


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


def idle() -> tuple[int]:
    with _tree() as worker:
        return (_in_status(worker),)


def idle_again() -> tuple[int]:
    """The replacement is the spare process's child: its end comes by way of that."""
    with _tree() as worker:
        worker.kill(0)
        worker.restart(0)
        return (_in_status(worker),)


def _in_status(worker: Worker) -> int:
    pid = worker.status()[0].pid
    time.sleep(SETTLE_S)
    killed = time.perf_counter_ns()
    os.kill(pid, signal.SIGKILL)
    while worker.status()[0].state != "dead":
        time.sleep(POLL_S)
    return time.perf_counter_ns() - killed


def bare() -> tuple[int]:
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
    return (noticed - killed,)


def pipe() -> tuple[int]:
    import multiprocessing

    fork = multiprocessing.get_context("fork")
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
    return (noticed - killed,)


def _say_hello_and_wait(link: Any) -> None:
    link.send_bytes(b"x")
    signal.pause()


def pool() -> tuple[int]:
    import multiprocessing
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor

    fork = multiprocessing.get_context("fork")
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
            return (noticed[0] - killed,)
    raise RuntimeError("the pool did not break")
