"""A wavefront: the longest common subsequence of two texts, its table cut into tiles and spread over chips.

A tile needs the last row of the tile above, the last column of the one on its left and the corner of the
one between. Tasks name the tiles that they read and the one that they write, and nothing else: the runtime
works out which comes after which, and the front moves over the table with all chips busy. Rows of tiles take
turns on the chips.

    python wavefront.py --size 8192 --tile 512
"""

from __future__ import annotations

import argparse
import inspect
import json.decoder
import json.encoder
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from simpler import IN, OUT, Worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from simpler import CallableHandle, Orchestrator, TaskHandle, Tensor

    Table = NDArray[np.int32]
    Letters = NDArray[np.uint32]


class Span(NamedTuple):
    """When a kernel ran and where; the clock is the same in all processes."""

    chip: int
    started: float
    ended: float


def fill_tile(
    tile: Table, above: Table, left: Table, corner: Table, rows: Letters, columns: Letters
) -> tuple[float, float]:
    """One tile, row by row: ``t[i, j] = max(t[i-1, j], t[i-1, j-1] + (rows[i] == columns[j]), t[i, j-1])``.

    The last of the three makes a row a running maximum of the other two.
    """
    started = time.perf_counter()
    previous, edge = np.append(corner[-1, -1], above[-1]), left[:, -1]
    for i, letter in enumerate(rows):
        row = np.maximum(previous[1:], previous[:-1] + (columns == letter))
        row[0] = max(row[0], edge[i])
        np.maximum.accumulate(row, out=tile[i])
        previous[0] = edge[i]
        previous[1:] = tile[i]
    return started, time.perf_counter()


class Wavefront:
    """The two texts, their table and the tasks that fill it. The texts are equally long, in whole tiles."""

    def __init__(self, worker: Worker, filling: CallableHandle, rows: str, columns: str, tile: int) -> None:
        self._worker, self._filling = worker, filling
        side = range(len(rows) // tile)
        self._shape = (len(side), len(side), tile, tile)
        self._table = worker.create_buffer(4 * len(rows) ** 2)
        tiles = self._table.tensor(self._shape, np.int32)
        self._tiles = [[tiles[i, j] for j in side] for i in side]
        border = worker.create_buffer(4 * tile**2)
        border.array((tile, tile), np.int32)[:] = 0
        self._border = border.tensor((tile, tile), np.int32)
        self._rows = [self._share(rows[i * tile :][:tile]) for i in side]
        self._columns = [self._share(columns[i * tile :][:tile]) for i in side]

    def run(self, chips: int) -> tuple[float, list[Span]]:
        """Fill the table on so many chips: the seconds it took, and when each tile was worked on."""
        started = time.perf_counter()
        tasks = self._worker.run(self._submit, chips)
        took = time.perf_counter() - started
        return took, [Span(chip, *task.result()) for chip, task in tasks]

    def table(self) -> Table:
        """A copy of the table, its tiles put together."""
        tiles = self._table.array(self._shape, np.int32, readonly=True)
        table: Table = tiles.swapaxes(1, 2).reshape(self._shape[0] * self._shape[2], -1)
        return table

    def _share(self, text: str) -> Tensor:
        codes = letters(text)
        buffer = self._worker.create_buffer(codes.nbytes)
        buffer.array(codes.shape, np.uint32)[:] = codes
        return buffer.tensor(codes.shape, np.uint32)

    def _submit(self, orch: Orchestrator, chips: int, _config: Any) -> list[tuple[int, TaskHandle]]:
        tasks = []
        for i, row in enumerate(self._rows):
            for j, column in enumerate(self._columns):
                above = self._tiles[i - 1][j] if i else self._border
                left = self._tiles[i][j - 1] if j else self._border
                corner = self._tiles[i - 1][j - 1] if i and j else self._border
                tile = OUT(self._tiles[i][j])
                chip = i % chips
                task = orch.submit(
                    self._filling, tile, IN(above), IN(left), IN(corner), IN(row), IN(column), worker=chip
                )
                tasks.append((chip, task))
        return tasks


def busy(spans: Sequence[Span]) -> float:
    """The seconds that kernels ran."""
    return sum(span.ended - span.started for span in spans)


def letters(text: str) -> Letters:
    """The code points."""
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def plain_table(rows: str, columns: str) -> Table:
    """The same table without tiles, to compare with."""
    table = np.zeros((len(rows) + 1, len(columns) + 1), np.int32)
    across = letters(columns)
    for i, letter in enumerate(letters(rows)):
        best = np.maximum(table[i, 1:], table[i, :-1] + (across == letter))
        np.maximum.accumulate(best, out=table[i + 1, 1:])
    return table[1:, 1:]


def texts(size: int) -> tuple[str, str]:
    """The sources of two modules that have much in common, repeated where they are too short."""
    sources = inspect.getsource(json.decoder), inspect.getsource(json.encoder)
    first, second = ((source * (size // len(source) + 1))[:size] for source in sources)
    return first, second


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the table on one chip and on all, compare, and say what the chips were worth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", type=int, default=4096, help="letters of each text")
    parser.add_argument("--tile", type=int, default=256, help="letters along the side of a tile")
    parser.add_argument("--chips", type=int, default=2)
    options = parser.parse_args(argv)
    if options.tile < 1 or options.size < 1 or options.size % options.tile:
        parser.error("--size must be a multiple of --tile")

    rows, columns = texts(options.size)
    worker = Worker(level=3, device_ids=range(options.chips))
    filling = worker.register(fill_tile)
    with worker:
        front = Wavefront(worker, filling, rows, columns, options.tile)
        front.run(options.chips)  # the first touch of memory is not what is measured
        _, alone = front.run(1)
        took, spans = front.run(options.chips)
        table = front.table()
    right = np.array_equal(table, plain_table(rows, columns))
    print(f"{len(spans)} tiles on {options.chips} chips: {took:.3f} s, kernels alone {busy(alone):.3f} s")
    available = took * options.chips
    print(f"parallel efficiency {busy(alone) / available:.1%}, chips busy {busy(spans) / available:.1%}")
    print(f"longest common subsequence: {table[-1, -1]} of {options.size} letters")
    print(f"equal to the plain computation: {right}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
