"""What a launch of a captured graph took: its tasks, when each ran, and what was lost between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from simpler import OUT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from simpler import CallableHandle, HostBuffer
    from simpler.orchestrator import Orchestrator

_CLOCK_BYTES = 16


@dataclass(frozen=True)
class Span:
    """Something that took time; ``start_s`` is on the monotonic clock of ``time.perf_counter``.

    ``chip`` is None for what the parent waited for.
    """

    name: str
    chip: int | None
    start_s: float
    duration_s: float


class StagedTasks:
    """Submits the tasks of a graph in stages, each with a clock, and remembers what they are.

    In a stage, tasks of one chip run one after another, beside those of the other chips; all of a stage
    come before all of the next. That follows from what they read and write: it is stated here for the
    time of the critical path, and not enforced.

    Args:
        orch: Of the capture.
        clocks: Host memory, ``clock_bytes(tasks)`` or more.
    """

    def __init__(self, orch: Orchestrator, clocks: HostBuffer) -> None:
        self._orch = orch
        self._clocks = clocks
        self.names: list[str] = []
        self.chips: list[int] = []
        self.stages: list[int] = []
        self._stage = 0

    def next_stage(self) -> None:
        """What follows comes after all that was submitted."""
        self._stage += 1

    def submit(self, kernel: CallableHandle, *items: object, chip: int) -> None:
        """Submit one task of the current stage; items as in ``Orchestrator.submit``."""
        clock = self._clocks.tensor((2,), np.float64, offset=len(self.names) * _CLOCK_BYTES)
        self._orch.submit(kernel, OUT(clock), *items, worker=chip)
        self.names.append(kernel.name)
        self.chips.append(chip)
        self.stages.append(self._stage)

    def read_clocks(self) -> NDArray[np.float64]:
        """When each task of the launch that just ended began and had ended, ``[tasks, 2]``."""
        return np.array(self._clocks.array((len(self.names), 2), np.float64), np.float64)


def clock_bytes(tasks: int) -> int:
    """Host memory for the clocks of that many tasks."""
    return tasks * _CLOCK_BYTES


@dataclass(frozen=True)
class Launch:
    """One launch that has ended.

    Attributes:
        name: ``"prefill"`` or ``"decode"``.
        start_s: When the parent launched it.
        end_s: When the parent had its result.
    """

    name: str
    start_s: float
    end_s: float
    _tasks: StagedTasks
    _clocks: NDArray[np.float64]

    @property
    def duration_s(self) -> float:
        """Seconds from the launch to its result."""
        return self.end_s - self.start_s

    @property
    def num_tasks(self) -> int:
        """How many tasks it had."""
        return len(self._clocks)

    @property
    def kernel_s(self) -> float:
        """Seconds of kernels on the critical path: in each stage those of the chip that takes longest.

        A kernel's time is what it measures itself: from its first line to its last.
        """
        durations = self._clocks[:, 1] - self._clocks[:, 0]
        chips = max(self._tasks.chips) + 1
        bins = np.multiply(self._tasks.stages, chips) + self._tasks.chips
        stages = np.bincount(bins, durations, minlength=chips * (self._tasks.stages[-1] + 1))
        return float(stages.reshape(-1, chips).max(axis=1).sum())

    @property
    def overhead_s(self) -> float:
        """``duration_s`` less ``kernel_s``: launching, dispatching, handing on, unpacking arguments.

        Also what is lost where the host has fewer free cores than a stage has chips.
        """
        return self.duration_s - self.kernel_s

    def spans(self) -> Iterator[Span]:
        """The launch as the parent saw it, then each task."""
        yield Span(self.name, None, self.start_s, self.duration_s)
        for name, chip, (began, ended) in zip(
            self._tasks.names, self._tasks.chips, self._clocks.tolist(), strict=True
        ):
            yield Span(name, chip, began, ended - began)


def typical(values: Any) -> float | None:
    """The median; None of nothing."""
    found = list(values)
    return float(np.median(found)) if found else None
