"""What the kernel says of processes: who lives, what they map, what they hold open, how often they woke."""

from __future__ import annotations

import contextlib
import os
import select
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from invariants.nodes import WATCHDOG_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Look until it holds: for what the kernel shows in /proc and announces nowhere."""
    deadline = time.monotonic() + WATCHDOG_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        os.sched_yield()


def parent_of(pid: int) -> int:
    """The parent's pid; 0 when the process is gone."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text()
        return int(text[text.rindex(")") + 2 :].split()[1])
    return 0


def children_of(pid: int) -> list[int]:
    """The direct children of a process."""
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if parent_of(int(entry.name)) == pid]


class Watched:
    """Processes whose ends are awaited. Make it while they live: a pid may be given away again."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pidfds: dict[int, int] = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                self._pidfds[pid] = os.pidfd_open(pid)

    def still_there(self, timeout_s: float) -> list[int]:
        """The pids of those that have not ended within the time."""
        deadline = time.monotonic() + timeout_s
        return [
            pid
            for pid, pidfd in self._pidfds.items()
            if not _ended(pidfd, max(0.0, deadline - time.monotonic()))
        ]

    def close(self) -> None:
        """Give the descriptors back."""
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds = {}


def _ended(pidfd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def wait_ended(pid: int) -> None:
    """Return when the process has ended (a zombie has)."""
    with contextlib.suppress(ProcessLookupError):
        watched = Watched([pid])
        try:
            assert watched.still_there(WATCHDOG_S) == []
        finally:
            watched.close()


def is_gone(pid: int) -> bool:
    """Whether there is no process of that pid, nor a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def open_files(pid: int | str = "self") -> dict[int, str]:
    """What each descriptor of a process points at."""
    files = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            files[int(entry.name)] = str(entry.readlink())
    return files


def threads_of(pid: int | str = "self") -> list[int]:
    """The thread ids of a process."""
    return sorted(int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir())


def status_field(pid: int | str, field: str, tid: int | None = None) -> int:
    """The number behind `field` in /proc/PID/status, or in that of one thread."""
    where = Path(f"/proc/{pid}") if tid is None else Path(f"/proc/{pid}/task/{tid}")
    for line in (where / "status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise KeyError(field)


def memfds_mapped(pid: int | str = "self") -> set[str]:
    """The inodes of all nameless shared memory that a process maps, in whatever way."""
    inodes = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/memfd:"):
            inodes.add(fields[4])
    return inodes


class Census(NamedTuple):
    """What this process has: not more than before when nothing has leaked."""

    files: int
    threads: int
    memfds: int
    children: int

    @staticmethod
    def take() -> Census:
        """Count."""
        return Census(
            files=len(open_files()),
            threads=len(threads_of()),
            memfds=len(memfds_mapped()),
            children=len(children_of(os.getpid())),
        )

    def assert_not_grown(self) -> None:
        """Nothing is there that was not there at this census."""
        now = Census.take()
        assert now.files <= self.files
        assert now.memfds <= self.memfds
        assert now.children <= self.children
        # A thread that has been joined may still be on its way out of the kernel.
        eventually(lambda: len(threads_of()) <= self.threads, f"{self.threads} threads")
