"""KV caches: moving blocks between chips, finding prefixes among a million, the bookkeeping of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.kv_moves import moves
from benchmarks.kv_prefix import prefix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.figures import Row
    from benchmarks.sampling import Effort


def kv(effort: Effort) -> Iterator[Row]:
    """First what forks, while this process is small."""
    yield from moves(effort)
    yield from prefix(effort)
