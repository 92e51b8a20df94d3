"""Generating text with a model in this process; the reference for the split run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]  # it ships no types

from simpler.models.sampling import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from simpler.models.layout import FloatArray
    from simpler.models.llama import Llama


def generate(
    model: Llama,
    weights: FloatArray,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    end_of_turn: int,
    sampler: Sampler | None = None,
) -> Iterator[int]:
    """Yield tokens that follow the prompt, the end of the turn left out.

    BLAS runs with one thread, as it does in a chip process: the number of threads decides the
    order of additions, and so the last bits.

    Args:
        model: Its capacity bounds prompt and answer together.
        weights: Flat buffer in the layout ``model.weights``.
        prompt: Token ids, at least one.
        max_tokens: Most tokens to yield; stops earlier when the cache is full.
        end_of_turn: Token that ends the answer.
        sampler: ``None`` takes the likeliest token each time.

    Raises:
        ValueError: the prompt is empty or longer than the model's capacity.
    """
    sampler = sampler or Sampler()
    libraries = ThreadpoolController()
    kv = np.zeros(model.kv.size, np.float32)
    position = len(prompt)
    with libraries.limit(limits=1):
        logits = model.prefill(weights, kv, prompt)
    for count in range(1, max_tokens + 1):
        token = sampler.choose(logits)
        if token == end_of_turn:
            return
        yield token
        if count == max_tokens or position == model.kv.capacity:
            return
        with libraries.limit(limits=1):
            logits = model.decode_step(weights, kv, token, position)
        position += 1
