"""Blocked Cholesky: the factor is numpy's, and the tasks need no order but what they name."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import simpler
from example_programs import load
from simpler import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

cholesky = load("cholesky")

SIZE, TILE = 96, 16
WATCHDOG_S = 30.0


@pytest.fixture
def factoring() -> Iterator[Any]:
    worker = Worker(level=3, device_ids=range(3), hbm_bytes=1 << 20)
    factoring = cholesky.Cholesky(worker, SIZE, TILE)
    with worker:
        yield factoring


def positive(seed: int) -> NDArray[np.float64]:
    half = np.random.default_rng(seed).standard_normal((SIZE, SIZE))
    matrix: NDArray[np.float64] = half @ half.T + np.eye(SIZE)
    return matrix


@pytest.mark.parametrize("chips", [1, 2, 3])
def test_the_factor_is_numpys(factoring: Any, chips: int) -> None:
    for seed in range(5):
        matrix = positive(seed)
        factor, _, spans = factoring.factor(matrix, chips)
        np.testing.assert_allclose(factor, np.linalg.cholesky(matrix), rtol=0, atol=1e-10)
        per_side = SIZE // TILE
        assert len(spans) == per_side * (per_side + 1) * (per_side + 2) // 6
        assert {span.chip for span in spans} == set(range(chips))


def test_a_matrix_that_has_no_factor_fails_where_that_shows(factoring: Any) -> None:
    matrix = positive(0)
    matrix[40, 40] = -1.0
    with pytest.raises(simpler.TaskError, match=r"(?s)potrf.*LinAlgError") as caught:
        factoring.factor(matrix, 2)
    assert caught.value.poisoned > 0
    factor, _, _ = factoring.factor(positive(1), 2)
    np.testing.assert_allclose(factor, np.linalg.cholesky(positive(1)), rtol=0, atol=1e-10)


def test_the_next_panel_runs_beside_updates_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    both = multiprocessing.Barrier(2)
    last, update, eliminate = 16.0, cholesky.syrk, cholesky.gemm

    def syrk(diagonal: NDArray[np.float64], panel: NDArray[np.float64]) -> tuple[float, float]:
        if diagonal[0, 0] == last:  # chip 0, the first column out of the third
            both.wait(WATCHDOG_S)
        span: tuple[float, float] = update(diagonal, panel)
        return span

    def gemm(*tiles: NDArray[np.float64]) -> tuple[float, float]:
        both.wait(WATCHDOG_S)  # chip 1, before the second panel
        span: tuple[float, float] = eliminate(*tiles)
        return span

    monkeypatch.setattr(cholesky, "syrk", syrk)
    monkeypatch.setattr(cholesky, "gemm", gemm)
    worker = Worker(level=3, device_ids=range(2), hbm_bytes=1 << 20)
    factoring = cholesky.Cholesky(worker, 3, 1)
    matrix = np.array([[4.0, 1.0, 2.0], [1.0, 9.0, 3.0], [2.0, 3.0, last]])
    with worker:
        factor, _, _ = factoring.factor(matrix, 2)
    np.testing.assert_allclose(factor, np.linalg.cholesky(matrix), rtol=0, atol=1e-12)


def test_the_program_compares_with_numpy(capsys: pytest.CaptureFixture[str]) -> None:
    assert cholesky.main(["--size", "256", "--tile", "64", "--chips", "3"]) == 0
    printed = capsys.readouterr().out
    assert "20 tasks on 3 chips" in printed
    assert "parallel efficiency" in printed


def test_a_wrong_factor_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(*_tiles: Any) -> tuple[float, float]:
        return 0.0, 1.0

    nothing.__name__ = "gemm"
    monkeypatch.setattr(cholesky, "gemm", nothing)
    assert cholesky.main(["--size", "256", "--tile", "64"]) == 1
    assert "equal to numpy's factor: False" in capsys.readouterr().out


def test_a_size_that_is_not_in_whole_tiles_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cholesky.main(["--size", "100", "--tile", "64"])
    assert "multiple of --tile" in capsys.readouterr().err
