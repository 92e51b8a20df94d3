"""Growth: what a task costs in longer runs, and in the state machine of the graph with more chips."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import ours
from benchmarks.figures import OURS, Row, Target, measure
from simpler import _core

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.figures import Sampler
    from benchmarks.sampling import Effort
    from simpler import CallableHandle, Orchestrator, Worker

FLAT = 1.25
"""What counts as flat: the figures of one run differ by as much."""
_SMALL = 1000


def growth(effort: Effort) -> Iterator[Row]:
    """Ratios to the smallest of each kind, which takes turns with the others."""
    yield from _runs(effort)
    yield from _chips(effort)


def _runs(effort: Effort) -> Iterator[Row]:
    beside = f"in a run of {_SMALL:,}"
    with ours.tree(2) as worker:
        handle = worker.register(ours.kernel("noop"))
        for tasks in (10_000, 100_000, 1_000_000):
            longer = max(_SMALL, effort.samples(tasks))
            contenders = {
                OURS: _run_of(worker, handle, longer, max(1, 100_000 // longer)),
                beside: _run_of(worker, handle, _SMALL, 100),
            }
            yield Row(
                f"growth: an independent no-op native kernel in a run of {longer:,}, 2 chips, submit_many",
                "time",
                measure(contenders, effort.rounds(5)),
                Target(FLAT, beside),
            )


def _run_of(worker: Worker, handle: CallableHandle, tasks: int, times: int) -> Sampler:
    chips = np.arange(tasks) % 2

    def fn(orch: Orchestrator, _args: Any, _config: Any) -> None:
        orch.submit_many(handle, chips)

    def take() -> list[float]:
        samples = []
        worker.run(fn)
        for _ in range(times):
            start = time.perf_counter_ns()
            worker.run(fn)
            samples.append((time.perf_counter_ns() - start) / tasks)
        return samples

    return take


def _chips(effort: Effort) -> Iterator[Row]:
    beside = "with 1 chip"
    for chips in (4, 16, 64):
        contenders = {OURS: _pure(effort, chips), beside: _pure(effort, 1)}
        yield Row(
            f"growth: a task of the graph alone, without processes, driven from Python, {chips} chips",
            "time",
            measure(contenders, effort.rounds(5)),
            Target(FLAT, beside),
        )


def _pure(effort: Effort, chips: int) -> Sampler:
    """A chain on each chip of as many tasks as there are of all chips together: no process takes part."""
    tasks = effort.samples(20_000) // chips * chips

    def take() -> list[float]:
        gc.collect()
        gc.disable()
        try:
            return [_drive(chips, tasks) / tasks for _ in range(effort.samples(7))]
        finally:
            gc.enable()

    return take


def _drive(chips: int, tasks: int) -> int:
    """Rounds of 64 tasks, over the chips in turn: submitted, sent, ended."""
    graph = _core.TaskGraph(chips=chips)
    accesses = [[(0, True, 8 * chip, 8 * chip + 8)] for chip in range(chips)]
    run = graph.open_run()
    start = time.perf_counter_ns()
    for first in range(0, tasks, 64):
        for i in range(first, min(first + 64, tasks)):
            chip = i % chips
            graph.submit(run, "chip", targets=(chip,), accesses=accesses[chip])
        _end_all(graph)
    elapsed = time.perf_counter_ns() - start
    if graph.sizes()["unfinished_tasks"]:
        raise RuntimeError("the graph kept tasks that were never sent")
    return elapsed


def _end_all(graph: _core.TaskGraph) -> None:
    """Play the chips: end what the graph sends until it sends nothing more."""
    sent = True
    while sent:
        sent = False
        for action in graph.take_actions():
            if action[0] == "send":
                graph.finished(action[1], action[2], "ok")
                sent = True
