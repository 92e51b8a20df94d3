"""Runs in which something fails, dies, raises or takes too long."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import simpler
from run_parts import add_one, device_array, die, fail_now, host_copy, pid, small_worker, wait_for
from simpler import Orchestrator, Tag, TaskArgs, Worker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def node() -> Iterator[Worker]:
    with small_worker(device_ids=[0, 1], num_sub_workers=2) as worker:
        yield worker


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def test_a_failed_task_poisons_what_needs_it_and_the_run_names_the_first_cause(node: Worker) -> None:
    good, bad = node.register(pid), node.register(fail_now)
    tasks: list[simpler.TaskHandle] = []

    def fn(orch: Orchestrator, _args: object, _config: object) -> None:
        tasks.append(orch.submit_next_level(good, worker=0))
        tasks.append(orch.submit_next_level(bad, worker=0))
        tasks.append(orch.submit(good, worker=0, after=[tasks[1]]))
        tasks.append(orch.submit(bad, worker=1, after=[tasks[2]]))
        tasks.append(orch.submit(good, after=[tasks[3]]))

    with pytest.raises(simpler.TaskError, match="kernel says no") as caught:
        node.run(fn)
    error = caught.value
    assert (error.callable, error.path, error.poisoned) == ("fail_now", (0,), 3)
    assert isinstance(error.cause, simpler.RemoteError)
    assert error.cause.type_name == "ValueError"
    assert tasks[0].result() == node.status()[0].pid
    for task in tasks[1:]:
        with pytest.raises(simpler.TaskError, match="kernel says no") as later:
            task.result()
        assert (later.value.callable, later.value.path) == ("fail_now", (0,))
    assert node.run(good) == node.status()[0].pid


def test_an_exception_of_the_function_comes_out_unchanged_after_its_tasks(node: Worker) -> None:
    handle = node.register(add_one)
    x = device_array(node, np.zeros(4, np.int32))
    error = KeyError("mine")

    def fn(orch: Orchestrator, _args: object, _config: object) -> None:
        orch.submit_next_level(handle, TaskArgs().add_tensor(x, Tag.INOUT), worker=0)
        raise error

    with pytest.raises(KeyError) as caught:
        node.run(fn)
    assert caught.value is error
    assert host_copy(node, x).tolist() in ([1, 1, 1, 1], [0, 0, 0, 0])  # it may have begun, or not


def test_the_death_of_a_chip_fails_its_task_and_says_how(node: Worker) -> None:
    deadly, good = node.register(die), node.register(pid)

    def fn(orch: Orchestrator, _args: object, _config: object) -> None:
        first = orch.submit_next_level(deadly, worker=0)
        orch.submit(good, worker=0, after=[first])
        orch.submit(good, worker=1, after=[first])

    with pytest.raises(simpler.TaskError, match="9") as caught:
        node.run(fn)
    assert isinstance(caught.value.cause, simpler.WorkerDiedError)
    assert (caught.value.callable, caught.value.path) == ("die", (0,))
    assert caught.value.poisoned in (1, 2)  # the second is lost with the chip when it was sent before
    with pytest.raises(simpler.TaskError, match="9"):
        node.run(good)
    node.restart(0)
    assert node.run(good) == node.status()[0].pid


@pytest.mark.parametrize("how", ["argument", "config"])
def test_a_deadline_bounds_the_run_and_cancels_nothing_that_has_begun(fifo: Path, how: str) -> None:
    name = str(fifo)
    with small_worker() as worker:
        slow, good = worker.register(lambda: wait_for(name)), worker.register(add_one)
        x = device_array(worker, np.zeros(4, np.int32))

        def fn(orch: Orchestrator, _args: object, _config: object) -> None:
            orch.submit_next_level(slow, worker=0)
            orch.submit_next_level(good, TaskArgs().add_tensor(x, Tag.INOUT), worker=0)

        limit: dict[str, Any] = {"timeout_s": 0.2}
        if how == "config":
            limit = {"config": simpler.RunConfig(deadline_s=0.2)}
        with pytest.raises(simpler.WorkerTimeoutError) as caught:
            worker.run(fn, **limit)
        assert caught.value.timeout_s == 0.2
        fifo.open("wb").close()
        assert host_copy(worker, x).tolist() == [0, 0, 0, 0]  # what had not begun never does


def test_what_a_dead_sub_worker_had_not_begun_is_done_by_another(fifo: Path) -> None:
    name = str(fifo)
    with small_worker(num_sub_workers=2) as worker:
        slow, quick = worker.register(lambda: wait_for(name)), worker.register(pid)

        def fn(orch: Orchestrator, _args: object, _config: object) -> Any:
            for _ in range(2):
                orch.submit_sub(slow)
            behind = [orch.submit_sub(quick) for _ in range(10)]
            while not all(record.running for record in worker.status()[1:3]):
                os.sched_yield()
            worker.kill(1)
            fifo.open("wb").close()
            assert {task.result() for task in behind} == {worker.status()[2].pid}

        with pytest.raises(simpler.TaskError, match="SIGKILL") as lost:
            worker.run(fn)
        assert (lost.value.path, lost.value.poisoned) == ((1,), 0)


def test_runs_of_several_threads_wait_and_fail_on_their_own(node: Worker) -> None:
    good, bad = node.register(pid), node.register(fail_now)
    done: list[simpler.CallableHandle] = []

    def one(handle: simpler.CallableHandle) -> None:
        for _ in range(20):
            with contextlib.suppress(simpler.TaskError):
                node.run(handle)
                done.append(handle)

    threads = [threading.Thread(target=one, args=(handle,)) for handle in (good, bad, good)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [good] * 40
