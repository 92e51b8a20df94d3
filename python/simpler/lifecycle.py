"""The five states of a Worker, one owner of each transition, and what closes workers nobody closed.

NEW -> STARTING -> READY is done by the thread in `init()`, STARTING -> CLOSED by it when it fails,
READY -> CLOSING -> CLOSED by the first thread in `close()`. Every other thread only waits or is refused.
"""

from __future__ import annotations

import atexit
import enum
import logging
import os
import threading
import weakref
from typing import Protocol

from simpler import _core
from simpler.errors import ClosedError

_log = logging.getLogger("simpler.worker")
_WHAT_TO_DO = {
    "NEW": "call init() or use it in a with statement",
    "STARTING": "wait until init() has returned",
    "CLOSING": "make a new Worker",
    "CLOSED": "make a new Worker",
}


class WorkerState(str, enum.Enum):
    """Where a Worker is in its life; equal to its name as a string."""

    NEW = "NEW"
    STARTING = "STARTING"
    READY = "READY"
    CLOSING = "CLOSING"
    CLOSED = "CLOSED"

    def __str__(self) -> str:
        return self.value


class Lifecycle:
    """The state of one Worker.

    Thread safety: any thread. Fork: a copy of the process sees CLOSED and is refused by name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._state = WorkerState.NEW
        self._epoch = _core.process_epoch()
        self._changed = threading.Condition()  # over an RLock: a signal handler may close
        self._starter: int | None = None
        self._closer: int | None = None
        self._close_wanted = False

    @property
    def is_copy(self) -> bool:
        """Whether this process is a forked copy of the one that made the Worker."""
        return _core.process_epoch() != self._epoch

    @property
    def state(self) -> WorkerState:
        """The current state."""
        return WorkerState.CLOSED if self.is_copy else self._state

    @property
    def close_wanted(self) -> bool:
        """Whether a thread has asked to close while STARTING."""
        return self._close_wanted

    def refusal(self, what: str) -> ClosedError:
        """The error of using `what` in the current state."""
        if self.is_copy:
            return ClosedError(
                f"{what}: {self._name} belongs to the process that made it; this process is a forked copy "
                "of it: make a new Worker here"
            )
        state = self._state
        advice = _WHAT_TO_DO.get(state.value, "try again")
        return ClosedError(f"{what}: {self._name} is {state.value}; {advice}")

    def require_ready(self, what: str) -> None:
        """Raise ClosedError unless READY and in the process that made the Worker."""
        if self._state is not WorkerState.READY or self.is_copy:
            raise self.refusal(what)

    def begin_start(self) -> None:
        """NEW -> STARTING by the caller, who now owns the next transition."""
        with self._changed:
            if self._state is not WorkerState.NEW or self.is_copy:
                if self._state is WorkerState.READY and not self.is_copy:
                    raise ClosedError(f"init: {self._name} is READY; init() has been called already")
                raise self.refusal("init")
            self._state = WorkerState.STARTING
            self._starter = threading.get_ident()

    def end_start(self, *, ready: bool) -> None:
        """STARTING -> READY, or CLOSED after a failure."""
        with self._changed:
            self._state = WorkerState.READY if ready else WorkerState.CLOSED
            self._changed.notify_all()

    def begin_close(self) -> bool:
        """READY -> CLOSING by the caller; False when there is nothing left to close.

        Waits for another thread's init() or close(). Within the caller's own (a signal handler, a
        callback) it returns at once; an init() asked to close does so before it ends.
        """
        if self.is_copy:
            return False
        with self._changed:
            if self._state is WorkerState.NEW:
                self._state = WorkerState.CLOSED
                return False
            if self._state is WorkerState.STARTING:
                self._close_wanted = True
                if self._starter == threading.get_ident():
                    return False
                self._changed.wait_for(lambda: self._state is not WorkerState.STARTING)
            if self._state is WorkerState.READY:
                self._state = WorkerState.CLOSING
                self._closer = threading.get_ident()
                return True
            if self._state is WorkerState.CLOSING and self._closer != threading.get_ident():
                self._changed.wait_for(lambda: self._state is WorkerState.CLOSED)
            return False

    def end_close(self) -> None:
        """CLOSING -> CLOSED."""
        with self._changed:
            self._state = WorkerState.CLOSED
            self._closer = None
            self._changed.notify_all()


class Closable(Protocol):
    """What the exit and fork hooks need of a Worker."""

    def close(self) -> None:
        """Stop it."""

    def refuse_copy(self) -> None:
        """Replace the unguarded entry points by refusing ones: this process is a copy."""


_live: weakref.WeakSet[Closable] = weakref.WeakSet()


def track(worker: Closable) -> None:
    """Close `worker` at interpreter exit unless it is gone by then; refuse its use in forked copies."""
    _live.add(worker)


def untrack(worker: Closable) -> None:
    """Forget a closed worker."""
    _live.discard(worker)


def _close_all() -> None:
    for worker in list(_live):
        _close(worker)


def _close(worker: Closable) -> None:
    try:
        worker.close()
    except Exception:  # noqa: BLE001 - the others still have to be closed
        _log.exception("a worker could not be closed at exit")


def _refuse_copies() -> None:
    for worker in list(_live):
        worker.refuse_copy()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_refuse_copies)
