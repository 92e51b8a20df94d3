"""Calls after a millisecond of idleness: what waking a sleeping child, and then the caller, costs."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

from benchmarks import floor, ours
from benchmarks.figures import OURS, Row, Target, measure
from benchmarks.peers import answer_same, peers
from benchmarks.sampling import Effort, sample

if TYPE_CHECKING:
    from collections.abc import Iterator

PACE_S = 1e-3
_ECHO = 'w.run_chip_control_extension("benchmark-echo", b"x", worker_id=next(child))'


def idle(effort: Effort) -> Iterator[Row]:
    """1 B to one child, and to four in turn, each call after a sleep of 1 ms."""
    count = effort.samples(400)
    for children in (1, 4):
        with peers(answer_same, children=children) as others, ours.tree(children) as worker:
            names = ours.names(worker, child=cycle(range(children)))
            contenders = {
                OURS: sample(_ECHO, names, count, pace_s=PACE_S, warm_up=8),
                **floor.exchanges(count, modes=(floor.FUTEX,), children=children, pace_s=PACE_S),
                **others.samplers(effort, 400, b"x", children=children, pace_s=PACE_S),
            }
            yield Row(
                f"extension call, 1 B, after 1 ms of idleness, {_text(children)}",
                "time",
                measure(contenders, effort.rounds(15)),
                Target(1.3, of=floor.FUTEX),
                skipped={**floor.skipped(), **others.skipped},
            )


def _text(children: int) -> str:
    return "1 child" if children == 1 else f"{children} children in turn"
