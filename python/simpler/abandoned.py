"""Runs that their callers have left before the tasks had ended: their outcomes are still collected."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from simpler.errors import SimplerError

if TYPE_CHECKING:
    from simpler.run import Run

_TURN_S = 0.25


class Abandoned:
    """Collects the tasks of abandoned runs, so that memory they use is released when they end.

    Its thread exists while there are such runs, and gives each a turn so that a stuck one holds up no other.
    Thread safety: any thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._runs: deque[Run] = deque()
        self._thread: threading.Thread | None = None

    def add(self, run: Run) -> None:
        """Take over a run."""
        with self._lock:
            self._runs.append(run)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._collect, name=f"{self._name}-abandoned", daemon=True
                )
                self._thread.start()

    def _collect(self) -> None:
        while True:
            with self._lock:
                if not self._runs:
                    self._thread = None
                    return
                run = self._runs.popleft()
            try:
                late = run.drain(_TURN_S)
            except SimplerError:
                run.release_all()  # closed: the processes are gone
                continue
            if late is not None:
                with self._lock:
                    self._runs.append(run)
