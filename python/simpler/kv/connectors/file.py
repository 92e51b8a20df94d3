"""The connector ``file``: KV blocks in a folder that any number of engines and processes share.

What was computed is saved when its step has ended, and found again by the hashes of its blocks. A stored file
is one block of one rank, all layers together: a file for each layer took 7 to 30 times as long to save.

Options: ``directory`` and ``max_bytes`` (required), ``fsync`` (true), ``timeout_s`` (30), as `FileBlockStore`
has them. `docs/kv-connectors.md` has what each failure does.
"""

# ruff: noqa: ARG002, D102 - the hooks are documented where they are declared

from __future__ import annotations

import itertools
import json
import struct
import threading
import time
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from simpler import ConfigError, SimplerError
from simpler.kv.connector import KVConnector, KVConnectorRole
from simpler.kv.connectors.file_events import StoreEvents
from simpler.kv.errors import KVTransferError
from simpler.kv.file_store import BlockStoreError, FileBlockStore
from simpler.kv.file_store_format import HEADER_BYTES, block_path
from simpler.kv.file_store_io import holds
from simpler.kv.metadata import KVBlocks, KVTransfer

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from simpler import CancelToken
    from simpler.kv.caches import KVCacheView
    from simpler.kv.config import KVTransferConfig
    from simpler.kv.metadata import (
        KVConnectorContext,
        KVConnectorMetadata,
        KVConnectorOutput,
        KVEvent,
        KVRequest,
        KVStep,
        KVTransferJob,
    )

    Array = np.ndarray[Any, np.dtype[Any]]

_KEY_BYTES = 32
_MOST_SAVES = 64  # batches under way; what comes beyond them is dropped, not waited for
_FORGOTTEN_S = 60.0  # a batch whose end was never reported does not count any more
_PARTS = 4  # transfers that a load is split into, to read at once
_LEAST_PART = 8
_DEFAULTS: dict[str, Any] = {"directory": None, "max_bytes": None, "fsync": True, "timeout_s": 30.0}


@dataclass
class _Request:
    """What is known of a request.

    Attributes:
        hashes: Names of its full blocks.
        computed: Tokens that are in its blocks for certain.
        blocks: Its blocks.
        saved: Blocks from the first on that need no saving any more.
        load: (first, last) of the blocks that are loaded.
    """

    hashes: tuple[bytes, ...] = ()
    computed: int = 0
    blocks: tuple[int, ...] = ()
    saved: int = 0
    load: tuple[int, int] | None = None


@dataclass
class _Batch:
    """Blocks being saved on every rank."""

    hashes: tuple[bytes, ...]
    since: float
    open: int


class FileConnector(KVConnector):
    """See the module."""

    def __init__(self, config: KVTransferConfig, role: KVConnectorRole, context: KVConnectorContext) -> None:
        super().__init__(config, role, context)
        options = _options(config.kv_connector_extra_config)
        self.store = FileBlockStore(
            options["directory"],
            options["max_bytes"],
            durable=options["fsync"],
            timeout_s=float(options["timeout_s"]),
        )
        self._changed = threading.Condition()
        self._caches: dict[str, KVCacheView] = {}
        self._handshake = b""
        self._running = 0
        self._stopping = False
        self._bad: dict[int, str] = {}
        self._dropped = self._bad_blocks = 0
        self._layouts: list[tuple[bytes, int]] = []  # (digest, bytes of a block) by rank
        self._requests: dict[str, _Request] = {}
        self._scheduled: dict[str, int] = {}
        self._loads: list[str] = []
        self._saves: list[KVTransfer] = []
        self._batches: dict[KVTransfer, _Batch] = {}
        self._events = StoreEvents(self._has)

    # On a chip

    def register_kv_caches(self, kv_caches: Mapping[str, KVCacheView]) -> None:
        nbytes = 0
        state = blake2b(digest_size=_KEY_BYTES)
        for name, cache in kv_caches.items():
            cache.data  # noqa: B018 - raises where the host cannot touch the memory
            layout = cache.layout
            outer, inner = layout.shape[: layout.block_dim], layout.shape[layout.block_dim + 1 :]
            part = [name, outer, inner, layout.dtype, layout.itemsize, layout.block_size]
            state.update(json.dumps(part).encode() + b"\n")
            nbytes += layout.block_nbytes
        if HEADER_BYTES + nbytes > self.store.stats().max_bytes:
            raise ValueError(f"a KV block of {nbytes} bytes is larger than max_bytes of the file connector")
        with self._changed:
            self._caches, self._stopping = dict(kv_caches), False
            self._handshake = json.dumps([state.hexdigest(), nbytes]).encode()

    def unregister_kv_caches(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.wait_for(lambda: not self._running)
            self._caches = {}

    def get_handshake_metadata(self) -> bytes | None:
        return self._handshake

    def start_load_kv(self) -> None:
        pass  # loads are managed transfers

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # compute waits for the ranges that it touches

    def save_kv_layer(self, layer_name: str, kv_layer: KVCacheView) -> None:
        pass  # saves are managed transfers

    def wait_for_save(self) -> None:
        pass

    def get_block_ids_with_load_errors(self) -> Mapping[int, str]:
        if not self._bad:
            return {}
        with self._changed:
            bad, self._bad = self._bad, {}
            return bad

    def run_transfer(self, job: KVTransferJob, cancel: CancelToken) -> None:
        with self._changed:
            if self._stopping or not self._caches:
                raise KVTransferError("no KV caches are registered")
            self._running += 1
            caches = list(self._caches.values())
        try:
            move = self._load if job.targets else self._save
            buffer = np.empty(sum(cache.layout.block_nbytes for cache in caches), np.uint8)
            wanted = _unpack(job.payload)
            for done, (block, key) in enumerate(wanted):
                if cancel.cancelled or self._stopping:
                    raise KVTransferError("it was cancelled")
                pieces = [piece for cache in caches for piece in cache.pieces([block])]
                try:
                    move(block, key, pieces, buffer)
                except BlockStoreError as error:
                    self._drop(len(wanted) - done, error)
                    raise
        except KVTransferError:
            raise
        except (
            SimplerError,
            OSError,
            ValueError,
        ) as error:  # nothing here touches memory after it has raised
            raise KVTransferError(f"{type(error).__name__}: {error}") from error
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _load(self, block: int, key: bytes, pieces: Sequence[Array], buffer: Array) -> None:
        direct = len(pieces) == 1
        try:
            found = self.store.get_into(key, pieces[0] if direct else buffer)
        except ValueError:  # a good block of another size
            found = False
        if not found:
            with self._changed:
                self._bad[block] = f"{self.store.directory} has the block no more, or it is damaged"
                self._bad_blocks += 1
            return
        at = 0
        for piece in () if direct else pieces:
            np.copyto(piece, buffer[at : at + piece.nbytes])
            at += piece.nbytes

    def _save(self, block: int, key: bytes, pieces: Sequence[Array], buffer: Array) -> None:
        if len(pieces) > 1:
            np.concatenate(pieces, out=buffer)
        self.store.put(key, pieces[0] if len(pieces) == 1 else buffer)

    def _drop(self, count: int, error: BlockStoreError) -> None:
        with self._changed:
            is_first = not self._dropped
            self._dropped += count
        if is_first:
            self.context.log.warning("KV blocks are not saved: %s", error)

    def get_stats(self) -> Mapping[str, float]:
        with self._changed:
            own = {"blocks_bad": self._bad_blocks, "blocks_dropped": self._dropped}
        return {**self.store.stats()._asdict(), **own}

    # Next to the scheduler

    def set_handshake_metadata(self, engine_id: str, metadata: Mapping[int, bytes]) -> None:
        if self.role is KVConnectorRole.SCHEDULER and engine_id == self.config.engine_id:
            told = [json.loads(metadata[rank]) for rank in sorted(metadata)]
            self._layouts = [(bytes.fromhex(digest), int(nbytes)) for digest, nbytes in told]

    def key(self, rank: int, block_hash: bytes) -> bytes:
        """What a block of a rank is stored as; nothing of another layout, rank or number of ranks has it."""
        state = blake2b(self._layouts[rank][0], digest_size=_KEY_BYTES, person=b"simpler.kv.file")
        state.update(struct.pack("<II", rank, len(self._layouts)) + block_hash)
        return state.digest()

    def get_num_new_matched_tokens(
        self, request: KVRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        state = self._requests.setdefault(request.request_id, _Request())
        if state.load is None:
            state.hashes, state.computed = tuple(request.block_hashes), num_computed_tokens
            self._scheduled.pop(request.request_id, None)
        if not self.config.is_consumer or not self._layouts:
            return 0, False
        size = self.context.block_size
        first = num_computed_tokens // size
        last = first + self._leading(state.hashes[first:])
        num_external = min(last * size, request.num_tokens) - num_computed_tokens
        return (num_external, True) if num_external > 0 else (0, False)

    def update_state_after_alloc(
        self, request: KVRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        state = self._requests.setdefault(request.request_id, _Request(tuple(request.block_hashes)))
        state.blocks = tuple(block_ids)
        if num_external_tokens and state.load is None:
            size = self.context.block_size
            last = -(-(state.computed + num_external_tokens) // size)
            state.load = (state.computed // size, last)
            self._loads.append(request.request_id)

    def build_connector_meta(self, step: KVStep) -> KVConnectorMetadata | None:
        if self._scheduled and self.config.is_producer:
            for request_id, num_tokens in self._scheduled.items():
                state = self._requests.get(request_id)
                if state is not None:
                    state.computed += num_tokens
                    self._begin_save(request_id, state)
        self._scheduled = dict(step.scheduled)
        return None

    def take_transfers(self) -> Sequence[KVTransfer]:
        if not self._loads and not self._saves:
            return ()
        transfers, self._saves = self._saves, []
        for request_id in self._loads:
            state = self._requests.get(request_id)
            if state is None or state.load is None:
                continue
            first, last = state.load
            count = last - first
            step = max(_LEAST_PART, -(-count // _PARTS))
            for at in range(first, last, step):
                wanted = range(at, min(at + step, last))
                transfers += [self._transfer(request_id, state, wanted, rank) for rank in self._ranks]
        self._loads = []
        return transfers

    def accept_transfer(self, transfer: KVTransfer) -> str | None:
        batch = self._batches.pop(transfer, None)
        if batch is not None:
            batch.open -= 1
            if not batch.open:
                self._events.seen(batch.hashes)
        return None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        for request_id in output.finished_recving:
            state = self._requests.get(request_id)
            if state is None or state.load is None:
                continue
            (first, last), state.load = state.load, None
            good = list(
                itertools.takewhile(
                    lambda at: state.blocks[at] not in output.invalid_block_ids,  # noqa: B023 - used at once
                    range(first, last),
                )
            )
            self._events.gone(state.hashes[first + len(good) : last])
            state.computed = max(state.computed, (first + len(good)) * self.context.block_size)
            state.saved = first + len(good)

    def request_finished(
        self, request: KVRequest, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        self._scheduled.pop(request.request_id, None)  # an aborted one may never have been computed
        return False, None

    def take_events(self) -> list[KVEvent]:
        return self._events.take()

    @property
    def _ranks(self) -> range:
        return range(len(self._layouts))

    def _transfer(self, request_id: str, state: _Request, wanted: Sequence[int], rank: int) -> KVTransfer:
        ids = tuple(state.blocks[at] for at in wanted)
        payload = _pack(ids, [self.key(rank, state.hashes[at]) for at in wanted])
        blocks = KVBlocks(self.config.engine_id, rank, ids)
        return KVTransfer(request_id, rank, None, blocks, payload)

    def _begin_save(self, request_id: str, state: _Request) -> None:
        last = min(state.computed // self.context.block_size, len(state.hashes), len(state.blocks))
        wanted = [at for at in range(state.saved, last) if not self._events.knows(state.hashes[at])]
        state.saved = max(state.saved, last)
        if not wanted or not self._layouts:
            return
        now = time.monotonic()
        if len(self._batches) >= _MOST_SAVES * len(self._layouts):
            self._batches = {
                key: batch for key, batch in self._batches.items() if now - batch.since < _FORGOTTEN_S
            }
            if len(self._batches) >= _MOST_SAVES * len(self._layouts):
                self.context.log.warning("%d KV blocks are not saved: the disk is behind", len(wanted))
                return
        batch = _Batch(tuple(state.hashes[at] for at in wanted), now, len(self._layouts))
        for rank in self._ranks:
            load = self._transfer(request_id, state, wanted, rank)
            save = KVTransfer(request_id, rank, load.target, None, load.payload)
            self._batches[save] = batch
            self._saves.append(save)

    def _leading(self, hashes: Sequence[bytes]) -> int:
        """How many blocks, from the first on, every rank has; they count as used."""
        found = len(hashes)
        for rank, (_, nbytes) in enumerate(self._layouts):
            keys = [self.key(rank, block_hash) for block_hash in hashes[:found]]
            keys = keys[: self.store.longest_prefix(keys)]
            found = len(list(itertools.takewhile(lambda key: self._holds(key, nbytes), keys)))  # noqa: B023 - now
        self._events.seen(hashes[:found])
        self._events.gone(hashes[found : found + 1])
        return found

    def _holds(self, key: bytes, nbytes: int) -> bool:
        return holds(block_path(self.store.directory, key), HEADER_BYTES + nbytes)

    def _has(self, block_hash: bytes) -> bool:
        sizes = enumerate(self._layouts)
        return all(self._holds(self.key(rank, block_hash), nbytes) for rank, (_, nbytes) in sizes)


def _options(extra: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(extra.keys() - _DEFAULTS.keys())
    if unknown:
        raise ConfigError(
            f"the file connector has no option {unknown[0]!r}; there are {', '.join(sorted(_DEFAULTS))}"
        )
    options = {**_DEFAULTS, **extra}
    directory, most, timeout_s = options["directory"], options["max_bytes"], options["timeout_s"]
    if not isinstance(directory, str) or not directory:
        raise ConfigError(f"directory of the file connector is a path: {directory!r}")
    if isinstance(most, bool) or not isinstance(most, int) or most < 1 << 16:
        raise ConfigError(f"max_bytes of the file connector is 65,536 or more: {most!r}")
    if not isinstance(options["fsync"], bool):
        raise ConfigError(f"fsync of the file connector is true or false: {options['fsync']!r}")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise ConfigError(f"timeout_s of the file connector is a number of seconds above 0: {timeout_s!r}")
    return options


def _pack(ids: Sequence[int], keys: Sequence[bytes]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids) + b"".join(keys)


def _unpack(payload: bytes) -> Collection[tuple[int, bytes]]:
    count = len(payload) // (4 + _KEY_BYTES)
    ids = struct.unpack_from(f"<{count}I", payload)
    begins = range(4 * count, len(payload), _KEY_BYTES)
    return [(block, payload[at : at + _KEY_BYTES]) for block, at in zip(ids, begins, strict=True)]
