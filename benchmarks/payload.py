"""Large payloads: each copy that a call makes, against one memcpy into memory in the same state.

A payload is copied into a shared arena whose pages stay ("warm"), and out of it into a new bytes object
("fresh": the allocator gets pages from the kernel, which fill on first touch, and gives them back).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks import floor, ours
from benchmarks.figures import OURS, Figure, Row, Target, figure_of, measure
from benchmarks.peers import Peers, peers
from benchmarks.sampling import Effort, sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.figures import Sampler
    from simpler import Worker

MEMCPYS = "the same number of memcpys"
_WARM, _FRESH = "memcpy, warm", "memcpy, fresh"


@dataclass(frozen=True)
class _Way:
    """One way a payload goes, and the copies on it."""

    name: str
    statement: str
    warm: int
    fresh: int
    reply: bool = False


_WAYS = (
    _Way("request to a C++ handler (PING): 1 copy, warm", "w.control_payload(0, PING, payload)", 1, 0),
    _Way(
        "request to a Python handler: 2 copies, warm and fresh",
        'w.run_chip_control_extension("benchmark-sink", payload, worker_id=0)',
        1,
        1,
    ),
    _Way(
        "reply of a Python handler: 2 copies, warm and fresh",
        'w.run_chip_control_extension("benchmark-source", payload, worker_id=0)',
        1,
        1,
        reply=True,
    ),
)


def _answer(payload: bytes) -> bytes:
    """Digits ask for so many bytes; any other payload is a request that gets one byte."""
    return ours.blob(int(payload)) if payload[:1].isdigit() else b"x"


def payload(effort: Effort) -> Iterator[Row]:
    """1 MiB and 64 MiB, request and reply."""
    for text, nbytes, count, rounds in (("1 MiB", 1 << 20, 200, 7), ("64 MiB", 64 << 20, 5, 5)):
        with peers(_answer) as others, ours.tree() as worker:
            for way in _WAYS:
                yield _row(effort, others, worker, way, text, nbytes, count, rounds)


def _row(
    effort: Effort,
    others: Peers,
    worker: Worker,
    way: _Way,
    text: str,
    nbytes: int,
    count: int,
    rounds: int,
) -> Row:
    sent = str(nbytes).encode() if way.reply else ours.blob(nbytes)
    samples = effort.samples(count)
    contenders: dict[str, Sampler] = {
        OURS: sample(way.statement, ours.names(worker, payload=sent), samples, warm_up=2)
    }
    if not floor.missing():
        contenders[_WARM] = floor.memcpy("warm", nbytes, samples)
        if way.fresh:
            contenders[_FRESH] = floor.memcpy("fresh", nbytes, samples)
    if way.fresh:
        contenders |= others.samplers(effort, count, sent)
    figures = measure(contenders, effort.rounds(rounds))
    if _WARM in figures:
        figures = _with_sum(figures, way)
    return Row(
        f"{text}, {way.name}",
        "time",
        figures,
        Target(1.5, of=MEMCPYS),
        skipped={**floor.skipped(), **others.skipped},
    )


def _with_sum(figures: dict[str, Figure], way: _Way) -> dict[str, Figure]:
    """Add what the way's copies would cost as plain memcpys, round by round."""
    warm = figures[_WARM].rounds
    fresh = figures[_FRESH].rounds if way.fresh else [0.0] * len(warm)
    sums = [[way.warm * w + way.fresh * f] for w, f in zip(warm, fresh, strict=True)]
    return {OURS: figures.pop(OURS), MEMCPYS: figure_of(sums), **figures}
