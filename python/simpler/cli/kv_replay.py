"""Replaying a trace on the terminal: progress, a table, and a plot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from simpler import SimplerError
from simpler.cli.kv_plot import plot_replay
from simpler.kv import FileBlockStore, read_trace, replay_trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from simpler.kv import BlockStore, ReplayReport, TraceRequest

EXIT_OK = 0
EXIT_FAILED = 1


@dataclass(frozen=True)
class ReplayOptions:
    """What the user asked for; see the help of ``simpler kv replay``. `store` is None without a connector."""

    trace: Path
    block_size: int
    capacity_blocks: int
    block_bytes: int
    store: Path | None = None
    max_bytes: int = 1 << 30
    requests: int | None = None
    plot: Path | None = None


def run_replay(options: ReplayOptions) -> int:
    """Replay a trace and show what came of it.

    The table goes to standard output, all else to standard error.

    Returns:
        The exit status: 1 when the trace, the store or an option is of no use.
    """
    status = Console(stderr=True, highlight=False)
    try:
        trace = list(read_trace(options.trace))[: options.requests]
        report = _replay(options, trace, _store(options), status)
        Console(highlight=False).print(table(report, with_store=options.store is not None))
        if options.plot is not None:
            options.plot.write_text(plot_replay(report, f"{options.trace.name}, {report.requests} requests"))
    except (SimplerError, OSError, ValueError) as error:
        status.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        return EXIT_FAILED
    return EXIT_OK


def _store(options: ReplayOptions) -> BlockStore | None:
    if options.store is None:
        return None
    # What stands for KV here is made from the hashes: it need not survive a power failure.
    return FileBlockStore(options.store, options.max_bytes, durable=False)


def _replay(
    options: ReplayOptions, trace: Sequence[TraceRequest], store: BlockStore | None, status: Console
) -> ReplayReport:
    columns = TextColumn("{task.description}"), BarColumn(40), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=status, transient=True, disable=not status.is_terminal) as progress:
        task = progress.add_task(f"replaying {options.trace.name}", total=len(trace))
        return replay_trace(
            trace,
            capacity_blocks=options.capacity_blocks,
            block_size=options.block_size,
            store=store,
            block_bytes=options.block_bytes,
            observe=lambda done: progress.update(task, completed=done),
        )


def table(report: ReplayReport, *, with_store: bool) -> Table:
    """The closing table."""
    shown = Table(show_header=False)
    refused = f", {report.refused:,} larger than the cache" if report.refused else ""
    shown.add_row("requests", f"{report.requests:,}{refused}")
    shown.add_row(
        "prompts", f"{report.input_tokens:,} tokens, {report.blocks:,} blocks of {report.block_size}"
    )
    rates = f"{report.token_hit_rate:.1%} of the tokens, {report.block_hit_rate:.1%} of the blocks"
    shown.add_row("hit rate", rates)
    shown.add_row("found in the cache", f"{report.cached_blocks:,} blocks")
    if with_store:
        shown.add_row("loaded from the store", f"{report.loaded_blocks:,} blocks")
    shown.add_row("evicted from the cache", f"{report.evictions:,} blocks")
    if with_store:
        moved = f"{size(report.bytes_loaded)} loaded, {size(report.bytes_saved)} saved"
        shown.add_row("bytes moved", moved)
        shown.add_row("load latency of a request", _latency(report))
    if report.failed_loads or report.failed_saves:
        shown.add_row("failed", f"{report.failed_loads:,} loads, {report.failed_saves:,} saves")
    rate = f"{report.requests_per_s:,.0f} requests/s"
    shown.add_row("bookkeeping", f"{report.bookkeeping_s:.2f} s of {report.elapsed_s:.2f} s, {rate}")
    return shown


def _latency(report: ReplayReport) -> str:
    if report.load_p50_s is None or report.load_p99_s is None:
        return "nothing was loaded"
    return f"p50 {report.load_p50_s * 1e3:.3g} ms, p99 {report.load_p99_s * 1e3:.3g} ms"


def size(nbytes: int) -> str:
    """Such as ``1.5 MB``."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if nbytes >= 1000**power:
            return f"{nbytes / 1000**power:.1f} {unit}"
    return f"{nbytes} B"
