"""Drives the task graph and its model side by side, with workers that take their rings' entries in order.

A worker here does what the graph asks of one: it neither runs nor skips an entry before the producers named
with it have ended, and skips it when one of those that must succeed did not. Its reports reach the graph
later, in order for each worker and in any order between workers.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal, NamedTuple

from graph.model import Access, Kind, Limits, Model, ModelRun, ModelTask
from simpler import _core

if TYPE_CHECKING:
    from collections.abc import Iterable

Report = Literal["ok", "failed", "skipped"]
Member = tuple[int, int]  # (task, member)


class Entry(NamedTuple):
    member: Member | None  # None once it was taken back
    producers: frozenset[tuple[Member, int | None, bool]]


class Machine:
    """One graph, its model and their workers; the worker None is the host."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.graph = _core.TaskGraph(
            limits.chips,
            limits.sub_workers,
            limits.ring_depth,
            limits.sub_depth,
            limits.regions,
            limits.capacity,
            limits.send_ahead,
        )
        self.model = Model(limits)
        self.ids: list[int] = []
        self.index_of: dict[int, int] = {}
        self.runs: list[int] = []
        self.scopes: list[int] = []
        self.buffers: list[int] = []
        self.rings: dict[int | None, deque[Entry]] = {worker: deque() for worker in (*limits.workers, None)}
        self.reports: dict[int | None, deque[tuple[Member | None, Report]]] = {
            worker: deque() for worker in self.rings
        }
        self.results: dict[Member, str] = {}  # of what has ended in a worker, told or not
        self.passed: set[Member] = set()  # what entries sent ahead need not wait for any more
        self.told_ended: set[int] = set()
        self.told_done: set[int] = set()
        self.told_passed: set[int] = set()
        self.told_empty: set[int] = set()
        self.told_idle: set[int] = set()

    # Events.

    def open_run(self, priority: int = 0) -> int:
        self.runs.append(self.graph.open_run(priority))
        self.model.runs.append(ModelRun(priority))
        return len(self.runs) - 1

    def seal_run(self, run: int) -> None:
        self.model.runs[run].sealed = True
        self.graph.seal_run(self.runs[run])
        self.compare()

    def cancel_run(self, run: int) -> None:
        recalled = set() if self.model.runs[run].cancelled else self.model.cancel(run)
        self.graph.cancel_run(self.runs[run])
        self.compare(recalled)

    def open_scope(self, run: int) -> None:
        self.scopes.append(self.graph.open_scope(self.runs[run]))

    def close_scope(self, scope: int) -> None:
        self.model.closed_scopes.add(scope)
        self.graph.close_scope(self.scopes[scope])
        self.compare()

    def open_buffer(self) -> None:
        self.buffers.append(self.graph.open_buffer())

    def release_buffer(self, buffer: int) -> None:
        self.model.released_buffers.add(buffer)
        self.graph.release_buffer(self.buffers[buffer])
        self.compare()

    def submit(
        self,
        run: int,
        kind: Kind,
        targets: list[int],
        members: int,
        accesses: list[Access],
        deps: Iterable[int],
        buffers: list[int],
        scope: int | None,
        priority: int | None,
    ) -> None:
        model, state = self.model, self.model.runs[run]
        is_full = len(model.tasks) - len(model.done()) >= self.limits.capacity
        deps = list(deps)
        task_id = self.graph.submit(
            self.runs[run],
            kind,
            targets,
            members if kind == "sub" else 1,
            accesses,
            [self.ids[dep] for dep in deps],
            [self.buffers[buffer] for buffer in buffers],
            None if scope is None else self.scopes[scope],
            priority,
        )
        assert (task_id is None) == is_full
        if task_id is None:
            self.compare()
            return
        used_priority = state.priority if priority is None else priority
        task = ModelTask(len(model.tasks), run, kind, targets, members, used_priority)
        task.buffers, task.scope = buffers, scope
        model.tasks.append(task)
        self.ids.append(task_id)
        self.index_of[task_id] = task.index
        if state.cancelled:
            model.end(task, "cancelled")
        else:
            task.after = set(deps)
            model.touch(task, accesses)
            model.spread_poison()
            if task.outcome is None and not model.can_ever_start(task):
                model.end(task, "lost")
        self.compare()

    def lose(self, worker: int) -> None:
        for entry in self.rings[worker]:
            if entry.member is not None:
                self.results[entry.member] = "lost"
        self.rings[worker].clear()
        self.reports[worker] = deque(news for news in self.reports[worker] if news[0] is not None)
        self.model.lose(worker)
        self.model.spread_poison()
        self.graph.worker_lost(worker)
        self.compare()

    def take_back(self, worker: int) -> None:
        """The newest single task in the ring of a sub worker, which has not begun it."""
        ring = self.rings[worker]
        tasks = self.model.tasks
        for position in reversed(range(len(ring))):
            member = ring[position].member
            if worker in self.limits.subs and member is not None and tasks[member[0]].members == 1:
                task = tasks[member[0]]
                if not task.recalled:
                    ring[position] = Entry(None, frozenset())
                    task.sent, task.workers = False, []
                    self.model.taken_back[worker] += 1
                assert self.graph.take_back(self.ids[task.index]) is not task.recalled
                self.compare()
                return

    def bring_back(self, worker: int) -> None:
        self.model.lost.discard(worker)
        self.graph.worker_back(worker)
        self.compare()

    def deliver(self, worker: int | None) -> bool:
        """Tell the graph the oldest news of a worker, if there is any."""
        if not self.reports[worker]:
            return False
        who, report = self.reports[worker].popleft()
        if who is None:
            assert worker is not None
            self.model.taken_back[worker] -= 1
            self.graph.passed_over(worker)
            self.compare()
            return True
        index, member = who
        task = self.model.tasks[index]
        is_news = member not in task.reports
        if is_news:
            self.model.report(task, member, report)
            self.model.spread_poison()
        assert self.graph.finished(self.ids[index], member, report) == is_news
        self.compare()
        return True

    # The workers.

    def step(self, worker: int | None, fails: bool, obeys_recall: bool) -> bool:
        """Let a worker end the first entry of its ring, if that may go."""
        ring = self.rings[worker]
        if not ring or any(producer not in self.passed for producer, _, _ in ring[0].producers):
            return False
        entry = ring.popleft()
        report: Report
        if entry.member is None:
            self.reports[worker].append((None, "skipped"))
            return True
        if any(must and self.results[producer] != "ok" for producer, _, must in entry.producers) or (
            obeys_recall and self.model.tasks[entry.member[0]].recalled
        ):
            report = "skipped"
        else:
            self.check_may_run(entry.member[0])
            report = "failed" if fails else "ok"
        self.results[entry.member] = report
        self.passed.add(entry.member)
        self.reports[worker].append((entry.member, report))
        return True

    def check_may_run(self, index: int) -> None:
        """TG-1 and TG-3 where they count: nothing before it can still run, nothing it needs has failed."""
        tasks = self.model.tasks
        for before in tasks[index].after:
            if tasks[before].run == tasks[index].run:
                assert all(self.results[before, m] == "ok" for m in range(tasks[before].members))
        above, seen = list(tasks[index].after), set(tasks[index].after)
        while above:
            task = tasks[above.pop()]
            if task.sent:
                assert all((task.index, m) in self.results for m in range(task.members))
            else:
                assert task.outcome is not None
            above += task.after - seen
            seen |= task.after

    # What the graph did, against what it had to do.

    def compare(self, recalled: set[Member] | None = None) -> None:
        """Take what the graph did since the last event, and check it against the state of the model."""
        actions = deque(self.graph.take_actions())
        seen_recalls: set[Member] = set()
        while actions:
            action = actions.popleft()
            if action[0] == "send":
                task = self.model.tasks[self.index_of[action[1]]]
                sends = [action]
                for _ in range(task.members - 1):
                    other = actions.popleft()
                    assert other[0] == "send", "a group is sent in one step"
                    sends.append(other)
                self.check_send(task, sends)
            elif action[0] == "recall":
                task = self.model.tasks[self.index_of[action[1]]]
                assert action[3] == (None if task.kind == "host" else task.workers[action[2]])
                seen_recalls.add((task.index, action[2]))
            elif action[0] == "ended":
                index = self.index_of[action[1]]
                assert self.model.tasks[index].outcome == action[2]
                if action[2] == "poisoned":
                    cause = None if action[3] is None else self.index_of[action[3]]
                    assert self.model.may_blame(self.model.tasks[index], cause)
                self.note(self.told_ended, index)
            elif action[0] == "done":
                self.check_done(action)
            elif action[0] == "passed":
                self.let_pass(self.index_of[action[1]])
            elif action[0] == "empty":
                self.note(self.told_empty, self.scopes.index(action[1]))
            else:
                self.note(self.told_idle, self.buffers.index(action[1]))
        assert seen_recalls == (recalled or set())
        self.check_nothing_is_missing()

    def note(self, told: set[int], index: int) -> None:
        assert index not in told, "everything is told once"
        told.add(index)

    def check_send(self, task: ModelTask, sends: list[_core.GraphSend]) -> None:
        assert sorted(send[2] for send in sends) == list(range(task.members))
        assert {send[1] for send in sends} == {self.ids[task.index]}
        ready = self.model.ready()
        assert task in ready, "sent before what it comes after"
        assert self.model.is_first(task, ready), "sent before what is first"
        assert self.model.has_places(task), "sent where there is no room"
        workers = [send[3] for send in sorted(sends, key=lambda send: send[2])]
        if task.kind == "sub":
            task.workers = [worker for worker in workers if worker is not None]
            assert len(set(task.workers) & set(self.limits.subs)) == task.members
            assert all(map(self.model.has_room, task.workers))
        else:
            assert workers == (task.workers if task.kind == "chip" else [None])
        done = self.model.done()
        for _, _, member, worker, producers in sends:
            named = frozenset(
                ((self.index_of[producer], of_member), on, must)
                for producer, of_member, on, must in producers
            )
            assert named == self.expected_producers(task, worker, done)
            self.rings[worker].append(Entry((task.index, member), named))
        task.sent = True

    def expected_producers(
        self, task: ModelTask, worker: int | None, done: set[int]
    ) -> frozenset[tuple[Member, int | None, bool]]:
        producers: set[tuple[Member, int | None, bool]] = set()
        for before in (self.model.tasks[index] for index in task.after - done):
            must = before.run == task.run
            for member, on in enumerate(before.workers):
                if member not in before.reports and (must or on != worker):
                    producers.add(((before.index, member), on, must))
        return frozenset(producers)

    def check_done(self, action: _core.GraphDone) -> None:
        _, run_id, cause, *rest = action
        run = self.runs.index(run_id)
        assert (None if cause is None else self.index_of[cause], *rest) == self.model.result(run)
        self.note(self.told_done, run)

    def let_pass(self, index: int) -> None:
        self.note(self.told_passed, index)
        reports = self.model.tasks[index].reports
        self.passed |= {(index, member) for member, report in reports.items() if report == "lost"}

    def check_nothing_is_missing(self) -> None:
        model, done = self.model, self.model.done()
        assert self.told_ended == {task.index for task in model.tasks if task.outcome is not None}
        assert model.sendable() == set(), "left unsent"
        assert self.told_done == set(model.done_runs())
        assert self.told_empty == model.empty_scopes()
        assert self.told_idle == model.idle_buffers()
        lost = {index for index in done if "lost" in model.tasks[index].reports.values()}
        assert self.told_passed == (lost if self.limits.send_ahead else set())
        assert self.graph.sizes()["unfinished_tasks"] == len(model.tasks) - len(done)

    def finish(self) -> None:
        """Let everything end, and see that it does and that nothing is left."""
        for run, state in enumerate(self.model.runs):
            if not state.sealed:
                self.seal_run(run)
        for scope in set(range(len(self.scopes))) - self.model.closed_scopes:
            self.close_scope(scope)
        for buffer in set(range(len(self.buffers))) - self.model.released_buffers:
            self.release_buffer(buffer)
        progress = True
        while progress:
            steps = [self.step(worker, fails=False, obeys_recall=True) for worker in self.rings]
            news = [self.deliver(worker) for worker in self.rings]
            progress = any(steps) or any(news)
        assert all(task.outcome is not None for task in self.model.tasks), "stuck"
        assert self.told_done == set(range(len(self.runs)))
        assert set(self.graph.sizes().values()) == {0}
