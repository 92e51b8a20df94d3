"""The prefix cache's rules, each worked out anew from what there is: slow, and plain to read."""

from __future__ import annotations

from dataclasses import dataclass, field

Path = tuple[int, ...]
"""A block's tokens and those of all blocks before it, one token a block: its name here."""


@dataclass
class NaiveRequest:
    path: Path
    blocks: list[int]
    committed: int


@dataclass
class NaivePrefixCache:
    capacity: int
    cached: dict[Path, int] = field(default_factory=dict)
    requests: dict[str, NaiveRequest] = field(default_factory=dict)
    pinned: list[list[int]] = field(default_factory=list)
    idle_since: dict[Path, int] = field(default_factory=dict)
    steps: int = 0

    def match(self, path: Path) -> int:
        return next((n for n in range(len(path)) if path[: n + 1] not in self.cached), len(path))

    def blocks_in_hand(self) -> set[int]:
        """Of requests and pins."""
        hands = [*(request.blocks for request in self.requests.values()), *self.pinned]
        return {block for blocks in hands for block in blocks}

    def used(self) -> set[Path]:
        """Cached names that may not be evicted: in somebody's hand, or before one that is."""
        hand = self.blocks_in_hand()
        ends = [path for path, block in self.cached.items() if block in hand]
        ends += [request.path[: request.committed] for request in self.requests.values()]
        return {end[:n] for end in ends for n in range(1, len(end) + 1)}

    def idle(self) -> set[Path]:
        return self.cached.keys() - self.used()

    def unavailable(self) -> set[int]:
        return self.blocks_in_hand() | {self.cached[path] for path in self.used()}

    def available(self) -> int:
        return self.capacity - len(self.unavailable())

    def available_beside(self, path: Path) -> int:
        """When the cached prefix of `path` is to be kept."""
        kept = {path[:n] for n in range(1, self.match(path) + 1)}
        return self.available() - len(kept & self.idle())

    def step_done(self) -> None:
        """Note who has fallen idle in this step."""
        self.steps += 1
        self.idle_since = {path: self.idle_since.get(path, self.steps) for path in self.idle()}

    def evict(self, gone: set[Path]) -> None:
        """Check that these may go now, and let them go."""
        idle = self.idle()
        assert gone <= idle
        stay = [self.idle_since[path] for path in idle - gone]
        assert max((self.idle_since[path] for path in gone), default=0) <= min(stay, default=self.steps)
        for path in gone:
            del self.cached[path], self.idle_since[path]
        assert all(path[:-1] in self.cached for path in self.cached if len(path) > 1), "a hole"

    def commit(self, request: NaiveRequest, count: int) -> int:
        before = len(self.cached)
        for n in range(request.committed, count):
            self.cached.setdefault(request.path[: n + 1], request.blocks[n])
        request.committed = max(request.committed, count)
        return len(self.cached) - before

    def mark_bad(self, blocks: set[int]) -> dict[str, int]:
        bad = blocks & self._known()
        size = -1
        while size < len(bad):
            size = len(bad)
            for request in self.requests.values():
                bad |= set(request.blocks[self._first(request, bad) :])
            spoilt = [path for path, block in self.cached.items() if block in bad]
            bad |= {self.cached[path] for path in self.cached if any(path[: len(s)] == s for s in spoilt)}
        self.cached = {path: block for path, block in self.cached.items() if block not in bad}
        for request in self.requests.values():
            request.committed = min(request.committed, self.match(request.path))
        firsts = {name: self._first(request, bad) for name, request in self.requests.items()}
        return {name: first for name, first in firsts.items() if first < len(self.requests[name].blocks)}

    def _known(self) -> set[int]:
        return self.blocks_in_hand() | set(self.cached.values())

    @staticmethod
    def _first(request: NaiveRequest, bad: set[int]) -> int:
        positions = [at for at, block in enumerate(request.blocks) if block in bad]
        return min(positions, default=len(request.blocks))
