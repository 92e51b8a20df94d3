"""What calls that name memory keep alive until their handlers have ended."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable

Release = Callable[[], None]


class Holds:
    """Releases by hold number and worker; each runs once, whoever learns first that the handler has ended.

    Thread safety: any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._releases: dict[tuple[int, int], Release] = {}

    def open(self, releases: Iterable[tuple[int, Release]]) -> int:
        """Keep these (worker, release) pairs; the number of the hold."""
        with self._lock:
            number = next(self._numbers)
            for worker, release in releases:
                self._releases[(worker, number)] = release
        return number

    def end(self, worker: int, number: int) -> None:
        """The handler on `worker` has ended or never will begin."""
        with self._lock:
            release = self._releases.pop((worker, number), None)
        if release is not None:
            release()

    def drop(self, worker: int, number: int) -> None:
        """Forget it without a release: the caller has what it held."""
        with self._lock:
            self._releases.pop((worker, number), None)

    def end_all(self) -> None:
        """Every handler has ended: the processes are gone."""
        with self._lock:
            releases = list(self._releases.values())
            self._releases.clear()
        for release in releases:
            release()
