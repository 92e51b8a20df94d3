"""Which blocks of a chip's memory hold which prefixes, who uses them, and which may be overwritten next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from simpler.kv.prefix_books import Books, Request
from simpler.kv.prefix_damage import find_damage

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks that a request may use until it is freed.

    Attributes:
        blocks: In the order of the request's tokens.
        cached: How many of them, from the first on, already hold their tokens' KV.
    """

    blocks: tuple[int, ...]
    cached: int


@dataclass(frozen=True, slots=True)
class BackPressure:
    """There were too few blocks, and nothing was changed: free or finish a request, then ask again.

    Attributes:
        needed: Blocks that had to be found.
        available: Blocks that could have been handed out.
        capacity: Blocks that there are in all; a need above it can never be met.
    """

    needed: int
    available: int
    capacity: int

    def __str__(self) -> str:
        return (
            f"{self.needed} blocks needed, {self.available} of {self.capacity} available: "
            "free requests or enlarge capacity_blocks"
        )


@dataclass(frozen=True, slots=True)
class Pin:
    """Blocks that a transfer reads or writes; give it back to `PrefixCache.unpin` when access has stopped."""

    number: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """What has happened so far, in blocks.

    Attributes:
        hits: Looked up by `PrefixCache.allocate` and found.
        misses: Looked up and not found.
        evictions: Cached blocks that were given to somebody else.
        duplicates: Committed when another block already held the same tokens.
        bad: Held wrong KV after a failed load, or KV computed from it.
    """

    hits: int
    misses: int
    evictions: int
    duplicates: int
    bad: int


class PrefixCache:
    """Block ids for requests, with what is still cached of their prefixes.

    A request gets blocks with `allocate` (and `extend`), tells with `commit` which of them now hold the KV of
    their tokens, and gives all back with `free`. Committed blocks stay cached until their room is needed: the
    longest unused first, and a block always after those that continue it.

    Thread safety: one thread at a time.

    Args:
        capacity_blocks: Blocks there are; their ids are 0 to this minus one.

    Raises:
        ValueError: no capacity.
    """

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise ValueError(f"capacity_blocks is {capacity_blocks}; it must be at least 1")
        self._books = Books(capacity_blocks)
        self._hits = self._misses = self._duplicates = self._bad = 0
        self._next_pin = 0

    @property
    def stats(self) -> PrefixCacheStats:
        """The counters as they are now."""
        return PrefixCacheStats(self._hits, self._misses, self._books.evictions, self._duplicates, self._bad)

    @property
    def capacity_blocks(self) -> int:
        """Blocks there are."""
        return self._books.capacity

    @property
    def available_blocks(self) -> int:
        """Blocks that the next request can get, cached ones that nobody uses included."""
        return self._books.available

    @property
    def cached_blocks(self) -> int:
        """Blocks that a lookup can find."""
        return len(self._books.index)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._books.index

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix. They may be evicted until a request allocates them."""
        return self._books.match(hashes)

    def allocate(
        self, request_id: str, num_blocks: int, hashes: Sequence[bytes] = ()
    ) -> Allocation | BackPressure:
        """Give a new request its blocks: cached ones of its prefix, fresh ones for the rest; all or none.

        Args:
            request_id: Not in use; it is again after `free`.
            num_blocks: Blocks in all, at least ``len(hashes)``.
            hashes: Names of the blocks to look up, as `hash_blocks` gives them, from the request's first on.
                To have something left to compute, leave out the last one of a prompt that fills its blocks.

        Raises:
            ValueError: the request has blocks already, or fewer blocks than hashes are wanted.
        """
        books = self._books
        if request_id in books.requests:
            raise ValueError(f"request {request_id!r} has blocks already; use extend, or free it first")
        if num_blocks < len(hashes):
            raise ValueError(f"{num_blocks} blocks wanted for {len(hashes)} hashes; there must be as many")
        found = books.match(hashes)
        # What continues an idle block is idle: the idle ones, which this would use up, are the last.
        used = len(found)
        while used and not books.holds[found[used - 1]]:
            used -= 1
        shortage = self._shortage(num_blocks - len(found), reserved=len(found) - used)
        if shortage is not None:
            return shortage
        books.hold_chain(found, used)
        request = Request(found + books.take(num_blocks - len(found)), len(found))
        if found:
            request.tip = found[-1]
        books.requests[request_id] = request
        self._hits += len(found)
        self._misses += len(hashes) - len(found)
        return Allocation(tuple(request.blocks), len(found))

    def extend(self, request_id: str, num_blocks: int) -> Allocation | BackPressure:
        """Give a request so many more blocks, such as for the tokens it generates; all or none.

        Raises:
            ValueError: no such request, or a negative number.
        """
        request = self._request(request_id)
        if num_blocks < 0:
            raise ValueError(f"{num_blocks} more blocks wanted; there must be none or more")
        shortage = self._shortage(num_blocks)
        if shortage is not None:
            return shortage
        blocks = self._books.take(num_blocks)
        request.blocks += blocks
        return Allocation(tuple(blocks), 0)

    def commit(self, request_id: str, hashes: Sequence[bytes]) -> int:
        """Say that a request's first blocks now hold the KV of these names, so that others may find them.

        Commit what has been computed, or loaded without error, and not before. When another block already
        has the same name, that one stays the one that is found; the request's own keeps its place in the
        request and is free for others after it.

        Args:
            request_id: Whose blocks.
            hashes: From its first block on; those committed earlier are given again.

        Returns:
            Blocks that have become findable.

        Raises:
            ValueError: no such request, fewer blocks than hashes, or another hash than one that its block
                has; what comes before that one is committed.
        """
        books = self._books
        request = self._request(request_id)
        if len(hashes) > len(request.blocks):
            raise ValueError(f"{len(hashes)} hashes for the {len(request.blocks)} blocks of {request_id!r}")
        done = request.committed
        if len(hashes) <= done:
            return 0
        if done and books.hashes[request.tip] != hashes[done - 1]:
            raise ValueError(f"hash {done - 1} of request {request_id!r} is not the one committed before")
        before = len(books.index)
        self._duplicates += books.name(request, hashes[done:])
        return len(books.index) - before

    def free(self, request_id: str) -> None:
        """Take a request's blocks back, finished or aborted. Pinned ones follow when their last pin goes.

        Raises:
            ValueError: no such request.
        """
        request = self._request(request_id)
        books = self._books
        del books.requests[request_id]
        books.release(request.tip)
        books.release_all(request.blocks)

    def pin(self, blocks: Iterable[int]) -> Pin:
        """Keep blocks from being evicted or handed out while a transfer reads or writes them.

        Blocks may be pinned several times, and pins outlive the request.

        Raises:
            ValueError: a block that is free: nothing says what it would hold.
        """
        books = self._books
        pin = Pin(self._next_pin, tuple(blocks))
        for block in pin.blocks:
            if not books.in_use(block):
                raise ValueError(
                    f"block {block} is free; only blocks of a request or cached ones can be pinned"
                )
        for block in pin.blocks:
            books.hold(block)
        books.pins[pin.number] = pin.blocks
        self._next_pin += 1
        return pin

    def unpin(self, pin: Pin) -> bool:
        """Say that the access has stopped. A pin given back before is ignored, and the answer is False."""
        blocks = self._books.pins.pop(pin.number, None)
        if blocks is None:
            return False
        self._books.release_all(blocks)
        return True

    def mark_bad(self, blocks: Iterable[int]) -> dict[str, int]:
        """Forget what blocks hold after a failed load, and all that was computed from it.

        That is: what follows them in each request that has them, cached blocks that continue those, and so
        on. They are found no more until they are committed anew. Requests keep their blocks, pins hold.

        Args:
            blocks: Ids; those that nobody has any more are ignored.

        Returns:
            By request, the first position that has to be loaded or computed again.
        """
        damage = find_damage(self._books, blocks)
        for request, committed, tip in damage.cuts:
            self._books.move_tip(request, tip)
            request.committed = committed
        for block in damage.named:
            self._books.forget(block)
        self._bad += len(damage.blocks)
        return damage.requests

    def check(self) -> None:
        """Verify every invariant, in time that grows with the blocks: for tests.

        Raises:
            AssertionError: one does not hold.
        """
        self._books.check()

    def _request(self, request_id: str) -> Request:
        request = self._books.requests.get(request_id)
        if request is None:
            raise ValueError(f"request {request_id!r} has no blocks: never allocated, or freed")
        return request

    def _shortage(self, needed: int, reserved: int = 0) -> BackPressure | None:
        available = self._books.available - reserved
        return BackPressure(needed, available, self._books.capacity) if needed > available else None
