"""Bringing a tree up and taking it down."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from benchmarks.figures import OURS, Row, Target, figure_of
from benchmarks.peers import fork
from simpler import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from benchmarks.sampling import Effort

    Cycle = Callable[[int], tuple[int, int]]

BARE = "os.fork, a byte on a pipe"
PROCESS = "multiprocessing.Process"
_TARGETS_MS = {1: (8, 5), 8: (30, 10)}


def lifecycle(effort: Effort) -> Iterator[Row]:
    """init() until every child is ready, and close() until every child is gone; 1 and 8 chips."""
    cycles: dict[str, Cycle] = {OURS: _ours, BARE: _bare, PROCESS: _processes}
    for chips, (init_ms, close_ms) in _TARGETS_MS.items():
        taken: dict[str, list[tuple[int, int]]] = {name: [] for name in cycles}
        for cycle in cycles.values():
            cycle(chips)
        for _ in range(effort.samples(40)):
            for name, cycle in cycles.items():
                taken[name].append(cycle(chips))
        for position, (what, limit_ms) in enumerate((("init", init_ms), ("close", close_ms))):
            figures = {name: figure_of([[pair[position]] for pair in pairs]) for name, pairs in taken.items()}
            yield Row(
                f"{what} of {chips} cpu chip{'s' if chips > 1 else ''}",
                "time",
                figures,
                Target(limit_ms * 1e6),
            )


def _ours(chips: int) -> tuple[int, int]:
    worker = Worker(level=3, device_ids=range(chips))
    start = time.perf_counter_ns()
    worker.init()
    ready = time.perf_counter_ns()
    worker.close()
    return ready - start, time.perf_counter_ns() - ready


def _bare(children: int) -> tuple[int, int]:
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


def _processes(children: int) -> tuple[int, int]:
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
