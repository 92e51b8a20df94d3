"""Random lives of requests: the prefix cache does what the naive one does, and loses no block."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv.naive_prefix_cache import NaivePrefixCache, NaiveRequest, Path
from simpler.kv import Allocation, BackPressure, BlockNamespace, Pin, PrefixCache, hash_blocks

SPACE = BlockNamespace("model", "main", "float16", block_size=1)

paths = st.lists(st.integers(0, 1), max_size=6).map(tuple)


def names(path: Path) -> list[bytes]:
    return hash_blocks(SPACE, path)


class PrefixCacheMachine(RuleBasedStateMachine):
    """Few blocks and few tokens, so that requests meet, and the room runs out, all the time."""

    cache: PrefixCache
    naive: NaivePrefixCache

    @initialize(capacity=st.integers(1, 14))
    def begin(self, capacity: int) -> None:
        self.cache = PrefixCache(capacity)
        self.naive = NaivePrefixCache(capacity)
        self.pins: list[Pin] = []
        self.count = 0

    @rule(path=paths, extra=st.integers(0, 2), looked_up=st.integers(0, 6))
    def allocate(self, path: Path, extra: int, looked_up: int) -> None:
        naive = self.naive
        name, wanted, found = f"r{self.count}", len(path) + extra, path[: naive.match(path[:looked_up])]
        self.count += 1
        available = naive.available_beside(found)
        got = self.cache.allocate(name, wanted, names(path)[:looked_up])
        if wanted - len(found) > available:
            assert got == BackPressure(wanted - len(found), available, naive.capacity)
            return
        assert isinstance(got, Allocation)
        assert got.cached == len(found)
        assert list(got.blocks[: got.cached]) == [naive.cached[path[: n + 1]] for n in range(got.cached)]
        naive.requests[name] = NaiveRequest(path, list(got.blocks[: got.cached]), got.cached)
        self.take_fresh(name, got.blocks[got.cached :])

    @precondition(lambda self: self.naive.requests)
    @rule(data=st.data(), more=st.integers(0, 3))
    def extend(self, data: st.DataObject, more: int) -> None:
        name = self.draw_request(data)
        available = self.naive.available()
        got = self.cache.extend(name, more)
        if more > available:
            assert got == BackPressure(more, available, self.naive.capacity)
        else:
            assert isinstance(got, Allocation)
            self.take_fresh(name, got.blocks)

    @precondition(lambda self: self.naive.requests)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name = self.draw_request(data)
        request = self.naive.requests[name]
        count = data.draw(st.integers(0, min(len(request.path), len(request.blocks))))
        assert self.cache.commit(name, names(request.path[:count])) == self.naive.commit(request, count)

    @precondition(lambda self: self.naive.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = self.draw_request(data)
        self.cache.free(name)
        del self.naive.requests[name]

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        known = sorted(self.naive.blocks_in_hand() | set(self.naive.cached.values()))
        blocks = data.draw(st.lists(st.sampled_from(known), max_size=4)) if known else []
        self.pins.append(self.cache.pin(blocks))
        self.naive.pinned.append(blocks)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.pins) - 1))
        pin = self.pins.pop(at)
        self.naive.pinned.pop(at)
        assert self.cache.unpin(pin)
        assert not self.cache.unpin(pin)

    @rule(blocks=st.sets(st.integers(0, 13), max_size=2))
    def mark_bad(self, blocks: set[int]) -> None:
        assert self.cache.mark_bad(blocks) == self.naive.mark_bad(blocks)

    @rule(path=paths)
    def match(self, path: Path) -> None:
        found = self.naive.match(path)
        assert self.cache.match(names(path)) == [self.naive.cached[path[: n + 1]] for n in range(found)]

    @invariant()
    def same_as_the_naive_one(self) -> None:
        if not hasattr(self, "naive"):
            return
        self.naive.step_done()
        self.cache.check()
        assert self.cache.available_blocks == self.naive.available()
        assert self.cache.cached_blocks == len(self.naive.cached)
        assert all(names(path)[-1] in self.cache for path in self.naive.cached)

    def teardown(self) -> None:
        if not hasattr(self, "naive"):
            return
        for name in self.naive.requests:
            self.cache.free(name)
        for pin in self.pins:
            self.cache.unpin(pin)
        self.cache.check()
        assert self.cache.available_blocks == self.cache.capacity_blocks

    def draw_request(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.naive.requests)))

    def take_fresh(self, name: str, blocks: tuple[int, ...]) -> None:
        """A request got these: whatever was cached there is evicted, and only if there was nothing else."""
        naive = self.naive
        room = naive.capacity - len(naive.blocks_in_hand() | set(naive.cached.values()))
        gone = {path for path in naive.cached if names(path)[-1] not in self.cache}
        assert len(gone) == max(0, len(blocks) - room)
        naive.evict(gone)
        assert set(blocks).isdisjoint(naive.blocks_in_hand() | set(naive.cached.values()))
        assert set(blocks) <= set(range(naive.capacity))
        assert len(set(blocks)) == len(blocks)
        naive.requests[name].blocks += blocks


PrefixCacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPrefixCacheAgainstAModel = PrefixCacheMachine.TestCase
