"""The connectors inside a chip's process: what the extension and the transfer provider do there.

Thread safety: the extension is concurrent, so that a step does not wait for compute. One call for an engine
runs at a time; transfers run beside it.
"""

from __future__ import annotations

import json
import threading
import traceback
from typing import TYPE_CHECKING, Any

from simpler import TransferResult
from simpler.kv import wire
from simpler.kv.caches import KVCacheView, layouts_from_json
from simpler.kv.config import KVTransferConfig
from simpler.kv.connector import KVConnectorRole
from simpler.kv.errors import KVTransferError
from simpler.kv.factory import load_class
from simpler.kv.metadata import KVConnectorContext, KVTransferJob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from simpler import CancelToken, ChipView, TransferRequest
    from simpler.kv.connector import KVConnector

_HEAD_BYTES = wire.HEAD.size
_KEY_BYTES = len(wire.step_key(0))
engines: dict[int, ChipEngine] = {}
"""The engines of this process, by their number in the parent. Numbers are not used again."""
_steps: dict[bytes, Callable[[bytes], bytes]] = {}


class UnknownEngineError(LookupError):
    """A call for an engine that is not on this chip."""


class ChipEngine:
    """The worker side of one engine on one chip."""

    def __init__(self, connector: KVConnector) -> None:
        self.connector = connector
        self.lock = threading.Lock()
        self._caches: dict[str, KVCacheView] = {}
        self._bound = False
        self._groups: list[tuple[int, bytes]] = []  # by step, not known to have arrived
        self._save_errors: list[str] = []

    def step(self, payload: bytes) -> bytes:
        """End the step before, begin this one, and report.

        What is reported is kept and sent again until the parent says that it has arrived.
        """
        with self.lock:
            if self._bound or self._groups or len(payload) > _HEAD_BYTES:
                self._turn(payload)
            else:
                self._collect(payload, ())
            return wire.pack_report(self._groups) if self._groups else b""

    def _turn(self, payload: bytes) -> None:
        arrived = wire.HEAD.unpack_from(payload)[3]
        self._groups = [group for group in self._groups if group[0] > arrived]
        if self._bound:
            self._end_step()
        finished: Sequence[str] = ()
        try:
            if len(payload) > _HEAD_BYTES:
                finished, metadata = wire.unpack_step(payload)
                if metadata is not None:
                    self._begin_step(metadata)
        finally:
            self._collect(payload, finished)

    def _collect(self, payload: bytes, finished: Sequence[str]) -> None:
        sent, received = self.connector.get_finished(finished)
        if sent or received:
            self._note(payload, wire.pack_records(sent, received, ()))
        bad = self.connector.get_block_ids_with_load_errors()
        if bad or self._save_errors:
            self._note(payload, wire.pack_records((), (), bad, self._save_errors))
            self._save_errors = []

    def _note(self, payload: bytes, records: bytes) -> None:
        self._groups.append((wire.HEAD.unpack_from(payload)[2], records))

    def _begin_step(self, metadata: Any) -> None:
        self.connector.bind_connector_metadata(metadata)
        self._bound = True
        try:
            self.connector.start_load_kv()
            for name in self._caches:
                self.connector.wait_for_layer_load(name)
        except BaseException:
            self._bound = False
            self.connector.clear_connector_metadata()
            raise

    def _end_step(self) -> None:
        """What the bound step saves. A save that fails harms no request: it is reported."""
        self._bound = False
        try:
            for name, cache in self._caches.items():
                self.connector.save_kv_layer(name, cache)
            self.connector.wait_for_save()
        except Exception as error:  # noqa: BLE001 - a connector of anybody's
            self.connector.context.log.warning("a KV save failed:\n%s", traceback.format_exc())
            self._save_errors.append(f"{type(error).__name__}: {error}")
        finally:
            self.connector.clear_connector_metadata()

    def register(self, chip: ChipView, content: Any) -> None:
        """Take over the buffers of the call."""
        with self.lock:
            if self._caches:
                raise ValueError("KV caches are registered already")
            layouts = layouts_from_json(content)
            caches = {name: KVCacheView(name, layout, chip.buffers[name]) for name, layout in layouts.items()}
            try:
                self.connector.register_kv_caches(caches)
            except BaseException:
                for cache in caches.values():
                    cache.expire()
                raise
            self._caches = caches

    def unregister(self) -> None:
        """Let go of the memory; nothing when none is registered."""
        with self.lock:
            if not self._caches:
                return
            if self._bound:
                self._end_step()
            self.connector.unregister_kv_caches()
            for cache in self._caches.values():
                cache.expire()
            self._caches = {}

    def shutdown(self) -> None:
        """Unregister and stop."""
        try:
            self.unregister()
        finally:
            self.connector.shutdown()


def handle(chip: ChipView, payload: bytes, _device_id: int) -> bytes:
    """The extension."""
    step = _steps.get(payload[:_KEY_BYTES])  # the hot path
    if step is not None:
        return step(payload)
    verb, number, _, _ = wire.HEAD.unpack_from(payload)
    if verb == wire.Verb.STEP:
        raise _unknown()
    return _ORDERS[wire.Verb(verb)](chip, number, wire.unpack_order(payload))


class Provider:
    """Runs managed transfers with the connector of the engine that wants them.

    Thread safety: any thread, several transfers at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, tuple[int, str]] = {}  # (engine, request) of transfers left open, by id

    def __call__(self, request: TransferRequest, cancel: CancelToken) -> TransferResult:
        """One transfer, from begin to end."""
        number, request_id, num_sources, payload = wire.unpack_move(request.payload)
        connector = _engine(number).connector
        job = KVTransferJob(request_id, payload, request.ranges[:num_sources], request.ranges[num_sources:])
        try:
            connector.run_transfer(job, cancel)
        except KVTransferError as error:
            return TransferResult.failed(str(error))
        except Exception as error:  # noqa: BLE001 - a connector of anybody's
            with self._lock:
                self._open[request.id] = (number, request_id)
            connector.context.log.warning("a KV transfer was left open:\n%s", traceback.format_exc())
            return TransferResult.unconfirmed(f"{type(error).__name__}: {error}")
        return TransferResult.ok()

    def confirm(self, ids: Sequence[int]) -> list[int]:
        """Those of some open transfers that no longer touch memory."""
        stopped = []
        with self._lock:
            asked = {number: self._open[number] for number in ids if number in self._open}
        for engine_number in {number for number, _ in asked.values()}:
            engine = engines.get(engine_number)
            own = {key: request for key, (number, request) in asked.items() if number == engine_number}
            if engine is None:  # shut down: its access has stopped
                stopped += list(own)
                continue
            done = set(engine.connector.confirm_transfers(list(own.values())))
            stopped += [key for key, request in own.items() if request in done]
        with self._lock:
            for key in stopped:
                del self._open[key]
        return stopped

    def reset(self) -> None:
        """Tear down the engines of all connectors here."""
        for engine in list(engines.values()):
            engine.connector.reset_transfers()
        with self._lock:
            self._open.clear()


provider = Provider()


def close(chip: ChipView) -> None:
    """The chip stops: so do its engines."""
    while engines:
        number, engine = engines.popitem()
        try:
            engine.shutdown()
        except Exception:
            chip.log.exception("KV engine %d did not shut down", number)


def _engine(number: int) -> ChipEngine:
    found = engines.get(number)
    if found is None:
        raise _unknown()
    return found


def _unknown() -> UnknownEngineError:
    return UnknownEngineError(
        "this chip has no such KV engine: it was restarted, or the engine has been closed"
    )


def _open(chip: ChipView, number: int, content: Any) -> bytes:
    config = KVTransferConfig.from_dict(content["config"])
    context = KVConnectorContext(
        num_ranks=len(content["chips"]),
        block_size=content["block_size"],
        log=chip.log,
        rank=content["chips"].index(chip.worker_id[-1]),
        worker_id=chip.worker_id,
        device_id=chip.device_id,
        platform=chip.platform,
    )
    cls = load_class(*content["class"])
    engines[number] = ChipEngine(cls(config, KVConnectorRole.WORKER, context))
    _steps[wire.step_key(number)] = engines[number].step
    return b""


def _register(chip: ChipView, number: int, content: Any) -> bytes:
    _engine(number).register(chip, content)
    return b""


def _unregister(_chip: ChipView, number: int, _content: Any) -> bytes:
    _engine(number).unregister()
    return b""


def _handshake(_chip: ChipView, number: int, _content: Any) -> bytes:
    engine = _engine(number)
    with engine.lock:
        return engine.connector.get_handshake_metadata() or b""


def _peer(_chip: ChipView, number: int, content: Any) -> bytes:
    engine = _engine(number)
    metadata = {int(rank): bytes.fromhex(data) for rank, data in content["metadata"].items()}
    with engine.lock:
        engine.connector.set_handshake_metadata(content["engine_id"], metadata)
    return b""


def _stats(_chip: ChipView, number: int, _content: Any) -> bytes:
    engine = _engine(number)
    with engine.lock:
        return json.dumps(dict(engine.connector.get_stats())).encode()


def _shutdown(_chip: ChipView, number: int, _content: Any) -> bytes:
    _steps.pop(wire.step_key(number), None)
    engine = engines.pop(number, None)
    if engine is not None:
        engine.shutdown()
    return b""


_ORDERS: dict[wire.Verb, Callable[[ChipView, int, Any], bytes]] = {
    wire.Verb.OPEN: _open,
    wire.Verb.REGISTER: _register,
    wire.Verb.UNREGISTER: _unregister,
    wire.Verb.HANDSHAKE: _handshake,
    wire.Verb.PEER: _peer,
    wire.Verb.STATS: _stats,
    wire.Verb.SHUTDOWN: _shutdown,
}
