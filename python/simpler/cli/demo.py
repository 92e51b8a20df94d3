"""The demo on the terminal: progress, the answer as it comes, and what it took."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from simpler import SimplerError
from simpler.models import (
    Checkpoint,
    ConnectedModel,
    GGUFError,
    GraphModel,
    Llama,
    Message,
    ModelError,
    PipelineModel,
    Sampler,
    SplitModel,
    TensorParallelModel,
    TokenizerError,
    block_namespace,
    compare,
    find_demo_model,
    generate,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from simpler.models import BlockMove, Span
    from simpler.models.graph_model import Chip
    from simpler.models.layout import FloatArray

DEFAULT_PROMPT = "What is the capital of France?"

STORE_CONNECTOR = "file"
STORE_BYTES = 1 << 30

EXIT_OK = 0
EXIT_FAILED = 1


@dataclass(frozen=True)
class DemoOptions:
    """What the user asked for; see the help of ``simpler demo``."""

    prompt: str
    check: bool = False
    pipeline: int | None = None
    tensor_parallel: int | None = None
    max_tokens: int = 128
    model: Path | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    trace: Path | None = None
    connector: str | None = None
    store: Path | None = None

    def sampler(self) -> Sampler:
        """A new sampler, the same each time."""
        return Sampler(temperature=self.temperature, top_p=self.top_p, seed=self.seed)

    def split(self, model: Llama, path: Path) -> GraphModel:
        """The model on its chips, not yet started.

        Args:
            model: The whole model.
            path: Its file.
        """
        if self.pipeline is not None:
            return PipelineModel(model, self.pipeline)
        if self.tensor_parallel is not None:
            return TensorParallelModel(model, self.tensor_parallel)
        if self.connector is not None:
            return ConnectedModel(model, self.connector, block_namespace(path), self.connector_options())
        return SplitModel(model)

    def connector_options(self) -> dict[str, object]:
        """The connector's own."""
        if self.connector != STORE_CONNECTOR:
            return {}
        return {"directory": str(self.store or default_store()), "max_bytes": STORE_BYTES}


@dataclass
class Answer:
    """What came out: the tokens, and when each was there, in seconds after the question.

    ``logits`` are those that each was chosen from, where the check needs them.
    """

    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    logits: list[FloatArray] = field(default_factory=list)

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
            with self._options.split(model, path) as split:
                what = f"the model on {len(split.chips)} chips"
                for _ in self._loading(what, checkpoint, split.load(checkpoint.chunks())):
                    pass
                answer = self._answer(checkpoint, prompt, split)
                self._show_figures(answer, prompt, split)
                if self._options.trace is not None:
                    self._options.trace.write_text(json.dumps(trace_events(split.spans)))
            if self._options.check:
                exact = split.is_exact if isinstance(split, ConnectedModel) else not self._sums_are_split
                return self._check(checkpoint, model, prompt, answer, exact=exact)
        return EXIT_OK

    @property
    def _sums_are_split(self) -> bool:
        return self._options.tensor_parallel is not None

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

    def _answer(self, checkpoint: Checkpoint, prompt: Sequence[int], split: GraphModel) -> Answer:
        answer = Answer()
        keep = self._options.check and (self._sums_are_split or self._options.connector is not None)
        stream = checkpoint.tokenizer.stream()
        start = time.perf_counter()
        for token in split.generate(
            prompt,
            max_tokens=self._options.max_tokens,
            end_of_turn=checkpoint.tokenizer.end_of_turn,
            sampler=self._options.sampler(),
            observe=(lambda logits: answer.logits.append(logits.copy())) if keep else None,
        ):
            answer.tokens.append(token)
            answer.times_s.append(time.perf_counter() - start)
            _write(stream.push(token))
        _write(stream.finish() + "\n\n")
        return answer

    def _show_figures(self, answer: Answer, prompt: Sequence[int], split: GraphModel) -> None:
        table = Table(show_header=False)
        table.add_row("prompt", f"{len(prompt)} tokens, on {name_chips(split.prompt_chips)}")
        table.add_row("answer", f"{len(answer.tokens)} tokens, on {name_chips(split.answer_chips)}")
        if answer.times_s:
            table.add_row("time to first token", f"{answer.times_s[0] * 1e3:.0f} ms")
        if answer.tokens_per_s is not None:
            table.add_row("speed", f"{answer.tokens_per_s:.1f} tokens/s")
        table.add_row("tasks per token", str(split.tasks_per_token))
        overhead, whole = split.overhead_per_token_s, split.time_per_token_s
        if overhead is not None and whole is not None:
            figures = f"{overhead * 1e6:.0f} us of {whole * 1e3:.1f} ms"
            table.add_row("scheduler overhead per token", figures)
        if isinstance(split, ConnectedModel):
            for name, figures in self._connector_rows(split, prompt):
                table.add_row(name, figures)
        moved = split.transfer if isinstance(split, SplitModel) else None
        if moved is not None:
            rate = moved.nbytes / moved.copy_s / 1e9
            table.add_row(
                "KV cache moved", f"{moved.nbytes / 1e6:.2f} MB in {moved.copies} blocks, {rate:.1f} GB/s"
            )
        table.add_row("control round trip", f"{split.control_round_trip_s() * 1e6:.1f} us")
        Console(highlight=False).print(table)

    def _connector_rows(self, split: ConnectedModel, prompt: Sequence[int]) -> Iterator[tuple[str, str]]:
        options = self._options.connector_options()
        where = f", in {options['directory']}" if "directory" in options else ""
        yield "KV connector", split.connector + where
        yield "KV cache moved", describe_move(split.moved)
        if not where:
            return
        found, whole_s = split.found, split.measure_prompt_s(prompt)
        loaded = f", {describe_move(found)}" if found.tokens else ""
        yield "found in the store", f"{found.tokens} of {len(prompt)} prompt tokens{loaded}"
        saved_s = whole_s - split.prompt_s - found.wall_s if found.tokens else 0.0
        each = f"{whole_s / len(prompt) * 1e3:.2f} ms a token"
        yield "prefill time saved", f"{saved_s * 1e3:.0f} ms of {whole_s * 1e3:.0f} ms ({each})"

    def _check(
        self, checkpoint: Checkpoint, model: Llama, prompt: Sequence[int], answer: Answer, *, exact: bool
    ) -> int:
        weights = checkpoint.new_buffer()
        for _ in self._loading("the model in one process", checkpoint, checkpoint.load_into(weights)):
            pass
        if not exact:
            return self._check_logits(model, weights, prompt, answer)
        tokens = answer.tokens
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
        if tokens == expected:
            self._status.print(f"check passed: {len(expected)} tokens equal those of one process")
            return EXIT_OK
        at = first_difference(tokens, expected)
        self._status.print(
            f"check FAILED: token {at} differs; {len(tokens)} tokens on the chips, "
            f"{len(expected)} in one process",
            style="bold red",
        )
        return EXIT_FAILED

    def _check_logits(self, model: Llama, weights: FloatArray, prompt: Sequence[int], answer: Answer) -> int:
        """One process gets the same tokens and must come to the same logits, within the tolerance."""
        found = compare(model, weights, prompt, answer.tokens, answer.logits)
        if found.failure is not None:
            self._status.print(f"check FAILED: {found.failure}", style="bold red", soft_wrap=True)
            return EXIT_FAILED
        self._status.print(
            f"check passed: logits of {found.steps} steps differ by at most {found.largest:.1g} from those "
            f"of one process, and {found.other_tokens} have another likeliest token",
            soft_wrap=True,
        )
        return EXIT_OK


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """Index where two sequences part; the length of both when they are equal."""
    pairs = itertools.zip_longest(left, right)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(left))


def name_chips(chips: Sequence[Chip]) -> str:
    """Such as ``chip 1`` or ``chips 0, 1``."""
    numbers = ", ".join(str(chip.number) for chip in chips)
    return f"chip {numbers}" if len(chips) == 1 else f"chips {numbers}"


def describe_move(move: BlockMove) -> str:
    """Such as ``1.84 MB in 60 blocks in 2.1 ms, 0.9 GB/s``."""
    megabytes, rate = move.nbytes / 1e6, move.nbytes / move.wall_s / 1e9
    return f"{megabytes:.2f} MB in {move.copies} blocks in {move.wall_s * 1e3:.1f} ms, {rate:.2f} GB/s"


def default_store() -> Path:
    """The folder of the user's caches that blocks are kept in between runs."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "simpler" / "kv"


def trace_events(spans: Sequence[Span]) -> list[dict[str, object]]:
    """The spans in Chrome's trace event format, times in microseconds: a row for the parent, one per chip."""
    rows = {span.chip: 0 if span.chip is None else span.chip + 1 for span in spans}
    names: list[dict[str, object]] = [
        {
            "name": "thread_name",
            "ph": "M",
            "pid": 0,
            "tid": row,
            "args": {"name": "parent" if chip is None else f"chip {chip}"},
        }
        for chip, row in rows.items()
    ]
    return names + [
        {
            "name": span.name,
            "ph": "X",
            "pid": 0,
            "tid": rows[span.chip],
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
