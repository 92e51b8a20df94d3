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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_run_of_the_task_graph_reports_each_peer_or_why_it_is_not_there(tmp_path: Path) -> None:
    kept = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--only", "graph", "--json", str(kept)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(kept.read_text())["rows"]
    alone = [row for row in rows if row["name"].startswith("one run with one no-op task")]
    assert [row["target"]["limit"] for row in alone] == [6000, 10_000]
    for row in alone:
        reported = row["figures"].keys() | row["skipped"].keys()
        assert {"simpler", "loky", "ray, actors", "ray, compiled graph", "dask.distributed"} <= reported
        assert "ProcessPoolExecutor" in row["figures"]
    assert all(figure["p50"] > 0 for row in rows for figure in row["figures"].values())
    assert len([row for row in rows if row["name"].startswith("growth")]) == 6


@pytest.mark.slow
def test_a_peer_that_is_not_installed_is_skipped_by_name() -> None:
    program = """
import importlib.util
from benchmarks import graph_others
from benchmarks.sampling import Effort
importlib.util.find_spec = lambda name: None
told = graph_others.others(Effort(quick=True))
assert told.figures["single"].keys() == {"ProcessPoolExecutor"}, told
print(*told.skipped.items(), sep="\\n")
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    for name in ("loky", "ray, actors", "ray, compiled graph", "dask.distributed"):
        assert f"('{name}', \"not installed" in ended.stdout
