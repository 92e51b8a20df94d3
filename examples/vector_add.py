"""Vector add: every chip adds its part of two vectors, with a native kernel or a Python one.

Each chip holds one block of device memory; its tasks see three parts of it, told apart by their offsets.

    python vector_add.py --kernel python --size 1000000 --chips 3
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from simpler import IN, OUT, Worker, compile_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from simpler import CallableHandle, Orchestrator, Tensor

    Vector = NDArray[np.float32]

NATIVE = """
#include <simpler/kernel.h>
#include <stdio.h>

int add(const simpler_kernel_args *args) {
  const simpler_tensor *x = &args->tensors[0], *y = &args->tensors[1], *sum = &args->tensors[2];
  if (x->nbytes != y->nbytes || x->nbytes != sum->nbytes) {
    snprintf(args->error, args->error_bytes, "vectors of different lengths");
    return 1;
  }
  const float *a = (const float *)x->data, *b = (const float *)y->data;
  float *out = (float *)sum->data;
  for (int64_t i = 0; i < sum->shape[0]; ++i) out[i] = a[i] + b[i];
  return 0;
}
"""


def add(x: Vector, y: Vector, total: Vector) -> None:
    """The same in Python: views of device memory, those tagged IN read-only."""
    np.add(x, y, out=total)


def register(worker: Worker, kernel: str) -> CallableHandle:
    """Make the kernel known to the chips: 'native' or 'python'."""
    return worker.register(compile_kernel(NATIVE, "add") if kernel == "native" else add)


def place(worker: Worker, chip: int, x: Vector, y: Vector) -> tuple[Tensor, Tensor, Tensor]:
    """Copy two vectors into one block of a chip's memory; views of them and of the room for their sum."""
    block = worker.malloc(3 * x.nbytes, worker_id=chip)
    parts = [block.tensor(x.shape, np.float32, offset=i * x.nbytes) for i in range(3)]
    worker.copy_to(parts[0], x)
    worker.copy_to(parts[1], y)
    return parts[0], parts[1], parts[2]


def add_on_chips(worker: Worker, adding: CallableHandle, x: Vector, y: Vector) -> tuple[Vector, float]:
    """The sum, and the seconds that the tasks took."""
    bounds = np.linspace(0, len(x), len(worker.worker_ids) + 1).astype(int)
    ranges = [slice(start, stop) for start, stop in pairwise(bounds)]
    placed = [place(worker, chip, x[part], y[part]) for chip, part in enumerate(ranges)]

    def submit(orch: Orchestrator, _args: None, _config: Any) -> None:
        for chip, (left, right, total) in enumerate(placed):
            orch.submit(adding, IN(left), IN(right), OUT(total), worker=chip)

    started = time.perf_counter()
    worker.run(submit)
    took = time.perf_counter() - started
    result = np.empty_like(x)
    for part, (left, _right, total) in zip(ranges, placed, strict=True):
        worker.copy_from(result[part], total)
        worker.free(left.buffer)
    return result, took


def main(argv: Sequence[str] | None = None) -> int:
    """Add, compare with numpy, and say how long it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", type=int, default=1 << 22, help="elements of each vector")
    parser.add_argument("--chips", type=int, default=2)
    parser.add_argument("--kernel", choices=["native", "python"], default="native")
    options = parser.parse_args(argv)
    if not 0 < options.chips <= options.size:
        parser.error("every chip needs an element at least")

    random = np.random.default_rng(0)
    x, y = random.random((2, options.size), np.float32)
    worker = Worker(level=3, device_ids=range(options.chips))
    adding = register(worker, options.kernel)
    with worker:
        result, took = add_on_chips(worker, adding, x, y)
    right = np.array_equal(result, x + y)
    print(f"{options.size} elements on {options.chips} chips, {options.kernel} kernel: {took * 1e3:.1f} ms")
    print(f"equal to numpy's sum: {right}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
