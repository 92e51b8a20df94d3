"""The benchmarks run and report every contender; how fast anything is, no test says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_quick_run_reports_us_the_peers_and_the_floor(tmp_path: Path) -> None:
    kept = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--only", "control", "--json", str(kept)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "targets met" in ended.stdout
    batches, single = json.loads(kept.read_text())["rows"]
    assert batches["target"] == single["target"] == {"limit": 700, "of": None}
    reported = single["figures"].keys() | single["skipped"].keys()
    assert {"simpler", "multiprocessing.Pipe", "pyzmq over ipc", "ProcessPoolExecutor"} <= reported
    assert {"bare C++, spinning", "bare C++, futex"} <= reported or "bare C++" in single["skipped"]
    assert all(figure["p50"] > 0 for figure in single["figures"].values())
    for name in reported:
        assert name in ended.stdout
