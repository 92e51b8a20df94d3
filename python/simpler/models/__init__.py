"""Language models in numpy, for the demo, the examples and the tests.

The forward pass works on memory that it does not own, so that it runs alike in one process and on
the device memory of chip processes. Only ``split`` knows of chips, by the public API.
"""

from simpler.models.checkpoint import (
    Checkpoint,
    ModelNotFoundError,
    WeightChunk,
    find_demo_model,
)
from simpler.models.config import LlamaConfig, ModelError
from simpler.models.generation import generate
from simpler.models.gguf import GGUFError, GGUFFile
from simpler.models.layout import KVLayout, WeightLayout
from simpler.models.llama import Llama
from simpler.models.sampling import Sampler
from simpler.models.split import Span, SplitModel, Transfer
from simpler.models.tokenizer import Message, StreamDecoder, Tokenizer, TokenizerError

__all__ = [
    "Checkpoint",
    "GGUFError",
    "GGUFFile",
    "KVLayout",
    "Llama",
    "LlamaConfig",
    "Message",
    "ModelError",
    "ModelNotFoundError",
    "Sampler",
    "Span",
    "SplitModel",
    "StreamDecoder",
    "Tokenizer",
    "TokenizerError",
    "Transfer",
    "WeightChunk",
    "WeightLayout",
    "find_demo_model",
    "generate",
]
