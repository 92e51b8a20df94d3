"""Trials in a process of their own, which has imported numpy, simpler and the trials and nothing more.

What a process has imported is copied at each fork and taken down at each end, so the suite's own imports
would be measured with both. Each contender gets such a process, and they take turns. ``python -m
benchmarks.fresh MODULE`` is its other side: a line of JSON asks for a trial, one answers.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator


class Fresh:
    """One process with the trials of one module."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def trial(self, name: str, *arguments: int | str) -> list[int]:
        """What the function `name` measured, in nanoseconds."""
        asked, answers = self._process.stdin, self._process.stdout
        if asked is None or answers is None:
            raise RuntimeError("the process of the trials has no pipes")
        print(json.dumps([name, *arguments]), file=asked, flush=True)
        line = answers.readline()
        if not line:
            raise RuntimeError(f"the process of the trials ended in {name}")
        measured: list[int] = json.loads(line)
        return measured


@contextlib.contextmanager
def fresh(module: str) -> Iterator[Fresh]:
    """Start the process, and end it."""
    import subprocess

    command = [sys.executable, "-m", "benchmarks.fresh", module]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Fresh(process)
        if process.stdin is not None:
            process.stdin.close()


def serve(module: str) -> None:
    """Answer until the end of the requests."""
    trials = importlib.import_module(f"benchmarks.{module}")
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        trial: Callable[..., tuple[int, ...]] = getattr(trials, name)
        print(json.dumps(trial(*arguments)), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
