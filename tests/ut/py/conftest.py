"""What holds for every test: it ends in time and leaves nothing behind.

Two watchdogs: pytest-timeout's thread reports the stacks of a test that is blocked with the GIL free, and
faulthandler's C thread, a minute later, ends one that is blocked holding it. After each test no process that
the test started and no file in /dev/shm may be left; the runtime promises a second for that, and a slow
machine gets a few more.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTLE_S = 5.0
SECOND_WATCHDOG_S = 60.0
SHM = Path("/dev/shm")

# Processes that Python itself keeps for the life of the test run.
KEPT = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


class Process(NamedTuple):
    """One process, told apart from a later one with the same pid by when it began."""

    pid: int
    started: int


class _Stat(NamedTuple):
    process: Process
    state: str
    parent: int
    group: int


def _read_stat(pid: int | str) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name, between the outermost parentheses, may hold spaces and parentheses of its own.
    fields = text[text.rindex(b")") + 2 :].split()
    return _Stat(Process(int(pid), int(fields[19])), fields[0].decode(), int(fields[1]), int(fields[2]))


def _is_kept(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(name in command for name in KEPT)


def related_processes() -> set[Process]:
    """The descendants of this process, and what was orphaned and still runs in its process group."""
    pids = [entry.name for entry in os.scandir("/proc") if entry.name.isdecimal()]
    stats = [stat for pid in pids if (stat := _read_stat(pid)) is not None]
    own = os.getpid()
    family = {own}
    grown = True
    while grown:
        more = {stat.process.pid for stat in stats if stat.parent in family} - family
        family |= more
        grown = bool(more)
    # An orphan that has ended is for init to reap, which may take its time.
    group = os.getpgrp()
    family |= {stat.process.pid for stat in stats if stat.group == group and stat.state != "Z"}
    family.remove(own)
    return {stat.process for stat in stats if stat.process.pid in family and not _is_kept(stat.process.pid)}


def shared_memory_files() -> set[str]:
    """The names in /dev/shm, where other programs may have left thousands: none is looked at here."""
    return {entry.name for entry in os.scandir(SHM)} if SHM.is_dir() else set()


def _is_ours(name: str) -> bool:
    try:
        return (SHM / name).stat().st_uid == os.geteuid()
    except OSError:
        return False


def _wait_gone(processes: set[Process], timeout_s: float) -> None:
    """Wait until each of the processes has ended, or the time is up."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            continue
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        finally:
            os.close(pidfd)


def _describe(process: Process) -> str:
    stat = _read_stat(process.pid)
    try:
        command = (
            Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        command = ""
    return f"pid {process.pid} in state {stat.state if stat else 'gone'}: {command[:200]}"


def _end(processes: set[Process]) -> None:
    for process in processes & related_processes():
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.waitpid(process.pid, 0)
    _wait_gone(processes, SETTLE_S)


def leftovers(processes: set[Process], files: set[str], settle_s: float = SETTLE_S) -> list[str]:
    """What is there now and was not in `processes` and `files`; processes left over are ended."""
    if new := related_processes() - processes:
        _wait_gone(new, settle_s)
        new &= related_processes()
    report = [_describe(process) for process in sorted(new)]
    _end(new)
    return report + [f"/dev/shm/{name}" for name in sorted(shared_memory_files() - files) if _is_ours(name)]


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves a process or a file in /dev/shm."""
    processes, files = related_processes(), shared_memory_files()
    yield
    if left := leftovers(processes, files):
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


def _timeout_of(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    if marker is None:
        value = item.config.getoption("timeout", default=None) or item.config.getini("timeout")
    else:
        value = marker.args[0] if marker.args else marker.kwargs.get("timeout")
    return float(value or 0)


_watchdog_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a suite started in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the programs of tests want Ctrl-C
    # A copy: while a test runs, pytest points descriptor 2 at a file.
    config.stash[_watchdog_stderr] = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    timeout_s = _timeout_of(item)
    if timeout_s > 0:
        faulthandler.dump_traceback_later(
            timeout_s + SECOND_WATCHDOG_S, exit=True, file=item.config.stash[_watchdog_stderr]
        )
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (marker := item.get_closest_marker("no_asan")) and not (marker.args or marker.kwargs):
            raise pytest.UsageError(f"{item.nodeid}: no_asan needs a reason")
        if item.get_closest_marker("root") and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="needs the rights of root"))
