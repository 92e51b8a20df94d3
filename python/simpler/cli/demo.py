"""The demo on the terminal: progress, the answer as it comes, and what it took."""

from __future__ import annotations

import itertools
import json
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from simpler import SimplerError
from simpler.models import (
    Checkpoint,
    GGUFError,
    Llama,
    Message,
    ModelError,
    Sampler,
    SplitModel,
    TokenizerError,
    find_demo_model,
    generate,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from simpler.models import Span

DEFAULT_PROMPT = "What is the capital of France?"

EXIT_OK = 0
EXIT_FAILED = 1


@dataclass(frozen=True)
class DemoOptions:
    """What the user asked for; see the help of ``simpler demo``."""

    prompt: str
    check: bool = False
    max_tokens: int = 128
    model: Path | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    trace: Path | None = None

    def sampler(self) -> Sampler:
        """A new sampler, the same each time."""
        return Sampler(temperature=self.temperature, top_p=self.top_p, seed=self.seed)


@dataclass
class Answer:
    """What came out: the tokens, and when each was there, in seconds after the question."""

    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float | None:
        """Speed after the first token; None with fewer than two."""
        if len(self.tokens) < 2:
            return None
        return (len(self.tokens) - 1) / (self.times_s[-1] - self.times_s[0])


def run_demo(options: DemoOptions) -> int:
    """Answer the prompt and show what it took.

    The answer and the table go to standard output, all else to standard error.

    Returns:
        The exit status: 1 when something failed or the check found a difference.
    """
    status = Console(stderr=True, highlight=False)
    try:
        return _Demo(options, status).run()
    except (SimplerError, ModelError, GGUFError, TokenizerError, OSError) as error:
        status.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        return EXIT_FAILED


class _Demo:
    def __init__(self, options: DemoOptions, status: Console) -> None:
        self._options = options
        self._status = status

    def run(self) -> int:
        path = self._options.model or find_demo_model()
        with Checkpoint(path) as checkpoint:
            prompt = checkpoint.tokenizer.encode_chat([Message("user", self._options.prompt)])
            wanted = len(prompt) + self._options.max_tokens
            if len(prompt) > checkpoint.config.context:
                raise ModelError(
                    f"the prompt has {len(prompt)} tokens; the model takes {checkpoint.config.context}"
                )
            model = Llama(checkpoint.config, min(wanted, checkpoint.config.context))
            with SplitModel(model) as split:
                for _ in self._loading("the model on two chips", checkpoint, split.load(checkpoint.chunks())):
                    pass
                answer = self._answer(checkpoint, prompt, split)
                self._show_figures(answer, len(prompt), split)
                if self._options.trace is not None:
                    self._options.trace.write_text(json.dumps(trace_events(split.spans)))
            if self._options.check:
                return self._check(checkpoint, model, prompt, answer.tokens)
        return EXIT_OK

    def _loading(self, what: str, checkpoint: Checkpoint, parts: Iterable[int]) -> Iterator[int]:
        """Pass the parts on and show how many of the bytes they make."""
        start = time.perf_counter()
        columns = TextColumn("{task.description}"), BarColumn(20), DownloadColumn(), TimeElapsedColumn()
        shown = self._status.is_terminal
        with Progress(*columns, console=self._status, transient=True, disable=not shown) as progress:
            task = progress.add_task(f"loading {what}", total=checkpoint.layout.nbytes)
            for nbytes in parts:
                progress.advance(task, nbytes)
                yield nbytes
        seconds = time.perf_counter() - start
        megabytes = checkpoint.layout.nbytes / 1e6
        self._status.print(f"loaded {what}: {megabytes:.0f} MB in {seconds:.1f} s", style="dim")

    def _answer(self, checkpoint: Checkpoint, prompt: Sequence[int], split: SplitModel) -> Answer:
        answer = Answer()
        stream = checkpoint.tokenizer.stream()
        start = time.perf_counter()
        for token in split.generate(
            prompt,
            max_tokens=self._options.max_tokens,
            end_of_turn=checkpoint.tokenizer.end_of_turn,
            sampler=self._options.sampler(),
        ):
            answer.tokens.append(token)
            answer.times_s.append(time.perf_counter() - start)
            _write(stream.push(token))
        _write(stream.finish() + "\n\n")
        return answer

    def _show_figures(self, answer: Answer, prompt_tokens: int, split: SplitModel) -> None:
        table = Table(show_header=False)
        table.add_row("prompt", f"{prompt_tokens} tokens, on chip 0")
        table.add_row("answer", f"{len(answer.tokens)} tokens, on chip 1")
        if answer.times_s:
            table.add_row("time to first token", f"{answer.times_s[0] * 1e3:.0f} ms")
        if answer.tokens_per_s is not None:
            table.add_row("speed", f"{answer.tokens_per_s:.1f} tokens/s")
        moved = split.transfer
        if moved is not None:
            rate = moved.nbytes / moved.copy_s / 1e9
            table.add_row(
                "KV cache moved", f"{moved.nbytes / 1e6:.2f} MB in {moved.copies} blocks, {rate:.1f} GB/s"
            )
        table.add_row("control round trip", f"{split.control_round_trip_s() * 1e6:.1f} us")
        Console(highlight=False).print(table)

    def _check(
        self, checkpoint: Checkpoint, model: Llama, prompt: Sequence[int], tokens: Sequence[int]
    ) -> int:
        weights = checkpoint.new_buffer()
        for _ in self._loading("the model in one process", checkpoint, checkpoint.load_into(weights)):
            pass
        expected = list(
            generate(
                model,
                weights,
                prompt,
                max_tokens=self._options.max_tokens,
                end_of_turn=checkpoint.tokenizer.end_of_turn,
                sampler=self._options.sampler(),
            )
        )
        if list(tokens) == expected:
            self._status.print(f"check passed: {len(expected)} tokens equal those of one process")
            return EXIT_OK
        at = first_difference(tokens, expected)
        self._status.print(
            f"check FAILED: token {at} differs; {len(tokens)} tokens on two chips, "
            f"{len(expected)} in one process",
            style="bold red",
        )
        return EXIT_FAILED


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """Index where two sequences part; the length of both when they are equal."""
    pairs = itertools.zip_longest(left, right)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(left))


def trace_events(spans: Sequence[Span]) -> list[dict[str, object]]:
    """The spans in Chrome's trace event format, times in microseconds, one row per chip."""
    return [
        {
            "name": span.name,
            "ph": "X",
            "pid": 0,
            "tid": span.chip,
            "ts": span.start_s * 1e6,
            "dur": span.duration_s * 1e6,
        }
        for span in spans
    ]


def _write(text: str) -> None:
    """Show text of the model at once; control characters, which could steer a terminal, are left out."""
    shown = "".join(character for character in text if character.isprintable() or character in "\n\t")
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(shown.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
