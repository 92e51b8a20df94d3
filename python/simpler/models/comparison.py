"""Comparing logits with those of one process, for splits that take sums in another order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]  # it ships no types

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from simpler.models.layout import FloatArray
    from simpler.models.llama import Llama

TOLERANCE = 1e-3
"""Largest accepted difference of a logit. Those of SmolLM2-135M range over 30 and differ by up to 1e-4."""


@dataclass(frozen=True)
class Comparison:
    """What came of it.

    Attributes:
        steps: How many vectors of logits were compared.
        largest: The largest difference of a logit.
        other_tokens: Steps where another token was the likeliest, by less than the tolerance.
        failure: What is wrong; None when nothing is.
    """

    steps: int
    largest: float
    other_tokens: int
    failure: str | None


def compare(
    model: Llama,
    weights: FloatArray,
    prompt: Sequence[int],
    tokens: Sequence[int],
    logits: Iterable[FloatArray],
    tolerance: float = TOLERANCE,
) -> Comparison:
    """Give one process the tokens that were chosen and compare what it computes at each step.

    So one token that differs does not make all that follow differ. It is accepted where the reference's
    logit of it is less than the tolerance below the best.

    Args:
        model: The whole model.
        weights: Its weights in this process.
        prompt: Token ids, at least one.
        tokens: The answer.
        logits: That each of them was chosen from, and perhaps those after the last.
        tolerance: Largest accepted difference of a logit.

    Raises:
        ValueError: there are more logits than tokens could have been chosen from.
    """
    limit = ThreadpoolController().limit
    kv = np.zeros(model.kv.size, np.float32)
    largest, other, steps = 0.0, 0, 0
    for step, actual in enumerate(logits):
        if step > len(tokens):
            raise ValueError(f"more logits than those of {len(tokens)} tokens and one after them")
        with limit(limits=1):
            if step == 0:
                expected = model.prefill(weights, kv, prompt)
            else:
                expected = model.decode_step(weights, kv, tokens[step - 1], len(prompt) + step - 1)
        steps += 1
        difference = float(np.abs(actual - expected).max())
        largest = float(np.fmax(largest, difference))
        if not difference <= tolerance:  # also when it is not a number
            failure = f"a logit of step {step} differs by {difference:.2g}, more than {tolerance:g}"
            return Comparison(steps, largest, other, failure)
        chosen, best = int(np.argmax(actual)), int(np.argmax(expected))
        if chosen != best:
            other += 1
            behind = float(expected[best] - expected[chosen])
            if behind >= tolerance:
                failure = f"token {chosen} of step {step} is {behind:.2g} below token {best}"
                return Comparison(steps, largest, other, failure)
    return Comparison(steps, largest, other, None)
