"""Longest prefixes of 256 blocks, and what a scheduler spends on blocks while it replays a trace."""

from __future__ import annotations

import gc
import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures import OURS, Row, Target, measure
from simpler.kv import PrefixCache, StoreIndex, TraceRequest, read_trace, replay_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.figures import Sampler
    from benchmarks.sampling import Effort

BLOCKS = 256
DICT = "a dict, asked for each block"
TRACE = "conversation_trace.jsonl"
_REQUESTS = 12_031
_TRACE_BLOCK = 512


def prefix(effort: Effort) -> Iterator[Row]:
    """Lookups, in memory that the caches of the processor have lost, then the trace."""
    count = max(BLOCKS, effort.samples(1_000_000)) // BLOCKS
    prefixes = [[os.urandom(16) for _ in range(BLOCKS)] for _ in range(count)]
    beside = {DICT: _lookups(effort, prefixes, _dict(prefixes))}
    for where, lookup in (
        ("cached in a chip", _cache(prefixes)),
        ("held by a store", _store(prefixes)),
    ):
        yield Row(
            f"longest prefix of {BLOCKS} blocks, all there, among {count * BLOCKS:,} blocks {where}",
            "time",
            measure({OURS: _lookups(effort, prefixes, lookup), **beside}, effort.rounds(5)),
            Target(50_000),
        )
    del beside, prefixes
    name, trace = _trace()
    yield Row(
        f"bookkeeping of {len(trace):,} requests of {name}, blocks of {_TRACE_BLOCK} tokens: hashes, cache, "
        "eviction",
        "time",
        measure({OURS: _replays(effort, trace)}, effort.rounds(3)),
        Target(10e9),
    )


def _dict(prefixes: list[list[bytes]]) -> Callable[[list[bytes]], int]:
    index = {block: number for number, block in enumerate(block for blocks in prefixes for block in blocks)}

    def lookup(hashes: list[bytes]) -> int:
        found = list(map(index.get, hashes))
        return found.index(None) if None in found else len(found)

    return lookup


def _cache(prefixes: list[list[bytes]]) -> Callable[[list[bytes]], int]:
    cache = PrefixCache(BLOCKS * len(prefixes))
    for blocks in prefixes:
        cache.allocate("request", BLOCKS, blocks)
        cache.commit("request", blocks)
        cache.free("request")
    return lambda hashes: len(cache.match(hashes))


def _store(prefixes: list[list[bytes]]) -> Callable[[list[bytes]], int]:
    index = StoreIndex()
    for blocks in prefixes:
        index.add("store", blocks)
    return lambda hashes: index.longest_prefix(hashes)["store"]


def _lookups(effort: Effort, prefixes: list[list[bytes]], lookup: Callable[[list[bytes]], int]) -> Sampler:
    """Each time another prefix, with hashes just made, as a request's are."""

    def take() -> list[float]:
        samples = []
        gc.collect()
        gc.disable()
        try:
            for chosen in random.choices(prefixes, k=effort.samples(1000)):
                hashes = [bytes(bytearray(block)) for block in chosen]
                start = time.perf_counter_ns()
                found = lookup(hashes)
                samples.append(float(time.perf_counter_ns() - start))
                if found != BLOCKS:
                    raise RuntimeError(f"{found} blocks found")
        finally:
            gc.enable()
        return samples

    return take


def _replays(effort: Effort, trace: list[TraceRequest]) -> Sampler:
    """With room for fewer blocks than there are, so that some are evicted."""

    def take() -> list[float]:
        times = 1 if effort.quick else 3
        return [1e9 * replay_trace(trace, capacity_blocks=20_000).bookkeeping_s for _ in range(times)]

    return take


def _trace() -> tuple[str, list[TraceRequest]]:
    """The published trace where `SIMPLER_DATA` has it; else one with as many requests of such lengths."""
    file = Path(os.environ.get("SIMPLER_DATA", "")) / TRACE
    if file.is_file():
        return TRACE, list(read_trace(file))
    chance = random.Random(1)
    prompts: list[list[int]] = [[0]]
    fresh = 1
    requests = []
    for number in range(_REQUESTS):
        blocks = 1 + min(246, int(chance.lognormvariate(2.6, 1.0)))
        ids = list(chance.choice(prompts[-2000:]))[: blocks // 2 + 1]
        more = blocks - len(ids)
        ids += range(fresh, fresh + more)
        fresh += more
        prompts.append(ids)
        requests.append(TraceRequest(300 * number, _TRACE_BLOCK * len(ids), 300, tuple(ids)))
    return "a made trace", requests
