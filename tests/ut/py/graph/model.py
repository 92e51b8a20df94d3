"""What the task graph promises, kept the slow way: users of single bytes, sets of tasks, nothing reused.

A task here is an index, in order of submission. Every question is answered from scratch, by looking at all
tasks, so that nothing can be forgotten to be updated.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

Kind = Literal["chip", "sub", "host"]
Access = tuple[int, bool, int, int]  # (region, writes, begin, end)
Outcome = Literal["ok", "failed", "lost", "poisoned", "cancelled"]

BAD_REPORTS = {"failed", "skipped", "lost"}


@dataclass(frozen=True)
class Limits:
    chips: int
    sub_workers: int
    ring_depth: int
    sub_depth: int
    regions: int
    capacity: int
    send_ahead: bool

    @property
    def workers(self) -> range:
        return range(self.chips + self.sub_workers)

    @property
    def subs(self) -> range:
        return range(self.chips, self.chips + self.sub_workers)


@dataclass
class ModelTask:
    index: int
    run: int
    kind: Kind
    workers: list[int]  # by member; of sub workers only once sent
    members: int
    priority: int
    after: set[int] = field(default_factory=set)  # the tasks it directly comes after
    buffers: list[int] = field(default_factory=list)
    scope: int | None = None
    sent: bool = False
    recalled: bool = False
    reports: dict[int, str] = field(default_factory=dict)  # by member, as told to the graph
    outcome: Outcome | None = None
    told_poisoned: bool = False  # a producer of its run was known not to succeed when it ended

    @property
    def is_bad(self) -> bool:
        if self.outcome is not None:
            return self.outcome != "ok"
        return any(report in BAD_REPORTS for report in self.reports.values())

    @property
    def key(self) -> tuple[int, int]:
        return (-self.priority, self.index)


@dataclass
class ModelRun:
    priority: int
    sealed: bool = False
    cancelled: bool = False
    told: bool = False
    cause: int | None = None


class Model:
    """The state that the events so far must have led to."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.tasks: list[ModelTask] = []
        self.runs: list[ModelRun] = []
        self.lost: set[int] = set()
        self.taken_back: Counter[int] = Counter()  # by worker: entries to be passed over
        self.last_writer: dict[tuple[int, int], int] = {}
        self.readers_since: dict[tuple[int, int], set[int]] = {}
        self.closed_scopes: set[int] = set()
        self.released_buffers: set[int] = set()

    # What follows from the events.

    def touch(self, task: ModelTask, accesses: Iterable[Access]) -> None:
        """TG-1, byte by byte."""
        for region, writes, begin, end in accesses:
            for byte in range(begin, end):
                at = (region, byte)
                if at in self.last_writer:
                    task.after.add(self.last_writer[at])
                if writes:
                    task.after |= self.readers_since.pop(at, set())
                    self.last_writer[at] = task.index
                else:
                    self.readers_since.setdefault(at, set()).add(task.index)
        task.after.discard(task.index)

    def done(self) -> set[int]:
        """The tasks that nothing has to wait for any more."""
        done: set[int] = set()
        for task in self.tasks:
            was_passed = any(report != "lost" for report in task.reports.values())
            if task.outcome is not None and (was_passed or task.after <= done):
                done.add(task.index)
        return done

    def can_ever_start(self, task: ModelTask) -> bool:
        if task.kind == "sub":
            return task.members <= len(set(self.limits.subs) - self.lost)
        return not self.lost.intersection(task.workers)

    def may_blame(self, task: ModelTask, cause: int | None) -> bool:
        """Whether a poisoned task may name this as what failed: something above it in its run has, or is bad
        for another reason when nobody is named."""
        above, seen = [i for i in task.after if self.tasks[i].run == task.run], set[int]()
        while above:
            other = self.tasks[above.pop()]
            if other.index in seen or not other.is_bad:
                continue
            seen.add(other.index)
            above += [i for i in other.after if self.tasks[i].run == task.run]
        if cause is None:
            # A chip that was sent ahead may tell that it skipped before the other tells why.
            return self.limits.send_ahead or any(
                self.tasks[i].outcome == "cancelled" or self.tasks[i].recalled for i in seen
            )
        reports = self.tasks[cause].reports.values()
        has_failed = self.tasks[cause].outcome in {"failed", "lost"} or {"failed", "lost"} & set(reports)
        return cause in seen and bool(has_failed)

    def is_poisoned(self, task: ModelTask) -> bool:
        return any(self.tasks[i].is_bad and self.tasks[i].run == task.run for i in task.after)

    def spread_poison(self) -> None:
        """TG-3: one pass is enough, since edges lead to later tasks only."""
        for task in self.tasks:
            if task.outcome is None and self.is_poisoned(task):
                if task.sent:
                    task.told_poisoned = True
                else:
                    self.end(task, "poisoned")

    def end(self, task: ModelTask, outcome: Outcome) -> None:
        assert task.outcome is None
        task.outcome = outcome
        run = self.runs[task.run]
        if outcome in {"failed", "lost"} and run.cause is None:
            run.cause = task.index

    def report(self, task: ModelTask, member: int, report: str) -> None:
        task.reports[member] = report
        if len(task.reports) < task.members:
            return
        failures = [r for r in task.reports.values() if r in {"failed", "lost"}]
        if failures:
            self.end(task, "lost" if failures[0] == "lost" else "failed")
        elif "skipped" in task.reports.values():
            self.end(task, "cancelled" if task.recalled and not task.told_poisoned else "poisoned")
        else:
            self.end(task, "ok")

    def lose(self, worker: int) -> None:
        self.lost.add(worker)
        del self.taken_back[worker]
        for task in self.tasks:
            if task.outcome is not None:
                continue
            if not task.sent:
                if not self.can_ever_start(task):
                    self.end(task, "lost")
                continue
            for member, on in enumerate(task.workers):
                if on == worker and member not in task.reports:
                    self.report(task, member, "lost")

    def cancel(self, run: int) -> set[tuple[int, int]]:
        """Returns the members that must be recalled."""
        self.runs[run].cancelled = True
        recalled = set()
        for task in self.tasks:
            if task.run != run or task.outcome is not None:
                continue
            if task.sent:
                task.recalled = True
                recalled |= {(task.index, m) for m in range(task.members) if m not in task.reports}
            else:
                self.end(task, "cancelled")
        return recalled

    # What the graph may and must send.

    def outstanding(self, worker: int) -> int:
        return self.taken_back[worker] + sum(
            on == worker and member not in task.reports
            for task in self.tasks
            if task.sent
            for member, on in enumerate(task.workers)
        )

    def has_room(self, worker: int) -> bool:
        depth = self.limits.ring_depth if worker < self.limits.chips else self.limits.sub_depth
        return worker not in self.lost and self.outstanding(worker) < depth

    def ready(self) -> list[ModelTask]:
        """TG-2: each producer is done, or ahead of the task in the rings where that is enough."""
        done = self.done()
        return [
            task
            for task in self.tasks
            if not task.sent
            and task.outcome is None
            and all(i in done or self.is_ahead(self.tasks[i], task) for i in task.after)
        ]

    def is_ahead(self, producer: ModelTask, task: ModelTask) -> bool:
        if (
            not producer.sent
            or producer.outcome is not None
            or (producer.kind, task.kind) != ("chip", "chip")
        ):
            return False
        same_ring = producer.members == task.members == 1 and producer.workers == task.workers
        return same_ring or self.limits.send_ahead

    def queues(self, task: ModelTask) -> list[object]:
        return ["subs"] if task.kind == "sub" else list(task.workers)

    def is_first(self, task: ModelTask, ready: list[ModelTask]) -> bool:
        """No other ready task goes before it anywhere it queues."""
        mine = set(self.queues(task))
        return not any(other.key < task.key and mine.intersection(self.queues(other)) for other in ready)

    def has_places(self, task: ModelTask) -> bool:
        if task.kind == "sub":
            return sum(map(self.has_room, self.limits.subs)) >= task.members
        return all(map(self.has_room, task.workers))

    def sendable(self) -> set[int]:
        """What is to be sent now: ready, first at all its places, and each has room."""
        ready = self.ready()
        return {task.index for task in ready if self.has_places(task) and self.is_first(task, ready)}

    # What is told about runs, scopes and buffers.

    def done_runs(self) -> list[int]:
        return [
            index
            for index, run in enumerate(self.runs)
            if run.sealed and all(task.outcome for task in self.tasks if task.run == index)
        ]

    def result(self, run: int) -> tuple[int | None, bool, int, int, int, int]:
        outcomes = [task.outcome for task in self.tasks if task.run == run]
        failed = outcomes.count("failed") + outcomes.count("lost")
        poisoned, cancelled = outcomes.count("poisoned"), outcomes.count("cancelled")
        state = self.runs[run]
        return (state.cause, state.cancelled, len(outcomes), failed, poisoned, cancelled)

    def empty_scopes(self) -> set[int]:
        busy = {task.scope for task in self.tasks if task.outcome is None}
        return self.closed_scopes - busy

    def idle_buffers(self) -> set[int]:
        busy = {buffer for task in self.tasks if task.outcome is None for buffer in task.buffers}
        return self.released_buffers - busy
