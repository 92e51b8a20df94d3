"""Tasks: a Python kernel on a chip, a native kernel beside it, and a function on a sub worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from simpler import Tag, TaskArgs, Worker, compile_kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from simpler import Orchestrator

SCALE = """
#include <simpler/kernel.h>

int scale(const simpler_kernel_args *args) {
  float *data = (float *)args->tensors[0].data;
  for (int64_t i = 0; i < args->tensors[0].shape[0]; ++i) data[i] *= (float)args->scalars[0].v.f;
  return 0;
}
"""


def fill(data: NDArray[np.float32], start: int) -> int:
    """A Python kernel gets numpy views of device memory, and scalars, in the order they were added."""
    data[:] = np.arange(start, start + len(data))
    return len(data)


def describe(values: NDArray[np.float32]) -> str:
    """Runs in a sub worker, on host memory that all processes share."""
    return f"first {values[0]:g}, last {values[-1]:g}"


def main() -> None:
    """Fill on the chip, scale there natively, and describe the result on the host."""
    worker = Worker(level=3, device_ids=[0], num_sub_workers=1, hbm_bytes=1 << 20)
    filling, describing = worker.register(fill), worker.register(describe)
    scaling = worker.register(compile_kernel(SCALE, "scale"))
    with worker:
        device = worker.malloc(4 * 100).tensor((100,), np.float32)
        host = worker.create_buffer(4 * 100)

        def on_chip(orch: Orchestrator, start: int, _config: Any) -> int:
            filled = orch.submit_next_level(
                filling, TaskArgs().add_tensor(device, Tag.OUT).add_scalar(start), worker=0
            )
            orch.submit_next_level(
                scaling, TaskArgs().add_tensor(device, Tag.INOUT).add_scalar(0.5), worker=0
            )
            return int(filled.result())

        print(f"{worker.run(on_chip, 10)} numbers on the chip")
        worker.copy_from(host, device)
        shared = TaskArgs().add_tensor(host.tensor((100,), np.float32), Tag.IN)
        task = worker.run(lambda orch, args, _config: orch.submit_sub(describing, args), shared)
        print(task.result())


if __name__ == "__main__":
    main()
