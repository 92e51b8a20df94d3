"""Vector add: each chip adds its part, whatever the kernel is written in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import simpler
from example_programs import load
from simpler import IN, OUT, Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

vector_add = load("vector_add")


@pytest.fixture(params=["native", "python"])
def chips_and_kernel(request: pytest.FixtureRequest) -> Iterator[tuple[Worker, Any]]:
    worker = Worker(level=3, device_ids=range(2), hbm_bytes=1 << 20)
    adding = vector_add.register(worker, request.param)
    with worker:
        yield worker, adding


@pytest.mark.parametrize("size", [2, 7, 10_000])
def test_the_sum_is_numpys(chips_and_kernel: tuple[Worker, Any], size: int) -> None:
    worker, adding = chips_and_kernel
    x, y = np.random.default_rng(size).random((2, size), np.float32)
    result, took = vector_add.add_on_chips(worker, adding, x, y)
    np.testing.assert_array_equal(result, x + y)
    assert took > 0
    assert [worker.committed_device_memory(chip) for chip in worker.worker_ids] == [0, 0]


def test_vectors_that_do_not_fit_fail_the_task_by_the_kernels_own_words(
    chips_and_kernel: tuple[Worker, Any],
) -> None:
    worker, adding = chips_and_kernel
    block = worker.malloc(64)
    x, y, total = (block.tensor(n, np.float32, offset=at) for n, at in ((4, 0), (3, 16), (4, 32)))
    with pytest.raises(simpler.TaskError, match=r"different lengths|could not be broadcast"):
        worker.run(lambda orch, _args, _config: orch.submit(adding, IN(x), IN(y), OUT(total), worker=0))


def test_three_chips_add_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    assert vector_add.main(["--size", "1000", "--chips", "3", "--kernel", "python"]) == 0
    printed = capsys.readouterr().out
    assert "1000 elements on 3 chips, python kernel" in printed
    assert "equal to numpy's sum: True" in printed


def test_a_wrong_sum_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(vector_add, "NATIVE", vector_add.NATIVE.replace("a[i] + b[i]", "a[i] - b[i]"))
    assert vector_add.main(["--size", "100"]) == 1
    assert "equal to numpy's sum: False" in capsys.readouterr().out


def test_more_chips_than_elements_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        vector_add.main(["--size", "1"])
    assert "every chip needs an element" in capsys.readouterr().err
