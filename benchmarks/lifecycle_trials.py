"""One tree, or as many bare children, brought up and taken down: see benchmarks.fresh."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from simpler import Worker

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def ours(chips: int) -> tuple[int, int]:
    worker = Worker(level=3, device_ids=range(chips))
    start = time.perf_counter_ns()
    worker.init()
    ready = time.perf_counter_ns()
    worker.close()
    return ready - start, time.perf_counter_ns() - ready


def bare(children: int) -> tuple[int, int]:
    """Each child writes a byte when it runs and leaves when its other pipe is closed."""
    start = time.perf_counter_ns()
    came, tell = os.pipe()
    told, leave = os.pipe()
    pids = []
    for _ in range(children):
        pid = os.fork()
        if pid == 0:
            os.close(leave)
            os.write(tell, b"x")
            os.read(told, 1)
            os._exit(0)
        pids.append(pid)
    seen = 0
    while seen < children:
        seen += len(os.read(came, children))
    ready = time.perf_counter_ns()
    os.close(leave)
    for pid in pids:
        os.waitpid(pid, 0)
    ended = time.perf_counter_ns()
    for descriptor in (came, tell, told):
        os.close(descriptor)
    return ready - start, ended - ready


def _wait_told(link: Connection[Any, Any]) -> None:
    link.send_bytes(b"x")
    link.recv_bytes()


def processes(children: int) -> tuple[int, int]:
    import multiprocessing

    fork = multiprocessing.get_context("fork")
    start = time.perf_counter_ns()
    running = []
    for _ in range(children):
        ours, theirs = fork.Pipe()
        process = fork.Process(target=_wait_told, args=(theirs,))
        process.start()
        running.append((process, ours))
    for _, link in running:
        link.recv_bytes()
    ready = time.perf_counter_ns()
    for _, link in running:
        link.send_bytes(b"x")
    for process, _ in running:
        process.join()
    return ready - start, time.perf_counter_ns() - ready
