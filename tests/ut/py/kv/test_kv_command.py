"""``simpler kv replay``, as a user runs it and in its parts."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from simpler.cli.kv_plot import plot_replay, ticks
from simpler.cli.kv_replay import ReplayOptions, run_replay, size
from simpler.kv import TraceRequest, replay_trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SVG = "{http://www.w3.org/2000/svg}"


def write_trace(folder: Path, name: str = "trace.jsonl") -> Path:
    """Sixty prompts of three blocks each, the first of which all have in common."""
    file = folder / name
    with file.open("w") as out:
        for number in range(60):
            ids = [0, number % 5 + 1, number % 7 + 6]
            line = {"timestamp": 100 * number, "input_length": 1536, "output_length": 9, "hash_ids": ids}
            out.write(json.dumps(line) + "\n")
    return file


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "simpler.cli", "kv", "replay", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def texts(svg: str) -> list[str]:
    return ["".join(text.itertext()) for text in ET.fromstring(svg).iter(SVG + "text")]


def test_a_replay_shows_its_table_and_writes_its_plot(tmp_path: Path) -> None:
    trace, plot = write_trace(tmp_path), tmp_path / "plot.svg"
    arguments = ("--trace", str(trace), "--capacity-blocks", "6", "--plot", str(plot))
    stored = ("--connector", "file", "--store", str(tmp_path / "store"), "--block-bytes", "100")
    ended = run(*arguments, *stored)
    assert (ended.returncode, ended.stderr) == (0, "")
    for row in ("requests", "hit rate", "% of the tokens", "loaded from the store", "p99", "requests/s"):
        assert row in ended.stdout
    assert "\x1b" not in ended.stdout
    assert {"tokens found, %", "load latency, ms", "trace.jsonl, 60 requests"} <= set(texts(plot.read_text()))
    assert list((tmp_path / "store").iterdir()) != []


def test_a_replay_without_a_store_says_nothing_of_loads(tmp_path: Path) -> None:
    ended = run("--trace", str(write_trace(tmp_path)), "--block-size", "64", "--requests", "10")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert " 10 " in ended.stdout
    assert "240 blocks of 64" in ended.stdout
    assert "load" not in ended.stdout


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (["--connector", "file"], "belong together"),
        (["--store", "x"], "belong together"),
        (["--connector", "carrier-pigeon"], "carrier-pigeon"),
        (["--capacity-blocks", "0"], "capacity-blocks"),
    ],
)
def test_options_that_cannot_be_are_named(tmp_path: Path, more: Sequence[str], what: str) -> None:
    ended = run("--trace", str(write_trace(tmp_path)), *more)
    assert ended.returncode == 2
    assert what in ended.stderr


def options(tmp_path: Path, **changes: object) -> ReplayOptions:
    values: dict[str, object] = {
        "trace": write_trace(tmp_path), "block_size": 512, "capacity_blocks": 10, "block_bytes": 64
    }  # fmt: skip
    return ReplayOptions(**{**values, **changes})  # type: ignore[arg-type]  # of each field's own type


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"block_size": 500}, "block_size is 500"),
        ({"trace": "absent.jsonl"}, "absent.jsonl"),
        ({"trace": "bad.jsonl"}, "bad.jsonl, line 1: no JSON"),
        ({"store": "store", "max_bytes": 1}, "max_bytes=1"),
        ({"plot": "absent/plot.svg"}, "absent/plot.svg"),
    ],
)
def test_what_keeps_a_replay_from_running_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], what: str
) -> None:
    (tmp_path / "bad.jsonl").write_text("[bold]not JSON\n")
    paths = {key: tmp_path / str(value) for key, value in changes.items() if isinstance(value, str)}
    assert run_replay(options(tmp_path, **{**changes, **paths})) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert what in told
    assert told.count("\n") == 1


def test_a_request_larger_than_the_cache_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_replay(options(tmp_path, capacity_blocks=3)) == 0
    assert "60 larger than the cache" in "".join(capsys.readouterr().out.replace("\n", " "))


def test_the_plot_has_a_line_for_each_figure_within_its_frame() -> None:
    trace = [TraceRequest(1000 * number, 512, 0, (number % 9,)) for number in range(100)]
    svg = ET.fromstring(plot_replay(replay_trace(trace, capacity_blocks=4), "title"))
    lines = [path for path in svg.iter(SVG + "path") if path.get("fill") == "none"]
    assert len(lines) == 1
    drawn = lines[0].get("d", "M").removeprefix("M").split("L")
    spots = [tuple(map(float, spot.split())) for spot in drawn]
    assert len(spots) == 60
    assert all(60 <= x <= 780 and 40 <= y <= 210 for x, y in spots)


def test_a_title_with_markup_and_control_characters_is_only_text() -> None:
    report = replay_trace([TraceRequest(0, 512, 0, (1,))], capacity_blocks=4)
    title = "<script>&\x00\x1b\N{SNOWMAN}"
    assert texts(plot_replay(report, title))[0] == "<script>&??\N{SNOWMAN}"


def test_a_plot_of_nothing_is_a_plot() -> None:
    assert "tokens found, %" in texts(plot_replay(replay_trace([], capacity_blocks=1), "nothing"))


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (100.0, [0, 20, 40, 60, 80, 100]),
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (3537.0, [0, 1000, 2000, 3000]),
        (7.0, [0, 2, 4, 6]),
        (0.0, [0]),
    ],
)
def test_ticks_are_round_numbers(end: float, expected: list[float]) -> None:
    assert ticks(end) == pytest.approx(expected)


def test_sizes_have_a_unit() -> None:
    assert [size(n) for n in (999, 1500, 2_000_000, 3_100_000_000, 4 * 10**12)] == [
        "999 B", "1.5 kB", "2.0 MB", "3.1 GB", "4.0 TB",
    ]  # fmt: skip
