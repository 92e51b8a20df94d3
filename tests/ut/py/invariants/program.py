"""A program of its own that uses simpler: the parent that a test stops, interrupts or kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from invariants.nodes import WATCHDOG_S
from invariants.processes import Watched, children_of

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

PROLOGUE = """
import ctypes, os, signal, sys, threading, time
sys.path.insert(0, {tests!r})
import simpler
from simpler import ControlOp, Tag, TaskArgs, Worker
from invariants.gate import gate_args, native, wait_at, wait_handler
from invariants.nodes import error_of, node, run_task

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

"""


def source(body: str) -> str:
    """The whole text of a program."""
    return PROLOGUE.format(tests=str(Path(__file__).parents[1])) + textwrap.dedent(body)


def environment() -> dict[str, str]:
    """This process's, but with buffered output, as a program has it by itself."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


class Program:
    """A running program, in a session of its own so that signals to its group reach nobody else."""

    def __init__(self, body: str, *args: object, prefix: tuple[str, ...] = ()) -> None:
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-c", source(body), *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=environment(),
        )
        assert self._process.stdout is not None
        self._stdout = self._process.stdout
        self.pid = self._process.pid

    def line(self) -> str:
        """The next line it says; its errors when it says no more."""
        line = self._stdout.readline().decode()
        if not line:
            raise AssertionError(f"the program ended ({self._process.wait()}): {self.errors()}")
        return line.rstrip("\n")

    def children(self) -> Watched:
        """Its children, the spare included, as they are now."""
        return Watched(children_of(self.pid))

    def tell(self) -> None:
        """Send an empty line, which `sys.stdin.readline()` waits for."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def signal(self, number: int) -> None:
        """Send a signal to the program alone."""
        os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the program and its children, as a terminal does."""
        os.killpg(self.pid, number)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        return self._process.wait(WATCHDOG_S)

    def rest(self) -> str:
        """Everything it still says until all that could write has ended."""
        return self._stdout.read().decode()

    def errors(self) -> str:
        """What it wrote to stderr, until all that could write there has ended."""
        assert self._process.stderr is not None
        return self._process.stderr.read().decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


def run_program(body: str, *args: object, prefix: tuple[str, ...] = ()) -> str:
    """Run a program to its end; what it said. It must exit with 0 and no exception may get lost in it."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", source(body), *map(str, args)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=WATCHDOG_S,
        start_new_session=True,
        env=environment(),
        check=False,
    )
    errors = done.stderr.decode()
    assert done.returncode == 0, errors
    assert "Traceback" not in errors
    assert "Exception" not in errors
    return done.stdout.decode()
