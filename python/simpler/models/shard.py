"""Which part of a model one chip holds, and how the parts are cut out of the whole model's weights.

A shard of layers (pipeline) or of heads and feed-forward columns (tensor parallel) is itself a model
with smaller dimensions: its layouts are those of ``Llama``, and so are its functions. With a part of
the heads or columns these give shares, whose sum over the shards is what the whole model computes.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from simpler.models.config import LlamaConfig, ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from simpler.models.checkpoint import WeightChunk
    from simpler.models.layout import FloatArray, WeightLayout


@dataclass(frozen=True)
class Shard:
    """A part of a model. All ranges are of the whole model's.

    Attributes:
        whole: The whole model.
        layers: Layers.
        kv_heads: Key and value heads, with the query heads that each serves.
        hidden: Columns of the feed-forward layer.
        vocabulary: Tokens whose logits this shard computes. It holds the whole embedding all the same.
    """

    whole: LlamaConfig
    layers: range
    kv_heads: range
    hidden: range
    vocabulary: range

    @classmethod
    def all_of(cls, config: LlamaConfig) -> Shard:
        """The whole model."""
        counts = config.layers, config.kv_heads, config.hidden, config.vocabulary
        return cls(config, *(range(count) for count in counts))

    @property
    def heads(self) -> range:
        """Query heads."""
        group = self.whole.heads // self.whole.kv_heads
        return range(self.kv_heads.start * group, self.kv_heads.stop * group)

    @property
    def config(self) -> LlamaConfig:
        """The dimensions of the part."""
        return dataclasses.replace(
            self.whole,
            layers=len(self.layers),
            heads=len(self.heads),
            kv_heads=len(self.kv_heads),
            hidden=len(self.hidden),
        )

    def cut(self, name: str, tensor: FloatArray) -> tuple[str, FloatArray] | None:
        """This shard's part of a tensor of the whole model, and its name in the shard's layout.

        Args:
            name: Such as ``"blk.7.qkv"``.
            tensor: In the whole model's shape.

        Returns:
            None when the shard has none of it.
        """
        if not name.startswith("blk."):
            return name, tensor
        _, layer, part = name.split(".")
        if int(layer) not in self.layers:
            return None
        return f"blk.{int(layer) - self.layers.start}.{part}", self._cut_part(part, tensor)

    def _cut_part(self, part: str, tensor: FloatArray) -> FloatArray:
        whole = self.whole
        queries, keys = _span(self.heads, whole.head), _span(self.kv_heads, whole.head)
        if part == "qkv":
            ends = np.cumsum([whole.heads, whole.kv_heads]) * whole.head
            query, key, value = np.split(tensor, ends, axis=1)
            return np.concatenate([query[:, queries], key[:, keys], value[:, keys]], axis=1)
        if part == "gate_up":
            columns = _span(self.hidden)
            return np.concatenate([half[:, columns] for half in np.split(tensor, 2, axis=1)], axis=1)
        if part == "attn_output":
            return tensor[queries]
        if part == "down":
            return tensor[_span(self.hidden)]
        return tensor


def split_layers(config: LlamaConfig, count: int) -> list[Shard]:
    """Consecutive layers for each of ``count`` chips, as evenly as possible.

    Raises:
        ModelError: fewer layers than chips.
    """
    _check_count(config.layers, count, "layers")
    whole = Shard.all_of(config)
    return [dataclasses.replace(whole, layers=layers) for layers in even_ranges(config.layers, count)]


def split_heads(config: LlamaConfig, count: int) -> list[Shard]:
    """Heads, feed-forward columns and logits for each of ``count`` chips, as evenly as whole heads allow.

    Raises:
        ModelError: fewer key and value heads than chips.
    """
    _check_count(config.kv_heads, count, "key and value heads")
    parts = zip(
        *(even_ranges(total, count) for total in (config.kv_heads, config.hidden, config.vocabulary)),
        strict=True,
    )
    return [Shard(config, range(config.layers), *ranges) for ranges in parts]


def even_ranges(total: int, count: int) -> list[range]:
    """``range(total)`` in ``count`` parts whose lengths differ by one at most, longer ones first."""
    short, longer = divmod(total, count)
    ends = [index * short + min(index, longer) for index in range(count + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends)]


def cut_chunks(
    layout: WeightLayout, chunks: Iterable[WeightChunk]
) -> Iterator[tuple[WeightChunk, list[tuple[str, FloatArray]]]]:
    """Each chunk with the tensors in it, by name and in their shapes.

    Raises:
        ValueError: a chunk has a part of a tensor.
    """
    for chunk in chunks:
        end = chunk.offset + chunk.data.size
        tensors = []
        for name, place in layout.places.items():
            if place.offset >= end or place.offset + place.size <= chunk.offset:
                continue
            at = place.offset - chunk.offset
            if at < 0 or at + place.size > chunk.data.size:
                raise ValueError(f"a chunk of weights has only a part of {name!r}")
            tensors.append((name, chunk.data[at : at + place.size].reshape(place.shape)))
        yield chunk, tensors


def _check_count(total: int, count: int, what: str) -> None:
    if not 1 <= count <= total:
        raise ModelError(f"the model's {total} {what} cannot be split over {count} chips")


def _span(units: range, width: int = 1) -> slice:
    return slice(units.start * width, units.stop * width)
