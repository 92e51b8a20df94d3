"""Two engines on one Worker that hand KV over, for `KVConnectorContract`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from simpler import Worker
from simpler.kv import (
    BlockNamespace,
    KVCacheLayout,
    KVRequest,
    KVRequestState,
    KVRuntime,
    KVStepOutput,
    hash_blocks,
    register,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simpler import Buffer, Tensor
    from simpler.kv import KVTransferConfig

    Array = np.ndarray[Any, np.dtype[Any]]

LAYERS = ("first", "second", "third")
BLOCKS = 16
BLOCK_SIZE = 8
_FLOATS = 96
_GAP = 256


def layout(kind: str) -> KVCacheLayout:
    """``"packed"``, ``"split"`` (keys and values apart) or ``"padded"`` (blocks with gaps between them)."""
    row = _FLOATS * 4
    if kind == "split":
        return KVCacheLayout((2, BLOCKS, _FLOATS), (BLOCKS * row, row, 4), "float32", 4, 1, BLOCK_SIZE)
    step = row + (_GAP if kind == "padded" else 0)
    return KVCacheLayout((BLOCKS, _FLOATS), (step, 4), "float32", 4, 0, BLOCK_SIZE)


class Engine:
    """One engine, its memory, and a model of a scheduler around it."""

    def __init__(self, worker: Worker, config: KVTransferConfig, chips: Sequence[int], kind: str) -> None:
        """Allocate the caches and fill each with bytes of its own."""
        self.worker = worker
        self.layout = layout(kind)
        self.chips = tuple(chips)
        self.runtime = KVRuntime(worker, config, block_size=BLOCK_SIZE, chips=chips, load_timeout_s=20.0)
        self.loaded: set[str] = set()
        self.failed: dict[str, Exception] = {}
        self.recompute: dict[str, Any] = {}
        self.freed: list[tuple[str, tuple[int, ...]]] = []
        self._rng = np.random.default_rng(chips[0])
        self.buffers = {
            name: [worker.malloc(self.layout.extent, worker_id=chip) for chip in chips] for name in LAYERS
        }
        for buffer in self._each():
            worker.copy_to(buffer, self._rng.bytes(buffer.nbytes))
        self.runtime.register_kv_caches(self.tensors(), block_dim=self.layout.block_dim)

    def tensors(self) -> dict[str, list[Tensor]]:
        """The caches as they are registered."""
        shape, strides = self.layout.shape, self.layout.strides
        return {
            name: [buffer.tensor(shape, "float32", strides=strides) for buffer in buffers]
            for name, buffers in self.buffers.items()
        }

    def step(self, scheduled: dict[str, int] | None = None) -> KVStepOutput:
        """One step, and what it brought added to the books."""
        return self._note(self.runtime.step(scheduled))

    def drain(self, timeout_s: float = 20.0) -> KVStepOutput:
        """Step until nothing is under way."""
        return self._note(self.runtime.drain(timeout_s))

    def fill(self, blocks: Sequence[int]) -> None:
        """What a model does: write the blocks of all layers."""
        for buffer in self._each():
            for offset, nbytes in self.layout.ranges(blocks):
                self.worker.copy_to(buffer, self._rng.bytes(nbytes), dst_offset=offset)

    def block(self, block: int) -> list[bytes]:
        """One block of each layer on each chip."""
        return [
            b"".join(
                self.memory(buffer)[offset : offset + size] for offset, size in self.layout.ranges([block])
            )
            for buffer in self._each()
        ]

    def memory(self, buffer: Buffer) -> bytes:
        """All bytes of a cache."""
        data = bytearray(buffer.nbytes)
        self.worker.copy_from(data, buffer)
        return bytes(data)

    def snapshot(self) -> list[bytes]:
        """All bytes of all caches."""
        return [self.memory(buffer) for buffer in self._each()]

    def close(self) -> None:
        """Shut down and free the memory."""
        self.runtime.close()
        for buffer in self._each():
            if not buffer.freed:
                self.worker.free(buffer)

    def _each(self) -> list[Buffer]:
        return [buffer for buffers in self.buffers.values() for buffer in buffers]

    def _note(self, output: KVStepOutput) -> KVStepOutput:
        self.loaded.update(output.loaded)
        self.failed.update(output.failed)
        self.recompute.update(output.recompute)
        self.freed += output.freed
        return output


class Pair:
    """A producer and a consumer, on chips of one Worker."""

    def __init__(
        self,
        configs: tuple[KVTransferConfig, KVTransferConfig],
        kind: str = "packed",
        ranks: int = 1,
        platform: str = "cpu",
    ) -> None:
        """Start; `close` ends it."""
        register()
        self.worker = Worker(
            level=3,
            platform=platform,
            device_ids=list(range(2 * ranks)),
            hbm_bytes=4 << 20,
            heap_bytes=1 << 20,
            control_timeout_s=20.0,
        )
        self.worker.init()
        try:
            chips = self.worker.worker_ids
            self.producer = Engine(self.worker, configs[0], chips[:ranks], kind)
            self.consumer = Engine(self.worker, configs[1], chips[ranks:], kind)
            self.consumer.runtime.connect(self.producer.runtime)
        except BaseException:
            self.worker.close()
            raise

    def request(self, request_id: str, num_blocks: int, params: Any = None) -> KVRequest:
        """A request with tokens that only its number of blocks and the text after the last dot decide."""
        seed = int.from_bytes(request_id.rpartition(".")[2].encode(), "little") % (1 << 30)
        tokens = np.random.default_rng(seed).integers(0, 32000, num_blocks * BLOCK_SIZE)
        space = BlockNamespace("contract", "1", "float32", BLOCK_SIZE)
        return KVRequest(
            request_id,
            len(tokens),
            token_ids=tokens.tolist(),
            block_hashes=hash_blocks(space, tokens),
            kv_transfer_params=params,
        )

    def produce(self, request_id: str, blocks: Sequence[int]) -> dict[str, Any] | None:
        """Compute a request on the producer and end it; what the consumer needs to load its blocks."""
        engine = self.producer
        request = self.request(request_id, len(blocks), {"do_remote_decode": True})
        engine.runtime.get_num_new_matched_tokens(request, 0)
        engine.runtime.update_state_after_alloc(request, blocks, 0)
        engine.step({request_id: request.num_tokens})
        engine.fill(blocks)
        engine.step()
        _, params = engine.runtime.request_finished(request, blocks)
        if params is None:
            engine.drain()
        return params

    def begin_load(
        self, request_id: str, blocks: Sequence[int], params: Any, num_computed: int = 0
    ) -> KVRequest:
        """Have the consumer load a request; it begins with its next step."""
        request = self.request(request_id, len(blocks), params)
        matched: int | None = None
        deadline = time.monotonic() + 20
        while matched is None:
            assert time.monotonic() < deadline, "the connector never knew how many tokens it has"
            matched, _ = self.consumer.runtime.get_num_new_matched_tokens(request, num_computed)
            if matched is None:
                self.producer.step()
                self.consumer.step()
        assert matched == request.num_tokens - num_computed
        self.consumer.runtime.update_state_after_alloc(request, blocks, matched)
        return request

    def finish_load(self, request_id: str) -> None:
        """Step the consumer until the load of a request has ended, well or not."""
        deadline = time.monotonic() + 20
        self.consumer.step()
        while self.consumer.runtime.state(request_id) in (KVRequestState.PENDING, KVRequestState.LOADING):
            assert time.monotonic() < deadline, f"the load of {request_id} never ended"
            self.producer.step()
            self.consumer.step()

    def committed(self) -> int:
        """Device memory in use on the chips that live."""
        dead = self._dead()
        return sum(
            self.worker.committed_device_memory(chip) for chip in self.worker.worker_ids if chip not in dead
        )

    def close(self) -> None:
        """End both engines; their memory can be freed, and is."""
        try:
            for handle in self.worker.unconfirmed_transfers():
                if (
                    handle.worker_id in self._dead()
                ):  # the end of a chip's transfers is certain with its restart
                    self.worker.restart(handle.worker_id)
            self.consumer.close()
            self.producer.close()
            assert self.committed() == 0
        finally:
            self.worker.close()

    def _dead(self) -> set[int]:
        return {status.path[0] for status in self.worker.status() if status.state == "dead" and status.path}
