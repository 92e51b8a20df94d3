"""Threads that make the submitted calls of level 2."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from simpler.deliveries import report

Call = Callable[[], None]


class CallThreads:
    """A few threads that make calls in the order given; each starts when it is first needed.

    They are daemons: a handler that never returns does not keep the interpreter from ending.
    Thread safety: one thread at a time.
    """

    def __init__(self, count: int, name: str) -> None:
        self._missing = count
        self._started = 0
        self._name = name
        self._calls: SimpleQueue[Call | None] = SimpleQueue()

    def add(self, call: Call) -> None:
        """Have a thread make `call`; what it raises is logged."""
        if self._missing:
            self._missing -= 1
            self._started += 1
            threading.Thread(target=_make_calls, args=(self._calls,), name=self._name, daemon=True).start()
        self._calls.put(call)

    def end(self) -> None:
        """End each thread when it has made the calls added before; returns at once."""
        for _ in range(self._started):
            self._calls.put(None)


def _make_calls(calls: SimpleQueue[Call | None]) -> None:
    while (call := calls.get()) is not None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - a Future's callback may raise anything; others still wait
            report(error)
        del call  # an idle thread keeps nothing of its last call alive
