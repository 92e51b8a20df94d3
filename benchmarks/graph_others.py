"""Asking the peers of the task graph, one after another, before we are measured.

They take no turns with us: the daemons of ray and dask use a part of the cores even while nobody calls them.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.figures import Figure, Samples, figure_of
from benchmarks.fresh import fresh
from benchmarks.graph_peers import COMPILED, DASK, GRAPH, LOKY, POOL, RAY

if TYPE_CHECKING:
    from benchmarks.sampling import Effort

ROUNDS = 5
INDEPENDENT = "independent"
CHAIN = "chain on one process"
ALTERNATING = "chain alternating between two"
SINGLE = "single"
_MODULES = {POOL: None, LOKY: "loky", RAY: "ray", COMPILED: "ray", DASK: "distributed"}
_TASKS = {POOL: 4000, LOKY: 4000, RAY: 4000, COMPILED: 4000, DASK: 400}


@dataclass(frozen=True)
class Others:
    """What the peers measured.

    Attributes:
        figures: By question, then by peer.
        skipped: Peers that took no part, with the reason.
    """

    figures: dict[str, dict[str, Figure]]
    skipped: dict[str, str]


def others(effort: Effort) -> Others:
    """Start each peer, ask it every question `ROUNDS` times, and end it."""
    figures: dict[str, dict[str, Figure]] = {INDEPENDENT: {}, CHAIN: {}, ALTERNATING: {}, SINGLE: {}}
    skipped = {}
    for name, module in _MODULES.items():
        if module is not None and importlib.util.find_spec(module) is None:
            skipped[name] = "not installed; pip install 'simpler[bench]'"
            continue
        try:
            answers = _ask(name, effort)
        except (RuntimeError, OSError, json.JSONDecodeError) as error:
            skipped[name] = f"does not run here: {error}"
            continue
        for question, rounds in answers.items():
            figures[question][name] = figure_of(rounds)
    return Others(figures, skipped)


def _ask(name: str, effort: Effort) -> dict[str, list[Samples]]:
    tasks = max(GRAPH, effort.samples(_TASKS[name]))
    questions: dict[str, tuple[str, tuple[int, ...]]] = {
        INDEPENDENT: ("independent", (tasks,)),
        CHAIN: ("chain", (tasks, 1)),
        ALTERNATING: ("chain", (tasks, 2)),
        SINGLE: ("single", (effort.samples(200),)),
    }
    answers: dict[str, list[Samples]] = {}
    with fresh("graph_peers") as process:
        process.trial("start", name)
        for question, (trial, arguments) in questions.items():
            process.trial(trial, *arguments)  # warms up, and compiles the graph
            answers[question] = [process.trial(trial, *arguments) for _ in range(effort.rounds(ROUNDS))]
        process.trial("stop")
    return answers
