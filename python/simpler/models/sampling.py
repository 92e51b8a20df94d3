"""Choosing the next token from logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from simpler.models.layout import FloatArray


class Sampler:
    """Chooses tokens: the likeliest one, or at random from the likeliest.

    Not thread-safe: it owns a random number generator. Equal settings and equal logits give equal
    tokens.

    Args:
        temperature: 0 always takes the likeliest token (the first of equals). Above 0, the logits
            are divided by it and a token is drawn.
        top_p: Draw only from the fewest tokens whose probabilities reach this sum; above 0 and at
            most 1.
        seed: Of the random number generator.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(self, *, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0) -> None:
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"a temperature of {temperature} is not a finite number from 0")
        if not 0 < top_p <= 1:
            raise ValueError(f"a top_p of {top_p} is not above 0 and at most 1")
        self._temperature = temperature
        self._top_p = top_p
        self._random = np.random.default_rng(seed)

    def choose(self, logits: FloatArray) -> int:
        """The next token, an index into ``logits``."""
        if self._temperature == 0:
            return int(np.argmax(logits))
        order = np.argsort(-logits, kind="stable")
        scaled = logits[order].astype(np.float64)
        scaled = (scaled - scaled[0]) / self._temperature
        probabilities = np.exp(scaled)
        reached = np.cumsum(probabilities)
        total = reached[-1]
        kept = int(np.searchsorted(reached, self._top_p * total)) + 1
        reached = reached[:kept]
        drawn = np.searchsorted(reached, self._random.random() * reached[-1], side="right")
        return int(order[min(int(drawn), reached.size - 1)])
