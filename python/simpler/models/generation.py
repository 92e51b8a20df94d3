"""Generating text with a model in this process; the reference for the split run."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]  # it ships no types

from simpler.models.sampling import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
    libraries = ThreadpoolController()
    kv = np.zeros(model.kv.size, np.float32)

    def decode(token: int, position: int) -> FloatArray:
        with libraries.limit(limits=1):
            return model.decode_step(weights, kv, token, position)

    with libraries.limit(limits=1):
        logits = model.prefill(weights, kv, prompt)
    yield from choose_tokens(
        logits,
        decode,
        positions=range(len(prompt), model.kv.capacity),
        max_tokens=max_tokens,
        end_of_turn=end_of_turn,
        sampler=sampler,
    )


def choose_tokens(
    logits: FloatArray,
    decode: Callable[[int, int], FloatArray],
    *,
    positions: Sequence[int],
    max_tokens: int,
    end_of_turn: int,
    sampler: Sampler | None = None,
) -> Iterator[int]:
    """Choose a token, yield it, have it decoded, and so on; the end of the turn left out.

    Args:
        logits: Of the first token.
        decode: Takes a token and its position, gives the logits of the next.
        positions: Where there is room for tokens; the one chosen when there is none is the last.
        max_tokens: Most tokens to yield.
        end_of_turn: Token that ends the answer.
        sampler: ``None`` takes the likeliest token each time.
    """
    sampler = sampler or Sampler()
    for count, position in enumerate(itertools.chain(positions, [None]), 1):
        if count > max_tokens:
            return
        token = sampler.choose(logits)
        if token == end_of_turn:
            return
        yield token
        if count == max_tokens or position is None:
            return
        logits = decode(token, position)
