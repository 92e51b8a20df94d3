"""Traces are read with suspicion, and replayed at the block counts that they have."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpler import SimplerError
from simpler.kv import FileBlockStore, TraceError, TraceHasher, TraceRequest, read_trace, replay_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

GOOD: dict[str, object] = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [4, 5]}
TRACE = "conversation_trace.jsonl"


def request(tokens: int, ids: Sequence[int], *, at_ms: int = 0, output: int = 0) -> TraceRequest:
    return TraceRequest(at_ms, tokens, output, tuple(ids))


def write(folder: Path, *lines: str) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(line + "\n" for line in lines))
    return file


class DictStore:
    """Keeps what it is given, but for what a test takes away."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.full = False

    def longest_prefix(self, hashes: Sequence[bytes]) -> int:
        return next((n for n, block_hash in enumerate(hashes) if block_hash not in self.blocks), len(hashes))

    def get_into(self, block_hash: bytes, buffer: memoryview) -> bool:
        buffer[:] = self.blocks[block_hash] or bytes(len(buffer))
        return bool(self.blocks[block_hash])

    def put(self, block_hash: bytes, data: memoryview) -> bool:
        if self.full:
            raise SimplerError("no room")
        new = not self.blocks.get(block_hash)
        self.blocks[block_hash] = bytes(data)
        return new


def test_a_trace_is_read_line_by_line(tmp_path: Path) -> None:
    file = write(tmp_path, json.dumps(GOOD), json.dumps(GOOD | {"timestamp": 7, "more": None}))
    assert list(read_trace(file)) == [TraceRequest(0, 600, 3, (4, 5)), TraceRequest(7, 600, 3, (4, 5))]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("\N{REPLACEMENT CHARACTER}", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[1]", "a JSON object is wanted, not list"),
        ("1" * 5000, "no JSON"),
        (json.dumps(GOOD | {"x": "y" * (1 << 20)}), "longer than"),
        (json.dumps({"timestamp": 0, "input_length": 1}), "hash_ids must be a list"),
        (json.dumps({key: GOOD[key] for key in GOOD if key != "output_length"}), "output_length is missing"),
        (json.dumps(GOOD | {"timestamp": -1}), "timestamp is -1"),
        (json.dumps(GOOD | {"timestamp": 0.5}), "timestamp is 0.5"),
        (json.dumps(GOOD | {"output_length": float("nan")}), "output_length is NaN"),
        (json.dumps(GOOD | {"output_length": True}), "output_length is true"),
        (json.dumps(GOOD | {"input_length": 0, "hash_ids": []}), "input_length is 0"),
        (json.dumps(GOOD | {"input_length": 10**30}), r"input_length is 1000.*an integer from 1"),
        (json.dumps(GOOD | {"input_length": "6" * 100}), r'input_length is "66+\.\.\.; an'),
        (json.dumps(GOOD | {"hash_ids": [1, None]}), "hash_ids has null"),
        (json.dumps(GOOD | {"hash_ids": [1, -1]}), "hash_ids has -1"),
        (json.dumps(GOOD | {"hash_ids": [1, 2**63]}), "hash_ids has 9223372036854775808"),
        (json.dumps(GOOD | {"hash_ids": [1]}), "1 hash_ids for 600 tokens; 2 are wanted"),
        (json.dumps(GOOD | {"hash_ids": [1, 2, 3]}), "3 hash_ids for 600 tokens; 2 are wanted"),
        (json.dumps(GOOD), "timestamp 0 is before 5"),
    ],
)
def test_a_line_that_is_not_a_request_is_named_by_its_number(tmp_path: Path, line: str, what: str) -> None:
    file = write(tmp_path, json.dumps(GOOD | {"timestamp": 5}), line)
    with pytest.raises(TraceError, match=f"trace.jsonl, line 2: .*{what}"):
        list(read_trace(file))


def test_bytes_that_are_no_text_are_named_by_their_line(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(b"\xff\xfe\x00\n")
    with pytest.raises(TraceError, match="line 1: no JSON"):
        list(read_trace(file))


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is empty"):
        list(read_trace(write(tmp_path)))


@pytest.mark.parametrize("block_size", [1, 16, 256, 512, 1024, 2048])
def test_a_prompt_has_a_hash_for_each_full_block_of_the_chosen_size(block_size: int) -> None:
    hasher = TraceHasher(block_size, 64)
    for tokens in (1, 511, 512, 513, 1024, 3000):
        ids = range(-(-tokens // 512))
        assert len(hasher.hashes(request(tokens, ids))) == tokens // block_size


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=5).flatmap(
    lambda ids: st.tuples(st.just(ids), st.integers(512 * len(ids) - 511, 512 * len(ids)))
)


@given(prompts, prompts, st.sampled_from([128, 512, 1024]))
def test_blocks_are_equal_just_as_far_as_the_trace_says_that_the_tokens_are(
    left: tuple[list[int], int], right: tuple[list[int], int], block_size: int
) -> None:
    hasher = TraceHasher(block_size, 64)
    pairs = zip(*(hasher.hashes(request(tokens, ids)) for ids, tokens in (left, right)), strict=False)
    for number, (a, b) in enumerate(pairs, 1):
        spanned = -(-number * block_size // 512)
        assert (a == b) == (left[0][:spanned] == right[0][:spanned])


def test_ids_that_differ_in_their_high_half_are_different() -> None:
    hasher = TraceHasher(512, 64)
    assert hasher.hashes(request(512, [1])) != hasher.hashes(request(512, [1 + 2**32]))


@pytest.mark.parametrize("block_size", [0, -512, 3, 513, 768, 1000])
def test_a_block_size_that_does_not_fit_the_trace_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size is {block_size}"):
        replay_trace([], capacity_blocks=1, block_size=block_size)


def test_a_replay_counts_what_was_found_in_tokens_and_in_blocks() -> None:
    trace = [request(1100, [1, 2, 3]), request(1600, [1, 2, 4, 5]), request(512, [9])]
    report = replay_trace(trace, capacity_blocks=100)
    assert (report.requests, report.refused, report.input_tokens) == (3, 0, 3212)
    assert (report.blocks, report.cached_blocks, report.loaded_blocks) == (2 + 3 + 1, 2, 0)
    assert (report.token_hit_rate, report.block_hit_rate) == (1024 / 3212, 2 / 6)
    assert (report.bytes_moved, report.load_p50_s, report.load_p99_s) == (0, None, None)


def test_smaller_blocks_find_more_and_larger_ones_less() -> None:
    trace = [request(1500, [1, 2, 3]), request(1500, [1, 2, 3])]
    hits = {
        size: replay_trace(trace, capacity_blocks=999, block_size=size).token_hit_rate
        for size in (4, 512, 1024)
    }
    assert hits == {4: 1500 / 3000, 512: 1024 / 3000, 1024: 1024 / 3000}


def test_a_cache_too_small_for_the_trace_forgets_the_oldest() -> None:
    trace = [request(1024, ids) for ids in ([1, 2], [3, 4], [1, 2])]
    assert replay_trace(trace, capacity_blocks=4).cached_blocks == 2
    report = replay_trace(trace, capacity_blocks=3)
    assert (report.cached_blocks, report.evictions) == (1, 2)


def test_the_output_takes_room_while_a_request_runs() -> None:
    trace = [request(512, [1]), request(512, [2], output=512), request(512, [1])]
    assert [replay_trace(trace, capacity_blocks=blocks).cached_blocks for blocks in (2, 3)] == [0, 1]


def test_a_request_larger_than_the_cache_is_refused_and_the_others_go_on() -> None:
    trace = [request(512, [1]), request(2048, [1, 2, 3, 4]), request(512, [1])]
    report = replay_trace(trace, capacity_blocks=3)
    assert (report.requests, report.refused, report.cached_blocks, report.blocks) == (3, 1, 1, 6)


def test_what_the_cache_lost_is_loaded_from_the_store_as_it_was_saved() -> None:
    trace = [request(1024, ids) for ids in ([1, 2], [3, 4], [1, 2])]
    store = DictStore()
    report = replay_trace(trace, capacity_blocks=2, store=store, block_bytes=100)
    assert (report.cached_blocks, report.loaded_blocks, report.block_hit_rate) == (0, 2, 2 / 6)
    assert (report.bytes_loaded, report.bytes_saved, report.bytes_moved) == (200, 400, 600)
    assert {len(block) for block in store.blocks.values()} == {100}
    assert report.load_p50_s is not None
    assert report.load_p99_s is not None
    assert 0 < report.load_p50_s <= report.load_p99_s
    again = replay_trace(trace, capacity_blocks=2, store=store, block_bytes=100)
    assert (again.block_hit_rate, again.bytes_saved) == (1, 0)


def test_blocks_of_another_size_in_the_same_store_are_other_blocks() -> None:
    store = DictStore()
    for block_bytes in (100, 200):
        report = replay_trace([request(512, [1])], capacity_blocks=2, store=store, block_bytes=block_bytes)
        assert (report.loaded_blocks, report.failed_loads) == (0, 0)


@pytest.mark.parametrize("damage", [b"", b"x" * 64], ids=["gone", "changed"])
def test_a_load_that_fails_counts_as_computed_from_there_on_and_is_saved_again(damage: bytes) -> None:
    trace = [request(1536, [1, 2, 3])]
    store = DictStore()
    replay_trace(trace, capacity_blocks=3, store=store, block_bytes=64)
    second = TraceHasher(512, 64).hashes(trace[0])[1]
    good = store.blocks[second]
    store.blocks[second] = damage
    report = replay_trace(trace, capacity_blocks=3, store=store, block_bytes=64)
    assert (report.loaded_blocks, report.failed_loads, report.block_hit_rate) == (1, 1, 1 / 3)
    assert store.blocks[second] == good
    assert replay_trace(trace, capacity_blocks=3, store=store, block_bytes=64).block_hit_rate == 1


def test_a_store_that_is_full_is_counted_and_the_replay_goes_on() -> None:
    store = DictStore()
    store.full = True
    report = replay_trace([request(1024, [1, 2])] * 2, capacity_blocks=2, store=store)
    assert (report.failed_saves, report.bytes_saved, report.cached_blocks) == (2, 0, 2)


def test_the_points_cover_the_time_of_the_trace() -> None:
    trace = [request(512, [number % 3], at_ms=1000 * number) for number in range(240)]
    report = replay_trace(trace, capacity_blocks=10, store=DictStore())
    assert 0 < len(report.points) <= 60
    assert [point.time_s for point in report.points] == sorted({point.time_s for point in report.points})
    assert report.points[-1].time_s <= 239
    assert sum(point.input_tokens for point in report.points) == report.input_tokens
    assert sum(point.hit_tokens for point in report.points) == report.token_hit_rate * report.input_tokens
    assert report.points[0].hit_rate == 0.25
    assert report.points[-1].hit_rate == 1


def test_whoever_observes_is_told_how_far_it_is() -> None:
    told: list[int] = []
    replay_trace([request(512, [1])] * 100, capacity_blocks=1, observe=told.append)
    assert told == [0, 64, 100]


def test_a_replay_of_nothing_reports_nothing() -> None:
    report = replay_trace([], capacity_blocks=1)
    assert (report.requests, report.token_hit_rate, report.block_hit_rate) == (0, 0, 0)


def test_blocks_smaller_than_their_pattern_are_refused() -> None:
    with pytest.raises(ValueError, match="block_bytes is 15"):
        replay_trace([], capacity_blocks=1, block_bytes=15)


def test_a_store_on_disk_serves_a_later_replay(tmp_path: Path) -> None:
    chance = random.Random(1)
    trace = [request(2048, [chance.randrange(3) for _ in range(4)]) for _ in range(20)]
    first, second = (
        replay_trace(trace, capacity_blocks=4, store=FileBlockStore(tmp_path, 1 << 20), block_bytes=300)
        for _ in range(2)
    )
    assert first.bytes_saved > 0
    assert (second.block_hit_rate, second.bytes_saved, second.failed_loads) == (1, 0, 0)


@pytest.mark.extra
def test_the_conversation_trace_is_replayed_at_its_true_block_counts() -> None:
    file = Path(os.environ.get("SIMPLER_DATA", "")) / TRACE
    if not file.is_file():
        pytest.skip(f"SIMPLER_DATA must name the folder of {TRACE}")
    trace = list(read_trace(file))
    report = replay_trace(trace, capacity_blocks=1_000_000)
    assert (report.requests, report.refused, report.evictions) == (12_031, 0, 0)
    assert (report.blocks, report.cached_blocks) == (276_491, 105_592)
    small = replay_trace(trace, capacity_blocks=10_000)
    assert 0 < small.block_hit_rate < report.block_hit_rate
