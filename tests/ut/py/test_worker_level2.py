"""One chip inside this process: the same rules without a process."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import simpler
from registered import extension
from simpler import ControlOp, Tag, TaskArgs, Worker

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def chip() -> Iterator[Worker]:
    with Worker(
        level=2, device_id=3, hbm_bytes=1 << 20, heap_bytes=1 << 20, control_timeout_s=20.0
    ) as worker:
        yield worker


def test_it_has_no_children_and_is_this_process(chip: Worker) -> None:
    with (
        extension("pid", lambda _chip, _payload, device: b"%d %d" % (os.getpid(), device)),
        Worker(level=2, device_id=3, hbm_bytes=1 << 20, heap_bytes=1 << 20) as worker,
    ):
        expected = b"%d 3" % os.getpid()
        assert worker.run_chip_control_extension("pid", worker_id=0) == expected
        assert worker.run_chip_control_extension("pid") == [expected]
    with pytest.raises(ValueError, match="no children"):
        chip.kill(0)


def test_control_calls_are_answered(chip: Worker) -> None:
    assert chip.control_payload(0, ControlOp.PING) == b""
    assert chip.control_payload(0, ControlOp.ECHO, bytearray(b"abc")) == b"abc"
    with pytest.raises(ValueError, match="worker"):
        chip.control_payload(1, ControlOp.PING)
    with pytest.raises(ValueError, match="unknown control op"):
        chip.control_payload(0, 77)


def test_it_runs_one_kernel(chip: Worker) -> None:
    def total(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
        y[:] = x * 2
        return float(y.sum())

    x, y = chip.malloc(32), chip.malloc(32)
    chip.copy_to(x, np.arange(4.0))
    args = (
        TaskArgs()
        .add_tensor(x.tensor((4,), "float64"), Tag.IN)
        .add_tensor(y.tensor((4,), "float64"), Tag.OUT)
    )
    assert chip.run(chip.register(total), args) == 12.0
    result = np.empty(4)
    chip.copy_from(result, y)
    assert result.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_it_runs_a_native_kernel(chip: Worker) -> None:
    source = (
        "#include <simpler/kernel.h>\n#include <string.h>\nint k(const simpler_kernel_args *a) {\n"
        '  if (a->num_scalars) return strncpy(a->error, "told to", a->error_bytes), 1;\n'
        "  return a->device_id == 3 ? 0 : 2;\n}\n"
    )
    handle = chip.register(simpler.compile_kernel(source, "k"))
    assert chip.run(handle) is None
    with pytest.raises(simpler.TaskError, match="told to"):
        chip.run(handle, TaskArgs().add_scalar(1))


def test_a_kernels_exception_is_a_task_error(chip: Worker) -> None:
    def fail() -> None:
        raise KeyError("missing")

    with pytest.raises(simpler.TaskError, match="missing") as caught:
        chip.run(chip.register(fail))
    assert caught.value.callable == "fail"
    assert isinstance(caught.value.cause, simpler.RemoteError)
    assert caught.value.cause.type_name == "KeyError"


def test_it_has_no_orchestration(chip: Worker) -> None:
    with pytest.raises(TypeError, match="one registered kernel"):
        chip.run(lambda _orch, _args, _config: None)


def test_a_deadline_is_reported_when_the_work_has_ended() -> None:
    release = threading.Event()

    def wait(_chip: object, _payload: bytes, _device: int) -> None:
        release.wait(20)

    with (
        extension("wait", wait),
        Worker(level=2, hbm_bytes=1 << 20, heap_bytes=1 << 20) as worker,
    ):
        stuck = worker.submit_chip_control_extension("wait", worker_id=0, timeout_s=0.05)
        while worker.status()[0].running is None:
            pass
        with pytest.raises(simpler.WorkerTimeoutError) as waiting:
            worker.run_chip_control_extension("wait", worker_id=0, timeout_s=0.05)
        assert not waiting.value.started
        release.set()
        with pytest.raises(simpler.WorkerTimeoutError) as late:
            stuck.result(20)
        assert late.value.started
        assert worker.run_chip_control_extension("wait", worker_id=0) == b""


def test_concurrent_handlers_run_beside_an_exclusive_one() -> None:
    release = threading.Event()

    def wait(_chip: object, _payload: bytes, _device: int) -> None:
        release.wait(20)

    with (
        extension("wait", wait),
        extension("beside", lambda _c, payload, _d: payload, concurrent=True),
        Worker(level=2, hbm_bytes=1 << 20, heap_bytes=1 << 20) as worker,
    ):
        stuck = worker.submit_chip_control_extension("wait", worker_id=0)
        assert worker.run_chip_control_extension("beside", b"1", worker_id=0) == b"1"
        release.set()
        assert stuck.result(20) == b""


def test_the_device_is_given_back_by_close_and_can_be_taken_again() -> None:
    for _ in range(3):
        with Worker(level=2, device_id=1, hbm_bytes=1 << 20, heap_bytes=1 << 20) as worker:
            worker.malloc(1 << 20)
