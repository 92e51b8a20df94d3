"""The check that a test leaves nothing behind can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import shared_memory
from typing import TYPE_CHECKING

import pytest

import conftest

if TYPE_CHECKING:
    from collections.abc import Iterator

WAITING = "import sys; print(flush=True); sys.stdin.read()"


@pytest.fixture
def waiting_child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", WAITING], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child


def test_a_child_still_running_is_reported_and_ended(waiting_child: subprocess.Popen[bytes]) -> None:
    before = conftest.related_processes() - {
        process for process in conftest.related_processes() if process.pid == waiting_child.pid
    }
    report = conftest.leftovers(before, conftest.shared_memory_files(), settle_s=0.05)
    assert len(report) == 1
    assert f"pid {waiting_child.pid}" in report[0]
    assert waiting_child.pid not in {process.pid for process in conftest.related_processes()}


def test_a_child_nobody_reaped_is_reported() -> None:
    before = conftest.related_processes()
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    report = conftest.leftovers(before, conftest.shared_memory_files(), settle_s=0.05)
    assert len(report) == 1
    assert f"pid {pid} in state Z" in report[0]


def test_a_grandchild_whose_parent_has_gone_is_reported() -> None:
    before = conftest.related_processes()
    script = (
        "import subprocess as s, sys\n"
        f"print(s.Popen([sys.executable, '-c', {WAITING!r}], stdout=s.DEVNULL).pid)"
    )
    read_end, write_end = os.pipe()
    try:
        output = subprocess.run(
            [sys.executable, "-c", script], stdin=read_end, stdout=subprocess.PIPE, check=True
        ).stdout
        report = conftest.leftovers(before, conftest.shared_memory_files(), settle_s=0.05)
    finally:
        os.close(read_end)
        os.close(write_end)
    assert len(report) == 1
    assert f"pid {int(output)}" in report[0]


def test_a_file_in_dev_shm_is_reported() -> None:
    files = conftest.shared_memory_files()
    memory = shared_memory.SharedMemory(create=True, size=1)
    try:
        report = conftest.leftovers(conftest.related_processes(), files)
    finally:
        memory.close()
        memory.unlink()
    assert report == [f"/dev/shm/{memory.name}"]
