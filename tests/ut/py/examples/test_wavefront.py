"""The wavefront: tiles come after those they need, for no other reason than the bytes they name."""

from __future__ import annotations

import multiprocessing
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from example_programs import load
from simpler import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

wavefront = load("wavefront")

ROWS = "the quick brown fox jumps over the lazy dog, and then over it again"[:64]
WATCHDOG_S = 30.0
COLUMNS = "a lazy dog is what the quick brown fox jumped over, and the end of it"[:64]


def by_definition(rows: str, columns: str) -> NDArray[np.int32]:
    table = [[0] * (len(columns) + 1) for _ in range(len(rows) + 1)]
    for i, j in product(range(len(rows)), range(len(columns))):
        best = table[i][j] + 1 if rows[i] == columns[j] else max(table[i][j + 1], table[i + 1][j])
        table[i + 1][j + 1] = best
    return np.array(table, np.int32)[1:, 1:]


@pytest.fixture
def chips() -> Iterator[tuple[Worker, Any]]:
    worker = Worker(level=3, device_ids=range(2), hbm_bytes=1 << 20)
    filling = worker.register(wavefront.fill_tile)
    with worker:
        yield worker, filling


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("tile", [1, 16, 64])
def test_the_table_is_the_definitions(chips: tuple[Worker, Any], count: int, tile: int) -> None:
    side = 8 if tile == 1 else 64
    rows, columns = ROWS[:side], COLUMNS[:side]
    front = wavefront.Wavefront(*chips, rows, columns, tile)
    for _ in range(2):  # the second run finds the values of the first
        _, spans = front.run(count)
        assert len(spans) == (side // tile) ** 2
    np.testing.assert_array_equal(front.table(), by_definition(rows, columns))


def test_each_tile_begins_after_the_three_that_it_reads(chips: tuple[Worker, Any]) -> None:
    front = wavefront.Wavefront(*chips, ROWS, COLUMNS, 8)
    for _ in range(10):
        spans = dict(zip(product(range(8), range(8)), front.run(2)[1], strict=True))
        for (i, j), span in spans.items():
            before = [spans[at] for at in ((i - 1, j), (i, j - 1), (i - 1, j - 1)) if at in spans]
            assert all(needed.ended <= span.started for needed in before)


def test_the_two_tiles_of_a_front_run_at_once() -> None:
    both = multiprocessing.Barrier(2)
    second_front = {("a", "d"), ("b", "c")}

    def fill(*parts: NDArray[Any]) -> tuple[float, float]:
        *_, rows, columns = parts
        if (chr(rows[0]), chr(columns[0])) in second_front:
            both.wait(WATCHDOG_S)
        span: tuple[float, float] = wavefront.fill_tile(*parts)
        return span

    worker = Worker(level=3, device_ids=range(2), hbm_bytes=1 << 20)
    filling = worker.register(fill)
    with worker:
        front = wavefront.Wavefront(worker, filling, "ab", "cd", 1)
        front.run(2)
        np.testing.assert_array_equal(front.table(), by_definition("ab", "cd"))


def test_the_plain_computation_is_the_definitions_too() -> None:
    np.testing.assert_array_equal(wavefront.plain_table(ROWS, COLUMNS), by_definition(ROWS, COLUMNS))


def test_a_wrong_table_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forgetful(tile: NDArray[np.int32], *others: Any) -> tuple[float, float]:
        tile[:] = 0
        return 0.0, 1.0

    monkeypatch.setattr(wavefront, "fill_tile", forgetful)
    assert wavefront.main(["--size", "128", "--tile", "64"]) == 1
    assert "equal to the plain computation: False" in capsys.readouterr().out


def test_a_size_that_is_not_in_whole_tiles_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        wavefront.main(["--size", "100", "--tile", "64"])
    assert "multiple of --tile" in capsys.readouterr().err
