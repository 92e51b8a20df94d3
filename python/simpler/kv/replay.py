"""Replay a trace of requests through a prefix cache and a store: what would have been found, and how fast."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from simpler import SimplerError
from simpler.kv.block_hash import BlockNamespace, hash_blocks
from simpler.kv.prefix_cache import BackPressure, PrefixCache
from simpler.kv.trace import TRACE_BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from simpler.kv.trace import TraceRequest

MOST_POINTS = 60
"""Into so many parts the time of a trace is divided at most, for `ReplayReport.points`."""

_OBSERVE_EVERY = 64


class BlockStore(Protocol):
    """Where blocks of bytes are kept under their hashes."""

    def longest_prefix(self, hashes: Sequence[bytes], /) -> int:
        """How many of these, from the first on, are there."""

    def get_into(self, block_hash: bytes, buffer: memoryview, /) -> bool:
        """Fill the buffer with a block; False when it is not there any more, or damaged."""

    def put(self, block_hash: bytes, data: memoryview, /) -> bool:
        """Keep a block; False when it was there already. SimplerError when it cannot be kept."""


@dataclass(frozen=True, slots=True)
class ReplayPoint:
    """A part of the trace's time.

    Attributes:
        time_s: When it begins, from the beginning of the trace on.
        input_tokens: Tokens of the prompts that came in it.
        hit_tokens: How many of them did not have to be computed.
        load_p50_s: Half of the loads took at most this long; None without loads.
        load_p99_s: 99% of them did.
    """

    time_s: float
    input_tokens: int
    hit_tokens: int
    load_p50_s: float | None
    load_p99_s: float | None

    @property
    def hit_rate(self) -> float:
        """Of tokens."""
        return self.hit_tokens / max(1, self.input_tokens)


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What became of the requests.

    Attributes:
        requests: How many there were.
        refused: Those of them that need more blocks than there are; nothing of them was cached.
        block_size: Tokens in a block.
        input_tokens: Tokens of all prompts.
        blocks: Full blocks of all prompts.
        cached_blocks: Found in the cache.
        loaded_blocks: Not in the cache, but loaded from the store.
        evictions: Blocks that had to leave the cache.
        bytes_loaded: Read from the store.
        bytes_saved: Written to it.
        failed_loads: Blocks that the store named and then did not deliver as they were.
        failed_saves: Blocks that it could not keep.
        load_p50_s: Half of the requests that loaded anything waited at most this long; None without any.
        load_p99_s: 99% of them did.
        bookkeeping_s: Time spent on hashes and the cache.
        elapsed_s: Time spent in all.
        points: The same over the time of the trace.
    """

    requests: int
    refused: int
    block_size: int
    input_tokens: int
    blocks: int
    cached_blocks: int
    loaded_blocks: int
    evictions: int
    bytes_loaded: int
    bytes_saved: int
    failed_loads: int
    failed_saves: int
    load_p50_s: float | None
    load_p99_s: float | None
    bookkeeping_s: float
    elapsed_s: float
    points: tuple[ReplayPoint, ...]

    @property
    def token_hit_rate(self) -> float:
        """Tokens that did not have to be computed, of all tokens of the prompts."""
        return (self.cached_blocks + self.loaded_blocks) * self.block_size / max(1, self.input_tokens)

    @property
    def block_hit_rate(self) -> float:
        """Full blocks that did not have to be computed, of all full blocks."""
        return (self.cached_blocks + self.loaded_blocks) / max(1, self.blocks)

    @property
    def bytes_moved(self) -> int:
        """To and from the store."""
        return self.bytes_loaded + self.bytes_saved

    @property
    def requests_per_s(self) -> float:
        """Requests by the time spent on their bookkeeping."""
        return self.requests / max(self.bookkeeping_s, 1e-9)


class TraceHasher:
    """Hashes of the full blocks of a trace's requests, for a block size of one's own.

    A trace has one number for each 512 tokens. A larger block is named by the numbers that it spans, a
    smaller one by its number and its place in it: two blocks have equal names exactly when the trace says
    that their tokens, and all before, are the same.

    Args:
        block_size: Tokens; divides 512 or is a multiple of it.
        block_bytes: Bytes of a block, which is part of the names: a store may outlive the choice.

    Raises:
        ValueError: another block size.
    """

    def __init__(self, block_size: int, block_bytes: int) -> None:
        whole = block_size >= 1 and block_size % TRACE_BLOCK_TOKENS == 0
        if not whole and (block_size < 1 or TRACE_BLOCK_TOKENS % block_size):
            raise ValueError(f"block_size is {block_size}; it must divide 512 or be a multiple of it")
        self._block_size = block_size
        # A smaller block is three words: the number's halves and the place. A larger one is all its numbers.
        words = 2 * block_size // TRACE_BLOCK_TOKENS if whole else 3
        extra = f"{block_size} tokens of {block_bytes} bytes"
        self._namespace = BlockNamespace("trace", "", "bytes", words, extra)

    def hashes(self, request: TraceRequest) -> list[bytes]:
        """One for each full block of the prompt."""
        ids = np.array(request.hash_ids, np.uint64)
        parts = TRACE_BLOCK_TOKENS // self._block_size
        if parts <= 1:
            ids = ids[: request.input_length // TRACE_BLOCK_TOKENS]
            return hash_blocks(self._namespace, _words(ids).reshape(-1))
        count = request.input_length // self._block_size
        words = np.empty((len(ids), parts, 3), np.uint32)
        words[:, :, :2] = _words(ids)[:, np.newaxis]
        words[:, :, 2] = np.arange(parts)
        return hash_blocks(self._namespace, words.reshape(-1)[: 3 * count])


def _words(
    ids: np.ndarray[tuple[int], np.dtype[np.uint64]],
) -> np.ndarray[tuple[int, int], np.dtype[np.uint32]]:
    """The low and the high half of each."""
    words = np.empty((len(ids), 2), np.uint32)
    words[:, 0] = ids & np.uint64(0xFFFFFFFF)
    words[:, 1] = ids >> np.uint64(32)
    return words


def replay_trace(
    requests: Sequence[TraceRequest],
    *,
    capacity_blocks: int,
    block_size: int = TRACE_BLOCK_TOKENS,
    store: BlockStore | None = None,
    block_bytes: int = 4096,
    observe: Callable[[int], None] | None = None,
) -> ReplayReport:
    """Let each request, one after another, find, load, compute and keep its blocks as far as there is room.

    Nothing is computed: what stands for the KV of a block is a pattern made from its hash, `block_bytes`
    long. A request has blocks for its prompt and its output while it runs; the full ones of its prompt are
    cached afterwards. With a store it loads what the cache lacks, as far as the prefix goes, and saves the
    rest.

    Args:
        requests: In the order of their times.
        capacity_blocks: Blocks of the cache.
        block_size: Tokens of a block; divides 512 or is a multiple of it.
        store: Where blocks are kept beyond the cache.
        block_bytes: Size of a block, at least 16.
        observe: Called with the number of requests done, now and then and at the end.

    Raises:
        ValueError: a capacity, block size or number of bytes that cannot be.
    """
    return _Replay(requests, capacity_blocks, block_size, store, block_bytes).run(observe)


@dataclass(slots=True)
class _Part:
    input_tokens: int = 0
    hit_tokens: int = 0
    loads_s: list[float] = field(default_factory=list)


class _Replay:
    def __init__(
        self,
        requests: Sequence[TraceRequest],
        capacity_blocks: int,
        block_size: int,
        store: BlockStore | None,
        block_bytes: int,
    ) -> None:
        if block_bytes < 16:
            raise ValueError(f"block_bytes is {block_bytes}; it must be at least 16")
        self._requests = requests
        self._cache = PrefixCache(capacity_blocks)
        self._hasher = TraceHasher(block_size, block_bytes)
        self._block_size = block_size
        self._store = store
        self._block_bytes = block_bytes
        self._buffer = bytearray(block_bytes)
        self._begin_ms = requests[0].timestamp_ms if requests else 0
        span_ms = (requests[-1].timestamp_ms - self._begin_ms if requests else 0) + 1
        self._part_ms = -(-span_ms // MOST_POINTS)
        self._parts = [_Part() for _ in range(-(-span_ms // self._part_ms))]
        self._bookkeeping_s = 0.0
        self._refused = self._loaded = self._saved = self._failed_loads = self._failed_saves = 0

    def run(self, observe: Callable[[int], None] | None) -> ReplayReport:
        begin = time.perf_counter()
        for number, request in enumerate(self._requests):
            if observe is not None and number % _OBSERVE_EVERY == 0:
                observe(number)
            self._request(str(number), request)
        if observe is not None:
            observe(len(self._requests))
        return self._report(time.perf_counter() - begin)

    def _request(self, name: str, request: TraceRequest) -> None:
        part = self._parts[(request.timestamp_ms - self._begin_ms) // self._part_ms]
        part.input_tokens += request.input_length
        begin = time.perf_counter()
        hashes = self._hasher.hashes(request)
        blocks = -(-(request.input_length + request.output_length) // self._block_size)
        cache = self._cache
        got = cache.allocate(name, blocks, hashes)
        self._bookkeeping_s += time.perf_counter() - begin
        if isinstance(got, BackPressure):
            self._refused += 1
            return
        ready = got.cached
        if self._store is not None:
            ready += self._load(self._store, hashes[ready:], got.blocks[ready:], part)
            for block_hash in hashes[ready:]:
                self._save(self._store, block_hash)
        begin = time.perf_counter()
        cache.commit(name, hashes)
        cache.free(name)
        self._bookkeeping_s += time.perf_counter() - begin
        part.hit_tokens += ready * self._block_size

    def _load(self, store: BlockStore, hashes: list[bytes], blocks: Sequence[int], part: _Part) -> int:
        """Load as far as the store has the prefix; how many blocks are good."""
        if not hashes:
            return 0
        begin = time.perf_counter()
        found = store.longest_prefix(hashes)
        took_s = time.perf_counter() - begin
        if not found:
            return 0
        pin = self._cache.pin(blocks[:found])
        loaded = 0
        for block_hash in hashes[:found]:
            begin = time.perf_counter()
            good = store.get_into(block_hash, memoryview(self._buffer))
            took_s += time.perf_counter() - begin
            if not good or self._buffer != self._content(block_hash):
                self._failed_loads += 1
                self._cache.mark_bad([blocks[loaded]])
                break
            loaded += 1
        self._cache.unpin(pin)
        part.loads_s.append(took_s)
        self._loaded += loaded
        return loaded

    def _save(self, store: BlockStore, block_hash: bytes) -> None:
        try:
            self._saved += store.put(block_hash, memoryview(self._content(block_hash)))
        except SimplerError:
            self._failed_saves += 1

    def _content(self, block_hash: bytes) -> bytes:
        return (block_hash * (self._block_bytes // len(block_hash) + 1))[: self._block_bytes]

    def _report(self, elapsed_s: float) -> ReplayReport:
        stats = self._cache.stats
        loads_s = sorted(load for part in self._parts for load in part.loads_s)
        return ReplayReport(
            requests=len(self._requests),
            refused=self._refused,
            block_size=self._block_size,
            input_tokens=sum(request.input_length for request in self._requests),
            blocks=sum(request.input_length // self._block_size for request in self._requests),
            cached_blocks=stats.hits,
            loaded_blocks=self._loaded,
            evictions=stats.evictions,
            bytes_loaded=self._loaded * self._block_bytes,
            bytes_saved=self._saved * self._block_bytes,
            failed_loads=self._failed_loads,
            failed_saves=self._failed_saves,
            load_p50_s=_share(loads_s, 0.5),
            load_p99_s=_share(loads_s, 0.99),
            bookkeeping_s=self._bookkeeping_s,
            elapsed_s=elapsed_s,
            points=tuple(self._point(number, part) for number, part in enumerate(self._parts)),
        )

    def _point(self, number: int, part: _Part) -> ReplayPoint:
        loads_s = sorted(part.loads_s)
        time_s = number * self._part_ms / 1000
        p50_s, p99_s = _share(loads_s, 0.5), _share(loads_s, 0.99)
        return ReplayPoint(time_s, part.input_tokens, part.hit_tokens, p50_s, p99_s)


def _share(ordered: Sequence[float], share: float) -> float | None:
    """What so large a share of the values does not exceed."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else None
