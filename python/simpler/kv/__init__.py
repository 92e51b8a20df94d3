"""KV caches between chips, processes and stores: what a serving scheduler programs against."""

from simpler.kv.block_hash import HASH_BYTES, BlockNamespace, hash_blocks
from simpler.kv.caches import KVCacheLayout, KVCacheView
from simpler.kv.config import KVTransferConfig
from simpler.kv.connector import KVConnector, KVConnectorRole
from simpler.kv.errors import KVLoadError, KVReplyError, KVTransferError
from simpler.kv.factory import KVConnectorFactory
from simpler.kv.file_store import BlockStoreError, FileBlockStore, FileBlockStoreStats
from simpler.kv.leases import BlockLeases
from simpler.kv.ledger import KVRequestState
from simpler.kv.metadata import (
    KVBlocks,
    KVConnectorContext,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVEvent,
    KVRecompute,
    KVRequest,
    KVStep,
    KVStepOutput,
    KVTransfer,
    KVTransferJob,
)
from simpler.kv.prefix_cache import Allocation, BackPressure, Pin, PrefixCache, PrefixCacheStats
from simpler.kv.replay import BlockStore, ReplayPoint, ReplayReport, TraceHasher, replay_trace
from simpler.kv.runtime import KVRuntime, register
from simpler.kv.store_index import StoreEvent, StoreIndex
from simpler.kv.trace import TRACE_BLOCK_TOKENS, TraceError, TraceRequest, read_trace

__all__ = [
    "HASH_BYTES",
    "TRACE_BLOCK_TOKENS",
    "Allocation",
    "BackPressure",
    "BlockLeases",
    "BlockNamespace",
    "BlockStore",
    "BlockStoreError",
    "FileBlockStore",
    "FileBlockStoreStats",
    "KVBlocks",
    "KVCacheLayout",
    "KVCacheView",
    "KVConnector",
    "KVConnectorContext",
    "KVConnectorFactory",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorRole",
    "KVEvent",
    "KVLoadError",
    "KVRecompute",
    "KVReplyError",
    "KVRequest",
    "KVRequestState",
    "KVRuntime",
    "KVStep",
    "KVStepOutput",
    "KVTransfer",
    "KVTransferConfig",
    "KVTransferError",
    "KVTransferJob",
    "Pin",
    "PrefixCache",
    "PrefixCacheStats",
    "ReplayPoint",
    "ReplayReport",
    "StoreEvent",
    "StoreIndex",
    "TraceError",
    "TraceHasher",
    "TraceRequest",
    "hash_blocks",
    "read_trace",
    "register",
    "replay_trace",
]
