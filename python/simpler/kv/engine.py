"""KVEngine: a connector on every chip of an engine, the memory it may use, the engines it knows."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from typing import TYPE_CHECKING

from simpler import ClosedError, SimplerError, WorkerDiedError
from simpler.kv import wire
from simpler.kv.cache_table import CacheTable
from simpler.kv.caches import layouts_as_json
from simpler.kv.channel import KVChannel
from simpler.kv.connector import KVConnector, KVConnectorRole
from simpler.kv.factory import KVConnectorFactory, load_class
from simpler.kv.metadata import KVConnectorContext

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from simpler import Tensor, Worker
    from simpler.kv.config import KVTransferConfig

_log = logging.getLogger("simpler.kv")
_numbers = itertools.count(1)


class KVEngine:
    """What `KVRuntime` stands on.

    Thread safety: any thread; one call at a time goes on.
    """

    def __init__(
        self,
        worker: Worker,
        config: KVTransferConfig,
        block_size: int,
        chips: Sequence[int] | None,
        step_timeout_s: float | None,
    ) -> None:
        """See `KVRuntime`."""
        ids = worker.worker_ids if chips is None else tuple(chips)
        if not ids or len(set(ids)) != len(ids) or not set(ids) <= set(worker.worker_ids):
            raise ValueError(f"chips={chips!r}: the worker has {worker.worker_ids}")
        if block_size < 1:
            raise ValueError(f"block_size is 1 or more: {block_size}")
        self.worker = worker
        self.config = config
        self.block_size = block_size
        self.chips = ids
        self.handshake: dict[int, bytes] = {}
        self._number = next(_numbers)
        self._lock = threading.RLock()
        self._table: CacheTable | None = None
        self._peers: weakref.WeakValueDictionary[str, KVEngine] = weakref.WeakValueDictionary()
        self._closed = False
        self._channel = KVChannel(worker, self._number, ids, step_timeout_s)
        where = KVConnectorFactory.find(config)
        context = KVConnectorContext(num_ranks=len(ids), block_size=block_size, log=_log)
        self._scheduler = load_class(*where)(config, KVConnectorRole.SCHEDULER, context)
        content = {"config": config.to_dict(), "chips": ids, "block_size": block_size, "class": where}
        try:
            self._channel.order(wire.Verb.OPEN, lambda _rank: content)
        except BaseException:
            KVEngine.close(self)
            raise

    @property
    def engine_id(self) -> str:
        """As configured."""
        return self.config.engine_id

    @property
    def connector(self) -> KVConnector:
        """The connector's scheduler side."""
        return self._scheduler

    @property
    def caches(self) -> CacheTable | None:
        """What is registered."""
        return self._table

    def register_kv_caches(
        self, caches: Mapping[str, Tensor | Sequence[Tensor]], *, block_dim: int = 0
    ) -> None:
        """Let the chips' connectors use memory that the caller has allocated, until `unregister_kv_caches`.

        The buffers are pinned meanwhile. Then the chips' handshake metadata is collected.

        Args:
            caches: By layer: a tensor for each chip, in the order of `chips`. Their layouts may have strides
                and parts (see `KVCacheLayout`); all have one number of blocks.
            block_dim: The dimension that counts blocks.

        Raises:
            ValueError: Caches are registered already, overlap, or have a layout that cannot be.
            MemoryRangeError: Memory that is dead, or another chip's.
            ChipControlError: An engine refuses; no chip has any of it registered then.
        """
        with self._lock:
            self._check_open()
            if self._table is not None:
                raise ValueError(f"engine {self.engine_id!r} has registered its KV caches already")
            table = CacheTable(caches, self.chips, block_dim, self.block_size)
            table.pin(f"KV engine {self.engine_id}")
            self._table = table
            try:
                self._channel.order(
                    wire.Verb.REGISTER, lambda rank: layouts_as_json(table.layouts(rank)), table.views
                )
                replies = self._channel.order(wire.Verb.HANDSHAKE, lambda _rank: None)
            except BaseException:
                self._release_caches()
                raise
            self.handshake = {rank: reply for rank, reply in enumerate(replies) if reply}
            self._scheduler.set_handshake_metadata(self.engine_id, self.handshake)

    def unregister_kv_caches(self) -> None:
        """Have the chips let go of the memory; nothing when none is registered.

        Raises:
            ChipControlError: Not every chip did: the buffers of those stay pinned.
        """
        with self._lock:
            self._check_open()
            if self._table is not None:
                errors = self._release_caches()
                if errors:
                    raise next(iter(errors.values()))

    def connect(self, peer: KVEngine) -> None:
        """Introduce an engine of this process: how to reach it, and its caches for transfers."""
        self._peers[peer.engine_id] = peer
        self.connect_engine(peer.engine_id, peer.handshake)

    def connect_engine(self, engine_id: str, handshake: Mapping[int, bytes]) -> None:
        """Introduce an engine from anywhere: `KVRuntime.handshake` of its process.

        Raises:
            ChipControlError: Not every chip took it.
        """
        with self._lock:
            self._check_open()
            self._scheduler.set_handshake_metadata(engine_id, handshake)
            encoded = {str(rank): data.hex() for rank, data in handshake.items()}
            content = {"engine_id": engine_id, "metadata": encoded}
            self._channel.order(wire.Verb.PEER, lambda _rank: content)

    def close(self) -> None:
        """Shut the connector down everywhere and let go of the memory; again it does nothing.

        A chip that does not answer keeps its buffers pinned; the log says so.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                outcomes = self._channel.try_order(wire.Verb.SHUTDOWN, lambda _rank: None)
                for rank, outcome in enumerate(outcomes):
                    if self._table is not None and isinstance(outcome, bytes | WorkerDiedError | ClosedError):
                        self._table.unpin(rank)
                    elif not isinstance(outcome, bytes):
                        _log.warning("KV engine %s was not shut down: %s", self.engine_id, outcome)
            finally:
                self._scheduler.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"KV engine {self.engine_id!r} is closed")

    def _caches_of(self, engine_id: str) -> CacheTable:
        peer = self if engine_id == self.engine_id else self._peers.get(engine_id)
        table = None if peer is None else peer.caches
        if table is None:
            raise ValueError(f"engine {engine_id!r} has no KV caches that {self.engine_id!r} knows")
        return table

    def _release_caches(self) -> dict[tuple[int, ...], SimplerError]:
        table, self._table = self._table, None
        errors: dict[tuple[int, ...], SimplerError] = {}
        if table is None:
            return errors
        outcomes = self._channel.try_order(wire.Verb.UNREGISTER, lambda _rank: None)
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, bytes | WorkerDiedError | ClosedError):
                table.unpin(rank)
            if not isinstance(outcome, bytes):
                errors[self.chips[rank],] = outcome
        return errors
