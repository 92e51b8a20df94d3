"""Bringing a tree up and taking it down."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from benchmarks.figures import OURS, Row, Target, figure_of
from benchmarks.fresh import fresh

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.sampling import Effort

_CONTENDERS = {
    OURS: "ours",
    "os.fork, a byte on a pipe": "bare",
    "multiprocessing.Process": "processes",
}
_TARGETS_MS = {1: (8, 5), 8: (30, 10)}


def lifecycle(effort: Effort) -> Iterator[Row]:
    """init() until every child is ready, and close() until every child is gone; 1 and 8 chips."""
    with contextlib.ExitStack() as stack:
        processes = {name: stack.enter_context(fresh("lifecycle_trials")) for name in _CONTENDERS}
        for chips, (init_ms, close_ms) in _TARGETS_MS.items():
            taken: dict[str, list[list[int]]] = {name: [] for name in _CONTENDERS}
            for name, trial in _CONTENDERS.items():
                processes[name].trial(trial, chips)
            for _ in range(effort.samples(40)):
                for name, trial in _CONTENDERS.items():
                    taken[name].append(processes[name].trial(trial, chips))
            for position, (what, limit_ms) in enumerate((("init", init_ms), ("close", close_ms))):
                figures = {
                    name: figure_of([[times[position]] for times in rounds]) for name, rounds in taken.items()
                }
                yield Row(
                    f"{what} of {chips} cpu chip{'s' if chips > 1 else ''}",
                    "time",
                    figures,
                    Target(limit_ms * 1e6),
                )
