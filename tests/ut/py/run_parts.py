"""Workers, kernels and copies that tests of runs share."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import simpler
from simpler import Worker

SMALL = 1 << 20


def small_worker(**options: Any) -> Worker:
    return Worker(**{"hbm_bytes": SMALL, "heap_bytes": SMALL, "control_timeout_s": 20.0} | options)


def fail(text: str = "no") -> None:
    raise ValueError(text)


def fail_now() -> None:
    fail("kernel says no")


def die() -> None:
    os._exit(9)


def pid() -> int:
    return os.getpid()


def add_one(x: np.ndarray[Any, Any]) -> None:
    x += 1


def device_array(worker: Worker, array: np.ndarray[Any, Any], worker_id: int = 0) -> simpler.Tensor:
    buffer = worker.malloc(array.nbytes, worker_id=worker_id)
    worker.copy_to(buffer, array)
    return buffer.tensor(array.shape, array.dtype)


def host_copy(worker: Worker, tensor: simpler.Tensor) -> np.ndarray[Any, Any]:
    array = np.empty(tensor.shape, tensor.dtype.numpy)
    worker.copy_from(array, tensor)
    return array


def wait_for(path: str) -> None:
    with open(path, "rb") as fifo:  # noqa: PTH123 - a plain name
        fifo.read()
