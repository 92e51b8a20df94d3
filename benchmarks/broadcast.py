"""Broadcasts of 1 B to four children."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import floor, ours
from benchmarks.figures import OURS, Row, Target, measure
from benchmarks.idle import PACE_S
from benchmarks.peers import answer_same, peers
from benchmarks.sampling import Effort, sample

if TYPE_CHECKING:
    from collections.abc import Iterator

CHILDREN = 4
_BROADCAST = 'w.run_chip_control_extension("benchmark-echo", b"x")'


def broadcast(effort: Effort) -> Iterator[Row]:
    """All four get the request before the first reply is awaited; back to back, then paced."""
    with peers(answer_same, children=CHILDREN, pool=False) as others, ours.tree(CHILDREN) as worker:
        for name, pace_s, count, limit in (
            ("back to back", 0.0, 2000, 60e3),
            ("paced 1 ms", PACE_S, 400, 200e3),
        ):
            samples = effort.samples(count)
            contenders = {
                OURS: sample(_BROADCAST, ours.names(worker), samples, pace_s=pace_s, warm_up=20),
                **floor.exchanges(
                    samples, modes=(floor.FUTEX,), pattern="broadcast", children=CHILDREN, pace_s=pace_s
                ),
                **others.samplers(effort, count, b"x", children=CHILDREN, pace_s=pace_s, broadcast=True),
            }
            yield Row(
                f"broadcast to {CHILDREN} children, 1 B, {name}",
                "time",
                measure(contenders, effort.rounds(11)),
                Target(limit),
                skipped={**floor.skipped(), **others.skipped},
            )
