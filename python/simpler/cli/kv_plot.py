"""The plot of a replay: hit rate and load latency over the time of the trace, as SVG text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from simpler.kv import ReplayReport

_WIDTH, _HEIGHT = 800, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 20, 40, 40
_COLOURS = ("#1f6feb", "#d1242f")


@dataclass(frozen=True)
class _Line:
    name: str
    points: Sequence[tuple[float, float]]


def plot_replay(report: ReplayReport, title: str) -> str:
    """An SVG document. Without loads it has the hit rate alone.

    Args:
        report: What to show.
        title: Any text.
    """
    points = report.points
    end_s = points[-1].time_s + points[1].time_s if len(points) > 1 else 1.0
    rate = _Line("hit rate", [(p.time_s, 100 * p.hit_rate) for p in points if p.input_tokens])
    panels = [_panel("tokens found, %", [rate], end_s, 100.0)]
    loads = [
        _Line("p50", [(p.time_s, 1e3 * p.load_p50_s) for p in points if p.load_p50_s is not None]),
        _Line("p99", [(p.time_s, 1e3 * p.load_p99_s) for p in points if p.load_p99_s is not None]),
    ]
    most = max((value for line in loads for _, value in line.points), default=None)
    if most is not None:
        panels.append(_panel("load latency, ms", loads, end_s, most))
    height = 30 + _HEIGHT * len(panels)
    placed = "".join(
        f'<g transform="translate(0 {30 + _HEIGHT * number})">\n{panel}</g>\n'
        for number, panel in enumerate(panels)
    )
    name = escape(_printable(title))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img" font-family="sans-serif" font-size="12">\n'
        f"<title>{name}</title>\n"
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>\n'
        f'<text x="{_WIDTH / 2:g}" y="22" text-anchor="middle" font-size="15">{name}</text>\n'
        f"{placed}</svg>\n"
    )


def _panel(label: str, lines: Sequence[_Line], end_x: float, end_y: float) -> str:
    """Axes from 0 on, and a line for each. The upper end of the second is a tick."""
    steps_x, steps_y = ticks(end_x), ticks(end_y)
    if steps_y[-1] < end_y:
        steps_y.append(steps_y[-1] + steps_y[1])
    top_x, top_y = max(end_x, 1e-9), max(steps_y[-1], 1e-9)
    inner_w, inner_h = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + inner_w * x / top_x, _TOP + inner_h * (1 - y / top_y)

    parts = [f'<text x="{_LEFT}" y="{_TOP - 12}">{escape(label)}</text>\n']
    for value in steps_y:
        _, y = at(0, value)
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>\n'
        )
    for value in steps_x:
        x, y = at(value, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{value:g}</text>\n')
    middle = _LEFT + inner_w / 2
    parts.append(f'<text x="{middle:g}" y="{_HEIGHT - 8}" text-anchor="middle">s of the trace</text>\n')
    for number, (line, colour) in enumerate(zip(lines, _COLOURS, strict=False)):
        path = _path(at(*point) for point in line.points)
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>\n')
        if len(lines) > 1:
            x = _WIDTH - _RIGHT - 60 * (len(lines) - number)
            parts.append(f'<text x="{x}" y="{_TOP - 12}" fill="{colour}">{escape(line.name)}</text>\n')
    return "".join(parts)


def _path(points: Iterable[tuple[float, float]]) -> str:
    """A line through these; a single one is a dot as wide as the line."""
    texts = [f"{x:.1f} {y:.1f}" for x, y in points]
    return "M" + "L".join(texts if len(texts) != 1 else texts * 2) if texts else ""


def ticks(end: float) -> list[float]:
    """From 0 on, not beyond `end`, in steps of 1, 2 or 5 times a power of ten: at most six of them."""
    if end <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(end))
    step = next(power * part for part in (0.2, 0.5, 1, 2) if end / (power * part) <= 5)
    return [step * number for number in range(int(end / step + 1e-9) + 1)]


def _printable(text: str) -> str:
    """Without what XML cannot hold."""
    return "".join(character if character.isprintable() else "?" for character in text)
