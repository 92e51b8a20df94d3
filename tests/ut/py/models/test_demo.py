"""``simpler demo``, as a user runs it and in its parts."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from simpler.cli.demo import Answer, DemoOptions, first_difference, run_demo, trace_events
from simpler.models.split import Span

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
    for row in ("time to first token", "tokens/s", "KV cache moved", "control round trip"):
        assert row in ended.stdout
    assert "check passed: 7 tokens" in ended.stderr
    assert "\x1b" not in ended.stdout + ended.stderr
    assert [event["name"] for event in json.loads(trace.read_text())][:2] == ["prefill", "move cache"]


@pytest.mark.extra
@pytest.mark.usefixtures("checkpoint")
def test_the_check_fails_when_the_tokens_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("simpler.cli.demo.generate", lambda *_args, **_options: iter([504, 0]))
    assert run_demo(DemoOptions("What is the capital of France?", check=True, max_tokens=3)) == 1
    assert "check FAILED: token 1 differs; 3 tokens on two chips, 2 in one process" in capsys.readouterr().err


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
    assert trace_events([Span("decode", 1, 2.0, 0.5)]) == [
        {"name": "decode", "ph": "X", "pid": 0, "tid": 1, "ts": 2e6, "dur": 5e5}
    ]
