"""The peers of the task graph, each in a process of its own that `benchmarks.fresh` starts.

Every peer answers the same questions with two processes that do nothing: tasks that depend on nothing, tasks
that each take the last one's result, and one task from its submission to its result. All return nanoseconds.
"""

from __future__ import annotations

import importlib
import time
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

POOL = "ProcessPoolExecutor"
LOKY = "loky"
RAY = "ray, actors"
COMPILED = "ray, compiled graph"
DASK = "dask.distributed"
PROCESSES = 2
GRAPH = 100  # the tasks of a compiled graph


def noop(_previous: object = None) -> None:
    """The task."""


class Peer(Protocol):
    """What runs tasks in two processes."""

    def independent(self, count: int) -> None:
        """That many tasks, until the last result is there."""

    def chain(self, count: int, processes: int) -> None:
        """Each task takes the result of the one before it, on one process or on two in turn."""

    def single(self) -> None:
        """One task until its result is there."""

    def stop(self) -> None:
        """End the processes."""


class Pool:
    """Executors know no dependencies: in a chain each task is submitted when the last has ended."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def independent(self, count: int) -> None:
        for future in [self._pool.submit(noop) for _ in range(count)]:
            future.result()

    def chain(self, count: int, processes: int) -> None:  # noqa: ARG002 - which process, the pool chooses
        last = None
        for _ in range(count):
            last = self._pool.submit(noop, last).result()

    def single(self) -> None:
        self._pool.submit(noop).result()

    def stop(self) -> None:
        self._pool.shutdown()


class Dask:
    """A local cluster of two processes with one thread each."""

    def __init__(self) -> None:
        distributed = importlib.import_module("distributed")
        self._cluster = distributed.LocalCluster(
            n_workers=PROCESSES, threads_per_worker=1, processes=True, dashboard_address=None
        )
        self._client = distributed.Client(self._cluster)
        self._addresses = list(self._client.scheduler_info()["workers"])

    def independent(self, count: int) -> None:
        self._client.gather(self._client.map(noop, range(count), pure=False))

    def chain(self, count: int, processes: int) -> None:
        last = None
        for i in range(count):
            address = self._addresses[i % processes]
            last = self._client.submit(noop, last, pure=False, workers=[address])
        self._client.gather(last)

    def single(self) -> None:
        self._client.submit(noop, pure=False).result()

    def stop(self) -> None:
        self._client.close()
        self._cluster.close()


def _ray() -> Any:
    ray = importlib.import_module("ray")
    ray.init(num_cpus=PROCESSES, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    return ray


class _Actor:
    def noop(self, _previous: object = None) -> None:
        """The task."""


class Ray:
    """Method calls of two actors; an object reference is what the next call depends on."""

    def __init__(self) -> None:
        self._ray = _ray()
        actor = self._ray.remote(_Actor)
        self._actors = [actor.options(num_cpus=1).remote() for _ in range(PROCESSES)]

    def independent(self, count: int) -> None:
        actors = self._actors
        self._ray.get([actors[i % PROCESSES].noop.remote() for i in range(count)])

    def chain(self, count: int, processes: int) -> None:
        last = None
        for i in range(count):
            last = self._actors[i % processes].noop.remote(last)
        self._ray.get(last)

    def single(self) -> None:
        self._ray.get(self._actors[0].noop.remote())

    def stop(self) -> None:
        self._ray.shutdown()


class Compiled:
    """A graph of `GRAPH` tasks of two actors, compiled at the first call and executed again and again."""

    def __init__(self) -> None:
        self._ray = _ray()
        self._actor = self._ray.remote(_Actor)
        self._shape: tuple[int, int, bool] | None = None
        self._graph: Any = None
        self._actors: list[Any] = []

    def independent(self, count: int) -> None:
        self._execute((GRAPH, PROCESSES, False), count // GRAPH)

    def chain(self, count: int, processes: int) -> None:
        self._execute((GRAPH, processes, True), count // GRAPH)

    def single(self) -> None:
        self._execute((1, 1, True), 1)

    def stop(self) -> None:
        self._teardown()
        self._ray.shutdown()

    def _execute(self, shape: tuple[int, int, bool], times: int) -> None:
        if shape != self._shape:
            self._teardown()
            self._graph = self._compile(*shape)
            self._shape = shape
        for _ in range(times):
            self._ray.get(self._graph.execute(0))

    def _compile(self, tasks: int, processes: int, is_chain: bool) -> Any:
        dag = importlib.import_module("ray.dag")
        self._actors = [self._actor.options(num_cpus=1).remote() for _ in range(processes)]
        with dag.InputNode() as given:
            nodes = [given]
            for i in range(tasks):
                nodes.append(self._actors[i % processes].noop.bind(nodes[-1] if is_chain else given))
            last = nodes[-1] if is_chain else dag.MultiOutputNode(nodes[1:])
        return last.experimental_compile()

    def _teardown(self) -> None:
        if self._graph is not None:
            self._graph.teardown()
        for actor in self._actors:
            self._ray.kill(actor)


def _pool() -> Pool:
    return Pool(ProcessPoolExecutor(PROCESSES))


def _loky() -> Pool:
    return Pool(importlib.import_module("loky").ProcessPoolExecutor(PROCESSES))


MAKERS: dict[str, Callable[[], Peer]] = {POOL: _pool, LOKY: _loky, RAY: Ray, COMPILED: Compiled, DASK: Dask}
_running: list[Peer] = []


def start(name: str) -> list[int]:
    """Start a peer and wait until its processes run."""
    peer = MAKERS[name]()
    _running.append(peer)
    peer.single()
    return []


def independent(count: int) -> list[int]:
    """Nanoseconds a task."""
    start_ns = time.perf_counter_ns()
    _running[-1].independent(count)
    return [(time.perf_counter_ns() - start_ns) // count]


def chain(count: int, processes: int) -> list[int]:
    """Nanoseconds a link."""
    start_ns = time.perf_counter_ns()
    _running[-1].chain(count, processes)
    return [(time.perf_counter_ns() - start_ns) // count]


def single(count: int) -> list[int]:
    """Nanoseconds of each of `count` tasks."""
    samples = [0] * count
    peer = _running[-1]
    for i in range(count):
        start_ns = time.perf_counter_ns()
        peer.single()
        samples[i] = time.perf_counter_ns() - start_ns
    return samples


def stop() -> list[int]:
    """End what `start` started."""
    _running.pop().stop()
    return []
