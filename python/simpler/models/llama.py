"""The forward pass of Llama models, in numpy and float32.

A model holds its dimensions and no weights: weights and key-value cache are flat buffers passed
to every call (see ``layout``), so the same functions run on ordinary arrays and on the device
memory of a chip process. Equal inputs give equal bits wherever the same BLAS library runs with
the same number of threads.

Architecture: https://arxiv.org/abs/2302.13971, with grouped-query attention as in
https://arxiv.org/abs/2305.13245 and rotary embeddings as in https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simpler.models.layout import BLOCK_TOKENS, FloatArray, KVLayout, LayerWeights, WeightLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simpler.models.config import LlamaConfig

ComplexArray: TypeAlias = NDArray[np.complex64]


class Llama:
    """Computes logits; immutable, so threads and forks may share it.

    Args:
        config: The model's dimensions.
        capacity: Most tokens of a sequence, at most ``config.context``.

    Raises:
        ValueError: ``capacity`` is out of range.

    Attributes:
        weights: Layout of the buffer of weights.
        kv: Layout of the buffer of keys and values.
    """

    def __init__(self, config: LlamaConfig, capacity: int) -> None:
        self.config = config
        self.weights = WeightLayout(config)
        self.kv = KVLayout(config, capacity)
        self._rotations = rope_rotations(config, capacity)

    def prefill(
        self, weights: FloatArray, kv: FloatArray, tokens: Sequence[int], start: int = 0
    ) -> FloatArray:
        """Run tokens that follow the first ``start`` tokens of the sequence, all at once.

        Args:
            weights: Flat buffer in the layout ``self.weights``; only read.
            kv: Flat buffer in the layout ``self.kv``; holds the first ``start`` tokens and gets
                these. Its contents beyond need not be initialised.
            tokens: One or more token ids.
            start: Position of the first of them.

        Returns:
            Logits of the token after the last, ``[vocabulary]``.

        Raises:
            ValueError: no tokens, an unknown token, a position outside the capacity, or a buffer
                that does not fit the layout.
        """
        count = len(tokens)
        if not count or start < 0 or start + count > self.kv.capacity:
            raise ValueError(f"{count} tokens from position {start} do not fit a cache of {self.kv.capacity}")
        cache = self.kv.view(kv)
        stream = self.embed(weights, tokens)
        for index in range(self.config.layers):
            layer = self.weights.layer(weights, index)
            stream += self.attend(stream, layer, cache[index], start)
            stream += self.feed_forward(stream, layer)
        return self.logits(weights, stream[-1])

    def decode_step(self, weights: FloatArray, kv: FloatArray, token: int, position: int) -> FloatArray:
        """Run one token at ``position``; otherwise like ``prefill``."""
        return self.prefill(weights, kv, (token,), position)

    def embed(self, weights: FloatArray, tokens: Sequence[int] | NDArray[np.int32]) -> FloatArray:
        """The residual stream as it enters the first layer, ``[tokens, embedding]``.

        Raises:
            ValueError: an unknown token, or a buffer that does not fit the layout.
        """
        ids = np.asarray(tokens, np.int64)
        if ids.min() < 0 or ids.max() >= self.config.vocabulary:
            raise ValueError(f"a token is not one of the {self.config.vocabulary}")
        return np.ascontiguousarray(self.weights.tensor(weights, "token_embd")[:, ids].T)

    def attend(self, stream: FloatArray, weights: LayerWeights, cache: FloatArray, start: int) -> FloatArray:
        """What the attention of one layer adds to the stream.

        Where the model has a part of the heads, that part's share of it.

        Args:
            stream: ``[tokens, embedding]``.
            weights: The layer's.
            cache: Its part of the key-value cache, which gets these tokens.
            start: Position of the first of them.
        """
        config = self.config
        count = stream.shape[0]
        end = start + count
        normed = rms_norm(stream, weights.attention_norm, config.norm_epsilon)
        qkv = (normed @ weights.qkv).reshape(count, -1, config.head)
        rotated = config.heads + config.kv_heads
        qkv[:, :rotated] = rotate(qkv[:, :rotated], self._rotations[start:end])
        queries, keys, values = np.split(qkv, (config.heads, rotated), axis=1)
        _store(cache, 0, keys, start)
        _store(cache, 1, values, start)
        attended = causal_attention(queries, _gather(cache, 0, end), _gather(cache, 1, end), start)
        output: FloatArray = attended @ weights.attention_output
        return output

    def feed_forward(self, stream: FloatArray, weights: LayerWeights) -> FloatArray:
        """What the feed-forward part of one layer adds to the stream, or a share of it as above."""
        normed = rms_norm(stream, weights.feed_forward_norm, self.config.norm_epsilon)
        gate, up = np.split(normed @ weights.gate_up, 2, axis=1)
        output: FloatArray = (silu(gate) * up) @ weights.down
        return output

    def logits(self, weights: FloatArray, row: FloatArray, tokens: slice = slice(None)) -> FloatArray:
        """Logits after the token whose ``row`` of the stream has left the last layer.

        Args:
            weights: Flat buffer in the layout ``self.weights``.
            row: ``[embedding]``.
            tokens: The part of the vocabulary to compute; all of it by default.
        """
        norm = self.weights.tensor(weights, "output_norm")
        last = rms_norm(row, norm, self.config.norm_epsilon)
        logits: FloatArray = last @ self.weights.tensor(weights, "token_embd")[:, tokens]
        return logits


def rms_norm(x: FloatArray, weight: FloatArray, epsilon: float) -> FloatArray:
    """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last axis."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    normed: FloatArray = x / np.sqrt(mean_square + np.float32(epsilon)) * weight
    return normed


def silu(x: FloatArray) -> FloatArray:
    """``x * sigmoid(x)``, exact at both ends of the range."""
    with np.errstate(over="ignore"):
        activated: FloatArray = x / (np.float32(1) + np.exp(-x))
    return activated


def rope_rotations(config: LlamaConfig, positions: int) -> ComplexArray:
    """Rotation of each pair at each position, ``[positions, 1, head / 2]``.

    Pair ``i`` turns by ``position * base ** (-2 i / head)``. Angles are computed in float64.
    """
    wavelengths = config.rope_base ** (-np.arange(0, config.head, 2) / config.head)
    angles = np.arange(positions)[:, None] * wavelengths
    rotations: ComplexArray = np.exp(1j * angles).astype(np.complex64)[:, None, :]
    return rotations


def rotate(x: FloatArray, rotations: ComplexArray) -> FloatArray:
    """Apply rotary embeddings to ``x``, ``[tokens, heads, head]``.

    GGUF files order the rows of the query and key projections so that the two numbers of a pair
    are neighbours, the real and imaginary part of one complex number.
    """
    turned: ComplexArray = np.ascontiguousarray(x).view(np.complex64) * rotations
    return turned.view(np.float32)


def causal_attention(queries: FloatArray, keys: FloatArray, values: FloatArray, start: int) -> FloatArray:
    """Softmax attention where a token sees itself and those before it.

    Args:
        queries: ``[tokens, heads, head]``, at positions ``start`` and on.
        keys: ``[kv_heads, start + tokens, head]``; each serves ``heads / kv_heads`` query heads
            in a row.
        values: Likewise.
        start: Position of the first query.

    Returns:
        ``[tokens, heads * head]``.
    """
    count, heads, width = queries.shape
    kv_heads, seen = keys.shape[:2]
    grouped = queries.reshape(count, kv_heads, heads // kv_heads, width)
    # The queries that share a key head become the rows of one matrix.
    rows = grouped.transpose(1, 2, 0, 3).reshape(kv_heads, -1, width)
    scores = rows @ keys.transpose(0, 2, 1)
    scores *= np.float32(width**-0.5)
    if count > 1:
        future = np.arange(seen) > np.arange(start, start + count)[:, None]
        scores.reshape(kv_heads, -1, count, seen)[:, :, future] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    attended = (scores @ values).reshape(kv_heads, -1, count, width)
    merged: FloatArray = attended.transpose(2, 0, 1, 3).reshape(count, heads * width)
    return merged


def _store(cache: FloatArray, which: int, rows: FloatArray, start: int) -> None:
    """Write ``[tokens, kv_heads, head]`` into the blocks of one layer from position ``start``."""
    written = 0
    while written < rows.shape[0]:
        block, slot = divmod(start + written, BLOCK_TOKENS)
        part = rows[written : written + BLOCK_TOKENS - slot]
        cache[block, which, :, slot : slot + part.shape[0]] = part.transpose(1, 0, 2)
        written += part.shape[0]


def _gather(cache: FloatArray, which: int, end: int) -> FloatArray:
    """Keys or values of the first ``end`` tokens of one layer, ``[kv_heads, end, head]``."""
    blocks = cache[: -(-end // BLOCK_TOKENS), which].transpose(1, 0, 2, 3)
    joined: FloatArray = blocks.reshape(blocks.shape[0], -1, blocks.shape[3])
    return joined[:, :end]
