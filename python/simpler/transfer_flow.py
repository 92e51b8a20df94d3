"""The way of each transfer of a Worker: its turn, its place, its call, its end.

Whoever changes a transfer's phase under the lock decides what becomes of it; everything else happens without
the lock, which is never held while anything is called that may take another.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from itertools import starmap
from typing import TYPE_CHECKING, NamedTuple, Protocol

from simpler import _core
from simpler.control.transfers import TransferOutcome
from simpler.errors import ClosedError, TransferError, TransferUnconfirmedError, WorkerDiedError
from simpler.transfer_handle import TransferState
from simpler.transfer_records import BEGUN_LATER, NOT_ENDED, Phase, Places
from simpler.transfer_wire import Verb, pack_control, unpack_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from simpler.caller import Caller
    from simpler.deliveries import Deliveries, Outcome
    from simpler.pins import Pins
    from simpler.transfer_ranges import Piece
    from simpler.transfer_records import InFlight
    from simpler.uses import Use

_TRANSFER, _CONTROL = _core.ControlOp.TRANSFER, _core.ControlOp.TRANSFER_CONTROL
_log = logging.getLogger("simpler.transfers")


class TransferHost(Protocol):
    """What transfers need of the Worker's inside."""

    def watch_turn(self, use: Use, call: Callable[[], None]) -> None:
        """Have `call` made once the use's turn has come, or never will."""

    def may_block(self) -> bool:
        """Whether this thread may wait for outcomes."""

    def is_alive(self, worker: int) -> bool:
        """Whether the chip's process is there."""

    def wait_gone(self, worker: int) -> None:
        """Block until the process of a chip that is not alive has been taken down."""

    def process_number(self, worker: int) -> int:
        """Which of the chip's processes is there, counted from 0."""

    def note_death(self, worker: int) -> None:
        """The chip's process is gone: its memory is lost from now on, if that is not known yet."""


class Ending(NamedTuple):
    """How a transfer ends."""

    state: TransferState
    result: bytes = b""
    text: str | None = None
    cause: BaseException | None = None


class TransferFlow:
    """The transfers that have not ended, or are unconfirmed.

    Thread safety: any thread.
    """

    def __init__(
        self,
        host: TransferHost,
        caller: Caller,
        pins: Pins,
        deliveries: Deliveries,
        chips: int,
        cancel_timeout_s: float,
    ) -> None:
        """Start with none.

        Args:
            host: The Worker's inside.
            caller: Carries the calls.
            pins: What unconfirmed transfers keep from everybody.
            deliveries: Brings the outcomes.
            chips: How many there are.
            cancel_timeout_s: For telling a provider that it should stop.
        """
        self._host = host
        self._caller = caller
        self._pins = pins
        self._deliveries = deliveries
        self._cancel_timeout_s = cancel_timeout_s
        self._changed = threading.Condition()
        self._places = [Places() for _ in range(chips)]
        self._live: dict[int, InFlight] = {}
        self._is_closed = False

    def in_phase(self, phases: Collection[Phase]) -> list[InFlight]:
        """Those that are there now, oldest first."""
        with self._changed:
            return [transfer for transfer in self._live.values() if transfer.phase in phases]

    def refuse_more(self) -> None:
        """The Worker is closing."""
        with self._changed:
            self._is_closed = True

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until each has ended, confirmed or not."""
        if not self._host.may_block():
            return not self.in_phase(NOT_ENDED)
        with self._changed:
            return self._changed.wait_for(
                lambda: all(transfer.phase not in NOT_ENDED for transfer in self._live.values()),
                max(timeout_s, 0.0),
            )

    # One transfer, in the order of what happens to it

    def begin(self, transfer: InFlight) -> None:
        """It has its place in the order: wait for its turn.

        Raises:
            ClosedError: The Worker is closing.
        """
        with self._changed:
            if self._is_closed:
                raise ClosedError("submit_transfer: the worker is closing or closed")
            self._live[transfer.number] = transfer
        self._host.watch_turn(transfer.use, functools.partial(self._turn_came, transfer))

    def give_up(self, transfer: InFlight) -> None:
        """Its submitter was interrupted, or refused: nobody has its handle."""
        with self._changed:
            is_live = transfer.number in self._live
        if is_live:
            self.cancel(transfer.number)
        elif transfer.phase is Phase.WAITING:  # begun by nobody
            transfer.let_go()

    def _turn_came(self, transfer: InFlight) -> None:
        with self._changed:
            if transfer.phase is not Phase.WAITING:
                return
            transfer.phase = Phase.READY
            self._places[transfer.chip].ready.append(transfer)
        self._post_ready(transfer.chip)

    def _post_ready(self, chip: int) -> None:
        """Thousands may end here one after the other: none of them within another."""
        place = self._places[chip]
        while True:
            with self._changed:
                if not place.ready or place.posted >= Places.MOST:
                    return
                transfer = place.ready.popleft()
                transfer.phase = Phase.POSTED
                place.posted += 1
            ending = self._post(transfer)
            if ending is not None:
                self._finish(transfer, ending)

    def _post(self, transfer: InFlight) -> Ending | None:
        """Make its call; how it ended, if it has already."""
        try:
            transfer.use.wait_turn(0.0, transfer.chip)
            if not self._host.is_alive(transfer.chip):
                raise ClosedError(f"worker {transfer.chip} is dead")
            transfer.handle.begin()
            call = (
                transfer.chip, _TRANSFER, transfer.provider, _core.LANE_TRANSFER, transfer.meta,
                transfer.payload, math.inf, 0,
            )  # fmt: skip
            # In one step, between whose parts no signal handler of Python's comes.
            transfer.tokens.extend(starmap(self._caller.submit, (call,)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the call was not made
            return Ending(TransferState.FAILED, b"", f"did not begin: {error}", error)
        except BaseException as error:
            self._interrupted(transfer, error)
            raise
        transfer.process = self._host.process_number(transfer.chip)
        outcome = self._deliveries.expect_later(transfer.token, functools.partial(self._arrive, transfer))
        if outcome is not None:
            return self._ending(transfer, outcome)
        with self._changed:
            transfer.is_expected = True
            is_cancelled = transfer.is_cancelled
        return self._cancel_posted(transfer) if is_cancelled else None

    def _interrupted(self, transfer: InFlight, error: BaseException) -> None:
        if transfer.tokens:
            self._deliveries.expect(transfer.token, functools.partial(self._arrive, transfer))
        else:  # whether the call was made is not known
            self._finish(
                transfer, Ending(TransferState.UNCONFIRMED, b"", f"was interrupted: {error!r}", error)
            )

    def _arrive(self, transfer: InFlight, outcome: Outcome) -> None:
        self._finish(transfer, self._ending(transfer, outcome))
        self._post_ready(transfer.chip)

    def _ending(self, transfer: InFlight, outcome: Outcome) -> Ending:
        if isinstance(outcome, WorkerDiedError):
            self._host.note_death(transfer.chip)
        if isinstance(outcome, BaseException):  # whatever it was, it certifies nothing
            return Ending(TransferState.UNCONFIRMED, b"", f"is unconfirmed: {outcome}", outcome)
        answer, data = unpack_answer(outcome)
        if answer is TransferOutcome.OK:
            return Ending(TransferState.DONE, data)
        text = data.decode("utf-8", "replace")
        if answer is TransferOutcome.UNCONFIRMED:
            return Ending(TransferState.UNCONFIRMED, b"", f"is unconfirmed: {text}")
        if transfer.is_cancelled:
            return Ending(TransferState.CANCELLED, b"", f"was cancelled: {text}")
        return Ending(TransferState.FAILED, b"", f"failed: {text}")

    def _finish(self, transfer: InFlight, ending: Ending, only_in: Collection[Phase] = NOT_ENDED) -> None:
        """End it, unless somebody else has, or it is past the phases in which it may end like this."""
        place = self._places[transfer.chip]
        with self._changed:
            if transfer.phase not in only_in:
                return
            if transfer.phase is Phase.POSTED:
                place.posted -= 1
            elif transfer.phase is Phase.READY:
                place.ready.remove(transfer)
            transfer.phase = Phase.ENDING
        handle = transfer.handle
        state, result, text, cause = ending
        error: TransferError | None = None
        if text is not None:
            kind = TransferUnconfirmedError if state is TransferState.UNCONFIRMED else TransferError
            error = kind(text, transfer_id=handle.id, provider=handle.name, path=(transfer.chip,))
            error.__cause__ = cause
        if isinstance(cause, WorkerDiedError):
            transfer.pieces = _still_written(transfer)
        if state is TransferState.UNCONFIRMED and (transfer.pieces or not isinstance(cause, WorkerDiedError)):
            nbytes = sum(end - begin for _, begin, end, _ in transfer.pieces)
            _log.warning("%s: %d bytes stay pinned", error, nbytes)
            self._pin(transfer)
        else:
            self._forget(transfer)
        transfer.give_room_back()
        handle.finish(state, result, error)
        with self._changed:
            self._changed.notify_all()

    def _pin(self, transfer: InFlight) -> None:
        text = f"transfer {transfer.number} by {transfer.handle.name!r} (unconfirmed)"
        transfer.pinned = self._pins.block(transfer.number, text, transfer.pieces)
        transfer.meta = transfer.payload = b""
        with self._changed:
            transfer.phase = Phase.UNCONFIRMED
        if transfer.process < self._host.process_number(transfer.chip):
            self.certify(transfer.number)  # its process was replaced before this was known

    def certify(self, number: int) -> None:
        """An unconfirmed one no longer touches its memory; nothing for any other."""
        with self._changed:
            transfer = self._live.get(number)
            if transfer is None or transfer.phase is not Phase.UNCONFIRMED:
                return
            transfer.phase = Phase.ENDING
        self._pins.unblock(number, transfer.pinned)
        self._forget(transfer)

    def process_died(self, chip: int) -> None:
        """What unconfirmed transfers of the chip could only read is free."""
        for transfer in self.in_phase((Phase.UNCONFIRMED,)):
            if transfer.chip == chip and not _still_written(transfer):
                self.certify(transfer.number)

    def process_replaced(self, chip: int) -> None:
        """The chip has a new process: nothing of the old ones touches memory."""
        now = self._host.process_number(chip)
        for transfer in self.in_phase((Phase.UNCONFIRMED,)):
            if transfer.chip == chip and transfer.process < now:
                self.certify(transfer.number)

    def end_all(self) -> None:
        """The processes are gone: whatever is left has ended with them."""
        for transfer in self.in_phase(NOT_ENDED):
            text = "was running when the worker was closed"
            self._finish(transfer, Ending(TransferState.UNCONFIRMED, b"", text))
        for transfer in self.in_phase((Phase.UNCONFIRMED,)):
            self.certify(transfer.number)

    def _forget(self, transfer: InFlight) -> None:
        with self._changed:
            self._live.pop(transfer.number, None)
        transfer.use.release()

    # Ends that were asked for

    def withdraw(self, transfer: InFlight, text: str) -> None:
        """End it, if it has not begun."""
        self._finish(transfer, Ending(TransferState.CANCELLED, b"", text), BEGUN_LATER)

    def cancel(self, number: int) -> None:
        """`TransferHandle.cancel`."""
        with self._changed:
            transfer = self._live.get(number)
            if transfer is None or transfer.phase not in NOT_ENDED:
                return
            transfer.is_cancelled = True
            is_expected = transfer.is_expected
        self.withdraw(transfer, "was cancelled before it began")
        if is_expected:  # else _post() looks once it has made the call
            ending = self._cancel_posted(transfer)
            if ending is not None:
                self._finish(transfer, ending)
                self._post_ready(transfer.chip)

    def _cancel_posted(self, transfer: InFlight) -> Ending | None:
        if self._caller.cancel(transfer.token):
            self._deliveries.forget(transfer.token)
            return Ending(TransferState.CANCELLED, b"", "was cancelled before it began")
        with self._changed:
            if transfer.phase is not Phase.POSTED or transfer.is_told:
                return None
            transfer.is_told = True
        request = pack_control(Verb.CANCEL, [transfer.number])
        try:
            told = self._caller.submit(
                transfer.chip, _CONTROL, transfer.provider, _core.LANE_TRANSFER, b"", request,
                self._cancel_timeout_s, 0,
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - too busy, dying or closing: it may be asked again
            transfer.is_told = False
            _log.debug("%r was not told to stop: %s", transfer.handle, error)
            return None
        self._deliveries.expect(told, functools.partial(_note_told, transfer))
        return None


def _still_written(transfer: InFlight) -> list[Piece]:
    """What keeps of a dead process: it reads nothing any more, and its own memory has gone with it."""
    return [piece for piece in transfer.pieces if piece[3] and piece[0].worker != transfer.chip]


def _note_told(transfer: InFlight, outcome: Outcome) -> None:
    """The transfer's own answer says the rest."""
    if isinstance(outcome, BaseException):
        transfer.is_told = False
