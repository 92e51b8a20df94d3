"""One run: the tasks that an orchestration function submits, executed one after another in that order.

Consecutive tasks of one child are sent ahead into its ring, each naming the one before, which the child
skips it for when that failed. A task for another child is sent when all earlier ones have ended.
"""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from simpler.config import wait_timeout
from simpler.errors import RemoteError, TaskError, WorkerDiedError, WorkerTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from simpler.uses import Use

_DONE, _FAILED = 0, 1
_INF = math.inf
Outcome = tuple[int, bytes, tuple[str, str, str] | None]


class Ring(Protocol):
    """The task rings of the children: `_core.Tree`."""

    def publish(self, worker: int, callable_id: int, args: bytes, after: int, timeout_s: float, /) -> int:
        """Send one task; its number in the worker's ring."""

    def wait_task(self, worker: int, seq: int, timeout_s: float, /) -> Outcome | None:
        """Take the outcome of one task; None when the time ran out."""


class TaskHandle:
    """A submitted task.

    Attributes:
        name: Its function's.
        worker_id: The child that runs it.
    """

    __slots__ = ("error", "finished", "name", "raw", "run", "seq", "use", "worker_id")

    def __init__(self, run: Run, name: str, worker_id: int, use: Use | None) -> None:
        self.run = run
        self.name = name
        self.worker_id = worker_id
        self.use = use
        self.seq = 0
        self.finished = False
        self.error: TaskError | None = None
        self.raw = b""

    def is_finished(self) -> bool:
        """As the attribute, read anew."""
        return self.finished

    def done(self) -> bool:
        """Whether it has ended: done, failed or not run because an earlier one failed."""
        return self.finished or self.run.settle(self, 0.0)

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait until it has ended; what a Python function returned, None for a native kernel.

        Args:
            timeout_s: None has no limit but the run's, 0 polls.

        Raises:
            TaskError: it failed, or an earlier task of the run did: then the error names that one.
            WorkerTimeoutError: not yet ended. Nothing is cancelled.
        """
        if not self.finished and not (timeout_s is None and self.run.settle_oldest(self)):
            limit = math.inf if timeout_s is None else wait_timeout(timeout_s)
            if not self.run.settle(self, limit):
                raise self.run.timed_out(self, timeout_s)
        if self.error is not None:
            raise self.error
        return pickle.loads(self.raw) if self.raw else None

    def wait_for_use(self, timeout_s: float) -> None:
        """Wait on behalf of someone who needs the memory; longer than the run may take if need be."""
        self.run.settle_for(self, timeout_s)

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call back once when it has ended; now if it has."""
        self.run.call_when_ended(self, callback)

    def __repr__(self) -> str:
        state = "pending" if not self.finished else "done" if self.error is None else "failed"
        return f"<TaskHandle {self.name!r} on worker {self.worker_id}, {state}>"


class Run:
    """The tasks of one `Worker.run`.

    Thread safety: any thread; whoever waits collects the outcomes of all tasks up to the one wanted.
    """

    def __init__(
        self, ring: Ring, remote: Callable[[int, tuple[str, str, str]], RemoteError], timeout_s: float
    ) -> None:
        self._publish = ring.publish
        self._wait_task = ring.wait_task
        self._remote = remote
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s if timeout_s != math.inf else math.inf
        self._lock = threading.RLock()
        self._open: deque[TaskHandle] = deque()
        self._last: TaskHandle | None = None
        self._failed: TaskHandle | None = None
        self._poisoned = 0
        self._callbacks: dict[TaskHandle, Callable[[], None]] = {}

    def left(self) -> float:
        """Seconds until the run's deadline."""
        return math.inf if self._deadline == math.inf else self._deadline - time.monotonic()

    def submit(self, name: str, worker: int, callable_id: int, args: bytes, use: Use | None) -> TaskHandle:
        """Send one task unless an earlier one has failed; `use` is released when it has ended."""
        handle = TaskHandle(self, name, worker, use)
        last = self._last
        behind = last is not None and not last.finished
        try:
            if behind or use is not None or self._deadline != _INF:
                self._wait_turn(handle, last if behind else None, use)
            if self._failed is not None:
                self._poison(handle)
                return handle
            after = last.seq if last is not None and not last.finished else 0
            left = _INF if self._deadline == _INF else self.left()
            handle.seq = self._publish(worker, callable_id, args, after, left)
        except WorkerDiedError as error:
            self.drain(self.left())
            if self._failed is None:
                self._fail(handle, error)
            else:
                self._poison(handle)
            return handle
        except BaseException:
            if use is not None:
                use.release()
            raise
        self._last = handle
        self._open.append(handle)
        return handle

    def _wait_turn(self, handle: TaskHandle, last: TaskHandle | None, use: Use | None) -> None:
        """Wait until `handle` may be sent: behind `last` in its ring, else when that has ended."""
        if last is not None and last.worker_id != handle.worker_id and not self.settle(last, _INF):
            raise self.timed_out(last, None)
        left = self.left()
        if left <= 0:
            raise self.timed_out(handle, None)
        if use is not None:
            use.waiter = handle.wait_for_use
            if not use.wait(left):
                raise self.timed_out(handle, None)

    def settle_oldest(self, handle: TaskHandle) -> bool:
        """The common case of `settle`, made short: no limit, and no other task to collect first.

        False when the case is another, and then nothing was done.
        """
        if self._deadline != _INF or not self._lock.acquire(blocking=False):
            return False
        try:
            pending = self._open
            return bool(pending) and pending[0] is handle and self._take(handle, _INF)
        finally:
            self._lock.release()

    def settle(self, handle: TaskHandle, timeout_s: float) -> bool:
        """Wait until `handle` has ended, within the run's deadline too."""
        return self.settle_for(handle, min(timeout_s, max(self.left(), 0.0)))

    def drain(self, timeout_s: float) -> TaskHandle | None:
        """Wait for every task; the first that has not ended in time."""
        while self._open:
            try:
                first = self._open[0]
            except IndexError:  # another thread took it
                continue
            if not self.settle_for(first, timeout_s):
                return first
        return None

    def has_open(self) -> bool:
        """Whether the outcome of some task has not been collected."""
        return bool(self._open)

    def call_when_ended(self, handle: TaskHandle, callback: Callable[[], None]) -> None:
        """See `TaskHandle.when_ended`."""
        with self._lock:
            if not handle.finished:
                self._callbacks[handle] = callback
                return
        callback()

    def release_all(self) -> None:
        """The processes are gone: nothing uses memory any more."""
        while self._open:
            handle = self._open.popleft()
            if handle.use is not None:
                handle.use.release()

    def finish(self) -> None:
        """Wait for every task.

        Raises:
            TaskError: the first failure, with the number of tasks that did not run because of it.
            WorkerTimeoutError: the run's deadline passed; tasks that have begun go on.
        """
        late = self.drain(max(self.left(), 0.0))
        if late is not None:
            raise self.timed_out(late, None)
        if self._failed is not None:
            raise self.failure()

    def failure(self) -> TaskError:
        """The run's error. REQUIRES: a task has failed."""
        assert self._failed is not None
        first = self._failed.error
        assert first is not None
        return TaskError(callable=first.callable, path=first.path, cause=first.cause, poisoned=self._poisoned)

    def timed_out(self, handle: TaskHandle, timeout_s: float | None) -> WorkerTimeoutError:
        """The error of waiting for `handle` longer than `timeout_s`, or than the run may take."""
        whole_run = timeout_s is None or self.left() <= 0
        limit = self._timeout_s if whole_run else timeout_s
        what = f"task {handle.name!r} on worker {handle.worker_id}"
        return WorkerTimeoutError(
            f"{what} had not ended when the {'run' if whole_run else 'wait'}'s limit of {limit:g} s passed",
            path=(handle.worker_id,),
            started=handle.seq != 0,
            waited_for=what,
            timeout_s=limit,
        )

    def settle_for(self, handle: TaskHandle, timeout_s: float) -> bool:
        """Wait until `handle` has ended, collecting the outcomes up to it; false when the time ran out."""
        if handle.finished:
            return True
        timeout_s = max(timeout_s, 0.0)
        deadline = time.monotonic() + timeout_s
        bound = min(timeout_s, threading.TIMEOUT_MAX)
        if not self._lock.acquire(timeout=bound):
            return False
        try:
            while not handle.is_finished():
                first = self._open[0]
                left = math.inf if timeout_s == math.inf else max(deadline - time.monotonic(), 0.0)
                if not self._take(first, left):
                    return False
        finally:
            self._lock.release()
        return True

    def _take(self, handle: TaskHandle, timeout_s: float) -> bool:
        """Collect the oldest task; false when the time ran out."""
        try:
            outcome = self._wait_task(handle.worker_id, handle.seq, timeout_s)
        except WorkerDiedError as error:
            self._open.popleft()
            if self._failed is None:
                self._fail(handle, error)
            else:
                self._poison(handle)
            return True
        if outcome is None:
            return False
        self._open.popleft()
        state, result, remote = outcome
        if state == _DONE:
            handle.raw = result
            if handle.use is None and not self._callbacks:
                handle.finished = True
            else:
                self._end(handle)
        elif state == _FAILED and remote is not None:
            self._fail(handle, self._remote(handle.worker_id, remote))
        else:
            self._poison(handle)
        return True

    def _fail(self, handle: TaskHandle, cause: BaseException) -> None:
        handle.error = TaskError(callable=handle.name, path=(handle.worker_id,), cause=cause)
        if self._failed is None:
            self._failed = handle
        self._end(handle)

    def _poison(self, handle: TaskHandle) -> None:
        self._poisoned += 1
        handle.error = self.failure()
        self._end(handle)

    def _end(self, handle: TaskHandle) -> None:
        handle.finished = True
        use = handle.use
        if use is not None:
            handle.use = None
            use.release()
        if self._callbacks and (callback := self._callbacks.pop(handle, None)) is not None:
            callback()
