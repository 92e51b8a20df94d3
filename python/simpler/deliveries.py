"""Replies of submitted calls on their way to whoever waits for them, and the thread that brings them."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from simpler import _core, logs

if TYPE_CHECKING:
    from simpler.failures import Failures

Outcome = bytes | BaseException
Deliver = Callable[[Outcome], None]

_log = logging.getLogger("simpler.worker")


class Deliveries:
    """Who waits for which token. A reply may come before the submitter has said that it waits.

    Thread safety: any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, Deliver] = {}
        self._early: dict[int, Outcome] = {}

    def expect(self, token: int, deliver: Deliver) -> None:
        """Have `deliver` called with the outcome of `token`: later by the delivering thread, or now."""
        outcome = self.expect_later(token, deliver)
        if outcome is not None:
            deliver(outcome)

    def expect_later(self, token: int, deliver: Deliver) -> Outcome | None:
        """Have `deliver` called by the delivering thread, unless the outcome is here: then return that."""
        with self._lock:
            outcome = self._early.pop(token, None)
            if outcome is None:
                self._waiting[token] = deliver
            return outcome

    def forget(self, token: int) -> None:
        """The call was withdrawn: no outcome will come."""
        with self._lock:
            self._waiting.pop(token, None)

    def arrive(self, token: int, outcome: Outcome) -> None:
        """Hand over an outcome."""
        with self._lock:
            deliver = self._waiting.pop(token, None)
            if deliver is None:
                self._early[token] = outcome
                return
        deliver(outcome)


class EventSink(Protocol):
    """What the dispatcher tells besides replies."""

    def on_died(self, worker: int, how: str) -> None:
        """A child is gone."""

    def on_ended(self, worker: int, hold: int) -> None:
        """A request that its caller had given up has ended."""

    def on_run_done(self, number: int) -> None:
        """A watched run is done."""

    def on_turn(self, number: int) -> None:
        """A watched use's turn has come, or never will."""

    def on_buffers_idle(self) -> None:
        """There is memory to be given back."""


class Dispatcher:
    """The thread of a running tree that takes its events.

    It refers to its sink weakly, and to the Worker not at all.
    """

    def __init__(
        self, tree: _core.Tree, deliveries: Deliveries, failures: Failures, sink: EventSink, name: str
    ) -> None:
        self._tree = tree
        self._deliveries = deliveries
        self._failures = failures
        self._sink = weakref.ref(sink)
        self._name = f"{name}-events"
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start taking events."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def is_current(self) -> bool:
        """Whether the caller is this thread."""
        return self._thread is threading.current_thread()

    def join(self, timeout_s: float) -> None:
        """Wait until the last event is delivered; not from a callback on this very thread."""
        if self._thread is not None and not self.is_current():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while events := self._tree.next_events():
            for event in events:
                self._handle(event)

    def _handle(self, event: _core.Event) -> None:
        try:
            self._deliver(event)
        except BaseException as error:  # noqa: BLE001 - a callback's or log handler's own error ends here
            report(error)

    def _deliver(self, event: _core.Event) -> None:
        if event[0] == "reply":
            self._deliveries.arrive(event[1], event[2])
        elif event[0] == "log":
            worker = event[1]
            logs.handle_frame(event[2], (worker,), self._failures.device_of(worker))
        elif event[0] == "lost":
            _log.warning(
                "%d log records of children were dropped: they came faster than they were handled", event[2]
            )
        elif (sink := self._sink()) is None:
            return
        elif event[0] == "ended":
            sink.on_ended(event[1], event[2])
        elif event[0] == "run":
            sink.on_run_done(event[2])
        elif event[0] == "turn":
            sink.on_turn(event[2])
        elif event[0] == "idle":
            sink.on_buffers_idle()
        else:
            sink.on_died(event[1], event[2])


def report(error: BaseException) -> None:
    """Log what a callback or log handler raised; raises nothing."""
    try:
        _log.error("an event could not be delivered: %s", error, exc_info=error)
    except Exception:  # noqa: BLE001 - the handler that raised may be the one asked to log it
        return
