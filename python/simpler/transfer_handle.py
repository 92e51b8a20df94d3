"""Transfers as their submitter sees them: the handle and its states."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
import time
from typing import TYPE_CHECKING

from simpler.config import wait_timeout
from simpler.deliveries import report
from simpler.errors import SimplerError, WorkerTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


class TransferState(enum.Enum):
    """Where a transfer stands."""

    WAITING = "waiting"
    """For its turn at the memory, or for one of the chip's places."""
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    """Access has ended."""
    CANCELLED = "cancelled"
    """Access has ended, or never began."""
    UNCONFIRMED = "unconfirmed"
    """Something may still touch the memory: it stays pinned."""


class TransferHandle:
    """One submitted transfer. It may be dropped: the transfer goes on.

    Thread safety: any thread.

    Attributes:
        id: Its number, never used again by this Worker.
        name: The provider's.
        worker_id: The chip that it runs on.
        nbytes: Of its ranges together.
    """

    __slots__ = (
        "__weakref__", "_calls", "_changed", "_error", "_may_block", "_result", "_state", "_stop",
        "id", "name", "nbytes", "worker_id",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        name: str,
        worker_id: int,
        nbytes: int,
        stop: Callable[[], None],
        may_block: Callable[[], bool],
    ) -> None:
        self.id = number
        self.name = name
        self.worker_id = worker_id
        self.nbytes = nbytes
        self._changed = threading.Condition()
        self._state = TransferState.WAITING
        self._result = b""
        self._error: SimplerError | None = None
        self._calls: list[Callable[[], None]] = []
        self._stop: Callable[[], None] | None = stop
        self._may_block = may_block

    @property
    def state(self) -> TransferState:
        """Where it stands now."""
        return self._state

    def done(self) -> bool:
        """Whether it has ended: an unconfirmed one has, although its memory stays pinned."""
        return self._state not in (TransferState.WAITING, TransferState.RUNNING)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it has ended; false when the time ran out. None has no limit, 0 polls.

        Raises:
            SimplerError: Called on the thread that brings the outcomes, which would wait for itself.
        """
        limit = wait_timeout(timeout_s)
        if self.done() or limit == 0:
            return self.done()
        if not self._may_block():
            raise SimplerError(
                "a callback of this worker cannot wait for a transfer: its own thread brings it"
            )
        with self._changed:
            return self._changed.wait_for(self.done, min(limit, threading.TIMEOUT_MAX))

    def result(self, timeout_s: float | None = None) -> bytes:
        """The provider's payload, once it has ended.

        Raises:
            WorkerTimeoutError: It has not ended in time; it goes on.
            TransferUnconfirmedError: Its access is not certified to have ended; the memory stays pinned.
            TransferError: It failed, or was cancelled, or never began.
        """
        begun = time.monotonic()
        if not self.wait(timeout_s):
            limit = wait_timeout(timeout_s)
            what = f"transfer {self.id} by {self.name!r} on worker {self.worker_id}"
            raise WorkerTimeoutError(
                f"{what} has not ended within {limit:g} s: it is {self._state.value} "
                f"(waited {time.monotonic() - begun:.3f} s)",
                path=(self.worker_id,),
                started=self._state is TransferState.RUNNING,
                waited_for=what,
                timeout_s=limit,
            )
        if self._error is not None:
            raise self._error.with_traceback(None)  # or each time would add to the last time's
        return self._result

    def cancel(self) -> None:
        """Ask it to stop: one that has not begun never does; a provider that runs is told, and decides."""
        stop = self._stop
        if stop is not None:
            stop()

    def __await__(self) -> Generator[object, None, bytes]:
        """As `result()`, in an event loop."""
        if not self.done():
            loop = asyncio.get_running_loop()
            woken = loop.create_future()

            def wake() -> None:
                if not woken.done():
                    woken.set_result(None)

            def told() -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                    loop.call_soon_threadsafe(wake)

            self.add_done_callback(told)
            yield from woken
        return self.result(0.0)

    def add_done_callback(self, call: Callable[[], None]) -> None:
        """Have `call` made once it has ended, on the thread that brings outcomes; now if it has."""
        with self._changed:
            if not self.done():
                self._calls.append(call)
                return
        call()

    def begin(self) -> None:
        """It runs now. For the runtime."""
        with self._changed:
            if self._state is TransferState.WAITING:
                self._state = TransferState.RUNNING

    def finish(self, state: TransferState, result: bytes, error: SimplerError | None) -> None:
        """It has ended. For the runtime, once."""
        with self._changed:
            self._result = result
            self._error = error
            self._state = state  # last: done() looks without the lock
            self._stop = None  # a handle that is kept keeps nothing of the Worker alive
            self._may_block = _always
            calls, self._calls = self._calls, []
            self._changed.notify_all()
        for call in calls:
            _make(call)

    def __repr__(self) -> str:
        return f"<TransferHandle {self.id} by {self.name!r} on worker {self.worker_id}: {self._state.value}>"


def _make(call: Callable[[], None]) -> None:
    try:
        call()
    except BaseException as failure:  # noqa: BLE001 - the others, and other transfers, go on
        report(failure)


def _always() -> bool:
    return True
