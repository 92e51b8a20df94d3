"""The connector ``shm``: chips of one Worker hand KV blocks over in the memory that they share.

A consumer's chip reads the producer's blocks where they are and writes its own: one memcpy for each run of
blocks that is contiguous on both sides. It needs a platform that maps peers, as `cpu` does.

Options: ``lease_s`` (30): how long a producer keeps blocks that nobody reads.
"""

# ruff: noqa: ARG002, D102 - the hooks are documented where they are declared

from __future__ import annotations

import json
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from simpler import ConfigError, MemoryRangeError
from simpler.kv.connector import KVConnector, KVConnectorRole
from simpler.kv.errors import KVTransferError
from simpler.kv.leases import BlockLeases
from simpler.kv.metadata import KVBlocks, KVConnectorMetadata, KVTransfer

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from simpler import CancelToken
    from simpler.kv.caches import KVCacheView
    from simpler.kv.config import KVTransferConfig
    from simpler.kv.metadata import (
        KVConnectorContext,
        KVConnectorOutput,
        KVRequest,
        KVStep,
        KVTransferJob,
    )

_CHUNK = 32 << 20  # bytes copied between two looks at the cancellation
_producers: weakref.WeakValueDictionary[str, ShmConnector] = weakref.WeakValueDictionary()
"""The scheduler sides in this process, by engine: peers agree on leases there."""


@dataclass(frozen=True)
class ShmMetadata(KVConnectorMetadata):
    """Requests whose blocks the producer takes back."""

    done: tuple[str, ...]


@dataclass
class _Load:
    """A request that loads, or is about to."""

    engine_id: str
    remote_id: str
    generation: int
    remote_blocks: tuple[int, ...]
    num_tokens: int
    num_computed: int = 0
    blocks: tuple[int, ...] = ()
    is_begun: bool = False
    is_ended: bool = False


class ShmConnector(KVConnector):
    """See the module."""

    def __init__(self, config: KVTransferConfig, role: KVConnectorRole, context: KVConnectorContext) -> None:
        super().__init__(config, role, context)
        self._loads: dict[str, _Load] = {}
        self._shapes: dict[str, list[list[Any]]] = {}
        self._done: set[str] = set()
        self._lock = threading.Lock()
        self._copied = self._transfers = 0
        self._layouts: list[list[Any]] = []
        if role is KVConnectorRole.SCHEDULER:
            lease_s = config.get_from_extra_config("lease_s", 30.0)
            if isinstance(lease_s, bool) or not isinstance(lease_s, int | float) or not lease_s > 0:
                raise ConfigError(f"lease_s of the shm connector is a number of seconds above 0: {lease_s!r}")
            self.leases = BlockLeases(float(lease_s))
            if _producers.setdefault(config.engine_id, self) is not self:
                raise ConfigError(f"this process has a shm engine {config.engine_id!r} already")

    # On a chip

    def register_kv_caches(self, kv_caches: Mapping[str, KVCacheView]) -> None:
        for cache in kv_caches.values():
            cache.data  # noqa: B018 - raises where the host cannot touch the memory
        self._layouts = [
            [cache.layout.parts, cache.layout.part_nbytes, cache.layout.dtype] for cache in kv_caches.values()
        ]

    def get_handshake_metadata(self) -> bytes | None:
        return json.dumps(self._layouts).encode()

    def start_load_kv(self) -> None:
        pass  # loads are managed transfers

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # compute waits for the ranges that it touches

    def save_kv_layer(self, layer_name: str, kv_layer: KVCacheView) -> None:
        pass  # peers read the blocks where they are

    def wait_for_save(self) -> None:
        pass

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(metadata)
        if isinstance(metadata, ShmMetadata):
            self._done.update(metadata.done)

    def get_finished(self, finished_req_ids: Collection[str]) -> tuple[Collection[str], Collection[str]]:
        if not self._done:
            return (), ()
        done, self._done = self._done, set()
        return done, ()

    def run_transfer(self, job: KVTransferJob, cancel: CancelToken) -> None:
        whole = sum(source.nbytes for source in job.sources)
        for source, target in zip(job.sources, job.targets, strict=True):
            for at in range(0, source.nbytes, _CHUNK):
                if cancel.cancelled:
                    raise KVTransferError("it was cancelled")
                nbytes = min(_CHUNK, source.nbytes - at)
                try:
                    target.copy_from(source, offset=at, nbytes=nbytes, whole=whole)
                except MemoryRangeError as error:
                    raise KVTransferError(
                        f"this platform does not map the memory of peers: {error}"
                    ) from error
        with self._lock:
            self._copied += whole
            self._transfers += 1

    def get_stats(self) -> Mapping[str, float]:
        with self._lock:
            return {"bytes_copied": self._copied, "transfers": self._transfers}

    # Next to the scheduler, as a producer

    def request_finished(
        self, request: KVRequest, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        load = self._loads.get(request.request_id)
        if load is not None and load.is_begun:
            load.is_ended = True  # given back when the read has stopped, or when the lease lapses
        elif load is not None:
            self._give_back(self._loads.pop(request.request_id))
        params = request.kv_transfer_params or {}
        if not self.config.is_producer or not params.get("do_remote_decode") or not block_ids:
            return False, None
        return True, {
            "do_remote_prefill": True,
            "remote_engine_id": self.config.engine_id,
            "remote_request_id": request.request_id,
            "remote_block_ids": list(block_ids),
            "remote_generation": self.leases.offer(request.request_id),
            "remote_num_tokens": request.num_tokens,
        }

    def take_back(self, request_id: str, generation: int) -> None:
        """A reader is done with the blocks of a request."""
        if self.leases.give_back(request_id, generation):
            with self._lock:
                self._done.add(request_id)

    def build_connector_meta(self, step: KVStep) -> KVConnectorMetadata | None:
        for load in self._loads.values():
            if not load.is_ended:
                self._renew(load)
        if not self.leases and not self._done:
            return None
        lapsed = self.leases.take_lapsed()
        for request_id in lapsed:
            self.context.log.warning("nobody has read the KV blocks of request %r in time", request_id)
        with self._lock:
            done, self._done = {*self._done, *lapsed}, set()
        return ShmMetadata(tuple(sorted(done))) if done else None

    # Next to the scheduler, as a consumer

    def set_handshake_metadata(self, engine_id: str, metadata: Mapping[int, bytes]) -> None:
        if self.role is not KVConnectorRole.SCHEDULER:
            return
        shapes = [json.loads(metadata[rank]) for rank in sorted(metadata)]
        own = self._shapes.get(self.config.engine_id)
        if own is not None and shapes != own:
            raise ValueError(f"the KV blocks of engine {engine_id!r} are not like those of this one")
        self._shapes[engine_id] = shapes

    def get_num_new_matched_tokens(
        self, request: KVRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        params = request.kv_transfer_params or {}
        if not self.config.is_consumer or not params.get("do_remote_prefill"):
            return 0, False
        load = _Load(
            str(params["remote_engine_id"]),
            str(params["remote_request_id"]),
            int(params["remote_generation"]),
            tuple(params["remote_block_ids"]),
            int(params["remote_num_tokens"]),
            num_computed_tokens,
        )
        num_external = min(load.num_tokens, request.num_tokens) - num_computed_tokens
        if num_external < 1 or load.engine_id not in self._shapes or not self._renew(load):
            return 0, False
        self._loads[request.request_id] = load
        return num_external, True

    def update_state_after_alloc(
        self, request: KVRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        load = self._loads.get(request.request_id)
        if load is None or load.is_begun:
            return
        if not num_external_tokens:
            self._give_back(self._loads.pop(request.request_id))
            return
        size = self.context.block_size
        first = load.num_computed // size
        last = -(-(load.num_computed + num_external_tokens) // size)
        load.blocks, load.remote_blocks = tuple(block_ids[first:last]), load.remote_blocks[first:last]

    def take_transfers(self) -> Sequence[KVTransfer]:
        if not self._loads:
            return ()
        begun = [(key, load) for key, load in self._loads.items() if load.blocks and not load.is_begun]
        for _, load in begun:
            load.is_begun = True
        return [
            KVTransfer(
                request_id,
                rank,
                KVBlocks(load.engine_id, rank, load.remote_blocks),
                KVBlocks(self.config.engine_id, rank, load.blocks),
            )
            for request_id, load in begun
            for rank in range(self.context.num_ranks)
        ]

    def accept_transfer(self, transfer: KVTransfer) -> str | None:
        load = self._loads.get(transfer.request_id)
        if load is None or self._renew(load):
            return None
        return f"engine {load.engine_id!r} has taken the blocks back while they were read"

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        for request_id in output.finished_recving:
            load = self._loads.pop(request_id, None)
            if load is not None:
                self._give_back(load)

    def shutdown(self) -> None:
        if _producers.get(self.config.engine_id) is self:
            del _producers[self.config.engine_id]

    def _renew(self, load: _Load) -> bool:
        producer = _producers.get(load.engine_id)
        return producer is not None and producer.leases.renew(load.remote_id, load.generation)

    def _give_back(self, load: _Load) -> None:
        producer = _producers.get(load.engine_id)
        if producer is not None:
            producer.take_back(load.remote_id, load.generation)
