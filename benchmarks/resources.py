"""What a tree costs that does nothing: memory, and processor time.

The tree lives in a process of its own, so that reading /proc here adds nothing to what is read.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import ours
from benchmarks.figures import OURS, Row, Samples, Target, figure_of
from benchmarks.peers import PIPE, answer_same, fork, serve_pipe
from simpler import TaskArgs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from benchmarks.sampling import Effort
    from simpler import Orchestrator, Worker

    Link = Connection[Any, Any]

PROC = Path("/proc")
CHIPS = 8
SETTLE_S = 1.5  # after it arenas have given their pages back
KERNEL_S = 5.0


def resources(effort: Effort) -> Iterator[Row]:
    """Private memory of an idle chip child; processor time of an idle tree and of a waiting parent."""
    yield from _memory(effort)
    yield _cpu("CPU use of an idle tree of 8 children, all processes", _host_idle, effort)
    yield _cpu("CPU use while a child runs a 5 s kernel, all processes but that child", _host_busy, effort)


def private_bytes(pid: int) -> int:
    """Memory that goes when the process goes: Private_Clean and Private_Dirty of smaps_rollup."""
    lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    sizes = (int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))
    return 1024 * sum(sizes)


def cpu_ns(pids: list[int]) -> int:
    """Nanoseconds on a processor so far, of all threads of the processes."""
    total = 0
    for pid in pids:
        for thread in (PROC / str(pid) / "task").iterdir():
            total += int((thread / "schedstat").read_text().split()[0])
    return total


def _host_fresh(link: Link) -> None:
    with ours.tree() as worker:
        _hand_over(link, worker)


def _host_used(link: Link) -> None:
    with ours.tree() as worker:
        handle = worker.register(ours.kernel("noop"))
        for _ in range(100):
            worker.run_chip_control_extension("benchmark-echo", b"x", worker_id=0)
            worker.run(handle, TaskArgs())
        _hand_over(link, worker)


def _host_large(link: Link) -> None:
    with ours.tree() as worker:
        payload = ours.blob(1 << 20)
        for _ in range(100):
            worker.run_chip_control_extension("benchmark-echo", payload, worker_id=0)
        _hand_over(link, worker)


def _host_idle(link: Link) -> None:
    with ours.tree(CHIPS) as worker:
        _hand_over(link, worker)


def _host_busy(link: Link) -> None:
    with ours.tree() as worker:
        handle = worker.register(ours.kernel("busy"))

        def fn(orch: Orchestrator, args: TaskArgs, _config: Any) -> None:
            task = orch.submit_next_level(handle, args, worker=0)
            link.send([child.pid for child in worker.status() if child.path != (0,)])
            task.result()

        worker.run(fn, TaskArgs().add_scalar(KERNEL_S))


def _hand_over(link: Link, worker: Worker) -> None:
    link.send([child.pid for child in worker.status()])
    link.recv()


def _host_pipe(link: Link) -> None:
    mine, theirs = fork.Pipe()
    process = fork.Process(target=serve_pipe, args=(theirs, answer_same), daemon=True)
    process.start()
    mine.send_bytes(b"x")
    mine.recv_bytes()
    link.send([process.pid])
    link.recv()
    process.kill()


@contextlib.contextmanager
def _hosted(host: Callable[[Link], None]) -> Iterator[tuple[int, list[int]]]:
    """Run `host` in a process; its pid and the pids it sends."""
    mine, theirs = fork.Pipe()
    process = fork.Process(target=host, args=(theirs,))
    process.start()
    theirs.close()
    try:
        pids: list[int] = mine.recv()
        yield process.pid or 0, pids
    finally:
        with contextlib.suppress(BrokenPipeError):
            mine.send(None)
        process.join()


def _memory(effort: Effort) -> Iterator[Row]:
    small = Target(3 << 20)
    hosts: tuple[tuple[str, Callable[[Link], None], Target | None], ...] = (
        ("after init", _host_fresh, small),
        ("after 100 small calls and tasks", _host_used, small),
        ("after 100 calls of 1 MiB each way", _host_large, None),
    )
    for when, host, target in hosts:
        taken: dict[str, list[Samples]] = {OURS: [], PIPE: []}
        for _ in range(effort.rounds(5)):
            for contender, its_host in ((OURS, host), (PIPE, _host_pipe)):
                with _hosted(its_host) as (_, pids):
                    time.sleep(SETTLE_S)
                    taken[contender].append([private_bytes(pids[0])])
        figures = {contender: figure_of(samples) for contender, samples in taken.items()}
        yield Row(f"private memory of an idle chip child, {when}", "memory", figures, target)


def _cpu(name: str, host: Callable[[Link], None], effort: Effort) -> Row:
    taken: list[Samples] = []
    seconds = 1.0 if effort.quick else 5.0 if host is _host_idle else KERNEL_S - 1.0
    for _ in range(effort.rounds(3)):
        with _hosted(host) as (parent, pids):
            time.sleep(0.5)  # what starting left to do
            before, start = cpu_ns([parent, *pids]), time.perf_counter_ns()
            time.sleep(seconds)
            used, elapsed = cpu_ns([parent, *pids]) - before, time.perf_counter_ns() - start
        taken.append([100.0 * used / elapsed])
    return Row(name, "percent", {OURS: figure_of(taken)}, Target(0.1))
