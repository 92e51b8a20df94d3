"""The functions that chips run: steps of the forward pass on views of device memory.

Each gets a clock first, two float64 in host memory, and writes there when it began and when it had
ended, on the monotonic clock that all processes of a machine share. Streams, shares and caches have
room for as many tokens as the graph was captured for; ``count`` of them are in use.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from simpler import CallableHandle, Worker
    from simpler.models.layout import FloatArray
    from simpler.models.llama import Llama
    from simpler.models.shard import Shard


@dataclass(frozen=True)
class Kernels:
    """Handles of one chip's kernels.

    Attributes:
        embed_prompt: ``(weights, tokens, stream, count)``.
        embed_token: ``(weights, stream, token)``.
        receive: ``(source, stream, count)``; the stream of another chip.
        layers: ``(weights, caches, stream, first, layers, start, count)``; that many whole layers.
        attend: ``(weights, cache, stream, share, layer, start, count, *shares)``; adds the shares of the
            step before to the stream, and gives this chip's of the layer's attention.
        feed_forward: ``(weights, stream, share, layer, count, *shares)``; likewise.
        logits: ``(weights, stream, logits, count, *shares)``; of this chip's part of the vocabulary.
    """

    embed_prompt: CallableHandle
    embed_token: CallableHandle
    receive: CallableHandle
    layers: CallableHandle
    attend: CallableHandle
    feed_forward: CallableHandle
    logits: CallableHandle


def register_kernels(worker: Worker, model: Llama, shard: Shard) -> Kernels:
    """Register the kernels of one chip, which is to inherit them.

    Args:
        worker: Not yet started.
        model: Of the shard's dimensions.
        shard: What the chip holds.
    """
    kernels = (*_stream_kernels(model), *_share_kernels(model, shard))
    return Kernels(*(worker.register(_timed(kernel)) for kernel in kernels))


def _stream_kernels(model: Llama) -> tuple[Callable[..., None], ...]:
    def embed_prompt(weights: FloatArray, tokens: NDArray[np.int32], stream: FloatArray, count: int) -> None:
        stream[:count] = model.embed(weights, tokens[:count])

    def embed_token(weights: FloatArray, stream: FloatArray, token: int) -> None:
        stream[:1] = model.embed(weights, [token])

    def receive(source: FloatArray, stream: FloatArray, count: int) -> None:
        stream[:count] = source[:count]

    def layers(
        weights: FloatArray,
        caches: FloatArray,
        stream: FloatArray,
        first: int,
        layers: int,
        start: int,
        count: int,
    ) -> None:
        rows = stream[:count]
        for layer, cache in enumerate(caches.reshape(layers, -1), first):
            part = model.weights.layer(weights, layer)
            rows += model.attend(rows, part, model.kv.view_layer(cache), start)
            rows += model.feed_forward(rows, part)

    return embed_prompt, embed_token, receive, layers


def _share_kernels(model: Llama, shard: Shard) -> tuple[Callable[..., None], ...]:
    vocabulary = slice(shard.vocabulary.start, shard.vocabulary.stop)

    def attend(
        weights: FloatArray,
        cache: FloatArray,
        stream: FloatArray,
        share: FloatArray,
        layer: int,
        start: int,
        count: int,
        *shares: FloatArray,
    ) -> None:
        rows = _add(stream[:count], shares)
        part = model.weights.layer(weights, layer)
        share[:count] = model.attend(rows, part, model.kv.view_layer(cache), start)

    def feed_forward(
        weights: FloatArray,
        stream: FloatArray,
        share: FloatArray,
        layer: int,
        count: int,
        *shares: FloatArray,
    ) -> None:
        rows = _add(stream[:count], shares)
        share[:count] = model.feed_forward(rows, model.weights.layer(weights, layer))

    def logits(
        weights: FloatArray, stream: FloatArray, logits: FloatArray, count: int, *shares: FloatArray
    ) -> None:
        row = _add(stream[count - 1 : count].copy(), [share[count - 1 :] for share in shares])
        logits[...] = model.logits(weights, row[0], vocabulary)

    return attend, feed_forward, logits


def _add(rows: FloatArray, shares: Sequence[FloatArray]) -> FloatArray:
    """Add the shares to the rows in place, in the same order on every chip, so that all get the same bits."""
    for share in shares:
        rows += share[: len(rows)]
    return rows


def _timed(kernel: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(kernel)
    def run(clock: NDArray[np.float64], *args: object) -> None:
        clock[0] = time.perf_counter()
        kernel(*args)
        clock[1] = time.perf_counter()

    return run
