"""What schedulers, connectors and chips tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import logging
    from collections.abc import Mapping, Sequence

    from simpler import TransferBuffer
    from simpler.kv.errors import KVLoadError


class KVConnectorMetadata:
    """Base of what the scheduler side of a connector sends to its chips with a step. Must pickle."""


@dataclass(frozen=True)
class KVConnectorContext:
    """Where an instance of a connector lives.

    Attributes:
        num_ranks: Chips of the engine.
        block_size: Tokens in a block.
        log: For messages; those of a chip reach the parent.
        rank: Position of the chip among the engine's; None on the scheduler side.
        worker_id: Path of the chip; empty on the scheduler side.
        device_id: Device of the chip; None on the scheduler side.
        platform: The chip backend's name; empty on the scheduler side.
    """

    num_ranks: int
    block_size: int
    log: logging.Logger
    rank: int | None = None
    worker_id: tuple[int, ...] = ()
    device_id: int | None = None
    platform: str = ""


@dataclass(frozen=True)
class KVRequest:
    """A request, as far as its KV blocks are concerned.

    Attributes:
        request_id: 1 to 1,000 bytes as UTF-8; no two requests of an engine that are known at a time share it.
        num_tokens: Tokens of the prompt.
        token_ids: The tokens themselves, when they are known.
        block_hashes: Names of the full blocks of the prompt, chained over their prefixes, when known.
        kv_transfer_params: What the engine that holds blocks of this request said about them (the second
            value of its `request_finished`), or wishes about what becomes of them.
    """

    request_id: str
    num_tokens: int
    token_ids: Sequence[int] = ()
    block_hashes: Sequence[bytes] = ()
    kv_transfer_params: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class KVStep:
    """What the scheduler has decided for a step: the argument of `build_connector_meta`.

    Attributes:
        scheduled: Tokens to compute after this step's loads, by request.
        finished: Requests that ended since the last step.
        payload: Anything else that a scheduler and a connector of one author share.
    """

    scheduled: Mapping[str, int] = field(default_factory=dict)
    finished: frozenset[str] = frozenset()
    payload: object = None


@dataclass(frozen=True)
class KVBlocks:
    """Some blocks of all caches that one chip of an engine has registered.

    Attributes:
        engine_id: The engine.
        rank: The chip, by its position among the engine's.
        block_ids: The blocks, in order.
    """

    engine_id: str
    rank: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class KVTransfer:
    """A managed transfer for one request, run by `KVConnector.run_transfer` in the process of a chip.

    Compute that touches the target, or writes to the source, waits for it; everything else runs.

    Attributes:
        request_id: The request that the blocks belong to.
        rank: The chip that runs it.
        source: Blocks that are read; None when what is read is no memory of these engines.
        target: Blocks that are written; None when what is written is no memory of these engines. With both,
            the bytes of each range have their counterpart in the other list.
        payload: For `run_transfer`.
        timeout_s: After that time it is asked to stop; None leaves that to `load_timeout_s` of the runtime.
    """

    request_id: str
    rank: int
    source: KVBlocks | None = None
    target: KVBlocks | None = None
    payload: bytes = b""
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.source is None and self.target is None:
            raise ValueError(f"the transfer for {self.request_id!r} touches no blocks")
        if self.source and self.target and len(self.source.block_ids) != len(self.target.block_ids):
            raise ValueError(
                f"the transfer for {self.request_id!r} reads {len(self.source.block_ids)} blocks "
                f"and writes {len(self.target.block_ids)}"
            )

    @property
    def is_load(self) -> bool:
        """Whether it fills blocks of its request."""
        return self.target is not None


@dataclass(frozen=True)
class KVTransferJob:
    """What `KVConnector.run_transfer` gets.

    Attributes:
        request_id: The request.
        payload: As the scheduler side gave it.
        sources: Ranges to read, cache by cache in the order registered, runs of blocks joined.
        targets: Ranges to write; with `sources`, as many, each of the size of its counterpart, and joined
            across caches that lie side by side.
    """

    request_id: str
    payload: bytes
    sources: Sequence[TransferBuffer]
    targets: Sequence[TransferBuffer]


@dataclass(frozen=True)
class KVConnectorOutput:
    """What all chips of an engine reported in a step: the argument of `update_connector_output`.

    Attributes:
        finished_sending: Requests whose blocks every chip has sent or given up.
        finished_recving: Requests whose loads have ended on every chip, well or not; of one that ended before
            its load, when that has stopped.
        invalid_block_ids: Blocks that were not loaded; they must not count as cached.
    """

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    invalid_block_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class KVRecompute:
    """A request that must compute what could not be loaded.

    Attributes:
        num_computed_tokens: Tokens whose blocks are good; computing goes on from there.
        replace: Blocks of the request that a peer may still write: take others in their place. They come
            back in `KVStepOutput.freed`.
        error: Why.
    """

    num_computed_tokens: int
    replace: tuple[int, ...]
    error: KVLoadError


@dataclass(frozen=True)
class KVStepOutput:
    """What a step brought.

    Attributes:
        loaded: Requests whose blocks are all there, on every chip.
        recompute: Requests whose blocks are there in part only, under the policy ``"recompute"``.
        failed: Requests that have ended with an error.
        freed: (request, blocks) that the scheduler may give to others from now on.
        errors: What went wrong on chips in this step, by path.
    """

    loaded: tuple[str, ...] = ()
    recompute: Mapping[str, KVRecompute] = field(default_factory=dict)
    failed: Mapping[str, Exception] = field(default_factory=dict)
    freed: tuple[tuple[str, tuple[int, ...]], ...] = ()
    errors: Mapping[tuple[int, ...], Exception] = field(default_factory=dict)


@dataclass(frozen=True)
class KVEvent:
    """Something that became of blocks in a connector's store.

    Attributes:
        kind: ``"stored"``, ``"removed"`` or ``"cleared"``.
        block_hashes: The blocks, by name.
        medium: Where: ``"chip"``, ``"host"``, ``"disk"`` or a name of the connector's own.
    """

    kind: str
    block_hashes: tuple[bytes, ...] = ()
    medium: str = ""
