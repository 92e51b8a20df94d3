"""Blocked Cholesky: a covariance matrix factored in tiles, its tasks spread over chips.

The loop below is the textbook's; it names what each task reads and changes, and nothing else. The runtime
works out the order, and which tasks run side by side. Columns take turns on the chips. A chip takes its tasks
in the order submitted, so the next panel is submitted ahead of the updates that nobody waits for.

    python cholesky.py --size 4096 --tile 512
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from simpler import IN, INOUT, OUT, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from simpler import CallableHandle, Orchestrator, TaskHandle, Tensor

    Matrix = NDArray[np.float64]


class Span(NamedTuple):
    """When a kernel ran and where; the clock is the same in all processes."""

    chip: int
    started: float
    ended: float


def timed(kernel: Callable[..., None]) -> Callable[..., tuple[float, float]]:
    """A kernel whose result is when it began and ended."""

    @functools.wraps(kernel)
    def run(*args: Any) -> tuple[float, float]:
        started = time.perf_counter()
        kernel(*args)
        return started, time.perf_counter()

    return run


@timed
def potrf(diagonal: Matrix, inverse: Matrix) -> None:
    """Factor a tile on the diagonal; the inverse of the factor is what the tiles below it need."""
    diagonal[:] = np.linalg.cholesky(diagonal)
    inverse[:] = np.linalg.inv(diagonal)


@timed
def trsm(panel: Matrix, inverse: Matrix) -> None:
    """Divide a tile below the diagonal by the factor."""
    panel[:] = panel @ inverse.T


@timed
def syrk(diagonal: Matrix, panel: Matrix) -> None:
    """Take what the panel explains from a tile on the diagonal."""
    diagonal -= panel @ panel.T


@timed
def gemm(tile: Matrix, left: Matrix, right: Matrix) -> None:
    """The same for a tile off the diagonal."""
    tile -= left @ right.T


class Cholesky:
    """A Worker's kernels and the memory of one matrix, in tiles."""

    def __init__(self, worker: Worker, size: int, tile: int) -> None:
        """`size` is in whole tiles. `worker` must be new."""
        self._worker, self._tile = worker, tile
        self._per_side = size // tile
        self._shape = (self._per_side, self._per_side, tile, tile)
        self._kernels = {kernel.__name__: worker.register(kernel) for kernel in (potrf, trsm, syrk, gemm)}

    def factor(self, matrix: Matrix, chips: int) -> tuple[Matrix, float, list[Span]]:
        """The lower factor, the seconds it took, and when each task ran."""
        buffer = self._worker.create_buffer(matrix.nbytes)
        tiles = buffer.array(self._shape, np.float64)
        tiles[:] = matrix.reshape(self._per_side, self._tile, self._per_side, self._tile).swapaxes(1, 2)
        parts, side = buffer.tensor(self._shape, np.float64), range(self._per_side)
        submission = _Submission(self._kernels, [[parts[i, j] for j in side] for i in side], chips)
        started = time.perf_counter()
        self._worker.run(submission)
        took = time.perf_counter() - started
        factor = np.tril(tiles.swapaxes(1, 2).reshape(matrix.shape))
        del tiles
        self._worker.free(buffer)
        return factor, took, [Span(chip, *task.result()) for chip, task in submission.tasks]


class _Submission:
    """The tasks of one factorisation."""

    def __init__(self, kernels: dict[str, CallableHandle], tiles: list[list[Tensor]], chips: int) -> None:
        self._kernels, self._tiles, self._chips = kernels, tiles, chips
        self.tasks: list[tuple[int, TaskHandle]] = []

    def __call__(self, orch: Orchestrator, _args: None, _config: Any) -> None:
        """Column after column, the next panel first."""
        per_side = len(self._tiles)
        self._panel(orch, 0)
        for k in range(per_side - 1):
            self._update(orch, k, k + 1)
            self._panel(orch, k + 1)
            for j in range(k + 2, per_side):
                self._update(orch, k, j)

    def _panel(self, orch: Orchestrator, k: int) -> None:
        """Column `k` is final after these."""
        tiles = self._tiles
        with orch.scope():  # the inverse goes as soon as the panel is done
            inverse = orch.alloc(tiles[k][k].shape, np.float64)
            self._submit(orch, "potrf", k, INOUT(tiles[k][k]), OUT(inverse))
            for i in range(k + 1, len(tiles)):
                self._submit(orch, "trsm", k, INOUT(tiles[i][k]), IN(inverse))

    def _update(self, orch: Orchestrator, k: int, j: int) -> None:
        """Take column `k` out of column `j`."""
        tiles = self._tiles
        self._submit(orch, "syrk", j, INOUT(tiles[j][j]), IN(tiles[j][k]))
        for i in range(j + 1, len(tiles)):
            self._submit(orch, "gemm", j, INOUT(tiles[i][j]), IN(tiles[i][k]), IN(tiles[j][k]))

    def _submit(self, orch: Orchestrator, kernel: str, column: int, *items: object) -> None:
        chip = column % self._chips
        self.tasks.append((chip, orch.submit(self._kernels[kernel], *items, worker=chip)))


def busy(spans: Sequence[Span]) -> float:
    """The seconds that kernels ran."""
    return sum(span.ended - span.started for span in spans)


def covariance(size: int) -> Matrix:
    """What a Gaussian process with some noise says of so many points on a line."""
    points = np.linspace(0.0, 0.05 * size, size)
    matrix: Matrix = np.exp(-0.5 * (points[:, None] - points[None, :]) ** 2)
    matrix[np.diag_indices(size)] += 0.1
    return matrix


def main(argv: Sequence[str] | None = None) -> int:
    """Factor on one chip and on all, compare with numpy, and say what the chips were worth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", type=int, default=3072, help="rows of the matrix")
    parser.add_argument("--tile", type=int, default=256, help="rows of a tile")
    parser.add_argument("--chips", type=int, default=2)
    options = parser.parse_args(argv)
    if options.tile < 1 or options.size < 1 or options.size % options.tile:
        parser.error("--size must be a multiple of --tile")

    matrix = covariance(options.size)
    worker = Worker(level=3, device_ids=range(options.chips))
    cholesky = Cholesky(worker, options.size, options.tile)
    with worker:
        cholesky.factor(matrix, options.chips)  # the first touch of memory is not what is measured
        _, _, alone = cholesky.factor(matrix, 1)
        factor, took, spans = cholesky.factor(matrix, options.chips)
    error = float(np.abs(factor - np.linalg.cholesky(matrix)).max())
    right = error < 1e-9
    print(f"{len(spans)} tasks on {options.chips} chips: {took:.3f} s, kernels alone {busy(alone):.3f} s")
    available = took * options.chips
    print(f"parallel efficiency {busy(alone) / available:.1%}, chips busy {busy(spans) / available:.1%}")
    print(f"equal to numpy's factor: {right} (largest difference {error:.1e})")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
