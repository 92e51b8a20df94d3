"""Samples, figures and rows: what is measured and what is said about it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

OURS = "simpler"
Samples = Sequence[float]
Sampler = Callable[[], Samples]


@dataclass(frozen=True)
class Figure:
    """One contender's samples over all rounds.

    Attributes:
        p50: Median of the rounds' medians.
        p99: Median of the rounds' 99th percentiles. Rounds of fewer than 100 samples: that of all samples
            together, which is nearly the largest; None for fewer than 30.
        rounds: Each round's median.
    """

    p50: float
    p99: float | None
    rounds: list[float]


@dataclass(frozen=True)
class Target:
    """What the row has to reach: a p50 of at most `limit`, or a ratio to contender `of` of at most it."""

    limit: float
    of: str | None = None


@dataclass(frozen=True)
class Row:
    """One line of the table with everything measured beside it.

    Attributes:
        name: What was measured.
        unit: ``"time"`` (nanoseconds), ``"percent"`` (of one core) or ``"memory"`` (bytes).
        figures: By contender; `OURS` first.
        target: None for a row that explains another.
        skipped: Contenders that could not take part, with the reason.
        note: How to read it, when the name does not say.
    """

    name: str
    unit: str
    figures: dict[str, Figure]
    target: Target | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def ratio(self, contender: str) -> float:
        """Ours divided by the contender's: the median over the rounds, since noise hits both of one round."""
        pairs = zip(self.figures[OURS].rounds, self.figures[contender].rounds, strict=True)
        return statistics.median(ours / max(theirs, 1e-9) for ours, theirs in pairs)

    def reached(self) -> bool | None:
        """Whether the target is met; None without one, or without the contender that it names."""
        if self.target is None:
            return None
        if self.target.of is None:
            return self.figures[OURS].p50 <= self.target.limit
        if self.target.of not in self.figures:
            return None
        return self.ratio(self.target.of) <= self.target.limit


def percentile(ordered: Samples, part: float) -> float:
    """The sample below which `part` (0 to 1) of them lie."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


def figure_of(rounds: Sequence[Samples]) -> Figure:
    """Summarise the samples of all rounds."""
    medians = [statistics.median(samples) for samples in rounds]
    return Figure(statistics.median(medians), _tail(rounds), medians)


def _tail(rounds: Sequence[Samples]) -> float | None:
    if min(len(samples) for samples in rounds) >= 100:
        return statistics.median(percentile(sorted(samples), 0.99) for samples in rounds)
    pooled = sorted(sample for samples in rounds for sample in samples)
    return percentile(pooled, 0.99) if len(pooled) >= 30 else None


def measure(contenders: Mapping[str, Sampler], rounds: int) -> dict[str, Figure]:
    """Let every contender take its samples once a round, one after another, and summarise.

    Interleaved, so that a disturbance of the machine falls on all of them and cancels in the ratios.
    """
    taken: dict[str, list[Samples]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, sampler in contenders.items():
            taken[name].append(sampler())
    return {name: figure_of(samples) for name, samples in taken.items()}
