"""Parts of a model, put together again in one process, compute what the whole does."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest

from models.small import MODEL, WEIGHTS
from models.small import PROMPT as TOKENS
from simpler.models.checkpoint import WeightChunk
from simpler.models.config import ModelError
from simpler.models.llama import Llama
from simpler.models.shard import Shard, cut_chunks, even_ranges, split_heads, split_layers

if TYPE_CHECKING:
    from simpler.models.layout import FloatArray

CONFIG = MODEL.config


@dataclasses.dataclass
class Part:
    """A shard with its weights and its cache."""

    shard: Shard
    model: Llama
    weights: FloatArray
    kv: FloatArray

    @classmethod
    def of(cls, shard: Shard) -> Part:
        model = Llama(shard.config, 40)
        weights = np.zeros(model.weights.size, np.float32)
        for _, tensors in cut_chunks(MODEL.weights, [WeightChunk(0, WEIGHTS)]):
            for name, tensor in tensors:
                mine = shard.cut(name, tensor)
                if mine is not None:
                    model.weights.places[mine[0]].view(weights)[...] = mine[1]
        return cls(shard, model, weights, np.zeros(model.kv.size, np.float32))


def pipeline_logits(parts: list[Part], tokens: list[int], start: int) -> FloatArray:
    stream = parts[0].model.embed(parts[0].weights, tokens)
    for part in parts:
        for index, cache in enumerate(part.model.kv.view(part.kv)):
            layer = part.model.weights.layer(part.weights, index)
            stream += part.model.attend(stream, layer, cache, start)
            stream += part.model.feed_forward(stream, layer)
    return parts[-1].model.logits(parts[-1].weights, stream[-1])


def tensor_parallel_logits(parts: list[Part], tokens: list[int], start: int) -> FloatArray:
    stream = parts[0].model.embed(parts[0].weights, tokens)
    for index in range(CONFIG.layers):
        layers = [part.model.weights.layer(part.weights, index) for part in parts]
        caches = [part.model.kv.view(part.kv)[index] for part in parts]
        for share in [
            part.model.attend(stream, layer, cache, start)
            for part, layer, cache in zip(parts, layers, caches, strict=True)
        ]:
            stream += share
        for share in [
            part.model.feed_forward(stream, layer) for part, layer in zip(parts, layers, strict=True)
        ]:
            stream += share
    return np.concatenate(
        [
            part.model.logits(
                part.weights, stream[-1], slice(part.shard.vocabulary.start, part.shard.vocabulary.stop)
            )
            for part in parts
        ]
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_layers_in_parts_give_the_same_bits(count: int) -> None:
    parts = [Part.of(shard) for shard in split_layers(CONFIG, count)]
    kv = np.zeros(MODEL.kv.size, np.float32)
    np.testing.assert_array_equal(pipeline_logits(parts, TOKENS, 0), MODEL.prefill(WEIGHTS, kv, TOKENS))
    position = len(TOKENS)
    np.testing.assert_array_equal(
        pipeline_logits(parts, [7], position), MODEL.decode_step(WEIGHTS, kv, 7, position)
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_shares_of_heads_and_columns_add_up(count: int) -> None:
    parts = [Part.of(shard) for shard in split_heads(CONFIG, count)]
    kv = np.zeros(MODEL.kv.size, np.float32)
    position = len(TOKENS)
    for actual, expected in [
        (tensor_parallel_logits(parts, TOKENS, 0), MODEL.prefill(WEIGHTS, kv, TOKENS)),
        (tensor_parallel_logits(parts, [7], position), MODEL.decode_step(WEIGHTS, kv, 7, position)),
    ]:
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)


def test_two_chips_get_six_and_three_of_nine_heads_and_three_get_three_each() -> None:
    two, three = (
        [(len(shard.heads), len(shard.kv_heads)) for shard in split_heads(CONFIG, count)] for count in (2, 3)
    )
    assert two == [(6, 2), (3, 1)]
    assert three == [(3, 1)] * 3


def test_the_parts_of_a_split_cover_everything_once() -> None:
    for count in (1, 2, 3):
        held = sum(
            Llama(shard.config, 40).weights.places["blk.0.gate_up"].size
            for shard in split_heads(CONFIG, count)
        )
        assert held == MODEL.weights.places["blk.0.gate_up"].size
        assert [layer for shard in split_layers(CONFIG, count) for layer in shard.layers] == [0, 1, 2]
    assert even_ranges(7, 3) == [range(3), range(3, 5), range(5, 7)]


def test_more_chips_than_there_is_to_split_are_refused() -> None:
    with pytest.raises(ModelError, match="3 layers cannot be split over 4 chips"):
        split_layers(CONFIG, 4)
    with pytest.raises(ModelError, match="3 key and value heads cannot be split over 4 chips"):
        split_heads(CONFIG, 4)


def test_a_chunk_that_ends_inside_a_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="only a part of 'token_embd'"):
        list(cut_chunks(MODEL.weights, [WeightChunk(0, WEIGHTS[:100])]))
