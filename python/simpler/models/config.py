"""The dimensions of a Llama model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_DIMENSION = 1 << 20
_MAX_LAYERS = 1 << 10


class ModelError(ValueError):
    """The file describes a model that is damaged or that this code does not compute."""


@dataclass(frozen=True)
class LlamaConfig:
    """Dimensions and constants of one model; checked when made.

    Attributes:
        layers: Number of transformer blocks.
        embedding: Width of the residual stream.
        hidden: Width of the feed-forward layer.
        heads: Query heads.
        kv_heads: Key and value heads; ``heads`` is a multiple.
        head: Width of a head; even.
        vocabulary: Number of tokens.
        context: Most tokens of a sequence.
        rope_base: Base of the rotary embedding's wavelengths.
        norm_epsilon: Added to the mean square in RMS normalisation.

    Raises:
        ModelError: a dimension is out of range or does not fit another.
    """

    layers: int
    embedding: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    context: int
    rope_base: float
    norm_epsilon: float

    def __post_init__(self) -> None:
        limits = {"layers": _MAX_LAYERS, "vocabulary": 1 << 24, "context": 1 << 24}
        for name in (
            "layers", "embedding", "hidden", "heads", "kv_heads", "head", "vocabulary", "context"
        ):  # fmt: skip
            value = getattr(self, name)
            if not 1 <= value <= limits.get(name, _MAX_DIMENSION):
                raise ModelError(f"{name} is {value}")
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} query heads do not divide by {self.kv_heads}")
        if self.head % 2:
            raise ModelError(f"the width of a head is {self.head}, which is odd")
        if not (math.isfinite(self.rope_base) and self.rope_base > 1):
            raise ModelError(f"rope_base is {self.rope_base}")
        if not (math.isfinite(self.norm_epsilon) and self.norm_epsilon > 0):
            raise ModelError(f"norm_epsilon is {self.norm_epsilon}")

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> LlamaConfig:
        """Read the ``llama.*`` entries of a GGUF file.

        Raises:
            ModelError: another architecture, or an entry is missing, of the wrong type or out of
                range.
        """
        architecture = metadata.get("general.architecture")
        if architecture != "llama":
            raise ModelError(f"the architecture is {architecture!r}; only 'llama' is computed")
        embedding = _integer(metadata, "llama.embedding_length")
        heads = _integer(metadata, "llama.attention.head_count")
        if heads < 1 or embedding % heads:
            raise ModelError(f"an embedding of {embedding} does not divide into {heads} heads")
        head = embedding // heads
        rotated = metadata.get("llama.rope.dimension_count", head)
        if rotated != head:
            raise ModelError(f"{rotated} of {head} dimensions of a head rotate; all must")
        return cls(
            layers=_integer(metadata, "llama.block_count"),
            embedding=embedding,
            hidden=_integer(metadata, "llama.feed_forward_length"),
            heads=heads,
            kv_heads=_integer(metadata, "llama.attention.head_count_kv"),
            head=head,
            vocabulary=_integer(metadata, "llama.vocab_size"),
            context=_integer(metadata, "llama.context_length"),
            rope_base=_number(metadata, "llama.rope.freq_base"),
            norm_epsilon=_number(metadata, "llama.attention.layer_norm_rms_epsilon"),
        )


def _integer(metadata: Mapping[str, object], key: str) -> int:
    value = metadata.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"{key} is {value!r}, not a whole number")
    return value


def _number(metadata: Mapping[str, object], key: str) -> float:
    value = metadata.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ModelError(f"{key} is {value!r}, not a number")
    return float(value)
