"""One model on two chips: the first reads the prompt, the second writes the answer.

Both chips hold the weights. When the prompt has been read, the second chip copies the blocks of the
key-value cache out of the first one's memory; the parent only names the two buffers. The arithmetic
is that of ``generate``, so the tokens are too.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from simpler import register_chip_control_extension
from simpler.models.graph_model import Chip, GraphModel, Step
from simpler.models.launches import Span
from simpler.models.layout import FloatArray, copy_blocks
from simpler.models.pipeline import LAYERS_OF_TASK, record_layers
from simpler.models.shard import Shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simpler import ChipView
    from simpler.models.llama import Llama

PREFILL_CHIP = 0
DECODE_CHIP = 1
TRANSFER_EXTENSION = "simpler.models.copy_kv_blocks"

# Layers, blocks per layer in the buffers, bytes of a block, blocks to copy of each layer.
_TRANSFER_REQUEST = struct.Struct("<4q")
# Bytes copied, seconds that took.
_TRANSFER_REPLY = struct.Struct("<qd")


@dataclass(frozen=True)
class Transfer:
    """What moving one sequence's cache took: ``copy_s`` inside the chip, without the call around it."""

    nbytes: int
    copies: int
    copy_s: float


def copy_kv_blocks(chip: ChipView, payload: bytes, _device_id: int) -> bytes:
    """Chip-control extension: copy blocks of a cache from buffer ``source`` to buffer ``target``."""
    layers, capacity, block_bytes, blocks = _TRANSFER_REQUEST.unpack(payload)
    shape = (layers, capacity, block_bytes)
    target = chip.buffers["target"].array(shape, np.uint8)
    source = chip.buffers["source"].array(shape, np.uint8)
    start = time.perf_counter()
    copied = copy_blocks(target, source, blocks)
    return _TRANSFER_REPLY.pack(copied, time.perf_counter() - start)


class TwoChipModel(GraphModel):
    """A chip for prompts and a chip for answers; how the cache gets to the second is for the subclasses.

    Args:
        model: The whole model.
    """

    def __init__(self, model: Llama) -> None:
        super().__init__(model, [Shard.all_of(model.config)] * 2)

    def _record(self, step: Step) -> None:
        chips = self.prompt_chips if step.reads_prompt else self.answer_chips
        logits = self._logits_tensor(range(self._model.config.vocabulary))
        record_layers(step, chips, logits, LAYERS_OF_TASK)

    @property
    def prompt_chips(self) -> Sequence[Chip]:
        """The first."""
        return self.chips[PREFILL_CHIP : PREFILL_CHIP + 1]

    @property
    def answer_chips(self) -> Sequence[Chip]:
        """The second."""
        return self.chips[DECODE_CHIP : DECODE_CHIP + 1]


class SplitModel(TwoChipModel):
    """See the module.

    Args:
        model: The whole model.

    Attributes:
        transfer: The last move of a cache; None before the first.
    """

    def __init__(self, model: Llama) -> None:
        register_chip_control_extension(TRANSFER_EXTENSION, copy_kv_blocks)
        super().__init__(model)
        self.transfer: Transfer | None = None
        self._move: list[Span] = []

    def _start(self) -> None:
        super()._start()
        # The first touch of memory costs a page fault; later moves cost the copies alone.
        self._move_cache(self._model.kv.capacity)

    def read_prompt(self, prompt: Sequence[int]) -> FloatArray:
        """Start a sequence and move its cache; otherwise as ``GraphModel.read_prompt``."""
        logits = super().read_prompt(prompt)
        start = time.perf_counter()
        self.transfer = self._move_cache(len(prompt))
        self._move = [Span("move cache", DECODE_CHIP, start, time.perf_counter() - start)]
        return logits

    @property
    def spans(self) -> list[Span]:
        """As of every such model, and the move of the cache, by the time they began."""
        return sorted([*super().spans, *self._move], key=lambda span: span.start_s)

    def _move_cache(self, tokens: int) -> Transfer:
        kv = self._model.kv
        blocks = kv.used_blocks(tokens)
        reply = self.worker.run_chip_control_extension(
            TRANSFER_EXTENSION,
            _TRANSFER_REQUEST.pack(kv.layers, kv.blocks, kv.block_bytes, blocks),
            worker_id=DECODE_CHIP,
            buffers={
                "source": self.chips[PREFILL_CHIP].cache,
                "target": self.chips[DECODE_CHIP].cache,
            },
        )
        nbytes, copy_s = _TRANSFER_REPLY.unpack(reply)
        return Transfer(nbytes, kv.layers * blocks, copy_s)
