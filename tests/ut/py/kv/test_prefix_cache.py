"""What the prefix cache promises, one case at a time; test_prefix_cache_model.py tries them together."""

from __future__ import annotations

import pytest

from simpler.kv import Allocation, BackPressure, BlockNamespace, PrefixCache, PrefixCacheStats, hash_blocks

SPACE = BlockNamespace("model", "main", "float16", block_size=1)


def names(tokens: str) -> list[bytes]:
    """A block for each character."""
    return hash_blocks(SPACE, [ord(token) for token in tokens])


def allocate(cache: PrefixCache, request: str, tokens: str, extra: int = 0) -> Allocation:
    got = cache.allocate(request, len(tokens) + extra, names(tokens))
    assert isinstance(got, Allocation), got
    return got


def store(cache: PrefixCache, tokens: str) -> tuple[int, ...]:
    """Let a request compute these and finish; its blocks."""
    got = allocate(cache, "stored", tokens)
    cache.commit("stored", names(tokens))
    cache.free("stored")
    return got.blocks


def test_a_request_gets_the_cached_blocks_of_its_prefix_and_fresh_ones_for_the_rest() -> None:
    cache = PrefixCache(10)
    first = store(cache, "abc")
    got = allocate(cache, "next", "abx", extra=1)
    assert (got.blocks[:2], got.cached, len(set(got.blocks))) == (first[:2], 2, 4)
    assert first[2] not in got.blocks
    assert cache.stats == PrefixCacheStats(hits=2, misses=4, evictions=0, duplicates=0, bad=0)


def test_two_requests_share_cached_blocks_and_the_last_one_to_go_lets_them_go() -> None:
    cache = PrefixCache(4)
    blocks = store(cache, "ab")
    assert allocate(cache, "one", "ab").blocks == allocate(cache, "two", "ab").blocks == blocks
    cache.free("one")
    assert cache.available_blocks == 2
    cache.free("two")
    assert cache.available_blocks == 4
    assert cache.match(names("ab")) == list(blocks)


def test_blocks_that_were_not_committed_are_not_found() -> None:
    cache = PrefixCache(4)
    allocate(cache, "running", "abc")
    assert cache.commit("running", names("ab")) == 2
    assert len(cache.match(names("abc"))) == 2
    cache.free("running")
    assert len(cache.match(names("abc"))) == 2


def test_committing_again_changes_nothing() -> None:
    cache = PrefixCache(4)
    allocate(cache, "running", "ab")
    assert [cache.commit("running", names(tokens)) for tokens in ("ab", "ab", "a", "")] == [2, 0, 0, 0]


def test_too_few_blocks_are_told_and_change_nothing() -> None:
    cache = PrefixCache(4)
    blocks = store(cache, "ab")
    allocate(cache, "running", "xyz")
    got = cache.allocate("large", 3, names("ab"))
    assert got == BackPressure(needed=2, available=0, capacity=4)
    assert "2 blocks needed, 0 of 4 available" in str(got)
    assert cache.extend("running", 2) == BackPressure(needed=2, available=1, capacity=4)
    assert cache.match(names("a")) == [blocks[0]]
    cache.free("running")
    assert isinstance(cache.allocate("large", 3, names("ab")), Allocation)


def test_a_request_as_large_as_the_cache_fits_when_nothing_else_runs() -> None:
    cache = PrefixCache(3)
    store(cache, "xyz")
    assert set(allocate(cache, "all", "abc").blocks) == {0, 1, 2}
    assert cache.stats.evictions == 3


def test_the_longest_unused_prefix_is_evicted_first_and_from_its_end() -> None:
    cache = PrefixCache(6)
    store(cache, "abc")
    store(cache, "xyz")
    allocate(cache, "look", "abc")
    cache.free("look")
    evicted = []
    for number in range(6):
        before = {tokens for tokens in ("a", "ab", "abc", "x", "xy", "xyz") if names(tokens)[-1] in cache}
        allocate(cache, f"r{number}", "", extra=1)
        evicted += [tokens for tokens in before if names(tokens)[-1] not in cache]
    assert evicted == ["xyz", "xy", "x", "abc", "ab", "a"]


def test_a_prefix_in_use_by_what_continues_it_is_not_evicted() -> None:
    cache = PrefixCache(3)
    store(cache, "ab")
    allocate(cache, "long", "abc")
    assert cache.available_blocks == 0
    assert cache.allocate("other", 1) == BackPressure(1, 0, 3)


def test_generated_tokens_get_blocks_that_are_cached_like_the_prompt() -> None:
    cache = PrefixCache(4)
    allocate(cache, "chat", "ab")
    cache.commit("chat", names("ab"))
    more = cache.extend("chat", 2)
    assert isinstance(more, Allocation)
    assert cache.commit("chat", names("abc")) == 1
    cache.free("chat")
    assert cache.match(names("abcd"))[2] == more.blocks[0]


def test_the_first_of_two_commits_of_the_same_tokens_is_the_one_that_is_found() -> None:
    cache = PrefixCache(6)
    one = allocate(cache, "one", "abc")
    two = allocate(cache, "two", "abc")
    assert cache.commit("one", names("ab")) == 2
    assert cache.commit("two", names("abc")) == 1
    assert cache.stats.duplicates == 2
    assert cache.match(names("abc")) == [*one.blocks[:2], two.blocks[2]]
    cache.free("one")
    cache.check()
    # One's blocks for "a" and "b" stay, since two's "c" continues them.
    assert cache.available_blocks == 1
    cache.free("two")
    assert cache.available_blocks == 6
    assert len(cache.match(names("abc"))) == 3


def test_a_pinned_block_of_an_aborted_request_comes_back_with_its_last_pin() -> None:
    cache = PrefixCache(3)
    loading = allocate(cache, "loading", "abc")
    pins = [cache.pin(loading.blocks[:2]), cache.pin(loading.blocks[1:2])]
    cache.free("loading")
    assert cache.available_blocks == 1
    other = allocate(cache, "other", "x")
    assert set(other.blocks).isdisjoint(loading.blocks[:2])
    assert cache.unpin(pins[0])
    assert cache.available_blocks == 1
    assert cache.allocate("large", 2) == BackPressure(2, 1, 3)
    assert cache.unpin(pins[1])
    assert cache.available_blocks == 2


def test_a_pinned_cached_block_is_not_evicted_nor_what_comes_before_it() -> None:
    cache = PrefixCache(3)
    blocks = store(cache, "abc")
    pin = cache.pin([blocks[1]])
    assert allocate(cache, "other", "x").blocks == (blocks[2],)
    assert cache.allocate("more", 1) == BackPressure(1, 0, 3)
    cache.free("other")
    cache.unpin(pin)
    assert cache.available_blocks == 3


def test_a_second_unpin_is_ignored_even_when_the_blocks_have_another_pin() -> None:
    cache = PrefixCache(1)
    block = store(cache, "a")
    first = cache.pin(block)
    second = cache.pin(block)
    assert [cache.unpin(first), cache.unpin(first)] == [True, False]
    assert cache.available_blocks == 0
    assert cache.unpin(second)


def test_a_free_block_cannot_be_pinned() -> None:
    cache = PrefixCache(2)
    allocate(cache, "gone", "a")
    cache.free("gone")
    for block in (0, 1, 2, -1):
        with pytest.raises(ValueError, match=f"block {block} is free"):
            cache.pin([block])


def test_bad_blocks_and_all_after_them_are_found_no_more() -> None:
    cache = PrefixCache(8)
    loaded = allocate(cache, "loaded", "abcd")
    cache.commit("loaded", names("abcd"))
    assert cache.mark_bad([loaded.blocks[2], loaded.blocks[1]]) == {"loaded": 1}
    assert cache.match(names("abcd")) == [loaded.blocks[0]]
    assert cache.stats.bad == 3
    assert cache.commit("loaded", names("abcd")) == 3
    assert cache.match(names("abcd")) == list(loaded.blocks)


def test_what_others_computed_from_a_bad_block_is_forgotten_too_and_they_are_named() -> None:
    cache = PrefixCache(8)
    loaded = allocate(cache, "loaded", "ab")
    cache.commit("loaded", names("ab"))
    later = allocate(cache, "later", "abcd")
    cache.commit("later", names("abcd"))
    store(cache, "abx")
    assert cache.mark_bad([loaded.blocks[1]]) == {"loaded": 1, "later": 1}
    assert [name in cache for name in (*names("abcd"), names("abx")[-1])] == [
        True,
        False,
        False,
        False,
        False,
    ]
    # Both compute the shared block again; the first to say so makes it found.
    assert (cache.commit("later", names("abc")), cache.commit("loaded", names("ab"))) == (2, 0)
    assert cache.match(names("abcd")) == list(later.blocks[:3])
    cache.check()


def test_a_bad_duplicate_spoils_its_own_request_alone() -> None:
    cache = PrefixCache(8)
    good, bad = allocate(cache, "good", "ab"), allocate(cache, "bad", "abc")
    cache.commit("good", names("ab"))
    cache.commit("bad", names("abc"))
    assert cache.mark_bad([bad.blocks[0]]) == {"bad": 0}
    assert cache.match(names("abc")) == list(good.blocks)


def test_a_failure_told_after_its_blocks_have_gone_is_ignored() -> None:
    cache = PrefixCache(2)
    allocate(cache, "gone", "ab")
    cache.free("gone")
    assert cache.mark_bad([0, 1, 7, -1]) == {}
    assert cache.stats.bad == 0


def test_bad_blocks_under_transfer_stay_pinned() -> None:
    cache = PrefixCache(1)
    block = store(cache, "a")
    pin = cache.pin(block)
    cache.mark_bad(block)
    assert (cache.cached_blocks, cache.available_blocks) == (0, 0)
    cache.unpin(pin)
    assert cache.available_blocks == 1


def test_wrong_use_is_refused_with_the_reason() -> None:
    cache = PrefixCache(4)
    allocate(cache, "here", "ab")
    with pytest.raises(ValueError, match="'here' has blocks already"):
        cache.allocate("here", 1)
    with pytest.raises(ValueError, match="1 blocks wanted for 2 hashes"):
        cache.allocate("other", 1, names("ab"))
    with pytest.raises(ValueError, match="3 hashes for the 2 blocks of 'here'"):
        cache.commit("here", names("abc"))
    with pytest.raises(ValueError, match="-1 more blocks"):
        cache.extend("here", -1)
    for call in (cache.free, lambda name: cache.extend(name, 1), lambda name: cache.commit(name, [])):
        with pytest.raises(ValueError, match="'gone' has no blocks"):
            call("gone")
    with pytest.raises(ValueError, match="capacity_blocks is 0"):
        PrefixCache(0)


def test_a_request_cannot_change_the_names_of_its_blocks() -> None:
    cache = PrefixCache(6)
    allocate(cache, "one", "abc")
    cache.commit("one", names("ab"))
    with pytest.raises(ValueError, match="hash 1 of request 'one'"):
        cache.commit("one", names("axc"))
    allocate(cache, "two", "ab", extra=1)
    cache.mark_bad([cache.match(names("ab"))[1]])
    cache.commit("two", names("ab"))
    with pytest.raises(ValueError, match="has another hash already"):
        cache.commit("one", names("ax"))
    cache.check()


def test_names_that_are_not_chained_are_refused() -> None:
    cache = PrefixCache(6)
    store(cache, "abc")
    a, _, c = names("abc")
    with pytest.raises(ValueError, match="chained"):
        cache.match([a, c])
