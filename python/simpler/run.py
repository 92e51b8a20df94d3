"""Runs and their tasks, from the side of whoever submitted them."""

from __future__ import annotations

import contextlib
import math
import pickle
import time
from typing import TYPE_CHECKING, Any, Protocol

from simpler import _core
from simpler.config import wait_timeout
from simpler.errors import ClosedError, RunCancelledError, SimplerError, TaskError, WorkerTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from simpler.callables import CallableTable
    from simpler.failures import Failures
    from simpler.trace import Tracer

_INF = math.inf
_OK, _FAILED, _LOST, _POISONED, _CANCELLED = range(5)
Failure = tuple[int, int, "tuple[str, str, str] | None", str]
"""(callable, worker, the exception in the child or None, how the worker died)."""


class Host(Protocol):
    """What a run needs of the node that it belongs to."""

    callables: CallableTable
    failures: Failures

    def watch(self, run: _core.Run, call: Callable[[], None]) -> None:
        """Call once, on the node's own thread, when the run is done; now if it is."""

    def unwatch(self, run: _core.Run, call: Callable[[], None]) -> None:
        """Do not call any more."""


class RunContext:
    """What the tasks of one run share: names, and the run's own limit."""

    __slots__ = ("deadline", "host", "limit_s", "tracer")

    def __init__(self, host: Host, limit_s: float, tracer: Tracer | None = None) -> None:
        self.host = host
        self.limit_s = limit_s
        self.tracer = tracer
        self.deadline = _INF if limit_s == _INF else time.monotonic() + limit_s

    def left(self) -> float:
        """Seconds until the run's deadline, not below 0."""
        return _INF if self.deadline == _INF else max(self.deadline - time.monotonic(), 0.0)

    def trace_when_done(self, run: _core.Run) -> None:
        """Have the trace written, if there is one."""
        if self.tracer is not None:
            self.host.watch(run, self.tracer.write)

    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline != _INF and time.monotonic() >= self.deadline

    def error(self, failure: Failure, poisoned: int = 0) -> TaskError:
        """The error of a task that failed or was lost."""
        callable_id, worker, remote, lost = failure
        failures = self.host.failures
        cause: BaseException
        if remote is not None:
            cause = failures.remote(worker, remote)
        else:
            cause = failures("died", worker, lost, True, None)  # noqa: FBT003 - as the core calls it
        return TaskError(
            callable=self.host.callables.name(callable_id), path=(worker,), cause=cause, poisoned=poisoned
        )

    def run_error(self, summary: _core.RunSummary) -> SimplerError:
        """The error of a run in which not every task succeeded."""
        tasks, _, poisoned, cancelled, timed_out, closed, failure = summary
        if closed:
            return ClosedError("the run was not done when the worker was closed")
        if failure is not None:
            return self.error(failure, poisoned=poisoned)
        if timed_out:
            what = f"the run ({cancelled} of {tasks} tasks did not begin)"
            return self.timed_out(what, None, started=cancelled < tasks)
        return RunCancelledError(f"the run was cancelled: {cancelled} of {tasks} tasks did not begin")

    def timed_out(self, what: str, timeout_s: float | None, *, started: bool = True) -> WorkerTimeoutError:
        """The error of waiting longer than `timeout_s`, or than the run may take."""
        whole_run = timeout_s is None or self.is_late()
        limit = self.limit_s if whole_run else timeout_s
        assert limit is not None
        return WorkerTimeoutError(
            f"{what} had not ended when the {'run' if whole_run else 'wait'}'s limit of {limit:g} s passed",
            path=(),
            started=started,
            waited_for=what,
            timeout_s=limit,
        )


class TaskHandle(_core.Task):
    """A submitted task.

    Thread safety: any thread.
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        """Its function's."""
        return self._context.host.callables.name(self.callable_id)

    @property
    def worker_id(self) -> int | None:
        """The child that runs it; None for a group, and for a task of sub workers until it has ended."""
        if self.worker >= 0:
            return self.worker
        outcome = self.fetch(0.0)
        return outcome[1] if outcome is not None and outcome[1] >= 0 else None

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait until it has ended; what a Python function returned, None for a native kernel.

        Args:
            timeout_s: None has no limit but the run's, 0 polls.

        Returns:
            For a group the list of its members' results, in their order.

        Raises:
            TaskError: it failed, or one before it did whose result it needed: then the error names that one.
            RunCancelledError: its run was cancelled before it began.
            WorkerTimeoutError: not yet ended. Nothing is cancelled.
        """
        context = self._context
        if timeout_s is None:
            outcome = self.fetch(_INF if context.deadline == _INF else context.left())
        else:
            outcome = self.fetch(min(wait_timeout(timeout_s), context.left()))
        if outcome is None:
            raise context.timed_out(f"task {self.name!r}", timeout_s)
        state, _, value = outcome
        if state == _OK:
            if value.__class__ is bytes:
                return pickle.loads(value) if value else None
            return [pickle.loads(part) if part else None for part in value]
        raise self._error(state, value)

    def _error(self, state: int, value: Any) -> SimplerError:
        context = self._context
        if state in (_FAILED, _LOST, _POISONED) and value is not None:
            return context.error(value, poisoned=1 if state == _POISONED else 0)
        if state in (_CANCELLED, _POISONED):
            if context.is_late():
                return context.timed_out(f"task {self.name!r}", None)
            return RunCancelledError(f"task {self.name!r} did not run: its run was cancelled")
        return ClosedError(f"task {self.name!r} had not ended when the worker was closed")

    @property
    def _context(self) -> RunContext:
        context: RunContext = self.core_run.context
        return context

    def __repr__(self) -> str:
        outcome = self.fetch(0.0) if self.done() else None
        state = "pending" if outcome is None else "done" if outcome[0] == _OK else "failed"
        return f"<TaskHandle {self.name!r}, {state}>"


_core.set_task_type(TaskHandle)


class RunHandle:
    """A run whose function has returned: what `Worker.submit` gives.

    Letting go of it cancels nothing. Thread safety: any thread.
    """

    __slots__ = ("_context", "_core", "_error", "_is_task", "_value")

    def __init__(self, core: _core.Run, context: RunContext, value: Any, *, is_task: bool = False) -> None:
        """`value` is its result; with `is_task` the handle of the task whose result that is."""
        self._core = core
        self._context = context
        self._value = value
        self._is_task = is_task
        self._error: SimplerError | None = None

    def done(self) -> bool:
        """Whether all of its tasks have ended."""
        return self._core.wait(0.0)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until all of its tasks have ended; false when the time ran out. Cancels nothing.

        Args:
            timeout_s: None has no limit, 0 polls.
        """
        return self._core.wait(wait_timeout(timeout_s))

    def cancel(self) -> bool:
        """Keep what has not begun from beginning; what has goes on, and the run is done when it has ended.

        Returns:
            False when the run was done already.
        """
        if self.done():
            return False
        self._core.cancel()
        return True

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the run and give what its function returned.

        Args:
            timeout_s: None has no limit but the run's, 0 polls.

        Raises:
            TaskError: the first failure, with the number of tasks that did not run because of it.
            RunCancelledError: it was cancelled, and not every task had begun.
            WorkerTimeoutError: it is not done, or was cut short by its deadline; what has begun goes on.
            ClosedError: the Worker was closed before the run was done.
        """
        limit = min(wait_timeout(timeout_s), self._context.left())
        summary = self._core.finish(limit)
        if summary is None:
            raise self._context.timed_out("the run", timeout_s)
        if summary is not True:
            self._error = self._context.run_error(summary)
        if self._error is not None:
            raise self._error
        return self._value.result() if self._is_task else self._value

    def __await__(self) -> Generator[Any, None, Any]:
        """As `result()`, in an event loop."""
        import asyncio

        if not self.done():
            loop = asyncio.get_running_loop()
            woken = loop.create_future()

            def wake() -> None:
                if not woken.done():
                    woken.set_result(None)

            def told() -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                    loop.call_soon_threadsafe(wake)

            self._context.host.watch(self._core, told)
            left = self._context.left()
            timer = None if left == _INF else loop.call_later(left, wake)
            try:
                yield from woken
            finally:
                self._context.host.unwatch(self._core, told)
                if timer is not None:
                    timer.cancel()
        return self.result(0.0)

    def __repr__(self) -> str:
        return f"<RunHandle, {'done' if self.done() else 'running'}>"
