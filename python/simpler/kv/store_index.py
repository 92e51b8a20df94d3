"""What each store holds: connectors, remote engines, files. Told by events that may come late or twice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simpler.kv.block_hash import HASH_BYTES
from simpler.kv.name_set import NameSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST_GAPS = 1 << 16
"""How far events of a store may run ahead of one that is missing before that one is given up."""

_LONG = 48
"""From so many names on, the table of `NameSet` is faster than the dictionary."""

MOST_SEQUENCE = (1 << 62) - 1
"""The largest number that an event may have."""


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """What a store did at one step.

    Attributes:
        sequence: 1, 2, 3 and so on in each epoch of the store.
        added: Blocks that it holds from now on.
        removed: Blocks that it no longer holds; a block also in `added` was removed first.
        epoch: Larger each time the store starts anew, empty, such as its start time.
    """

    sequence: int
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    epoch: int = 0


@dataclass(slots=True)
class _Store:
    """One store in its present epoch.

    Attributes:
        held: Blocks, with the sequence number of the event that last added each.
        names: The same blocks, for long lookups.
        gone: Blocks removed by an event that came before an older one; such an older one must not add them.
        applied: Every event up to this number was applied or given up.
        ahead: Numbers above it that were applied.
        newest: The largest number seen.
    """

    epoch: int = 0
    held: dict[bytes, int] = field(default_factory=dict)
    gone: dict[bytes, int] = field(default_factory=dict)
    applied: int = 0
    ahead: set[int] = field(default_factory=set)
    newest: int = 0
    names: NameSet = field(init=False)

    def __post_init__(self) -> None:
        self.names = NameSet(self.held.keys())

    def hold(self, name: bytes, sequence: int) -> None:
        known = name in self.held
        self.held[name] = sequence
        if not known:
            self.names.add(name)

    def lose(self, name: bytes) -> None:
        if self.held.pop(name, None) is not None:
            self.names.remove(name)

    def leading(self, hashes: Sequence[bytes]) -> int:
        if not hashes or hashes[0] not in self.held:
            return 0
        if len(hashes) >= _LONG:
            return self.names.leading(hashes)
        known = list(map(self.held.__contains__, hashes))
        return known.index(False) if False in known else len(known)


class StoreIndex:
    """Which blocks each named store holds, as far as its events tell.

    Events of one store may be applied in any order and repeatedly: once all have come, the outcome is that of
    applying each once in the order of their numbers. Whoever sees the store's doings at once, in order, may
    use `add` and `discard` instead; both ways should not be mixed for one store.

    What is said here is a hint: a block may be gone when it is asked for, and loading it then fails.

    Thread safety: one thread at a time.
    """

    def __init__(self) -> None:
        self._stores: dict[str, _Store] = {}
        self._ignored = 0
        self._missed = 0

    @property
    def stores(self) -> tuple[str, ...]:
        """The names that were told of."""
        return tuple(self._stores)

    @property
    def ignored(self) -> int:
        """Events that came twice, too late, or from an epoch that had ended."""
        return self._ignored

    @property
    def missed(self) -> int:
        """Events that were given up because so many younger ones had come."""
        return self._missed

    def add(self, store: str, hashes: Iterable[bytes]) -> None:
        """The store holds these blocks from now on.

        Raises:
            ValueError: something is no digest of `HASH_BYTES`.
        """
        names = _checked(hashes)
        entry = self._stores.setdefault(store, _Store())
        for name in names:
            entry.hold(name, entry.newest)

    def discard(self, store: str, hashes: Iterable[bytes]) -> None:
        """The store no longer holds these blocks; those that it did not hold are ignored."""
        entry = self._stores.get(store)
        if entry is not None:
            for name in hashes:
                entry.lose(name)

    def drop(self, store: str) -> None:
        """Forget all about a store: its events begin anew, in any epoch."""
        self._stores.pop(store, None)

    def apply(self, store: str, event: StoreEvent) -> bool:
        """Take an event into account.

        Returns:
            Whether it was new; False when it came before, too late, or from an epoch that has ended.

        Raises:
            ValueError: a sequence number below 1 or above `MOST_SEQUENCE`, or something that is no digest.
        """
        if not 1 <= event.sequence <= MOST_SEQUENCE:
            raise ValueError(f"sequence is {event.sequence}; events of a store are numbered from 1 on")
        _checked(event.added)
        entry = self._stores.setdefault(store, _Store(event.epoch))
        if event.epoch > entry.epoch:
            entry = self._stores[store] = _Store(event.epoch)
        stale = event.epoch < entry.epoch or event.sequence <= entry.applied
        if stale or event.sequence in entry.ahead:
            self._ignored += 1
            return False
        for name in event.removed:
            if entry.held.get(name, 0) < event.sequence:
                entry.lose(name)
                entry.gone[name] = max(event.sequence, entry.gone.get(name, 0))
        for name in event.added:
            if entry.gone.get(name, 0) <= event.sequence:
                entry.hold(name, max(event.sequence, entry.held.get(name, 0)))
        self._advance(entry, event.sequence)
        return True

    def longest_prefix(self, hashes: Sequence[bytes], store: str | None = None) -> dict[str, int]:
        """How many of these blocks, from the first on, each store holds; only that one when it is named."""
        return {
            name: entry.leading(hashes)
            for name, entry in self._stores.items()
            if store is None or name == store
        }

    def __len__(self) -> int:
        return sum(len(entry.held) for entry in self._stores.values())

    def _advance(self, entry: _Store, sequence: int) -> None:
        """Note an event as applied, and forget what only kept older ones in their place."""
        entry.newest = max(entry.newest, sequence)
        ahead = entry.ahead
        ahead.add(sequence)
        too_old = range(entry.applied + 1, entry.newest - MOST_GAPS)
        if too_old:
            # Numbers come from outside: a leap must not take time in proportion to it.
            known = {n for n in ahead if n in too_old} if len(too_old) > len(ahead) else ahead & {*too_old}
            self._missed += len(too_old) - len(known)
            ahead -= known
            entry.applied = too_old[-1]
        while entry.applied + 1 in ahead:
            entry.applied += 1
            ahead.remove(entry.applied)
        if not ahead:
            entry.gone.clear()


def _checked(hashes: Iterable[bytes]) -> tuple[bytes, ...]:
    names = tuple(hashes)
    if any(len(name) != HASH_BYTES for name in names):
        raise ValueError(f"names of blocks have {HASH_BYTES} bytes each")
    return names
