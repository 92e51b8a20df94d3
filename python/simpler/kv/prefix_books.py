"""The prefix cache's books: which block is named what, continues which, and is used by whom."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_BLOCK = -1


@dataclass(slots=True)
class Request:
    """What one request has.

    Attributes:
        blocks: In the order of its tokens.
        committed: How many of them, from the first on, are named.
        tip: The block found under the last of these names, held once more for this; `NO_BLOCK` without any.
            It is not the request's own when another block had that name first.
    """

    blocks: list[int]
    committed: int = 0
    tip: int = NO_BLOCK


class Books:
    """The state, in lists by block id, and the steps that keep it whole.

    A block's *holds* are one for each request that has it, one for each request whose tip it is, one for
    each pin, and one for each named block that continues it and is held itself. A named block without holds
    is idle. So whatever continues an idle block is idle too and fell idle before it: giving away the one that
    is idle longest never leaves a hole in a prefix.

    Ownership: `hashes`, `parents` and `holds` grow to `capacity` as blocks are first used.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.index: dict[bytes, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.free: list[int] = []
        self.hashes: list[bytes | None] = []
        self.parents: list[int] = []
        self.holds: list[int] = []
        self.requests: dict[str, Request] = {}
        self.pins: dict[int, tuple[int, ...]] = {}
        self.evictions = 0

    @property
    def available(self) -> int:
        """Blocks that `take` could hand out."""
        return len(self.free) + len(self.idle) + self.capacity - len(self.holds)

    def in_use(self, block: int) -> bool:
        """Whether anybody has the block or could find it."""
        return 0 <= block < len(self.holds) and bool(self.holds[block] or self.hashes[block] is not None)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest prefix that is named here.

        No prefix has a hole, so where it ends is found by halving. The blocks are read off backwards from its
        last one: a dictionary of a million names takes a chain of cache misses for each lookup.
        """
        index = self.index
        if not hashes or hashes[0] not in index:
            return []
        length = len(hashes)
        if hashes[-1] not in index:
            length = bisect_left(hashes, 1, 1, length - 1, key=lambda name: name not in index)
        parents = self.parents
        block = index[hashes[length - 1]]
        blocks = []
        while block >= 0:
            blocks.append(block)
            block = parents[block]
        if len(blocks) != length:
            raise ValueError("hashes must be chained over all blocks before, as hash_blocks does")
        blocks.reverse()
        return blocks

    def take(self, count: int) -> list[int]:
        """So many blocks, each held once: those given back, those never used, then the longest idle.

        REQUIRES: count <= available.
        """
        cut = max(0, len(self.free) - count)
        blocks = self.free[cut:]
        del self.free[cut:]
        for block in blocks:
            self.holds[block] = 1
        first = len(self.holds)
        fresh = min(count - len(blocks), self.capacity - first)
        if fresh:
            self.hashes += [None] * fresh
            self.parents += [NO_BLOCK] * fresh
            self.holds += [1] * fresh
            blocks += range(first, first + fresh)
        for _ in range(count - len(blocks)):
            block, _nothing = self.idle.popitem(last=False)
            self._unname(block)
            self.holds[block] = 1
            self.evictions += 1
            blocks.append(block)
        return blocks

    def name(self, request: Request, names: Sequence[bytes]) -> int:
        """Name the blocks of a request that follow its committed ones; how many names others had already.

        Raises:
            ValueError: a block has another name; what comes before it is named.
        """
        index, hashes, parents, holds = self.index, self.hashes, self.parents, self.holds
        done, tip, taken = request.committed, request.tip, 0
        try:
            for block, name in zip(request.blocks[done:], names, strict=False):
                current = hashes[block]
                found = index.setdefault(name, block) if current is None else block
                if found != block:
                    taken += 1
                elif current is None:
                    hashes[block] = name
                    parents[block] = tip
                    if tip >= 0 and holds[tip]:
                        holds[tip] += 1
                    else:
                        self.hold(tip)
                elif current != name:
                    raise ValueError(f"block {block} has another hash already")
                tip = found
                done += 1
        finally:
            self.move_tip(request, tip)
            request.committed = done
        return taken

    def hold(self, block: int) -> None:
        """Add a hold, and one to each block before it that was idle. `NO_BLOCK` is fine."""
        while block >= 0:
            self.holds[block] += 1
            if self.holds[block] > 1:
                return
            self.idle.pop(block, None)
            block = self.parents[block]

    def hold_chain(self, blocks: list[int], used: int) -> None:
        """Add a hold to each block of a prefix, and one as a tip to its last; the first `used` have some."""
        holds, idle = self.holds, self.idle
        for block in blocks[:used]:
            holds[block] += 1
        if used:
            holds[blocks[used - 1]] += 1  # by the next block, or as the tip
        for block in blocks[used:]:
            holds[block] = 2  # likewise
            del idle[block]

    def release(self, block: int) -> None:
        """Take a hold away: without any a block falls idle, before the one it continues, or is free."""
        while block >= 0:
            self.holds[block] -= 1
            if self.holds[block]:
                return
            if self.hashes[block] is None:
                self.free.append(block)
                return
            self.idle[block] = None
            block = self.parents[block]

    def release_all(self, blocks: Sequence[int]) -> None:
        """Take a hold of each away, from the last one on, so that none falls idle before its successors."""
        holds, hashes, parents, idle = self.holds, self.hashes, self.parents, self.idle
        for block in reversed(blocks):
            left = holds[block] = holds[block] - 1
            if left:
                continue
            if hashes[block] is None:
                self.free.append(block)
                continue
            idle[block] = None
            parent = parents[block]
            if parent >= 0 and holds[parent] > 1:
                holds[parent] -= 1
            else:
                self.release(parent)

    def move_tip(self, request: Request, tip: int) -> None:
        """Let a request's chain end at another block."""
        self.hold(tip)
        self.release(request.tip)
        request.tip = tip

    def forget(self, block: int) -> None:
        """Take a block's name away. REQUIRES: no named block continues it."""
        parent = self.parents[block]
        self._unname(block)
        if self.holds[block]:
            self.release(parent)
        else:
            del self.idle[block]
            self.free.append(block)

    def _unname(self, block: int) -> None:
        name = self.hashes[block]
        assert name is not None
        del self.index[name]
        self.hashes[block] = None
        self.parents[block] = NO_BLOCK

    def check(self) -> None:
        """Verify that everything fits together; AssertionError if not."""
        known = range(len(self.holds))
        assert len(self.hashes) == len(self.parents) == len(self.holds) <= self.capacity
        assert self.index == {name: block for block, name in enumerate(self.hashes) if name is not None}
        expected: Counter[int] = Counter()
        for request in self.requests.values():
            assert request.committed <= len(request.blocks) == len(set(request.blocks))
            assert (request.tip == NO_BLOCK) == (request.committed == 0)
            expected.update(request.blocks)
            expected.update([request.tip] if request.committed else [])
        for blocks in self.pins.values():
            expected.update(blocks)
        for block in known:
            parent = self.parents[block]
            if parent != NO_BLOCK:
                assert self.hashes[block] is not None, f"block {block} continues {parent} without a name"
                assert self.hashes[parent] is not None, f"a hole: block {block} continues {parent}"
                expected[parent] += bool(self.holds[block])
        assert {block: count for block, count in enumerate(self.holds) if count} == +expected
        named_idle = {block for block in known if not self.holds[block] and self.hashes[block] is not None}
        assert named_idle == self.idle.keys()
        order = {block: position for position, block in enumerate(self.idle)}
        for block in self.idle:
            parent = self.parents[block]
            assert parent not in order or order[block] < order[parent], f"{parent} goes before {block}"
        unnamed = [block for block in known if not self.holds[block] and self.hashes[block] is None]
        assert unnamed == sorted(self.free)
