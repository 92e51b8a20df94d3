"""A set of block hashes that is quick to ask for many at once."""

from __future__ import annotations

from array import array
from struct import Struct
from typing import TYPE_CHECKING

import numpy as np

from simpler.kv.block_hash import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import KeysView, Sequence

    from numpy.typing import NDArray

_HALVES = Struct("<QQ")
_SLOTS = 8
_EMPTY = 0
_FEWEST_BUCKETS = 64
_AT_ONCE = 1024


class NameSet:
    """Which of some names are held, as a table of buckets beside the dictionary that holds them.

    A dictionary of a million names takes a chain of cache misses for each; here each name is one cache line
    and the processor fetches many at once. A bucket is chosen by a name's first half and has eight slots for
    second halves, so two names are taken for one another only if some 80 bits of their digests agree. What
    finds its bucket full is kept aside.

    Thread safety: one thread at a time.

    Args:
        held: The names; the owner tells of every change with `add` and `remove`, right after it.
    """

    def __init__(self, held: KeysView[bytes]) -> None:
        self._held = held
        self._aside: set[bytes] = set()
        self._build(_FEWEST_BUCKETS)

    def add(self, name: bytes) -> None:
        """A name is held now that was not."""
        if len(self._held) * 2 > len(self._slots):
            self._build(2 * self._buckets)
            return
        slots = self._slots
        first, tag = self._place(name)
        if tag != _EMPTY:
            for slot in range(first, first + _SLOTS):
                if slots[slot] == _EMPTY:
                    slots[slot] = tag
                    return
        self._aside.add(name)

    def remove(self, name: bytes) -> None:
        """A name is not held any more."""
        if name in self._aside:
            self._aside.remove(name)
            return
        slots = self._slots
        first, tag = self._place(name)
        for slot in range(first, first + _SLOTS):
            if slots[slot] == tag:
                slots[slot] = _EMPTY
                return

    def leading(self, names: Sequence[bytes]) -> int:
        """How many of these, from the first on, are held.

        Raises:
            ValueError: something is no digest of `HASH_BYTES`.
        """
        for begin in range(0, len(names), _AT_ONCE):
            part = names[begin : begin + _AT_ONCE]
            found = self._leading_of(part)
            if found < len(part):
                return begin + found
        return len(names)

    def _leading_of(self, names: Sequence[bytes]) -> int:
        halves = _halves(names)
        chosen, tags = halves[:, 0] & np.uint64(self._buckets - 1), halves[:, 1]
        rows = self._table.take(chosen.view(np.int64), axis=0, mode="clip")
        # The eight answers of a bucket are eight bytes: one number, which is quicker than a reduction.
        known = (rows == tags[:, np.newaxis]).view(np.uint64)[:, 0] != 0
        known &= tags != _EMPTY
        at = int(known.argmin())
        while not known[at] and names[at] in self._aside:
            known[at] = True
            at = int(known.argmin())
        return len(names) if known[at] else at

    def _place(self, name: bytes) -> tuple[int, int]:
        """Where a name's bucket begins, and what stands for the name there."""
        chosen, tag = _HALVES.unpack(name)
        return (chosen & (self._buckets - 1)) * _SLOTS, tag

    def _build(self, buckets: int) -> None:
        """A table for all names that are held, at most half full."""
        self._buckets = buckets
        self._slots = array("Q", bytes(8 * _SLOTS * buckets))
        self._table: NDArray[np.uint64] = np.frombuffer(self._slots, np.uint64).reshape(buckets, _SLOTS)
        self._aside.clear()
        names = list(self._held)
        if not names:
            return
        halves = _halves(names)
        chosen = halves[:, 0] & np.uint64(buckets - 1)
        order = np.argsort(chosen, kind="stable")
        ordered = chosen[order]
        # Names of one bucket are neighbours now: a name's slot is its distance from the first of them.
        slot = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
        tags = halves[order, 1]
        fits = (slot < _SLOTS) & (tags != _EMPTY)
        self._table[ordered[fits], slot[fits]] = tags[fits]
        self._aside.update(names[at] for at in order[~fits])


def _halves(names: Sequence[bytes]) -> NDArray[np.uint64]:
    joined = b"".join(names)
    if len(joined) != HASH_BYTES * len(names):
        raise ValueError(f"names of blocks have {HASH_BYTES} bytes each")
    return np.frombuffer(joined, "<u8").astype(np.uint64, copy=False).reshape(-1, 2)
