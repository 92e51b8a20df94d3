"""Control calls and extension calls, back to back, one child."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import floor, ours
from benchmarks.figures import OURS, Row, Target, measure
from benchmarks.peers import Peers, answer_same, peers
from benchmarks.sampling import Effort, sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simpler import Worker

BATCH = 100
_PING = "w.control_payload(0, PING)"
_ECHO = 'w.run_chip_control_extension("benchmark-echo", payload, worker_id=0)'


def control(effort: Effort) -> Iterator[Row]:
    """An empty call answered by a no-op C++ handler."""
    with peers(answer_same) as others, ours.tree() as worker:
        yield from _rows(
            effort, others, worker, "control call, empty, no-op C++ handler", _PING, b"", Target(700)
        )


def extension(effort: Effort) -> Iterator[Row]:
    """A call to a no-op Python handler that returns the payload."""
    with peers(answer_same) as others, ours.tree() as worker:
        for nbytes, text, limit in ((1, "1 B", 1500), (4096, "4 KiB", 2200)):
            name = f"extension call, {text} each way, no-op Python handler"
            yield from _rows(effort, others, worker, name, _ECHO, ours.blob(nbytes), Target(limit))


def _rows(
    effort: Effort,
    others: Peers,
    worker: Worker,
    name: str,
    statement: str,
    payload: bytes,
    target: Target,
) -> Iterator[Row]:
    """Two rows: means of batches, which the clock does not add to, and single calls, which have a tail."""
    names = ours.names(worker, payload=payload)
    rounds = effort.rounds(11)
    calls = effort.samples(20_000)
    nbytes = max(1, len(payload))
    batched = {
        OURS: sample(statement, names, calls // BATCH, batch=BATCH, warm_up=1000),
        **floor.exchanges(calls, modes=(floor.SPIN,), batch=BATCH, nbytes=nbytes),
    }
    yield Row(
        f"{name}, batches of {BATCH}", "time", measure(batched, rounds), target, skipped=floor.skipped()
    )
    single = {
        OURS: sample(statement, names, calls, warm_up=1000),
        **floor.exchanges(calls, nbytes=nbytes),
        **others.samplers(effort, 1000, payload),
    }
    yield Row(
        f"{name}, single calls",
        "time",
        measure(single, rounds),
        target,
        skipped={**floor.skipped(), **others.skipped},
    )
