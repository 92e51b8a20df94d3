"""KVConnector: what moves KV blocks between an engine and the world, as the runtime sees it.

A connector is one class that is instantiated once for each role: once next to the scheduler, and once in the
process of every chip, where the memory is. `docs/kv.md` has the order of the calls.
"""

# ruff: noqa: ARG002, B027 - the hooks that a connector may leave out do nothing

from __future__ import annotations

import abc
import enum
from typing import TYPE_CHECKING, Any

from simpler.kv.errors import KVTransferError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

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
        KVTransfer,
        KVTransferJob,
    )


class KVConnectorRole(enum.Enum):
    """Where an instance lives."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


class KVConnector(abc.ABC):
    """The base of every connector.

    Thread safety: the runtime calls one hook of an instance at a time, on any thread; `run_transfer` is the
    exception: it runs beside the others, and several at once.
    Fork: worker instances are made in the chip's process and never cross a fork.

    Attributes:
        config: The engine's configuration.
        role: Which hooks of this instance are called.
        context: Where it lives.
    """

    def __init__(self, config: KVTransferConfig, role: KVConnectorRole, context: KVConnectorContext) -> None:
        """Keep the arguments; a connector's own constructor takes the same and calls this."""
        self.config = config
        self.role = role
        self.context = context
        self._metadata: KVConnectorMetadata | None = None

    # The worker role, in the process of a chip.

    def register_kv_caches(self, kv_caches: Mapping[str, KVCacheView]) -> None:
        """Make memory that the caller allocated known to the engine. Called once, before any step.

        Args:
            kv_caches: By the name of the layer, in the order of the layers.

        Raises:
            Exception: The engine refuses a range. What was registered before it has been unregistered again.
        """

    def unregister_kv_caches(self) -> None:
        """Let go of the memory. Access of the engine to it has stopped when this returns."""

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        """Take what the scheduler side has built for this step."""
        self._metadata = metadata

    def clear_connector_metadata(self) -> None:
        """End the step."""
        self._metadata = None

    @property
    def connector_metadata(self) -> Any:
        """What is bound now, of the connector's own class; None between steps."""
        return self._metadata

    @abc.abstractmethod
    def start_load_kv(self) -> None:
        """Begin all loads of the bound step, or do them."""

    @abc.abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Block until one layer of the synchronous loads is there, or known to be bad."""

    @abc.abstractmethod
    def save_kv_layer(self, layer_name: str, kv_layer: KVCacheView) -> None:
        """Begin to save what the bound step wants of one layer; the step has been computed."""

    @abc.abstractmethod
    def wait_for_save(self) -> None:
        """Block until the memory that `save_kv_layer` reads may change again."""

    def get_finished(self, finished_req_ids: Collection[str]) -> tuple[Collection[str], Collection[str]]:
        """What has ended since the last call.

        Args:
            finished_req_ids: Requests that ended in the scheduler since then, aborted ones among them.

        Returns:
            (requests whose blocks have been sent, requests whose asynchronous loads have ended): each once,
            only when access to their blocks has stopped. A load that failed is among them too.
        """
        return (), ()

    def get_block_ids_with_load_errors(self) -> Collection[int] | Mapping[int, str]:
        """Blocks found bad since the last call, perhaps with the reason, before their request is finished."""
        return ()

    def get_handshake_metadata(self) -> bytes | None:
        """What peers need to reach this chip. Called once, after `register_kv_caches`."""
        return None

    def get_stats(self) -> Mapping[str, float]:
        """Counters of this instance."""
        return {}

    def run_transfer(self, job: KVTransferJob, cancel: CancelToken) -> None:
        """Move the bytes of one managed transfer and return when they are there.

        Raises:
            KVTransferError: They are not, and nothing touches the ranges any more.
            Exception: They are not, and the ranges may still be touched: they stay pinned.
        """
        raise KVTransferError(f"{type(self).__name__} runs no transfers")

    def confirm_transfers(self, request_ids: Sequence[str]) -> Collection[str]:
        """Of these requests, with transfers left open, those whose ranges nothing touches any more."""
        return ()

    def reset_transfers(self) -> None:
        """Tear the engine down and make it anew: no access of an earlier transfer goes on after it."""

    # The scheduler role, in the parent.

    @abc.abstractmethod
    def get_num_new_matched_tokens(
        self, request: KVRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond those computed this connector can load.

        Returns:
            (tokens, whether they are loaded beside other steps). None for tokens: not known yet, ask again.
        """

    @abc.abstractmethod
    def update_state_after_alloc(
        self, request: KVRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """The scheduler has given blocks to a request; `num_external_tokens` of its tokens are to be loaded.

        Args:
            request: The request.
            block_ids: All of its blocks, in the order of its tokens.
            num_external_tokens: As `get_num_new_matched_tokens` answered, or fewer; 0 for none.
        """

    @abc.abstractmethod
    def build_connector_meta(self, step: KVStep) -> KVConnectorMetadata | None:
        """What the chips are to do in this step; None for nothing."""

    def take_transfers(self) -> Sequence[KVTransfer]:
        """Managed transfers to begin with this step; called after `build_connector_meta`."""
        return ()

    def accept_transfer(self, transfer: KVTransfer) -> str | None:
        """A transfer has ended well: None, or why its bytes do not count after all."""
        return None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """What all chips have reported. Not called when that is nothing."""

    def request_finished(
        self, request: KVRequest, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended, or was aborted.

        Returns:
            (True when the connector frees the blocks later, by `get_finished`; what a peer needs to
            load them).
        """
        return False, None

    def take_events(self) -> Iterable[KVEvent]:
        """What became of blocks in this connector's store since the last call."""
        return ()

    # Both roles.

    def set_handshake_metadata(self, engine_id: str, metadata: Mapping[int, bytes]) -> None:
        """How to reach the chips of an engine, by rank.

        The scheduler side is told of its own engine and of every peer, the chips of the peers.
        """

    def shutdown(self) -> None:
        """Stop threads and engines. Called once or more; after it no other hook is called."""
