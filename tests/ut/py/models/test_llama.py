"""The forward pass and its buffers, on a model small enough for loops."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpler.models.config import LlamaConfig, ModelError
from simpler.models.generation import generate
from simpler.models.layout import BLOCK_TOKENS, KVLayout, WeightLayout, copy_blocks
from simpler.models.llama import Llama, causal_attention, rms_norm, rope_rotations, rotate, silu
from simpler.models.sampling import Sampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simpler.models.layout import FloatArray, Weights

CONFIG = LlamaConfig(
    layers=2,
    embedding=24,
    hidden=20,
    heads=6,
    kv_heads=2,
    head=4,
    vocabulary=50,
    context=64,
    rope_base=100.0,
    norm_epsilon=1e-5,
)
MODEL = Llama(CONFIG, 64)
TOKENS = [3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7, 9, 32, 38, 46, 26, 43, 38, 32, 7]


def make_weights() -> FloatArray:
    random = np.random.default_rng(1)
    return (random.standard_normal(MODEL.weights.size) / 4).astype(np.float32)


WEIGHTS = make_weights()


def new_cache() -> FloatArray:
    """A cache whose contents poison whatever reads them before they are written."""
    return np.full(MODEL.kv.size, np.nan, np.float32)


def naive_sum(left: list[float], right: list[float]) -> list[float]:
    return [a + b for a, b in zip(left, right, strict=True)]


def naive_norm(row: Sequence[float], weight: FloatArray) -> list[float]:
    scale = 1 / math.sqrt(sum(x * x for x in row) / len(row) + CONFIG.norm_epsilon)
    return [x * scale * float(w) for x, w in zip(row, weight, strict=True)]


def naive_product(row: Sequence[float], matrix: FloatArray) -> list[float]:
    return [sum(x * float(w) for x, w in zip(row, column, strict=True)) for column in matrix.T]


def naive_rotate(head: Sequence[float], position: int) -> list[float]:
    turned: list[float] = []
    for pair in range(CONFIG.head // 2):
        angle = position * CONFIG.rope_base ** (-2 * pair / CONFIG.head)
        a, b = head[2 * pair], head[2 * pair + 1]
        turned += [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
    return turned


def naive_attention(query: list[float], keys: list[list[float]], values: list[list[float]]) -> list[float]:
    scores = [sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(CONFIG.head) for key in keys]
    shares = [math.exp(score - max(scores)) for score in scores]
    return [
        sum(share * value[i] for share, value in zip(shares, values, strict=True)) / sum(shares)
        for i in range(CONFIG.head)
    ]


def naive_logits(weights: Weights, tokens: list[int]) -> list[float]:
    """The model's definition, token by token and number by number."""
    rows = [[float(x) for x in weights.embedding[:, token]] for token in tokens]
    width, heads, kv_heads = CONFIG.head, CONFIG.heads, CONFIG.kv_heads
    for layer in weights.layers:
        keys: list[list[list[float]]] = [[] for _ in range(kv_heads)]
        values: list[list[list[float]]] = [[] for _ in range(kv_heads)]
        for position, row in enumerate(rows):
            flat = naive_product(naive_norm(row, layer.attention_norm), layer.qkv)
            parts = [flat[i : i + width] for i in range(0, len(flat), width)]
            for head in range(kv_heads):
                keys[head].append(naive_rotate(parts[heads + head], position))
                values[head].append(parts[heads + kv_heads + head])
            attended: list[float] = []
            for head in range(heads):
                shared = head * kv_heads // heads
                query = naive_rotate(parts[head], position)
                attended += naive_attention(query, keys[shared], values[shared])
            rows[position] = naive_sum(row, naive_product(attended, layer.attention_output))
        for position, row in enumerate(rows):
            flat = naive_product(naive_norm(row, layer.feed_forward_norm), layer.gate_up)
            gate, up = flat[: CONFIG.hidden], flat[CONFIG.hidden :]
            active = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
            rows[position] = naive_sum(row, naive_product(active, layer.down))
    return naive_product(naive_norm(rows[-1], weights.output_norm), weights.embedding)


@pytest.mark.parametrize("count", [1, 2, BLOCK_TOKENS, len(TOKENS)])
def test_prefill_computes_what_the_definition_says(count: int) -> None:
    logits = MODEL.prefill(WEIGHTS, new_cache(), TOKENS[:count])
    expected = naive_logits(MODEL.weights.views(WEIGHTS), TOKENS[:count])
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_decoding_token_by_token_equals_prefill() -> None:
    cache = new_cache()
    for position, token in enumerate(TOKENS):
        stepped = MODEL.decode_step(WEIGHTS, cache, token, position)
        whole = MODEL.prefill(WEIGHTS, new_cache(), TOKENS[: position + 1])
        np.testing.assert_allclose(stepped, whole, rtol=1e-4, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, len(TOKENS) - 1), unique=True, max_size=5))
def test_prefill_in_parts_equals_prefill_at_once(cuts: list[int]) -> None:
    cache = new_cache()
    edges = [0, *sorted(cuts), len(TOKENS)]
    for start, end in itertools.pairwise(edges):
        logits = MODEL.prefill(WEIGHTS, cache, TOKENS[start:end], start)
    whole = MODEL.prefill(WEIGHTS, new_cache(), TOKENS)
    np.testing.assert_allclose(logits, whole, rtol=1e-4, atol=1e-4)


def shifted(array: FloatArray, floats: int) -> FloatArray:
    """A copy that starts ``floats`` floats after a cache line."""
    raw = np.empty(array.size + 32, np.float32)
    start = (-raw.ctypes.data // 4) % 16 + floats
    raw[start : start + array.size] = array
    return raw[start : start + array.size]


@pytest.mark.parametrize("floats", [1, 4, 9])
def test_where_the_buffers_lie_changes_no_bit(floats: int) -> None:
    results = []
    for offset in (0, floats):
        weights, cache = shifted(WEIGHTS, offset), shifted(new_cache(), offset)
        prefilled = MODEL.prefill(weights, cache, TOKENS)
        results.append(np.stack([prefilled, MODEL.decode_step(weights, cache, 4, len(TOKENS))]))
    np.testing.assert_array_equal(results[0], results[1])


def test_a_cache_copied_by_blocks_continues_bit_for_bit() -> None:
    source, target = new_cache(), new_cache()
    MODEL.prefill(WEIGHTS, source, TOKENS)
    blocks = MODEL.kv.used_blocks(len(TOKENS))
    copied = copy_blocks(MODEL.kv.view(target), MODEL.kv.view(source), blocks)
    assert copied == CONFIG.layers * 2 * MODEL.kv.block_bytes
    expected = MODEL.decode_step(WEIGHTS, source, 1, len(TOKENS))
    np.testing.assert_array_equal(MODEL.decode_step(WEIGHTS, target, 1, len(TOKENS)), expected)


def test_only_used_blocks_are_copied() -> None:
    layout = KVLayout(CONFIG, 64)
    assert [layout.used_blocks(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
    source = layout.view(np.ones(layout.size, np.float32))
    target = layout.view(np.zeros(layout.size, np.float32))
    copy_blocks(target, source, 2)
    assert target[:, :2].all()
    assert not target[:, 2:].any()
    with pytest.raises(ValueError, match="5 blocks are not 0 to 4"):
        copy_blocks(target, source, 5)
    with pytest.raises(ValueError, match="laid out differently"):
        copy_blocks(target[:, :3], source, 1)


def test_the_cache_is_laid_out_as_documented() -> None:
    cache = new_cache()
    MODEL.prefill(WEIGHTS, cache, TOKENS)
    blocks = MODEL.kv.view(cache)
    assert blocks.shape == (CONFIG.layers, 4, 2, CONFIG.kv_heads, BLOCK_TOKENS, CONFIG.head)
    for layer in range(CONFIG.layers):
        assert all(blocks[layer, block].flags.c_contiguous for block in range(4))
    assert blocks[0, 0].nbytes == MODEL.kv.block_bytes
    written = ~np.isnan(blocks)
    assert written[:, 0].all()
    assert written[:, 1, :, :, : len(TOKENS) - BLOCK_TOKENS].all()
    assert not written[:, 1, :, :, len(TOKENS) - BLOCK_TOKENS :].any()
    assert not written[:, 2:].any()


def test_weights_fill_their_buffer_without_overlap() -> None:
    layout = WeightLayout(CONFIG)
    owner = np.zeros(layout.size, np.float32)
    for place in layout.places.values():
        view = place.view(owner)
        assert np.shares_memory(view, owner)
        assert place.offset % 16 == 0
        assert not view.any()
        view[...] = 1
    assert layout.nbytes == owner.nbytes
    assert layout.size - owner.sum() < 16 * len(layout.places)


@pytest.mark.parametrize(
    "buffer",
    [
        np.zeros(MODEL.weights.size - 1, np.float32),
        np.zeros(MODEL.weights.size, np.float64),
        np.zeros((2, MODEL.weights.size), np.float32),
        np.zeros(2 * MODEL.weights.size, np.float32)[::2],
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(buffer: FloatArray) -> None:
    with pytest.raises(ValueError, match="the buffer of the weights"):
        MODEL.prefill(buffer, new_cache(), [1])


@pytest.mark.parametrize(
    ("tokens", "start"), [([], 0), ([1], -1), ([1], 64), ([1, 2], 63), ([50], 0), ([-1], 0)]
)
def test_tokens_and_positions_out_of_range_are_refused(tokens: list[int], start: int) -> None:
    cache = new_cache()
    with pytest.raises(ValueError, match=r"do not fit a cache of 64|is not one of the 50"):
        MODEL.prefill(WEIGHTS, cache, tokens, start)
    assert np.isnan(cache).all()


@pytest.mark.parametrize("capacity", [0, 65])
def test_a_capacity_outside_the_context_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="is not 1 to 64"):
        Llama(CONFIG, capacity)


@pytest.mark.parametrize(
    ("name", "value"), [("heads", 5), ("head", 3), ("layers", 0), ("rope_base", 1.0), ("norm_epsilon", 0.0)]
)
def test_dimensions_that_do_not_fit_are_refused(name: str, value: float) -> None:
    with pytest.raises(ModelError):
        dataclasses.replace(CONFIG, **{name: value})  # type: ignore[arg-type]  # wrong on purpose


def test_rotated_products_depend_on_the_distance_alone() -> None:
    random = np.random.default_rng(2)
    query, key = random.standard_normal((2, 1, 1, CONFIG.head)).astype(np.float32)
    turns = rope_rotations(CONFIG, 64)
    products = [
        float(np.sum(rotate(query, turns[at + 7 : at + 8]) * rotate(key, turns[at : at + 1])))
        for at in (0, 3, 50)
    ]
    np.testing.assert_allclose(products, products[0], rtol=1e-5)


def test_attention_sees_no_later_token() -> None:
    random = np.random.default_rng(3)
    queries = random.standard_normal((5, 6, 4)).astype(np.float32)
    keys, values = random.standard_normal((2, 2, 8, 4)).astype(np.float32)
    before = causal_attention(queries, keys, values, 3)
    keys[:, 6:], values[:, 6:] = 9, 9
    after = causal_attention(queries, keys, values, 3)
    np.testing.assert_array_equal(before[:3], after[:3])
    assert not np.array_equal(before[3:], after[3:])


def test_activation_and_norm_hold_at_the_ends_of_the_range() -> None:
    ends = np.array([-200, -1, 0, 1, 200], np.float32)
    expected = [0, -0.26894143, 0, 0.7310586, 200]
    np.testing.assert_allclose(silu(ends), expected, rtol=1e-6, atol=1e-30)
    zeros = np.zeros((1, 4), np.float32)
    np.testing.assert_array_equal(rms_norm(zeros, np.ones(4, np.float32), 1e-5), zeros)


def run_generate(max_tokens: int, end_of_turn: int = -1, sampler: Sampler | None = None) -> list[int]:
    return list(
        generate(MODEL, WEIGHTS, TOKENS, max_tokens=max_tokens, end_of_turn=end_of_turn, sampler=sampler)
    )


def test_generation_takes_the_likeliest_token_each_time() -> None:
    tokens = list(TOKENS)
    for token in run_generate(6):
        assert token == int(np.argmax(MODEL.prefill(WEIGHTS, new_cache(), tokens)))
        tokens.append(token)
    assert len(tokens) == len(TOKENS) + 6


def test_generation_stops_at_the_end_of_the_turn_and_at_the_capacity() -> None:
    unbounded = run_generate(1000)
    # The last token needs no place in the cache.
    assert len(unbounded) == 64 - len(TOKENS) + 1
    assert run_generate(1000, end_of_turn=unbounded[4]) == unbounded[: unbounded.index(unbounded[4])]
    assert run_generate(0) == []


def test_sampling_is_repeatable_and_its_seed_matters() -> None:
    def draw(seed: int) -> list[int]:
        return run_generate(20, sampler=Sampler(temperature=2.0, seed=seed))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@given(st.floats(0.1, 5), st.floats(0.01, 1), st.integers(0, 1000))
def test_sampling_draws_only_from_the_likeliest(temperature: float, top_p: float, seed: int) -> None:
    logits = np.random.default_rng(seed).standard_normal(30).astype(np.float32)
    token = Sampler(temperature=temperature, top_p=top_p, seed=seed).choose(logits)
    shares = np.exp(logits.astype(np.float64) / temperature)
    shares /= shares.sum()
    assert shares[shares > shares[token]].sum() < top_p


def test_a_low_temperature_takes_the_likeliest_token() -> None:
    logits = np.array([1, 3, 2], np.float32)
    assert Sampler(temperature=1e-300).choose(logits) == 1
    assert Sampler(temperature=1.0, top_p=1e-9).choose(logits) == 1
    drawn = {Sampler(temperature=100.0, seed=seed).choose(logits) for seed in range(50)}
    assert drawn == {0, 1, 2}


@pytest.mark.parametrize("setting", [{"temperature": -1.0}, {"temperature": math.nan}, {"top_p": 0.0}])
def test_sampling_settings_out_of_range_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="is not"):
        Sampler(**setting)  # type: ignore[arg-type]  # one setting at a time
