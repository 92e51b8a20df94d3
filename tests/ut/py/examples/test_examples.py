"""Every example runs as a user would run it and prints what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from simpler.models import ModelNotFoundError, find_demo_model

EXAMPLES = Path(__file__).parents[4] / "examples"
EXPECTED = {
    "extension.py": [
        "device 1, call 1: sum 2500",
        "device 1, call 2: again 2500",
        "ChipControlError: ",
        "device 1 says no",
    ],
    "tasks.py": ["100 numbers on the chip", "first 5, last 54.5"],
    "failures.py": [
        "error: True",
        "deadline: the handler had begun: True",
        "death: True",
        "the other chip: 0 bytes in use",
        "restarted: 64 bytes allocated",
    ],
    "vector_add.py": ["4194304 elements on 2 chips, native kernel: ", "equal to numpy's sum: True"],
    "wavefront.py": ["256 tiles on 2 chips: ", "equal to the plain computation: True"],
    "cholesky.py": ["364 tasks on 2 chips: ", "equal to numpy's factor: True"],
    "kv_connector.py": ["loaded: ('one',)", "equal to the computed blocks: True"],
    "map_reduce.py": ["equal to the plain count: True"],
}
NEED_THE_MODEL = {"generate_text.py": ["The capital of France is Paris."]}


def run(name: str) -> str:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_prints_what_it_promises(name: str) -> None:
    printed = run(name)
    assert [line for line in EXPECTED[name] if line not in printed] == []


@pytest.mark.extra
@pytest.mark.parametrize("name", NEED_THE_MODEL)
def test_an_example_with_a_model_prints_what_it_promises(name: str) -> None:
    try:
        find_demo_model()
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    assert [line for line in NEED_THE_MODEL[name] if line not in run(name)] == []


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*EXPECTED, *NEED_THE_MODEL}
