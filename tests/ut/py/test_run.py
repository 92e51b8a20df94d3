"""Runs: orchestration functions, tasks of Python and native kernels, what is refused."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import simpler
from run_parts import add_one, device_array, fail_now, host_copy, pid, small_worker, wait_for
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


def scale(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], factor: float) -> float:
    np.multiply(x, factor, out=y)
    return float(y.sum())


ADD_SOURCE = r"""
#include <simpler/kernel.h>
#include <stdio.h>
int add(const simpler_kernel_args *a) {
  const int32_t *x = a->tensors[0].data;
  int32_t *y = a->tensors[1].data;
  for (int64_t i = 0; i < a->tensors[0].shape[0]; ++i) y[i] = x[i] + (int32_t)a->scalars[0].v.i;
  return 0;
}
int fails(const simpler_kernel_args *a) {
  snprintf(a->error, a->error_bytes, "device %d is on strike", a->device_id);
  return 1;
}
int nothing(const simpler_kernel_args *a) { (void)a; return 0; }
"""


@pytest.fixture(scope="module")
def kernels() -> dict[str, simpler.NativeKernel]:
    return {name: simpler.compile_kernel(ADD_SOURCE, name) for name in ("add", "fails", "nothing")}


def test_the_function_runs_here_with_its_arguments_and_its_result_is_the_runs(node: Worker) -> None:
    config = simpler.RunConfig(priority=3)
    args = object()

    def fn(orch: Orchestrator, given: object, given_config: object) -> tuple[object, ...]:
        return threading.get_ident(), given, given_config, isinstance(orch, Orchestrator)

    assert node.run(fn, args, config) == (threading.get_ident(), args, config, True)


def test_a_python_kernel_gets_views_and_scalars_and_its_result_comes_back(node: Worker) -> None:
    handle = node.register(scale)
    x = device_array(node, np.arange(8, dtype=np.float32))
    y = device_array(node, np.zeros(8, np.float32))

    def fn(orch: Orchestrator, _args: object, _config: object) -> Any:
        task = TaskArgs().add_tensor(x, Tag.IN).add_tensor(y, Tag.OUT).add_scalar(2.5)
        return orch.submit_next_level(handle, task, worker=0).result()

    assert node.run(fn) == 70.0
    assert np.array_equal(host_copy(node, y), np.arange(8, dtype=np.float32) * 2.5)


def test_in_views_cannot_be_written(node: Worker) -> None:
    handle = node.register(add_one)
    x = device_array(node, np.zeros(4, np.int32))

    def fn(orch: Orchestrator, _args: object, _config: object) -> None:
        orch.submit_next_level(handle, TaskArgs().add_tensor(x, Tag.IN), worker=0)

    with pytest.raises(simpler.TaskError, match="read-only"):
        node.run(fn)
    assert host_copy(node, x).tolist() == [0, 0, 0, 0]


def test_a_native_kernel_runs_on_device_memory(
    node: Worker, kernels: dict[str, simpler.NativeKernel]
) -> None:
    handle = node.register(kernels["add"])
    x = device_array(node, np.arange(100, dtype=np.int32), 1)
    y = device_array(node, np.zeros(100, np.int32), 1)
    task = TaskArgs().add_tensor(x, Tag.IN).add_tensor(y, Tag.OUT).add_scalar(7)
    assert node.run(lambda orch, a, _c: orch.submit_next_level(handle, a, worker=1).result(), task) is None
    assert np.array_equal(host_copy(node, y), np.arange(100) + 7)


def test_a_native_kernels_failure_is_a_task_error_with_its_text(
    node: Worker, kernels: dict[str, simpler.NativeKernel]
) -> None:
    handle = node.register(kernels["fails"])
    with pytest.raises(simpler.TaskError, match="device 0 is on strike") as caught:
        node.run(handle)
    assert (caught.value.callable, caught.value.path, caught.value.poisoned) == ("fails", (0,), 0)


def test_a_handle_runs_as_one_task_on_worker_0(node: Worker) -> None:
    handle = node.register(pid)
    assert node.run(handle) == node.status()[0].pid


@pytest.mark.parametrize("late", [False, True])
def test_functions_registered_before_and_after_init_run_in_every_child(
    late: bool, kernels: dict[str, simpler.NativeKernel]
) -> None:
    offset = 5
    worker = small_worker(device_ids=[0, 1], num_sub_workers=1)
    if late:
        worker.init()
    handle = worker.register(lambda: offset + 1)
    native = worker.register(kernels["nothing"])
    if not late:
        worker.init()

    def fn(orch: Orchestrator, _args: object, _config: object) -> list[Any]:
        tasks = [orch.submit_next_level(handle, worker=chip) for chip in (0, 1)]
        tasks.append(orch.submit_sub(handle))
        tasks.append(orch.submit_next_level(native, worker=1))
        return [task.result() for task in tasks]

    try:
        assert worker.run(fn) == [6, 6, 6, None]
        worker.kill(1)
        worker.restart(1)
        assert worker.run(fn) == [6, 6, 6, None]
    finally:
        worker.close()


def test_a_function_that_a_child_cannot_load_is_refused_at_register(node: Worker) -> None:
    class Unloadable:
        def __call__(self) -> None:
            return None

        def __reduce__(self) -> Any:
            return fail_now, ()

    with pytest.raises(simpler.RemoteError, match="kernel says no"):
        node.register(Unloadable())
    assert node.run(node.register(pid)) == node.status()[0].pid


def test_tasks_of_one_run_execute_in_submission_order_across_children(node: Worker) -> None:
    order = node.create_buffer(8 * 40)

    def append(log: np.ndarray[Any, Any], value: int) -> None:
        log[0] += 1
        log[log[0]] = value

    handle = node.register(append)
    tensor = order.tensor((40,), "int64")
    order.array((40,), "int64")[:] = 0

    def fn(orch: Orchestrator, _args: object, _config: object) -> None:
        for number in range(30):
            task = TaskArgs().add_tensor(tensor, Tag.INOUT).add_scalar(number)
            if number % 5 == 4:
                orch.submit_sub(handle, task)
            else:
                orch.submit_next_level(handle, task, worker=number // 3 % 2)

    node.run(fn)
    assert order.array((40,), "int64")[1:31].tolist() == list(range(30))


def test_more_tasks_than_the_ring_holds_can_be_submitted_before_any_is_waited_for(
    node: Worker, kernels: dict[str, simpler.NativeKernel]
) -> None:
    handle = node.register(kernels["nothing"])
    tasks = node.run(lambda orch, _a, _c: [orch.submit_next_level(handle, worker=0) for _ in range(1000)])
    assert [task.result() for task in tasks] == [None] * 1000
    assert node.stats()[0].tasks == 1000


def test_the_result_of_a_task_can_be_polled(fifo: Path) -> None:
    name = str(fifo)
    with small_worker() as worker:
        slow = worker.register(lambda: wait_for(name))

        def fn(orch: Orchestrator, _args: object, _config: object) -> None:
            task = orch.submit_next_level(slow, worker=0)
            assert not task.done()
            with pytest.raises(simpler.WorkerTimeoutError):
                task.result(0)
            with pytest.raises(ValueError, match="timeout_s"):
                task.result(-1)
            fifo.open("wb").close()
            assert task.result() is None
            assert task.done()

        worker.run(fn)


def test_a_copy_in_the_function_waits_for_the_tasks_submitted_before_it(node: Worker) -> None:
    handle = node.register(add_one)
    x = device_array(node, np.zeros(4, np.int32))

    def fn(orch: Orchestrator, _args: object, _config: object) -> list[int]:
        for _ in range(3):
            orch.submit_next_level(handle, TaskArgs().add_tensor(x, Tag.INOUT), worker=0)
        seen = host_copy(node, x).tolist()
        node.copy_to(x, np.full(4, 10, np.int32))
        orch.submit_next_level(handle, TaskArgs().add_tensor(x, Tag.INOUT), worker=0)
        return list(seen)

    assert node.run(fn) == [3, 3, 3, 3]
    assert host_copy(node, x).tolist() == [11, 11, 11, 11]


def test_memory_freed_while_a_task_uses_it_goes_when_the_task_has_ended(fifo: Path) -> None:
    name = str(fifo)
    with small_worker() as worker:
        slow = worker.register(lambda _x: wait_for(name))
        buffer = worker.malloc(256)

        def fn(orch: Orchestrator, _args: object, _config: object) -> None:
            task = orch.submit_next_level(slow, TaskArgs().add_tensor(buffer, Tag.IN), worker=0)
            worker.free(buffer)
            with pytest.raises(simpler.MemoryRangeError, match="freed"):
                orch.submit_next_level(slow, TaskArgs().add_tensor(buffer, Tag.IN), worker=0)
            fifo.open("wb").close()
            task.result()
            assert worker.committed_device_memory() == 0

        worker.run(fn)


def test_arguments_are_copied_at_submit(node: Worker) -> None:
    handle = node.register(lambda *values: values)

    def fn(orch: Orchestrator, _args: object, _config: object) -> Any:
        args = TaskArgs().add_scalar(1)
        task = orch.submit_next_level(handle, args, worker=0)
        args.add_scalar(True).add_scalar(0.5)  # noqa: FBT003 - a bool is a scalar
        return task.result(), orch.submit_next_level(handle, args, worker=0).result()

    assert node.run(fn) == ((1,), (1, True, 0.5))


def test_the_orchestrator_is_valid_only_inside_the_run(node: Worker) -> None:
    handle = node.register(pid)
    orch = node.run(lambda orch, _a, _c: orch)
    with pytest.raises(simpler.ClosedError, match="run has ended"):
        orch.submit_next_level(handle, worker=0)
    with pytest.raises(simpler.ClosedError, match="run has ended"):
        orch.submit_sub(handle)


def test_what_cannot_be_submitted_is_refused(node: Worker) -> None:
    handle = node.register(pid)
    device = node.malloc(8)

    def fn(orch: Orchestrator, _args: object, _config: object) -> None:
        with pytest.raises(ValueError, match="chips"):
            orch.submit_next_level(handle, worker=2)
        with pytest.raises(TypeError, match="CallableHandle"):
            orch.submit_next_level(pid, worker=0)  # type: ignore[arg-type]  # what is tested
        with pytest.raises(simpler.MemoryRangeError, match="host memory only"):
            orch.submit_sub(handle, TaskArgs().add_tensor(device, Tag.IN))
        with pytest.raises(simpler.ConfigError, match="priority"):
            orch.submit_next_level(handle, None, simpler.RunConfig(deadline_s=1), worker=0)

    node.run(fn)
    with small_worker() as other, pytest.raises(ValueError, match="another Worker"):
        other.run(handle)
    with small_worker() as other, pytest.raises(simpler.ConfigError, match="num_sub_workers"):
        other.run(lambda orch, _a, _c: orch.submit_sub(other.register(pid)))


def test_a_sub_task_goes_to_a_sub_worker_that_is_idle(fifo: Path) -> None:
    name = str(fifo)
    with small_worker(num_sub_workers=2) as worker:
        slow, quick = worker.register(lambda: wait_for(name)), worker.register(pid)

        def fn(orch: Orchestrator, _args: object, _config: object) -> Any:
            task = orch.submit_sub(slow)
            pids = [orch.submit_sub(quick).result() for _ in range(3)]
            fifo.open("wb").close()
            task.result()
            return task.worker_id, set(pids)

        assert worker.run(fn) == (1, {worker.status()[2].pid})


def test_results_that_only_cloudpickle_can_pickle_come_back(node: Worker) -> None:
    def make() -> Any:
        return lambda value: value + 1

    assert node.run(node.register(make))(1) == 2
