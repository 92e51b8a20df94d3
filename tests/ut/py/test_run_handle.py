"""RunHandle: waited for, awaited, cancelled, shared by threads, let go of, closed under."""

from __future__ import annotations

import asyncio
import gc
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

import simpler
from run_parts import fail, pid, small_worker, wait_for
from simpler import IN, INOUT, NO_DEP, Orchestrator, RunConfig, RunHandle, Worker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WATCHDOG_S = 30.0


class Gated:
    """A node with a function that ends when the gate is opened."""

    def __init__(self, worker: Worker, gate: Path) -> None:
        self.worker, self.gate = worker, gate
        name = str(gate)
        self.slow = worker.register(lambda: wait_for(name), name="slow")
        self.quick = worker.register(pid)
        self.bad = worker.register(fail)

    def begin(self, behind: int = 0, config: RunConfig | None = None) -> RunHandle:
        """A run whose first task has begun, with others behind it."""

        def fn(orch: Orchestrator, _args: object, _config: object) -> list[simpler.TaskHandle]:
            first = orch.submit(self.slow, worker=0)
            return [first, *(orch.submit(self.quick, worker=1, after=[first]) for _ in range(behind))]

        run = self.worker.submit(fn, None, config)
        while self.worker.status()[0].running is None:
            os.sched_yield()
        return run

    def open(self) -> None:
        self.gate.open("wb").close()

    def records(self) -> int:
        """What the engine keeps of runs, tasks and results."""
        engine: Any = self.worker._engine
        return int(engine.engine.counts()["records"])


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Gated]:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with small_worker(device_ids=[0, 1]) as worker:
        yield Gated(worker, gate)


def test_a_wait_that_times_out_cancels_nothing(gated: Gated) -> None:
    run = gated.begin(behind=3)
    assert (run.done(), run.wait(0), run.wait(0.01)) == (False, False, False)
    with pytest.raises(simpler.WorkerTimeoutError):
        run.result(0.01)
    gated.open()
    assert [task.result() is None for task in run.result()] == [True, False, False, False]
    assert run.done()
    assert not run.cancel()


def test_cancelling_stops_what_has_not_begun_and_waits_for_what_has(gated: Gated) -> None:
    run = gated.begin(behind=5)
    assert run.cancel()
    assert not run.wait(0)
    gated.open()
    assert run.wait(WATCHDOG_S)
    with pytest.raises(simpler.RunCancelledError, match="5 of 6"):
        run.result()


def test_every_thread_that_asks_gets_the_same_failure(gated: Gated) -> None:
    with ThreadPoolExecutor(4) as pool:
        for _ in range(50):
            run = gated.worker.submit(lambda orch, _a, _c: orch.submit(gated.bad, worker=0))
            errors = list(pool.map(error_of, [run] * 4))
            assert [type(error) for error in errors] == [simpler.TaskError] * 4


def error_of(run: RunHandle) -> BaseException | None:
    try:
        run.result(WATCHDOG_S)
    except simpler.SimplerError as error:
        return error
    return None


def test_several_runs_are_awaited_at_once(gated: Gated) -> None:
    async def main() -> list[Any]:
        def submit(handle: simpler.CallableHandle) -> RunHandle:
            return gated.worker.submit(lambda orch, _a, _c: orch.submit(handle, worker=1))

        async def end(run: RunHandle) -> Any:
            return await run

        slow = asyncio.ensure_future(end(gated.begin()))
        quick = await asyncio.gather(*(end(submit(gated.quick)) for _ in range(20)))
        with pytest.raises(simpler.TaskError, match="no"):
            await submit(gated.bad)
        assert not slow.done()
        gated.open()
        await asyncio.wait_for(slow, WATCHDOG_S)
        return [task.result() for task in quick]

    assert asyncio.run(main()) == [gated.worker.status()[1].pid] * 20


def test_an_await_that_is_given_up_leaves_the_run_and_nothing_else(gated: Gated) -> None:
    run = gated.begin()

    async def end() -> Any:
        return await run

    async def main() -> None:
        for _ in range(5):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(end(), 0.01)
        node: Any = gated.worker._engine
        assert [calls for calls in node._watched.values() if calls] == []
        gated.open()
        await asyncio.wait_for(end(), WATCHDOG_S)

    asyncio.run(main())


def test_an_await_ends_at_the_deadline_of_the_run(gated: Gated) -> None:
    async def main() -> None:
        with pytest.raises(simpler.WorkerTimeoutError):
            await gated.begin(config=RunConfig(deadline_s=0.2))

    asyncio.run(main())
    gated.open()


def test_closing_fails_every_run_in_flight(gated: Gated) -> None:
    runs = [
        gated.begin(behind=3),
        gated.worker.submit(lambda orch, _a, _c: orch.submit(gated.slow, worker=0)),
    ]
    with ThreadPoolExecutor(2) as pool:
        errors = [pool.submit(error_of, run) for run in runs]
        gated.worker.close()
        assert [type(error.result(WATCHDOG_S)) for error in errors] == [simpler.ClosedError] * 2


def test_handles_that_are_let_go_of_leave_nothing(gated: Gated) -> None:
    for _ in range(2000):
        gated.worker.submit(lambda orch, _a, _c: [orch.submit(gated.quick, worker=1) for _ in range(3)])
    gated.worker.run(lambda orch, _a, _c: orch.submit(gated.quick, worker=1).result())
    gc.collect()
    assert gated.records() == 0


def append(log: Any, number: int) -> None:
    log[0] += 1
    log[log[0]] = number


def test_higher_priorities_go_first_among_tasks_that_are_not_sent(gated: Gated) -> None:
    log = gated.worker.create_buffer(8 * 5)
    log.array(5, "int64").fill(0)
    note = gated.worker.register(append)

    def fn(orch: Orchestrator, _args: object, _config: object) -> None:
        first = orch.submit(gated.slow, worker=0)
        for number, priority in enumerate((0, -3, 5, 1)):
            where = NO_DEP(log.tensor(5, "int64"))
            orch.submit(note, where, number, worker=1, after=[first], priority=priority)

    run = gated.worker.submit(fn)
    gated.open()
    run.result(WATCHDOG_S)
    assert log.array(5, "int64").tolist() == [4, 2, 3, 0, 1]


def test_runs_that_share_memory_follow_each_other_and_fail_alone(gated: Gated) -> None:
    shared = gated.worker.create_buffer(8).tensor(1, "int64")

    def failing(orch: Orchestrator, _args: object, _config: object) -> None:
        orch.submit(gated.bad, INOUT(shared), worker=0)

    first = gated.worker.submit(failing)
    second = gated.worker.submit(
        lambda orch, _a, _c: orch.submit(gated.worker.register(len), IN(shared), worker=1)
    )
    with pytest.raises(simpler.TaskError):
        first.result()
    assert second.result().result() == 1
