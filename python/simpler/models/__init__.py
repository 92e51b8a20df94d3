"""Language models in numpy, for the demo, the examples and the tests.

The forward pass works on memory that it does not own, so that it runs alike in one process and on
the device memory of chip processes. ``graph_model`` and what is made from it know of chips, by the
public API: ``split``, ``connected``, ``pipeline`` and ``tensor_parallel``.
"""

from simpler.models.checkpoint import (
    Checkpoint,
    ModelNotFoundError,
    WeightChunk,
    find_demo_model,
)
from simpler.models.comparison import Comparison, compare
from simpler.models.config import LlamaConfig, ModelError
from simpler.models.connected import BlockMove, ConnectedModel, block_namespace, name_blocks
from simpler.models.generation import generate
from simpler.models.gguf import GGUFError, GGUFFile
from simpler.models.graph_model import GraphModel
from simpler.models.launches import Launch, Span
from simpler.models.layout import KVLayout, WeightLayout
from simpler.models.llama import Llama
from simpler.models.pipeline import PipelineModel
from simpler.models.sampling import Sampler
from simpler.models.split import SplitModel, Transfer
from simpler.models.tensor_parallel import TensorParallelModel
from simpler.models.tokenizer import Message, StreamDecoder, Tokenizer, TokenizerError

__all__ = [
    "BlockMove",
    "Checkpoint",
    "Comparison",
    "ConnectedModel",
    "GGUFError",
    "GGUFFile",
    "GraphModel",
    "KVLayout",
    "Launch",
    "Llama",
    "LlamaConfig",
    "Message",
    "ModelError",
    "ModelNotFoundError",
    "PipelineModel",
    "Sampler",
    "Span",
    "SplitModel",
    "StreamDecoder",
    "TensorParallelModel",
    "Tokenizer",
    "TokenizerError",
    "Transfer",
    "WeightChunk",
    "WeightLayout",
    "block_namespace",
    "compare",
    "find_demo_model",
    "generate",
    "name_blocks",
]
