"""What became of blocks in a folder that others write to and evict from without telling anybody.

Thread safety: one call at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from simpler.kv.metadata import KVEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_LOOKED_AT = 64
MEDIUM = "disk"


class StoreEvents:
    """The blocks believed to be there, checked in turn, and what of that nobody was told yet."""

    def __init__(self, has: Callable[[bytes], bool]) -> None:
        """Believe nothing.

        Args:
            has: Whether a block is there now.
        """
        self._has = has
        self._known: OrderedDict[bytes, None] = OrderedDict()  # looked at longest ago first
        self._untold: dict[bytes, str] = {}

    def knows(self, block_hash: bytes) -> bool:
        """Whether a block is believed to be there and is; a look at the disk only in the first case."""
        if block_hash not in self._known:
            return False
        if self._has(block_hash):
            return True
        self.gone([block_hash])
        return False

    def seen(self, hashes: Iterable[bytes]) -> None:
        """These are there. For each, two others are looked at, so that the belief does not grow for ever."""
        count = 0
        for block_hash in hashes:
            count += block_hash not in self._known
            if block_hash not in self._known:
                self._known[block_hash] = None
                self._tell(block_hash, "stored", "removed")
        self._look(min(2 * count, _LOOKED_AT))

    def gone(self, hashes: Iterable[bytes]) -> None:
        """These are not there."""
        for block_hash in hashes:
            if block_hash in self._known:
                del self._known[block_hash]
                self._tell(block_hash, "removed", "stored")

    def take(self) -> list[KVEvent]:
        """What has changed since the last call, after a look at some."""
        self._look(_LOOKED_AT)
        untold, self._untold = self._untold, {}
        events = []
        for kind in ("stored", "removed"):
            hashes = tuple(block_hash for block_hash, what in untold.items() if what == kind)
            if hashes:
                events.append(KVEvent(kind, hashes, MEDIUM))
        return events

    def _tell(self, block_hash: bytes, kind: str, opposite: str) -> None:
        if self._untold.get(block_hash) == opposite:
            del self._untold[block_hash]
        else:
            self._untold[block_hash] = kind

    def _look(self, count: int) -> None:
        for block_hash in _first(self._known, count):
            if self._has(block_hash):
                self._known.move_to_end(block_hash)
            else:
                self.gone([block_hash])


def _first(known: OrderedDict[bytes, None], count: int) -> list[bytes]:
    return [block_hash for block_hash, _ in zip(known, range(count), strict=False)]
