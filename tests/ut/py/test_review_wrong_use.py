"""Wrong uses of the public API end with an error that says what is wrong, and touch nothing."""

from __future__ import annotations

import array
import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import simpler
from registered import extension
from simpler import ConfigError, ControlOp, Orchestrator, RunConfig, Tag, TaskArgs, Worker

if TYPE_CHECKING:
    from collections.abc import Iterator


def _count_buffers(chip: simpler.ChipView, payload: bytes, device_id: int) -> bytes:
    return str(len(chip.buffers)).encode()


@pytest.fixture(scope="module", params=[2, 3])
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    with (
        extension("review-count", _count_buffers),
        Worker(request.param, hbm_bytes=1 << 20, heap_bytes=1 << 20) as ready,
    ):
        yield ready


def test_free_refuses_a_tensor_and_the_buffer_lives_on(worker: Worker) -> None:
    buffer = worker.malloc(64)
    tensor: Any = buffer.tensor((64,), "uint8")
    with pytest.raises(TypeError, match="Tensor"):
        worker.free(tensor)
    assert not buffer.freed
    worker.free(buffer)


def test_sizes_and_shapes_may_be_numpy_integers(worker: Worker) -> None:
    size: Any = np.int64(64)
    device, host = worker.malloc(size), worker.create_buffer(size)
    assert type(device.nbytes) is type(host.nbytes) is int
    assert device.tensor(size, "uint8").shape == (64,)
    worker.free(device)
    worker.free(host)


def test_host_memory_beyond_any_size_is_back_pressure(worker: Worker) -> None:
    with pytest.raises(simpler.BackPressureError, match="heap_bytes"):
        worker.create_buffer(1 << 70)


@pytest.mark.parametrize("pin", [5, "", None])
def test_a_pin_has_a_name(worker: Worker, pin: Any) -> None:
    buffer = worker.malloc(64)
    with pytest.raises(TypeError, match="pin"):
        buffer.pin(pin)
    worker.free(buffer)


@pytest.mark.parametrize("worker_id", ["0", b"\0", 0.0, ("0",), True])
def test_a_worker_id_that_is_no_integer_is_named(worker: Worker, worker_id: Any) -> None:
    with pytest.raises(TypeError, match="worker id is an integer"):
        worker.malloc(8, worker_id=worker_id)


def test_memory_in_another_order_than_c_is_not_contiguous(worker: Worker) -> None:
    turned = np.arange(16, dtype=np.uint8).reshape(4, 4).T
    buffer = worker.malloc(16)
    with pytest.raises(ValueError, match="contiguous"):
        worker.copy_to(buffer, turned)
    with pytest.raises(ValueError, match="contiguous"):
        worker.copy_from(turned, buffer)
    with pytest.raises(ValueError, match="contiguous"):
        worker.control_payload(0, ControlOp.ECHO, turned)
    worker.free(buffer)


@pytest.mark.parametrize(
    "source", [ctypes.c_void_p(7), memoryview(bytes(range(8))).cast("P"), array.array("d", [1.5])]
)
def test_host_memory_of_any_element_format_is_copied(worker: Worker, source: Any) -> None:
    buffer, back = worker.malloc(8), bytearray(8)
    worker.copy_to(buffer, source)
    worker.copy_from(back, buffer)
    assert back == memoryview(source).tobytes()
    worker.free(buffer)


def test_buffers_are_named_in_a_sequence_or_by_names(worker: Worker) -> None:
    buffer = worker.malloc(64)
    wrong: list[Any] = [buffer, buffer.tensor((8, 8), "uint8"), 5, {1: buffer}, {"": buffer}, "name"]
    for buffers in wrong:
        with pytest.raises(TypeError, match="buffers="):
            worker.run_chip_control_extension("review-count", worker_id=0, buffers=buffers)
    assert worker.run_chip_control_extension("review-count", worker_id=0, buffers=[buffer]) == b"1"
    worker.free(buffer)


@pytest.mark.parametrize("args", ["text", [1], 5, {}])
def test_the_arguments_of_a_task_are_task_args(worker: Worker, args: Any) -> None:
    handle = worker.register(len)
    with pytest.raises(TypeError, match="TaskArgs"):
        worker.run(handle, args)


def test_a_config_that_is_none_is_refused(worker: Worker) -> None:
    handle = worker.register(dict)
    config: Any = {"deadline_s": 3}
    with pytest.raises(TypeError, match="RunConfig"):
        worker.run(handle, None, config)


def test_a_submitted_task_checks_its_arguments_and_config() -> None:
    with Worker(num_sub_workers=1) as node:
        handle = node.register(len)
        wrong: Any = [1]

        def submit(orch: Orchestrator, _args: object, _config: object) -> None:
            with pytest.raises(TypeError, match="TaskArgs"):
                orch.submit_next_level(handle, wrong, worker=0)
            with pytest.raises(TypeError, match="TaskArgs"):
                orch.submit_sub(handle, wrong)
            with pytest.raises(TypeError, match="RunConfig"):
                orch.submit_next_level(handle, None, wrong, worker=0)

        node.run(submit)


@pytest.mark.parametrize("deadline_s", ["3", True, float("nan"), 0, -1.0])
def test_a_deadline_is_a_number_above_zero(deadline_s: Any) -> None:
    with pytest.raises(ConfigError, match="deadline_s"):
        RunConfig(deadline_s=deadline_s)


def test_a_run_without_time_does_not_begin(worker: Worker) -> None:
    handle = worker.register(_fill)
    buffer = worker.create_buffer(8)
    args = TaskArgs().add_tensor(buffer, Tag.OUT)
    with pytest.raises(simpler.WorkerTimeoutError) as late:
        worker.run(handle, args, timeout_s=0)
    assert not late.value.started
    assert bytes(buffer) == bytes(8)
    worker.free(buffer)


def _fill(view: np.ndarray[Any, np.dtype[Any]]) -> None:
    view[:] = 1
