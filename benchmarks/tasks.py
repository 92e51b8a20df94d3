"""Tasks: a no-op native kernel from submission to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import floor, ours
from benchmarks.figures import OURS, Row, Target, measure
from benchmarks.peers import answer_same, peers
from benchmarks.sampling import Effort, sample
from simpler import TaskArgs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.figures import Samples
    from simpler import Orchestrator

BATCH = 100
_TASK = "orch.submit_next_level(handle, args, worker=0).result()"


def task(effort: Effort) -> Iterator[Row]:
    """One at a time: the next is submitted when the last has ended."""
    count = effort.samples(10_000)
    with peers(answer_same) as others, ours.tree() as worker:
        handle = worker.register(ours.kernel("noop"))
        for batch in (BATCH, 1):

            def run(batch: int = batch) -> Samples:
                def fn(orch: Orchestrator, args: Any, _config: Any) -> Samples:
                    names = {"orch": orch, "handle": handle, "args": args}
                    return sample(_TASK, names, count // batch, batch=batch, warm_up=1000)()

                return worker.run(fn, TaskArgs())  # type: ignore[no-any-return]  # run() returns what fn does

            contenders = {
                OURS: run,
                **floor.exchanges(count, modes=(floor.SPIN,), batch=batch, nbytes=64),
            }
            if batch == 1:
                contenders |= others.samplers(effort, 1000, b"")
            yield Row(
                "no-op native kernel, submit to done, "
                + (f"batches of {batch}" if batch > 1 else "single tasks"),
                "time",
                measure(contenders, effort.rounds(11)),
                Target(4000),
                skipped={**floor.skipped(), **(others.skipped if batch == 1 else {})},
            )
