"""``simpler demo``, as a user runs it and in its parts."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from simpler.cli.demo import (
    Answer,
    DemoOptions,
    default_store,
    describe_move,
    first_difference,
    run_demo,
    trace_events,
)
from simpler.models.comparison import Comparison
from simpler.models.connected import BlockMove
from simpler.models.launches import Span

if TYPE_CHECKING:
    from pathlib import Path

    from simpler.models.checkpoint import Checkpoint


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "simpler.cli", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.extra
@pytest.mark.usefixtures("checkpoint")
def test_the_demo_answers_checks_itself_and_writes_plain_text(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    ended = run("demo", "--check", "--max-tokens", "20", "--trace", str(trace))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("The capital of France is Paris.\n")
    for row in (
        "on chip 0", "on chip 1", "time to first token", "tokens/s", "tasks per token", " 8 ",
        "scheduler overhead per token", "KV cache moved", "control round trip",
    ):  # fmt: skip
        assert row in ended.stdout
    assert "check passed: 7 tokens" in ended.stderr
    assert "\x1b" not in ended.stdout + ended.stderr
    events = [(event["name"], event["tid"]) for event in json.loads(trace.read_text())]
    assert {("prefill", 0), ("embed_prompt", 1), ("move cache", 2), ("decode", 0), ("layers", 2)} <= set(
        events
    )


@pytest.mark.extra
@pytest.mark.usefixtures("checkpoint")
def test_layers_in_a_row_give_the_tokens_of_one_process() -> None:
    ended = run("demo", "--check", "--max-tokens", "20", "--pipeline", "2")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("The capital of France is Paris.\n")
    assert "tokens, on chips 0, 1" in ended.stdout
    assert " 9 " in ended.stdout
    assert "KV cache moved" not in ended.stdout
    assert "check passed: 7 tokens" in ended.stderr


@pytest.mark.extra
@pytest.mark.usefixtures("checkpoint")
@pytest.mark.parametrize(("chips", "tasks"), [(2, 124), (3, 186)])
def test_heads_side_by_side_give_the_logits_of_one_process(chips: int, tasks: int) -> None:
    ended = run("demo", "--check", "--max-tokens", "20", "--tensor-parallel", str(chips))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("The capital of France is Paris.\n")
    assert str(tasks) in ended.stdout
    assert "check passed: logits of 8 steps" in ended.stderr


@pytest.mark.extra
@pytest.mark.usefixtures("checkpoint")
def test_the_check_fails_when_the_tokens_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("simpler.cli.demo.generate", lambda *_args, **_options: iter([504, 0]))
    assert run_demo(DemoOptions("What is the capital of France?", check=True, max_tokens=3)) == 1
    assert "check FAILED: token 1 differs; 3 tokens on the chips, 2 in one process" in capsys.readouterr().err


@pytest.mark.extra
def test_a_prompt_beyond_the_context_is_refused_before_anything_starts(
    checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "word " * checkpoint.config.context
    assert run_demo(DemoOptions(prompt)) == 1
    assert "tokens; the model takes 8192" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "expected"), [(None, "No such file"), (b"PK", "magic number"), (b"PK\3\4", "not a GGUF file")]
)
def test_a_model_that_cannot_be_read_is_one_line_of_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, expected: str
) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    assert run_demo(DemoOptions("hi", model=path)) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert expected in shown.err


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra_the_command_says_what_to_install(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from simpler.cli import main; main()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == f"the command line needs {package}: pip install 'simpler[cli]'\n"


def test_a_wrong_option_is_a_usage_error() -> None:
    ended = run("demo", "--max-tokens", "0")
    assert ended.returncode == 2
    assert "max-tokens" in ended.stderr


@pytest.mark.parametrize(
    ("left", "right", "at"), [([1, 2], [1, 2], 2), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], 0)]
)
def test_the_first_difference_is_found(left: list[int], right: list[int], at: int) -> None:
    assert first_difference(left, right) == at


def test_speed_counts_the_tokens_after_the_first() -> None:
    assert Answer([5], [0.5]).tokens_per_s is None
    assert Answer([5, 6, 7], [0.5, 0.6, 0.7]).tokens_per_s == pytest.approx(10)


def test_spans_become_trace_events_in_microseconds() -> None:
    spans = [Span("decode", None, 2.0, 0.75), Span("layer", 1, 2.1, 0.5)]
    parent, chip, *events = trace_events(spans)
    assert (parent["tid"], parent["args"]) == (0, {"name": "parent"})
    assert (chip["tid"], chip["args"]) == (2, {"name": "chip 1"})
    assert events == [
        {"name": "decode", "ph": "X", "pid": 0, "tid": 0, "ts": 2e6, "dur": 7.5e5},
        {"name": "layer", "ph": "X", "pid": 0, "tid": 2, "ts": 2.1e6, "dur": 5e5},
    ]


def test_two_ways_to_split_at_once_are_a_usage_error() -> None:
    ended = run("demo", "--pipeline", "2", "--tensor-parallel", "2")
    assert ended.returncode == 2
    assert "choose" in ended.stderr


@pytest.mark.extra
@pytest.mark.usefixtures("checkpoint")
def test_a_split_that_the_model_does_not_have_is_one_line_of_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_demo(DemoOptions("hi", tensor_parallel=4)) == 1
    error = capsys.readouterr().err
    assert error == "error: the model's 3 key and value heads cannot be split over 4 chips\n"


@pytest.mark.extra
@pytest.mark.usefixtures("checkpoint")
def test_the_check_fails_when_logits_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = Comparison(1, 0.5, 0, "a logit of step 0 differs by 0.5, more than 0.001")
    monkeypatch.setattr("simpler.cli.demo.compare", lambda *_args: failed)
    assert run_demo(DemoOptions("What is the capital of France?", check=True, tensor_parallel=2)) == 1
    assert "check FAILED: a logit of step 0 differs by 0.5" in capsys.readouterr().err


@pytest.mark.extra
@pytest.mark.usefixtures("checkpoint")
def test_a_connector_moves_the_cache_and_the_tokens_stay_those_of_one_process() -> None:
    ended = run("demo", "--check", "--max-tokens", "20", "--connector", "shm")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("The capital of France is Paris.\n")
    for row in ("KV connector", "shm", "KV cache moved", "MB in 90 blocks"):
        assert row in ended.stdout
    assert "found in the store" not in ended.stdout
    assert "check passed: 7 tokens equal those of one process" in ended.stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--connector", "shm", "--pipeline", "2"), "choose one"),
        (("--connector", "shm", "--store", "blocks"), "--store belongs to"),
        (("--store", "blocks"), "--store belongs to"),
    ],
)
def test_options_of_connectors_that_do_not_fit_are_usage_errors(
    options: tuple[str, ...], expected: str
) -> None:
    ended = run("demo", *options)
    assert ended.returncode == 2
    assert expected in ended.stderr


def test_the_store_is_in_the_cache_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_store() == tmp_path / ".cache" / "simpler" / "kv"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert default_store() == tmp_path / "caches" / "simpler" / "kv"
    options = DemoOptions("hi", connector="file", store=tmp_path / "blocks").connector_options()
    assert options["directory"] == str(tmp_path / "blocks")
    assert DemoOptions("hi", connector="shm").connector_options() == {}


def test_a_move_is_described_by_size_time_and_rate() -> None:
    assert describe_move(BlockMove(32, 60, 1_500_000, 0.003)) == "1.50 MB in 60 blocks in 3.0 ms, 0.50 GB/s"
