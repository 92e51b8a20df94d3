"""One model on two chips: the first reads the prompt, the second writes the answer.

Both chips hold the weights. When the prompt has been read, the second chip copies the blocks of the
key-value cache out of the first one's memory; the parent only names the two buffers. The arithmetic
is that of ``generate``, so the tokens are too.
"""

from __future__ import annotations

import itertools
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from simpler import ControlOp, Tag, TaskArgs, Worker, register_chip_control_extension
from simpler.models.layout import FLOAT_BYTES, FloatArray, copy_blocks
from simpler.models.sampling import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Self

    from simpler import Buffer, CallableHandle, ChipView, HostBuffer
    from simpler.models.checkpoint import WeightChunk
    from simpler.models.llama import Llama

PREFILL_CHIP = 0
DECODE_CHIP = 1
TRANSFER_EXTENSION = "simpler.models.copy_kv_blocks"
_PINGS = 1000
# Room for the allocator's alignment.
_SLACK_BYTES = 1 << 20

# Layers, blocks per layer in the buffers, bytes of a block, blocks to copy of each layer.
_TRANSFER_REQUEST = struct.Struct("<4q")
# Bytes copied, seconds that took.
_TRANSFER_REPLY = struct.Struct("<qd")


@dataclass(frozen=True)
class Span:
    """Something that took time; ``start_s`` is on the monotonic clock of ``time.perf_counter``."""

    name: str
    chip: int
    start_s: float
    duration_s: float


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


class SplitModel:
    """A model on two chip processes. Enter it to start them; leaving it ends them.

    Not thread-safe; one sequence at a time.

    Args:
        model: Inherited by the chips at the fork; its capacity bounds prompt and answer together.

    Attributes:
        worker: The node of two chips.
        caches: The buffer of keys and values of each chip, while entered.
        spans: What the chips have done, in order.
        transfer: The last move of a cache; None before the first.
    """

    def __init__(self, model: Llama) -> None:
        self._model = model
        register_chip_control_extension(TRANSFER_EXTENSION, copy_kv_blocks)
        self.worker = Worker(
            level=3,
            device_ids=[0, 1],
            hbm_bytes=model.weights.nbytes + model.kv.nbytes + _SLACK_BYTES,
        )
        self._prefill, self._decode = (self.worker.register(kernel) for kernel in _kernels(model))
        self._weights: list[Buffer] = []
        self.caches: list[Buffer] = []
        self.spans: list[Span] = []
        self.transfer: Transfer | None = None

    def __enter__(self) -> Self:
        self.worker.init()
        try:
            self._allocate()
        except BaseException:
            self.worker.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.worker.close()

    def _allocate(self) -> None:
        model, chips = self._model, (PREFILL_CHIP, DECODE_CHIP)
        self._weights = [self.worker.malloc(model.weights.nbytes, worker_id=chip) for chip in chips]
        self.caches = [self.worker.malloc(model.kv.nbytes, worker_id=chip) for chip in chips]
        self._tokens = self._host_buffer(model.kv.capacity)
        self._logits = self._host_buffer(model.config.vocabulary)
        # The first touch of memory costs a page fault; later moves cost the copies alone.
        self._move_cache(model.kv.capacity)

    def _host_buffer(self, items: int) -> HostBuffer:
        return self.worker.create_buffer(items * FLOAT_BYTES)

    def load(self, chunks: Iterable[WeightChunk]) -> Iterator[int]:
        """Copy weights to both chips, yielding the bytes of each part done.

        Nothing is loaded unless the iterator is used up.
        """
        for chunk in chunks:
            for buffer in self._weights:
                self.worker.copy_to(buffer, chunk.data, dst_offset=chunk.offset * FLOAT_BYTES)
            yield chunk.data.nbytes

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        end_of_turn: int,
        sampler: Sampler | None = None,
    ) -> Iterator[int]:
        """Yield tokens that follow the prompt; arguments and tokens as in ``generation.generate``.

        Raises:
            ValueError: the prompt is empty or longer than the model's capacity.
            SimplerError: a chip failed.
        """
        sampler = sampler or Sampler()
        capacity = self._model.kv.capacity
        if not 1 <= len(prompt) <= capacity:
            raise ValueError(f"a prompt of {len(prompt)} tokens does not fit a cache of {capacity}")
        self._read_prompt(prompt)
        start = time.perf_counter()
        self.transfer = self._move_cache(len(prompt))
        self.spans.append(Span("move cache", DECODE_CHIP, start, time.perf_counter() - start))
        for count, position in enumerate(itertools.count(len(prompt)), 1):
            if count > max_tokens:
                return
            token = sampler.choose(self._logits_array())
            if token == end_of_turn:
                return
            yield token
            if count == max_tokens or position == capacity:
                return
            self._write_token(token, position)

    def control_round_trip_s(self) -> float:
        """Median time of an empty control call to the second chip, answered in C++."""
        times = []
        for _ in range(_PINGS):
            start = time.perf_counter()
            self.worker.control_payload(DECODE_CHIP, ControlOp.PING)
            times.append(time.perf_counter() - start)
        return float(np.median(times))

    def _logits_array(self) -> FloatArray:
        return self._logits.array((self._model.config.vocabulary,), np.float32)

    def _read_prompt(self, prompt: Sequence[int]) -> None:
        self._tokens.array((len(prompt),), np.int32)[...] = prompt
        args = self._args(PREFILL_CHIP).add_tensor(self._tokens.tensor((len(prompt),), np.int32), Tag.IN)
        self._run("prefill", self._prefill, args, PREFILL_CHIP)

    def _write_token(self, token: int, position: int) -> None:
        args = self._args(DECODE_CHIP).add_scalar(token).add_scalar(position)
        self._run("decode", self._decode, args, DECODE_CHIP)

    def _args(self, chip: int) -> TaskArgs:
        model = self._model
        return (
            TaskArgs()
            .add_tensor(self._weights[chip].tensor((model.weights.size,), np.float32), Tag.IN)
            .add_tensor(self.caches[chip].tensor((model.kv.size,), np.float32), Tag.INOUT)
            .add_tensor(self._logits.tensor((model.config.vocabulary,), np.float32), Tag.OUT)
        )

    def _run(self, name: str, kernel: CallableHandle, args: TaskArgs, chip: int) -> None:
        start = time.perf_counter()
        self.worker.run(lambda orch, _args, _config: orch.submit_next_level(kernel, args, worker=chip))
        self.spans.append(Span(name, chip, start, time.perf_counter() - start))

    def _move_cache(self, tokens: int) -> Transfer:
        kv = self._model.kv
        blocks = kv.used_blocks(tokens)
        reply = self.worker.run_chip_control_extension(
            TRANSFER_EXTENSION,
            _TRANSFER_REQUEST.pack(kv.layers, kv.blocks, kv.block_bytes, blocks),
            worker_id=DECODE_CHIP,
            buffers={"source": self.caches[PREFILL_CHIP], "target": self.caches[DECODE_CHIP]},
        )
        nbytes, copy_s = _TRANSFER_REPLY.unpack(reply)
        return Transfer(nbytes, kv.layers * blocks, copy_s)


def _kernels(model: Llama) -> tuple[Callable[..., None], Callable[..., None]]:
    """The functions that run in the chips, on views of device memory and of shared host memory."""

    def prefill(weights: FloatArray, kv: FloatArray, logits: FloatArray, tokens: NDArray[np.int32]) -> None:
        logits[...] = model.prefill(weights, kv, tokens.tolist())

    def decode(weights: FloatArray, kv: FloatArray, logits: FloatArray, token: int, position: int) -> None:
        logits[...] = model.decode_step(weights, kv, token, position)

    return prefill, decode
