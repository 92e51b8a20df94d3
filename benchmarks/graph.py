"""The task graph: what a task costs among many, in a chain, launched again, alone, and as runs grow."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import ours
from benchmarks.figures import OURS, Figure, Row, Target, measure
from benchmarks.graph_growth import growth
from benchmarks.graph_others import ALTERNATING, CHAIN, INDEPENDENT, ROUNDS, SINGLE, Others, others
from benchmarks.graph_peers import COMPILED, noop
from benchmarks.sampling import Effort, sample
from simpler import INOUT, TaskArgs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.figures import Sampler
    from simpler import CallableHandle, CapturedGraph, Orchestrator, Worker

SAMPLES = 7
"""Runs a round: five rounds of them make a tail."""


def graph(effort: Effort) -> Iterator[Row]:
    """Native kernels, then Python sub tasks, then growth."""
    theirs = others(effort)
    with ours.tree(2) as worker:
        handle = worker.register(ours.kernel("noop"))
        yield from _independent(effort, theirs, worker, handle)
        yield from _chains(effort, theirs, worker, handle)
        yield from _relaunches(effort, theirs, worker, handle)
        yield _single(effort, theirs, worker, "native kernel", 6000, _one_native(handle))
    with ours.tree(1, sub_workers=2) as worker:
        handle = worker.register(noop)
        yield from _subs(effort, theirs, worker, handle)
        yield _single(effort, theirs, worker, "Python sub task", 10_000, _one_sub(handle))
    yield from growth(effort)


def whole(
    work: Callable[[], object],
    tasks: int,
    effort: Effort,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> Sampler:
    """A sampler of a run of so many tasks: nanoseconds of `clock` a task."""

    def take() -> list[float]:
        work()
        gc.collect()
        gc.disable()
        samples = []
        try:
            for _ in range(effort.samples(SAMPLES)):
                start = clock()
                work()
                samples.append((clock() - start) / tasks)
        finally:
            gc.enable()
        return samples

    return take


def _row(
    name: str, effort: Effort, theirs: Others, question: str, sampler: Sampler, limit_ns: float | None
) -> Row:
    figures: dict[str, Figure] = measure({OURS: sampler}, effort.rounds(ROUNDS))
    figures |= theirs.figures[question]
    target = None if limit_ns is None else Target(limit_ns)
    return Row(name, "time", figures, target, skipped=theirs.skipped)


def _independent(effort: Effort, theirs: Others, worker: Worker, handle: CallableHandle) -> Iterator[Row]:
    count = effort.samples(100_000)
    chips = np.arange(count) % 2

    def many(orch: Orchestrator, _args: Any, _config: Any) -> None:
        orch.submit_many(handle, chips)

    def one_by_one(orch: Orchestrator, _args: Any, _config: Any) -> None:
        submit = orch.submit_next_level
        for _ in range(count // 2):
            submit(handle, worker=0)
            submit(handle, worker=1)

    for fn, how, limit_ns in ((many, "submit_many", 1000), (one_by_one, "one by one from Python", 1e9 / 3e5)):
        yield _row(
            f"{count:,} independent no-op native kernels in one run, 2 chips, {how}, a task",
            effort,
            theirs,
            INDEPENDENT,
            whole(lambda fn=fn: worker.run(fn), count, effort),  # type: ignore[misc]  # bound now
            limit_ns,
        )


def _chain(worker: Worker, handle: CallableHandle, links: int, chips: int) -> Callable[..., None]:
    """Each task writes the bytes that the last one wrote."""
    args = TaskArgs.of(INOUT(worker.create_buffer(8).tensor((8,), np.uint8)))

    def fn(orch: Orchestrator, _args: Any, _config: Any) -> None:
        submit = orch.submit_next_level
        for i in range(links):
            submit(handle, args, worker=i % chips)

    return fn


def _chains(effort: Effort, theirs: Others, worker: Worker, handle: CallableHandle) -> Iterator[Row]:
    links = effort.samples(10_000)
    kinds = ((1, "on one chip", 500, CHAIN), (2, "alternating between 2 chips", 3000, ALTERNATING))
    for chips, where, limit_ns, question in kinds:
        fn = _chain(worker, handle, links, chips)
        captured = worker.capture(fn)
        name = f"chain of {links:,} no-op native kernels {where}"
        launched = whole(lambda captured=captured: captured.launch().result(), links, effort)  # type: ignore[misc]  # bound now
        yield _row(f"{name}, captured, a link", effort, theirs, question, launched, limit_ns)
        submitted = whole(lambda fn=fn: worker.run(fn), links, effort)  # type: ignore[misc]  # bound now
        yield _row(f"{name}, submitted from Python, a link", effort, theirs, question, submitted, None)


def _relaunches(effort: Effort, theirs: Others, worker: Worker, handle: CallableHandle) -> Iterator[Row]:
    tasks = 1000

    def independent(orch: Orchestrator, _args: Any, _config: Any) -> None:
        for i in range(tasks):
            orch.submit_next_level(handle, worker=i % 2)

    def two_chains(orch: Orchestrator, _args: Any, _config: Any) -> None:
        rows = [TaskArgs.of(INOUT(orch.alloc((8,), np.uint8))) for _ in range(2)]
        for i in range(tasks):
            orch.submit_next_level(handle, rows[i % 2], worker=i % 2)

    compiled = {name: figure for name, figure in theirs.figures[INDEPENDENT].items() if name == COMPILED}
    for fn, what in ((independent, "independent"), (two_chains, "in two chains, one on each chip")):
        captured = worker.capture(fn)
        name = f"captured graph of 1,000 no-op native kernels, {what}, launched again, a task"
        spender = _launches(captured, tasks, effort, time.process_time_ns)  # of all its threads
        spent = measure({OURS: spender}, effort.rounds(ROUNDS))
        yield Row(f"{name}: CPU of the parent until all have ended", "time", spent, Target(300))
        wall = measure({OURS: _launches(captured, tasks, effort)}, effort.rounds(ROUNDS))
        yield Row(f"{name}: until all have ended", "time", wall | compiled, skipped=theirs.skipped)


def _launches(
    captured: CapturedGraph,
    tasks: int,
    effort: Effort,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> Sampler:
    times = 20

    def work() -> None:
        for _ in range(times):
            captured.launch().result()

    return whole(work, times * tasks, effort, clock)


def _one_native(handle: CallableHandle) -> Callable[..., Any]:
    return lambda orch, _args, _config: orch.submit_next_level(handle, worker=0)


def _one_sub(handle: CallableHandle) -> Callable[..., Any]:
    return lambda orch, _args, _config: orch.submit_sub(handle)


def _single(
    effort: Effort, theirs: Others, worker: Worker, what: str, limit_ns: float, fn: Callable[..., Any]
) -> Row:
    """Each run is begun when the last one's result is there."""
    sampler = sample("w.run(fn)", {"w": worker, "fn": fn}, effort.samples(10_000), warm_up=1000)
    name = f"one run with one no-op task, submit to result, {what}"
    return _row(name, effort, theirs, SINGLE, sampler, limit_ns)


def _subs(effort: Effort, theirs: Others, worker: Worker, handle: CallableHandle) -> Iterator[Row]:
    count = effort.samples(50_000)

    def fn(orch: Orchestrator, _args: Any, _config: Any) -> None:
        submit = orch.submit_sub
        for _ in range(count):
            submit(handle)

    captured = worker.capture(fn)
    name = f"{count:,} no-op Python sub tasks in one run, 2 sub workers"
    one_by_one = whole(lambda: worker.run(fn), count, effort)
    yield _row(f"{name}, one by one, a task", effort, theirs, INDEPENDENT, one_by_one, 5000)
    launched = whole(lambda: captured.launch().result(), count, effort)
    yield _row(f"{name}, captured, a task", effort, theirs, INDEPENDENT, launched, 5000)
