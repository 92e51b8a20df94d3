"""Taking samples of Python statements without adding to what they cost."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.figures import Sampler

# As in timeit: the statement stands in the loop itself, since a call through a lambda costs as much as a
# tenth of the shortest of them. Results go into a list made beforehand.
_LOOP = """
def loop(count, pace_s):
    samples = [0] * count
    for i in range(count):
        if pace_s: sleep(pace_s)
        start = clock()
        {statement}
        samples[i] = clock() - start
    return samples
"""
_BATCHES = """
def loop(count, pace_s):
    samples = [0] * count
    calls = [None] * {batch}
    for i in range(count):
        start = clock()
        for _ in calls:
            {statement}
        samples[i] = (clock() - start) / {batch}
    return samples
"""


@dataclass(frozen=True)
class Effort:
    """How long to measure: `--quick` says whether it works, not how fast it is."""

    quick: bool

    def rounds(self, count: int) -> int:
        """Of `count` rounds, how many to make."""
        return min(count, 2) if self.quick else count

    def samples(self, count: int) -> int:
        """Of `count` samples, how many to take."""
        return max(3, count // 20) if self.quick else count


def sample(
    statement: str,
    names: Mapping[str, object],
    count: int,
    *,
    batch: int = 1,
    pace_s: float = 0.0,
    warm_up: int = 0,
) -> Sampler:
    """A sampler of one Python statement; samples in nanoseconds.

    Args:
        statement: A single line.
        names: Its variables.
        count: Samples to take.
        batch: Above 1, a sample is the mean of that many executions, without the clock's own cost.
        pace_s: Sleep before each sample, outside what is timed.
        warm_up: Executions before the first sample: they wake what slept while others were measured.
    """
    scope: dict[str, Any] = {"clock": time.perf_counter_ns, "sleep": time.sleep, **names}
    exec((_LOOP if batch == 1 else _BATCHES).format(statement=statement, batch=batch), scope)
    loop: Callable[[int, float], list[float]] = scope["loop"]

    def take() -> list[float]:
        loop(warm_up // batch, pace_s)
        gc.collect()
        gc.disable()
        try:
            return loop(count, pace_s)
        finally:
            gc.enable()

    return take
