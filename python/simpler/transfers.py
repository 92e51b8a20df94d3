"""Managed transfers: data moved by other people's engines inside the chip processes, while tasks go on.

A transfer takes its place in the order of uses like a copy does: it waits for what was submitted before it
and conflicts, and what comes after it waits for its bytes alone (TR-2). They stay its own until the provider
certifies that its access has ended (TR-1).
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from typing import TYPE_CHECKING

from simpler import _core
from simpler.buffers import HOST
from simpler.control.transfers import unknown_provider
from simpler.errors import MemoryRangeError
from simpler.payloads import payload_bytes
from simpler.transfer_flow import TransferFlow
from simpler.transfer_handle import TransferHandle
from simpler.transfer_ranges import checked_pieces, records_of
from simpler.transfer_records import BEGUN_LATER, NOT_ENDED, InFlight, Phase, TransferRoom
from simpler.transfer_wire import Verb, pack_control, pack_request, request_bytes, unpack_ids

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from simpler.caller import Caller
    from simpler.config import WorkerConfig
    from simpler.control.transfers import RegisteredProvider
    from simpler.deliveries import Deliveries
    from simpler.memory import MemoryRegistry
    from simpler.payloads import BytesLike
    from simpler.transfer_flow import TransferHost
    from simpler.transfer_ranges import Piece

_CONTROL = _core.ControlOp.TRANSFER_CONTROL
_log = logging.getLogger("simpler.transfers")


class Transfers:
    """The transfers of one Worker.

    Thread safety: any thread.
    """

    def __init__(
        self,
        config: WorkerConfig,
        host: TransferHost,
        caller: Caller,
        providers: Sequence[RegisteredProvider],
        host_visible: Sequence[bool],
        registry: MemoryRegistry,
        deliveries: Deliveries,
    ) -> None:
        """Share the Worker's parts.

        Args:
            config: Limits.
            host: The Worker's inside.
            caller: Carries the calls.
            providers: The Worker's snapshot.
            host_visible: For each chip whether the host can touch its memory.
            registry: Checks and orders the memory that transfers name.
            deliveries: Brings the outcomes.
        """
        self._most_payload = config.max_control_payload
        self._host = host
        self._caller = caller
        self._table = {provider.name: provider.id for provider in providers}
        self._host_visible = tuple(host_visible)
        self._registry = registry
        self._numbers = itertools.count(1)
        self._room = [TransferRoom(worker, config) for worker, _ in enumerate(host_visible)]
        self._flow = TransferFlow(
            host, caller, registry.pins, deliveries, len(host_visible), config.control_timeout_s
        )

    def submit(
        self,
        name: str,
        ranges: Iterable[object],
        payload: BytesLike,
        worker: int | None,
        timeout_s: float,
    ) -> TransferHandle:
        """`Worker.submit_transfer`."""
        provider = self._provider(name)
        pieces = checked_pieces(ranges)
        for record in records_of(pieces):
            if record.pin_refusal is not None:
                raise MemoryRangeError(record.pin_refusal)
        chip = self._owner(pieces) if worker is None else worker
        data = payload_bytes(payload, self._most_payload)
        self._check_size(len(pieces), len(data))
        nbytes = sum(end - begin for _, begin, end, _ in pieces)
        number = next(self._numbers)
        stop = functools.partial(self._flow.cancel, number)
        handle = TransferHandle(number, name, chip, nbytes, stop, self._host.may_block)
        transfer = InFlight(handle, provider, pieces, data)
        try:
            self._room[chip].take(transfer, timeout_s, may_block=self._host.may_block())
            what = f"transfer by {name!r}"
            transfer.use = self._registry.enqueue_pieces(pieces, worker=chip, what=what)
            transfer.meta = pack_request(number, pieces, self._host_visible)
            self._flow.begin(transfer)
        except BaseException:  # a signal's too: nobody will have the handle
            self._flow.give_up(transfer)
            raise
        return handle

    def confirm(self, name: str, chip: int, timeout_s: float, *, reset: bool) -> int:
        """`Worker.confirm_transfers` and `Worker.reset_provider`."""
        provider = self._provider(name)
        ids = [handle.id for handle in self.unconfirmed(name, chip)]
        if not self._host.is_alive(chip):
            self._host.wait_gone(chip)
            return self._certify(ids)  # an engine goes with its process
        if reset:
            self._control(chip, provider, pack_control(Verb.RESET, []), timeout_s)
            return self._certify(ids)
        deadline = time.monotonic() + timeout_s
        most = max((self._most_payload - 1) // 8, 1)
        stopped = 0
        for begin in range(0, len(ids), most):
            asked = ids[begin : begin + most]
            left = max(deadline - time.monotonic(), 0.0)
            reply = self._control(chip, provider, pack_control(Verb.CONFIRM, asked), left)
            stopped += self._certify(set(asked).intersection(unpack_ids(reply)))
        return stopped

    def unconfirmed(self, name: str | None, chip: int | None) -> list[TransferHandle]:
        """`Worker.unconfirmed_transfers`."""
        return [
            transfer.handle
            for transfer in self._flow.in_phase((Phase.UNCONFIRMED,))
            if name in (None, transfer.handle.name) and chip in (None, transfer.chip)
        ]

    def worker_died(self, chip: int) -> None:
        """The chip's process has died."""
        self._flow.process_died(chip)

    def worker_back(self, chip: int) -> None:
        """The chip has a new process: nothing of the old one touches memory."""
        self._flow.process_replaced(chip)

    def close(self, timeout_s: float) -> bool:
        """Refuse new ones, end what has not begun, wait for the rest, ask it to stop, say what did not.

        Returns:
            Whether all have ended.
        """
        self._flow.refuse_more()
        for room in self._room:
            room.close()
        for transfer in self._flow.in_phase(BEGUN_LATER):
            self._flow.withdraw(transfer, "did not begin: the worker was closed")
        for share in (0.5, 0.25):
            if self._flow.wait_ended(timeout_s * share):
                return True
            for transfer in self._flow.in_phase(NOT_ENDED):
                self._flow.cancel(transfer.number)
        left = self._flow.in_phase(NOT_ENDED)
        for transfer in left:
            _log.warning("close() ends the chip under %r, which did not stop in time", transfer.handle)
        return not left

    def end_all(self) -> None:
        """The processes are gone: whatever is left has ended with them."""
        self._flow.end_all()

    def _control(self, chip: int, provider: int, request: bytes, timeout_s: float) -> bytes:
        return self._caller.call(chip, _CONTROL, provider, _core.LANE_TRANSFER, b"", request, timeout_s)

    def _certify(self, numbers: Collection[int]) -> int:
        for number in numbers:
            self._flow.certify(number)
        return len(numbers)

    # What it may have

    def _provider(self, name: str) -> int:
        found = self._table.get(name)
        if found is None:
            raise unknown_provider(name)
        return found

    def _check_size(self, ranges: int, nbytes: int) -> None:
        meta = request_bytes(ranges)
        if meta + nbytes > self._most_payload:
            raise ValueError(
                f"{ranges} ranges take {meta} bytes of a request and the payload {nbytes}: more than "
                f"max_control_payload={self._most_payload}; split the transfer"
            )

    def _owner(self, pieces: Sequence[Piece]) -> int:
        owners = {record.worker for record in records_of(pieces)} - {HOST}
        if len(owners) != 1:
            raise ValueError(
                f"worker_id= says which chip's provider it is: its ranges belong to {len(owners)} chips"
            )
        return owners.pop()
