"""Printing rows, and keeping them as JSON."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures import OURS, Figure, Row, Target

if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDTH = 34


def machine() -> str:
    """The machine, as far as it explains the figures."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    lines = [line.partition(":") for line in cpuinfo.splitlines()]
    fields = {name.strip(): content.strip() for name, _, content in lines}
    virtual = ", virtual" if "hypervisor" in fields.get("flags", "") else ""
    model = fields.get("model name", platform.machine())
    cores = len(os.sched_getaffinity(0))
    return f"{model}{virtual}, {cores} cores, Linux {platform.release()}, Python {platform.python_version()}"


def value(unit: str, amount: float) -> str:
    """An amount with its unit, three digits or so."""
    if unit == "percent":
        return f"{amount:.3f} %"
    if unit == "memory":
        return f"{amount / (1 << 20):.2f} MiB"
    for size, name in ((1e9, "s"), (1e6, "ms"), (1e3, "us")):
        if amount >= size:
            return f"{amount / size:.3g} {name}" if amount < 1000 * size else f"{amount / size:.0f} {name}"
    return f"{amount / 1e3:.2f} us"


def verdict(row: Row) -> str:
    """``pass``, ``MISS``, ``unknown`` or nothing."""
    reached = row.reached()
    if row.target is None:
        return ""
    return "unknown" if reached is None else "pass" if reached else "MISS"


def target_text(target: Target, unit: str) -> str:
    """What has to be reached."""
    if target.of is None:
        return f"p50 at most {value(unit, target.limit)}"
    return f"at most {target.limit:g} times {target.of}"


def text(row: Row) -> str:
    """One row, as some lines."""
    lines = [row.name]
    if row.target is not None:
        lines.append(f"    target: {target_text(row.target, row.unit)}: {verdict(row)}")
    for name, figure in row.figures.items():
        lines.append(_line(row, name, figure))
    lines += [f"    {name:{_WIDTH}} skipped: {reason}" for name, reason in row.skipped.items()]
    return "\n".join(lines)


def _line(row: Row, name: str, figure: Figure) -> str:
    spread = f"rounds {value(row.unit, min(figure.rounds))} to {value(row.unit, max(figure.rounds))}"
    tail = value(row.unit, figure.p99) if figure.p99 is not None else "-"
    ratio = "" if name == OURS else f"simpler is {row.ratio(name):.2f} times this"
    middle = value(row.unit, figure.p50)
    return f"    {name:{_WIDTH}} p50 {middle:>10}  p99 {tail:>10}  {ratio:30} {spread}"


def summary(rows: Sequence[Row]) -> str:
    """How many targets are met, and which are not."""
    judged = [row for row in rows if row.target is not None]
    lines = [f"{sum(row.reached() is True for row in judged)} of {len(judged)} targets met"]
    lines += [f"    {verdict(row)}: {row.name}" for row in judged if row.reached() is not True]
    return "\n".join(lines)


def markdown(rows: Sequence[Row]) -> str:
    """The table of docs/benchmarks.md: p50 (p99) of ours, and p50 of the others."""
    lines = ["| what | target | simpler | beside it | |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        ours = row.figures[OURS]
        tail = f" ({value(row.unit, ours.p99)})" if ours.p99 is not None else ""
        others = [
            f"{name} {value(row.unit, figure.p50)} ({row.ratio(name):.2f})"
            for name, figure in row.figures.items()
            if name != OURS
        ]
        target = "" if row.target is None else target_text(row.target, row.unit)
        cells = (row.name, target, f"{value(row.unit, ours.p50)}{tail}", "; ".join(others), verdict(row))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """All that was measured; times in nanoseconds, memory in bytes."""
    return {
        "machine": machine(),
        "rows": [
            {
                "name": row.name,
                "unit": row.unit,
                "target": None if row.target is None else {"limit": row.target.limit, "of": row.target.of},
                "reached": row.reached(),
                "skipped": dict(row.skipped),
                "figures": {
                    name: {
                        "p50": figure.p50,
                        "p99": figure.p99,
                        "rounds": figure.rounds,
                        "ratio": row.ratio(name),
                    }
                    for name, figure in row.figures.items()
                },
            }
            for row in rows
        ],
    }


def write(rows: Sequence[Row], *, json_path: str | None, markdown_path: str | None) -> None:
    """Keep `rows` in the files that are named."""
    if json_path:
        Path(json_path).write_text(json.dumps(as_json(rows), indent=2) + "\n", encoding="utf-8")
    if markdown_path:
        Path(markdown_path).write_text(f"{machine()}\n\n{markdown(rows)}\n", encoding="utf-8")
