"""A small random model with the heads of SmolLM2-135M (nine for queries, three for keys), for the splits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from simpler.models.checkpoint import WeightChunk
from simpler.models.config import LlamaConfig
from simpler.models.generation import generate
from simpler.models.llama import Llama

if TYPE_CHECKING:
    from simpler.models.graph_model import GraphModel
    from simpler.models.sampling import Sampler

MODEL = Llama(
    LlamaConfig(
        layers=3,
        embedding=36,
        hidden=50,
        heads=9,
        kv_heads=3,
        head=4,
        vocabulary=80,
        context=64,
        rope_base=1e3,
        norm_epsilon=1e-5,
    ),
    40,
)
WEIGHTS = (np.random.default_rng(2).standard_normal(MODEL.weights.size) / 4).astype(np.float32)
PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 80, 21)]
OTHER_PROMPT = [int(token) for token in np.random.default_rng(4).integers(0, 80, 5)]
NEVER = -1


def load(model: GraphModel) -> None:
    """Give it the weights."""
    assert sum(model.load([WeightChunk(0, WEIGHTS)])) == MODEL.weights.nbytes


def reference(prompt: list[int], max_tokens: int, sampler: Sampler | None = None) -> list[int]:
    """What one process says."""
    return list(generate(MODEL, WEIGHTS, prompt, max_tokens=max_tokens, end_of_turn=NEVER, sampler=sampler))
