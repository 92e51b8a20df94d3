"""Blocks are named by everything that shapes their KV, and by nothing else."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpler.kv import BlockNamespace, hash_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

SPACE = BlockNamespace("model", "main", "float16", 4)
TOKENS = list(range(100, 112))

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_each_full_block_has_a_digest_of_16_bytes_and_a_partial_one_has_none() -> None:
    assert [len(digest) for digest in hash_blocks(SPACE, TOKENS)] == [16, 16, 16]
    assert hash_blocks(SPACE, TOKENS[:11]) == hash_blocks(SPACE, TOKENS)[:2]
    assert hash_blocks(SPACE, TOKENS[:3]) == []
    assert hash_blocks(SPACE, []) == []


def test_digests_are_the_same_in_another_process() -> None:
    program = (
        "from simpler.kv import BlockNamespace, hash_blocks\n"
        "space = BlockNamespace('model', 'main', 'float16', 4)\n"
        f"print(*(digest.hex() for digest in hash_blocks(space, {TOKENS})))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [digest.hex() for digest in hash_blocks(SPACE, TOKENS)]


def test_digests_are_those_of_this_version_for_ever_since_stores_outlive_processes() -> None:
    assert [digest.hex() for digest in hash_blocks(SPACE, TOKENS[:8])] == [
        "000c2960c1fcff2cd5bc4119bc182e2d",
        "f38a40929a34d4a9fe3455dd924da47d",
    ]


@given(token_lists, token_lists)
def test_digests_are_equal_just_as_far_as_the_tokens_are(left: list[int], right: list[int]) -> None:
    for count, (a, b) in enumerate(zip(hash_blocks(SPACE, left), hash_blocks(SPACE, right), strict=False), 1):
        assert (a == b) == (left[: 4 * count] == right[: 4 * count])


@given(token_lists, st.integers(0, 10))
def test_going_on_from_a_block_gives_what_hashing_at_once_gives(tokens: list[int], blocks: int) -> None:
    whole = hash_blocks(SPACE, tokens)
    first = whole[:blocks]
    parent = first[-1] if first else None
    assert hash_blocks(SPACE, tokens[4 * len(first) :], parent=parent) == whole[len(first) :]


def test_the_same_tokens_after_another_prefix_are_another_block() -> None:
    one = hash_blocks(SPACE, [1, 1, 1, 1, *TOKENS[:4]])
    other = hash_blocks(SPACE, [2, 2, 2, 2, *TOKENS[:4]])
    assert len({*one, *other, *hash_blocks(SPACE, TOKENS[:4])}) == 5


@pytest.mark.parametrize(
    "other",
    [
        replace(SPACE, model="another"),
        replace(SPACE, revision="2"),
        replace(SPACE, dtype="bfloat16"),
        replace(SPACE, extra="tenant"),
        BlockNamespace("modelm", "ain", "float16", 4),
        BlockNamespace("model", "mainf", "loat16", 4),
        BlockNamespace("model", "main", "", 4, "float16"),
    ],
)
def test_another_namespace_shares_nothing(other: BlockNamespace) -> None:
    assert set(hash_blocks(other, TOKENS)).isdisjoint(hash_blocks(SPACE, TOKENS))


def test_another_block_size_shares_nothing() -> None:
    assert set(hash_blocks(replace(SPACE, block_size=2), TOKENS)).isdisjoint(hash_blocks(SPACE, TOKENS))


def test_another_namespace_shares_nothing_even_after_the_same_parent() -> None:
    parent = hash_blocks(SPACE, TOKENS)[0]
    other = replace(SPACE, extra="tenant")
    assert hash_blocks(other, TOKENS, parent=parent) != hash_blocks(SPACE, TOKENS, parent=parent)


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(TOKENS),
        range(100, 112),
        np.array(TOKENS, np.uint32),
        np.array(TOKENS, np.int64),
        np.array(TOKENS, ">i8"),
        np.array(TOKENS, np.uint8),
        np.array(TOKENS + TOKENS, np.int64).reshape(12, 2, order="F")[:, 0],
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_how_the_tokens_are_held_does_not_matter(tokens: Sequence[int]) -> None:
    assert hash_blocks(SPACE, tokens) == hash_blocks(SPACE, TOKENS)


@pytest.mark.parametrize("token", [-1, 2**32, 2**63 - 1, -(2**63)])
def test_a_token_out_of_range_is_named(token: int) -> None:
    with pytest.raises(ValueError, match=f"token {token} is not from 0 to 4294967295"):
        hash_blocks(SPACE, [1, 2, 3, token])


@pytest.mark.parametrize("tokens", [[1.0, 2.0], ["1"], [True], [2**70]])
def test_what_is_not_a_token_is_refused(tokens: list[int]) -> None:
    with pytest.raises(TypeError, match="they must be integers"):
        hash_blocks(SPACE, tokens)


def test_tokens_in_two_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match="2 dimensions"):
        hash_blocks(SPACE, np.zeros((2, 4), np.int64))


def test_a_parent_that_is_no_digest_is_refused() -> None:
    with pytest.raises(ValueError, match="parent has 3 bytes"):
        hash_blocks(SPACE, TOKENS, parent=b"abc")


@pytest.mark.parametrize("block_size", [0, -1, 2**21])
def test_a_block_size_that_cannot_be_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match="block_size"):
        BlockNamespace("model", "main", "float16", block_size)


def test_namespaces_are_values() -> None:
    assert BlockNamespace("model", "main", "float16", 4) == SPACE
    assert len({SPACE, replace(SPACE), replace(SPACE, extra="x")}) == 2
