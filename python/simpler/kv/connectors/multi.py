"""The connector ``multi``: several as one. It loads from the first that has the blocks, and saves to all.

Options: ``connectors``: a list of what `KVTransferConfig.from_dict` takes, in the order in which to ask them.
Each gets the engine's id, and its role unless it has its own.
"""

# ruff: noqa: D102 - the hooks are documented where they are declared

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from simpler import ConfigError
from simpler.kv.config import KVTransferConfig
from simpler.kv.connector import KVConnector, KVConnectorRole
from simpler.kv.errors import KVTransferError
from simpler.kv.factory import KVConnectorFactory
from simpler.kv.metadata import KVConnectorMetadata

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from simpler import CancelToken
    from simpler.kv.caches import KVCacheView
    from simpler.kv.metadata import (
        KVConnectorContext,
        KVConnectorOutput,
        KVEvent,
        KVRequest,
        KVStep,
        KVTransfer,
        KVTransferJob,
    )

_MOST = 255  # the number of a connector is a byte of a transfer's payload


@dataclass(frozen=True)
class MultiMetadata(KVConnectorMetadata):
    """What the connectors have built, in their order, and how many of them send blocks of which requests."""

    parts: tuple[KVConnectorMetadata | None, ...]
    senders: dict[str, int]


class MultiConnector(KVConnector):
    """See the module."""

    def __init__(self, config: KVTransferConfig, role: KVConnectorRole, context: KVConnectorContext) -> None:
        super().__init__(config, role, context)
        with ExitStack() as undo:
            self.connectors: list[KVConnector] = []
            for part in _configs(config):
                self.connectors.append(KVConnectorFactory.create_connector(part, role, context))
                undo.callback(self.connectors[-1].shutdown)
            undo.pop_all()
        self._bound: list[KVConnector] = []
        self._senders: dict[str, int] = {}  # scheduler: not told yet; chip: still to be heard of
        self._open: dict[str, set[int]] = {}  # connectors with open transfers, by request
        self._chosen: dict[str, int] = {}

    # On a chip

    def register_kv_caches(self, kv_caches: Mapping[str, KVCacheView]) -> None:
        with ExitStack() as undo:
            for connector in self.connectors:
                connector.register_kv_caches(kv_caches)
                undo.callback(connector.unregister_kv_caches)
            undo.pop_all()

    def unregister_kv_caches(self) -> None:
        _each(self.connectors, lambda connector: connector.unregister_kv_caches())

    def get_handshake_metadata(self) -> bytes | None:
        parts = [connector.get_handshake_metadata() for connector in self.connectors]
        return json.dumps([None if part is None else part.hex() for part in parts]).encode()

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(metadata)
        assert isinstance(metadata, MultiMetadata)
        self._senders.update(metadata.senders)
        self._bound = []
        for connector, part in zip(self.connectors, metadata.parts, strict=True):
            if part is not None:
                connector.bind_connector_metadata(part)
                self._bound.append(connector)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        bound, self._bound = self._bound, []
        _each(bound, lambda connector: connector.clear_connector_metadata())

    def start_load_kv(self) -> None:
        _each(self._bound, lambda connector: connector.start_load_kv())

    def wait_for_layer_load(self, layer_name: str) -> None:
        _each(self._bound, lambda connector: connector.wait_for_layer_load(layer_name))

    def save_kv_layer(self, layer_name: str, kv_layer: KVCacheView) -> None:
        _each(self._bound, lambda connector: connector.save_kv_layer(layer_name, kv_layer))

    def wait_for_save(self) -> None:
        _each(self._bound, lambda connector: connector.wait_for_save())

    def get_finished(self, finished_req_ids: Collection[str]) -> tuple[Collection[str], Collection[str]]:
        answers = [connector.get_finished(finished_req_ids) for connector in self.connectors]
        sent = [request_id for some, _ in answers for request_id in some if self._is_sent(request_id)]
        return sent, [request_id for _, some in answers for request_id in some]

    def get_block_ids_with_load_errors(self) -> Mapping[int, str]:
        bad: dict[int, str] = {}
        for connector in self.connectors:
            found = connector.get_block_ids_with_load_errors()
            bad |= found if isinstance(found, Mapping) else dict.fromkeys(found, "")
        return bad

    def get_stats(self) -> Mapping[str, float]:
        return {
            f"{connector.config.kv_connector} {number}: {name}": value
            for number, connector in enumerate(self.connectors)
            for name, value in connector.get_stats().items()
        }

    def run_transfer(self, job: KVTransferJob, cancel: CancelToken) -> None:
        number = job.payload[0]
        try:
            self.connectors[number].run_transfer(replace(job, payload=job.payload[1:]), cancel)
        except KVTransferError:
            raise
        except Exception:
            self._open.setdefault(job.request_id, set()).add(number)
            raise

    def confirm_transfers(self, request_ids: Sequence[str]) -> Collection[str]:
        for number, connector in enumerate(self.connectors):
            own = [request_id for request_id in request_ids if number in self._open.get(request_id, ())]
            for request_id in connector.confirm_transfers(own) if own else ():
                self._open[request_id].discard(number)
        stopped = [request_id for request_id in request_ids if not self._open.get(request_id)]
        for request_id in stopped:
            self._open.pop(request_id, None)
        return stopped

    def reset_transfers(self) -> None:
        _each(self.connectors, lambda connector: connector.reset_transfers())
        self._open.clear()

    def _is_sent(self, request_id: str) -> bool:
        """Whether the last of the connectors that send a request has done so."""
        left = self._senders.pop(request_id, 1) - 1
        if left:
            self._senders[request_id] = left
        return not left

    # Next to the scheduler

    def get_num_new_matched_tokens(
        self, request: KVRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        ask = [connector.get_num_new_matched_tokens for connector in self.connectors]
        answers = [hook(request, num_computed_tokens) for hook in ask]  # all: each must learn of its end
        for number, (matched, is_async) in enumerate(answers):
            if matched is None:
                return None, False
            if matched:
                self._chosen[request.request_id] = number
                return matched, is_async
        return 0, False

    def update_state_after_alloc(
        self, request: KVRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        chosen = self._chosen.get(request.request_id)
        for number, connector in enumerate(self.connectors):
            own = num_external_tokens if number == chosen else 0
            connector.update_state_after_alloc(request, block_ids, own)

    def build_connector_meta(self, step: KVStep) -> KVConnectorMetadata | None:
        parts = tuple(connector.build_connector_meta(step) for connector in self.connectors)
        if not self._senders and not any(part is not None for part in parts):
            return None
        senders, self._senders = self._senders, {}
        return MultiMetadata(parts, senders)

    def take_transfers(self) -> Sequence[KVTransfer]:
        return [
            replace(transfer, payload=bytes([number]) + transfer.payload)
            for number, connector in enumerate(self.connectors)
            for transfer in connector.take_transfers()
        ]

    def accept_transfer(self, transfer: KVTransfer) -> str | None:
        own = replace(transfer, payload=transfer.payload[1:])
        return self.connectors[transfer.payload[0]].accept_transfer(own)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        for connector in self.connectors:
            connector.update_connector_output(output)

    def request_finished(
        self, request: KVRequest, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._chosen.pop(request.request_id, None)
        answers = [connector.request_finished(request, block_ids) for connector in self.connectors]
        num_senders = sum(sends for sends, _ in answers)
        if num_senders > 1:
            self._senders[request.request_id] = num_senders
        params: dict[str, Any] = {}
        for _, own in answers:
            if own and params.keys() & own.keys():
                raise ValueError(f"two connectors offer request {request.request_id!r} to peers")
            params |= own or {}
        return num_senders > 0, params or None

    def take_events(self) -> Iterable[KVEvent]:
        return list(itertools.chain.from_iterable(connector.take_events() for connector in self.connectors))

    # Both

    def set_handshake_metadata(self, engine_id: str, metadata: Mapping[int, bytes]) -> None:
        try:
            ranks = {rank: json.loads(data) for rank, data in metadata.items()}
            parts = [
                {
                    rank: bytes.fromhex(data[number])
                    for rank, data in ranks.items()
                    if data[number] is not None
                }
                for number in range(len(self.connectors))
            ]
        except (ValueError, TypeError, IndexError) as error:
            raise ValueError(
                f"engine {engine_id!r} has not the {len(self.connectors)} connectors of this one"
            ) from error
        for connector, part in zip(self.connectors, parts, strict=True):
            connector.set_handshake_metadata(engine_id, part)

    def shutdown(self) -> None:
        _each(self.connectors, lambda connector: connector.shutdown())


def _configs(config: KVTransferConfig) -> list[KVTransferConfig]:
    entries = config.get_from_extra_config("connectors", None)
    if not isinstance(entries, list) or not 1 <= len(entries) <= _MOST:
        raise ConfigError(f"the multi connector needs connectors=[...], 1 to {_MOST} of them: {entries!r}")
    shared = {"kv_role": config.kv_role, "engine_id": config.engine_id}
    return [
        KVTransferConfig.from_dict({**shared, **entry, "engine_id": config.engine_id})
        if isinstance(entry, dict)
        else KVTransferConfig.from_dict(entry)  # says what is wrong
        for entry in entries
    ]


def _each(connectors: Iterable[KVConnector], call: Callable[[KVConnector], None]) -> None:
    """Call all of them, then raise what one has raised: it keeps no other from its part."""
    with ExitStack() as calls:
        for connector in reversed(list(connectors)):
            calls.callback(call, connector)
