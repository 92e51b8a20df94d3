"""KVRuntime: calls a connector's hooks in the right order around each step of an engine on a Worker."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from simpler import (
    ClosedError,
    RemoteError,
    SimplerError,
    WorkerDiedError,
    WorkerTimeoutError,
    register_chip_control_extension,
    register_transfer_provider,
)
from simpler.kv import runtime_chip, wire
from simpler.kv.engine import KVEngine
from simpler.kv.errors import KVReplyError
from simpler.kv.ledger import KVRequestState, RequestLedger
from simpler.kv.metadata import KVStep, KVStepOutput
from simpler.kv.moves import KVMoves

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from simpler import Worker
    from simpler.kv.config import KVTransferConfig
    from simpler.kv.ledger import Record
    from simpler.kv.metadata import KVEvent, KVRequest

_log = logging.getLogger("simpler.kv")
_NO_STEP = KVStep()
_NO_OUTPUT = KVStepOutput()
_DRAIN_PAUSE_S = 0.001
_STOP_S = 10.0  # for transfers that are asked to stop


def register() -> None:
    """Make Workers that are initialised from now on able to carry connectors; again it does nothing."""
    register_chip_control_extension(
        wire.EXTENSION, runtime_chip.handle, concurrent=True, on_close=runtime_chip.close
    )
    register_transfer_provider(wire.EXTENSION, runtime_chip.provider)


class KVRuntime(KVEngine):
    """One engine's KV blocks: its connector next to the scheduler and in each of its chips.

    Thread safety: any thread; one call at a time goes on.
    """

    def __init__(
        self,
        worker: Worker,
        config: KVTransferConfig,
        *,
        block_size: int,
        chips: Sequence[int] | None = None,
        step_timeout_s: float | None = None,
        load_timeout_s: float = 60.0,
        max_unconfirmed_bytes: int = 1 << 30,
    ) -> None:
        """Make the connector for both roles, on every chip.

        Args:
            worker: A Worker that is READY; `register` was called before its init().
            config: Which connector, and its options.
            block_size: Tokens in a block.
            chips: The engine's chips by worker id; None is all of the Worker's. Their order is their rank.
            step_timeout_s: The limit of a control call; None is the Worker's `control_timeout_s`.
            load_timeout_s: How long a load may take before its request is given up.
            max_unconfirmed_bytes: Bytes on a chip that nobody certifies before its engine is reset.

        Raises:
            ConfigError: No such connector.
            ChipControlError: A chip could not make it; nothing is left of it on the others.
        """
        super().__init__(worker, config, block_size, chips, step_timeout_s)
        self._lost: dict[int, SimplerError] = {}  # by rank
        self._finished: set[str] = set()
        self._step = 0
        self._is_bound = False
        self._arrived = 0
        self._seen = [0] * len(self.chips)
        self._ledger = RequestLedger(
            [(chip,) for chip in self.chips],
            block_size,
            config.kv_load_failure_policy,
            load_timeout_s,
            self._failed,
        )
        self._moves = KVMoves(
            worker,
            self._number,
            self.chips,
            self._ledger,
            self._caches_of,
            self._scheduler.accept_transfer,
            max_unconfirmed_bytes,
        )

    # Requests

    def get_num_new_matched_tokens(
        self, request: KVRequest, num_computed_tokens: int = 0
    ) -> tuple[int | None, bool]:
        """How many tokens beyond those computed can be loaded; see the hook of that name."""
        with self._lock:
            self._check_open()
            if self._lost:
                return 0, False
            matched, is_async = self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
            self._ledger.note(request, num_computed_tokens, is_async=bool(matched) and is_async)
            return matched, is_async

    def update_state_after_alloc(
        self, request: KVRequest, block_ids: Sequence[int], num_external_tokens: int = 0
    ) -> None:
        """The scheduler has given blocks to a request; with external tokens, the next step begins to load.

        Raises:
            ValueError: Too few blocks, a block that the caches do not have, or a request that loads or has
                ended.
        """
        with self._lock:
            self._check_open()
            most = 0 if self._table is None else self._table.num_blocks
            if any(not 0 <= block < most for block in block_ids):
                raise ValueError(f"the engine has {most} blocks: {list(block_ids)}")
            self._ledger.allocate(request, block_ids, num_external_tokens)
            self._scheduler.update_state_after_alloc(request, block_ids, num_external_tokens)

    def request_finished(
        self, request: KVRequest, block_ids: Sequence[int] | None = None
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended, or is given up; its loads are asked to stop.

        Args:
            request: The request.
            block_ids: Its blocks, when they are others than at the last `update_state_after_alloc`.

        Returns:
            (whether its blocks are still in use: then `KVStepOutput.freed` gives them back later; what a peer
            needs to load them). For a request that has ended before, or that no call has named, (True, None):
            there is nothing to give back again.
        """
        with self._lock:
            self._check_open()
            record = self._ledger.records.get(request.request_id)
            if record is None or record.state is KVRequestState.ENDED:
                return True, None
            if block_ids is not None:
                record.blocks = tuple(block_ids)
            sends, params = self._scheduler.request_finished(request, record.blocks)
            self._finished.add(request.request_id)
            self._moves.cancel(record)
            return self._ledger.finish(record, sends=sends and not self._lost), params

    def abort(self, request_id: str) -> bool:
        """End a request at once: the first value of `request_finished`. Its blocks are offered to no peer."""
        with self._lock:
            self._check_open()
            record = self._ledger.records.get(request_id)
            if record is None:
                return True
            return self.request_finished(dataclasses.replace(record.request, kv_transfer_params=None))[0]

    def state(self, request_id: str) -> KVRequestState | None:
        """Where a request stands; None when it is unknown, or has ended and holds nothing."""
        record = self._ledger.records.get(request_id)
        return None if record is None else record.state

    # Steps

    def step(self, scheduled: Mapping[str, int] | None = None, *, payload: object = None) -> KVStepOutput:
        """Between two steps of compute: the chips save what was computed, load what comes, and report.

        Compute of the step before has ended. What goes wrong on chips and peers is in the output, by request
        and by chip.

        Args:
            scheduled: Tokens that will be computed, by request.
            payload: For the connector, as `KVStep.payload`.

        Raises:
            Exception: The connector's scheduler side raised it; no chip was told anything, and the loads that
                were to begin have failed.
        """
        with self._lock:
            self._check_open()
            step = _NO_STEP
            if scheduled or payload is not None or self._finished:
                step = KVStep(scheduled or {}, frozenset(self._finished), payload)
            try:
                metadata = self._scheduler.build_connector_meta(step)
                transfers = self._scheduler.take_transfers()
            except Exception as error:
                self._ledger.fail_pending(error)
                raise
            begun: Sequence[Record] = ()
            busy = transfers or not self._ledger.quiet or not self._moves.idle
            if busy:
                begun = self._ledger.start(time.monotonic())
                self._moves.begin(transfers)
                self._moves.look()
            self._step += 1
            self._is_bound = metadata is not None
            data = wire.pack_step(self._number, self._step, self._arrived, step.finished, metadata)
            try:
                replies = self._channel.step(data)
            except BaseException as error:
                self._interrupted(begun, error)
                raise
            if not busy and not any(replies):
                self._finished.difference_update(step.finished)
                self._arrived = self._step
                return _NO_OUTPUT
            errors = self._take_replies(replies, begun)
            if all(isinstance(reply, bytes) or rank in self._lost for rank, reply in enumerate(replies)):
                self._finished.difference_update(step.finished)
                self._arrived = self._step
            return self._conclude(errors)

    def drain(self, timeout_s: float = 30.0) -> KVStepOutput:
        """Step until nothing loads, nothing is held and the last step has ended; what all of it brought.

        Raises:
            WorkerTimeoutError: Something still was after that time; the text says what.
        """
        deadline = time.monotonic() + timeout_s
        outputs = [self.step()]
        while self._is_bound or not self._ledger.quiet or not self._moves.idle:
            if time.monotonic() > deadline:
                raise WorkerTimeoutError(
                    f"KV engine {self.engine_id!r} still holds blocks after {timeout_s:g} s: {self.held()}",
                    waited_for="KV blocks",
                    timeout_s=timeout_s,
                )
            if not self._is_bound and not self._moves.wait_any(0.1):
                threading.Event().wait(_DRAIN_PAUSE_S)
            outputs.append(self.step())
        return _joined(outputs)

    def held(self) -> dict[str, tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
        """Requests that have ended while their blocks are in use: (blocks, chips that may touch them)."""
        with self._lock:
            return self._ledger.held()

    def take_events(self) -> list[KVEvent]:
        """What became of blocks in the connector's store since the last call."""
        with self._lock:
            return list(self._scheduler.take_events())

    def stats(self) -> dict[str, Any]:
        """Counters of the runtime, and by path those of each chip's connector (or why they are missing)."""
        with self._lock:
            self._check_open()
            outcomes = self._channel.try_order(wire.Verb.STATS, lambda _rank: None)
            chips: dict[tuple[int, ...], Any] = {}
            for chip, outcome in zip(self.chips, outcomes, strict=True):
                chips[chip,] = _counters(outcome)
            return {**self._ledger.counters, "steps": self._step, "chips": chips}

    # Inside

    def _take_replies(
        self, replies: Sequence[bytes | SimplerError], begun: Iterable[Record]
    ) -> dict[tuple[int, ...], Exception]:
        errors: dict[tuple[int, ...], Exception] = {}
        num_blocks = 0 if self._table is None else self._table.num_blocks
        for rank, reply in enumerate(replies):
            error = self._take_reply(rank, reply, begun, num_blocks)
            if error is not None:
                errors[self.chips[rank],] = error
        return errors

    def _take_reply(
        self, rank: int, reply: bytes | SimplerError, begun: Iterable[Record], num_blocks: int
    ) -> SimplerError | None:
        try:
            if not isinstance(reply, bytes):
                raise reply
            report = wire.unpack_report(reply, num_blocks, self._seen[rank])
        except SimplerError as error:
            if not _is_end(error):
                self._ledger.step_failed(rank, begun, error)
            elif rank not in self._lost:
                self._lost[rank] = error
                self._ledger.rank_lost(rank, error)
                self._moves.rank_lost(rank)
            return error
        self._seen[rank] = report.step
        self._ledger.report(rank, report)
        if not report.save_errors:
            return None
        text = f"a KV save failed: {report.save_errors[0]}"
        return RemoteError(type_name="", message=text, path=(self.chips[rank],))

    def _interrupted(self, begun: Iterable[Record], error: BaseException) -> None:
        """Nobody knows what the chips have done in a step, unless it was too large to be sent."""
        was_sent = not isinstance(error, ValueError)
        reason = WorkerTimeoutError(f"the step was interrupted: {error!r}", started=was_sent)
        for rank in range(len(self.chips)):
            self._ledger.step_failed(rank, begun, reason)

    def _conclude(self, errors: Mapping[tuple[int, ...], Exception]) -> KVStepOutput:
        silent = [
            rank for rank, chip in enumerate(self.chips) if (chip,) in errors and rank not in self._lost
        ]
        self._moves.poll(silent)
        for record in self._ledger.expire(time.monotonic()):
            self._moves.cancel(record)
        for error in list(self._lost.values())[:1]:
            for record in list(self._ledger.records.values()):
                self._ledger.fail(record, error)
        output, told = self._ledger.take(errors)
        if told is not None:
            self._scheduler.update_connector_output(told)
        return output

    def _failed(self, record: Record) -> bool:
        """A request has failed here: the connector is told, as of any end."""
        request = record.request
        self._finished.add(request.request_id)
        try:
            return self._scheduler.request_finished(request, record.blocks)[0]
        except Exception:  # noqa: BLE001 - a connector of anybody's; the others' reports must be taken in
            _log.exception("the KV connector did not take the end of request %r", request.request_id)
            return False

    def unregister_kv_caches(self) -> None:
        """Have the chips let go of the memory; nothing when none is registered.

        Raises:
            ChipControlError: Not every chip did: the buffers of those stay pinned.
            WorkerTimeoutError: Transfers of blocks go on although they were asked to stop.
        """
        with self._lock:
            self._check_open()
            if not self._moves.stop(_STOP_S):
                raise WorkerTimeoutError(
                    f"KV engine {self.engine_id!r} still has transfers after {_STOP_S:g} s",
                    started=True,
                    waited_for="transfers of KV blocks",
                    timeout_s=_STOP_S,
                )
            super().unregister_kv_caches()

    def close(self) -> None:
        """Shut the connector down everywhere and let go of the memory; again it does nothing.

        A chip that does not answer keeps its buffers pinned; the log says so.
        """
        with self._lock:
            if not self._closed and not self._moves.stop(_STOP_S):
                _log.warning("KV engine %s is closed under transfers that go on", self.engine_id)
            super().close()


def _is_end(error: SimplerError) -> bool:
    """Whether a chip, or the engine on it, is there no more."""
    if isinstance(error, RemoteError):
        return error.type_name.rpartition(".")[2] == runtime_chip.UnknownEngineError.__name__
    return isinstance(error, WorkerDiedError | ClosedError)


def _counters(outcome: bytes | SimplerError) -> object:
    try:
        return wire.unpack_stats(outcome) if isinstance(outcome, bytes) else outcome
    except KVReplyError as error:
        return error


def _joined(outputs: Sequence[KVStepOutput]) -> KVStepOutput:
    return KVStepOutput(
        tuple(request for output in outputs for request in output.loaded),
        {key: value for output in outputs for key, value in output.recompute.items()},
        {key: value for output in outputs for key, value in output.failed.items()},
        tuple(freed for output in outputs for freed in output.freed),
        {path: error for output in outputs for path, error in output.errors.items()},
    )
