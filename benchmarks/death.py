"""A killed child: from os.kill(pid, SIGKILL) until its parent knows.

The kernel takes the process's memory down meanwhile; a pidfd or a pipe tells only after that.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from benchmarks import ours
from benchmarks.figures import OURS, Row, Samples, Target, figure_of
from benchmarks.fresh import fresh
from benchmarks.peers import PIPE, POOL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.sampling import Effort

BARE = "os.fork, a pidfd"


def death(effort: Effort) -> Iterator[Row]:
    """The error in a blocked caller, and status() of an idle child."""
    busy = ours.kernel("busy")
    bare = {BARE: ["bare"], PIPE: ["pipe"]}
    callers = {**bare, POOL: ["pool"]}
    rows = (
        ("killed in a handler: error in the blocked caller", ["in_handler"], callers),
        (
            "killed in a native kernel: error in the blocked caller",
            ["in_kernel", str(busy.path), busy.symbol],
            callers,
        ),
        ("killed while idle: status() says dead", ["idle"], bare),
        ("killed while idle, after a restart: status() says dead", ["idle_again"], bare),
    )
    with contextlib.ExitStack() as stack:
        processes = {name: stack.enter_context(fresh("death_trials")) for name in (OURS, BARE, PIPE, POOL)}
        for name, trial, others in rows:
            contenders = {OURS: trial, **others}
            taken: dict[str, list[Samples]] = {contender: [] for contender in contenders}
            for _ in range(effort.samples(60)):
                for contender, asked in contenders.items():
                    taken[contender].append(processes[contender].trial(*asked))
            yield Row(name, "time", {key: figure_of(value) for key, value in taken.items()}, Target(1e6))
