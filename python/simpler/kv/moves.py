"""Managed transfers of KV blocks: ranges for the blocks that a connector names, outcomes for the books.

Thread safety: one call at a time; the runtime locks.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, NamedTuple

from simpler import SimplerError, TransferAccess, TransferRange, TransferState
from simpler.kv import wire
from simpler.kv.cache_table import pair_pieces
from simpler.kv.errors import KVTransferError
from simpler.kv.ledger import KVRequestState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from simpler import TransferHandle, Worker
    from simpler.kv.cache_table import CacheTable, Piece
    from simpler.kv.ledger import Record, RequestLedger
    from simpler.kv.metadata import KVBlocks, KVTransfer

_log = logging.getLogger("simpler.kv")


class Move(NamedTuple):
    """A transfer in flight, or one that nobody has certified."""

    transfer: KVTransfer
    record: Record
    handle: TransferHandle
    deadline: float


class KVMoves:
    """The managed transfers of one engine."""

    def __init__(
        self,
        worker: Worker,
        number: int,
        chips: Sequence[int],
        ledger: RequestLedger,
        caches: Callable[[str], CacheTable],
        accept: Callable[[KVTransfer], str | None],
        most_unconfirmed: int,
    ) -> None:
        """Start with none.

        Args:
            worker: Runs them.
            number: The engine's.
            chips: Worker ids, by rank.
            ledger: The engine's books.
            caches: The caches of this engine or a peer; ValueError when there are none.
            accept: Asked about each that has ended well: why its bytes do not count, or None.
            most_unconfirmed: Bytes that may stay unconfirmed on a chip before its engine is reset.
        """
        self._worker = worker
        self._number = number
        self._chips = tuple(chips)
        self._ledger = ledger
        self._caches = caches
        self._accept = accept
        self._most_unconfirmed = most_unconfirmed
        self._refused: list[tuple[KVTransfer, Record, Exception]] = []
        self._open: list[Move] = []
        self._ended: list[Move] = []  # before the step that goes on
        self._unconfirmed: list[Move] = []

    @property
    def idle(self) -> bool:
        """Whether none is in flight, waits to be taken in, or is unconfirmed."""
        return not (self._open or self._refused or self._ended or self._unconfirmed)

    @property
    def count(self) -> int:
        """How many are in flight, wait to be taken in, or are unconfirmed."""
        return len(self._open) + len(self._refused) + len(self._ended) + len(self._unconfirmed)

    def begin(self, transfers: Iterable[KVTransfer]) -> None:
        """Submit them. What cannot be submitted is taken in as failed."""
        wanted = []
        for transfer in transfers:
            record = self._ledger.records.get(transfer.request_id)
            if record is None or not 0 <= transfer.rank < len(self._chips):
                self._ledger.counters["unknown"] += 1
                continue
            if transfer.is_load:
                record.moves[transfer.rank] += 1  # all first: one that fails must not end the load
            else:
                record.saves += 1
            wanted.append((transfer, record))
        for transfer, record in wanted:
            self._begin(transfer, record)

    def look(self) -> None:
        """See which have ended; before the chips are asked, who then tell of all bad blocks of these."""
        if self._open:
            moves, self._open = self._open, []
            now = time.monotonic()
            for move in moves:
                (self._ended if move.handle.done() else self._open).append(move)
                if move.deadline < now:
                    move.handle.cancel()

    def poll(self, silent: Collection[int] = ()) -> None:
        """Take in what `look` has seen, or could not begin.

        Args:
            silent: Ranks that have not answered the step: which blocks of their loads are bad is not known.
        """
        refused, self._refused = self._refused, []
        for transfer, record, error in refused:
            self._failed(transfer, record, error)
        ended, self._ended = self._ended, []
        for move in ended:
            waits = move.transfer.is_load and move.record.state is KVRequestState.LOADING
            if waits and move.transfer.rank in silent:
                self._ended.append(move)
            else:
                self._take(move)
        if self._unconfirmed:
            self._look_at_unconfirmed()

    def cancel(self, record: Record) -> None:
        """Ask the loads of a request to stop. What it saves is of use to others: that goes on."""
        for move in self._open:
            if move.record is record and move.transfer.is_load:
                move.handle.cancel()

    def stop(self, timeout_s: float) -> bool:
        """Ask all to stop, and wait; false when some go on."""
        for move in self._open:
            move.handle.cancel()
        deadline = time.monotonic() + timeout_s
        return all(move.handle.wait(max(deadline - time.monotonic(), 0.0)) for move in self._open)

    def rank_lost(self, rank: int) -> None:
        """A chip has died: what it ran touches nothing any more. Its loads are in the books already."""
        for moves in (self._open, self._ended, self._unconfirmed):
            for move in [move for move in moves if move.transfer.rank == rank]:
                moves.remove(move)
                if not move.transfer.is_load:
                    self._ledger.save_ended(move.record)

    def wait_any(self, timeout_s: float) -> bool:
        """Wait for one of those in flight; false when there is none."""
        if not self._open:
            return False
        self._open[0].handle.wait(timeout_s)
        return True

    def _begin(self, transfer: KVTransfer, record: Record) -> None:
        try:
            limit = math.inf if transfer.timeout_s is None else transfer.timeout_s
            self._open.append(Move(transfer, record, self._submit(transfer), time.monotonic() + limit))
        except (SimplerError, ValueError) as error:
            self._refused.append((transfer, record, error))

    def _submit(self, transfer: KVTransfer) -> TransferHandle:
        reads, writes = self._pieces(transfer.source, transfer.target)
        ranges = [
            TransferRange(piece.buffer, access, piece.offset, piece.nbytes)
            for pieces, access in ((reads, TransferAccess.READ), (writes, TransferAccess.WRITE))
            for piece in pieces
        ]
        payload = wire.pack_move(self._number, transfer.request_id, len(reads), transfer.payload)
        chip = self._chips[transfer.rank]
        return self._worker.submit_transfer(wire.EXTENSION, ranges, payload, worker_id=chip)

    def _pieces(
        self, source: KVBlocks | None, target: KVBlocks | None
    ) -> tuple[Sequence[Piece], Sequence[Piece]]:
        tables = [None if part is None else self._caches(part.engine_id) for part in (source, target)]
        for part, table in zip((source, target), tables, strict=True):
            if part is not None and table is not None and not 0 <= part.rank < len(table.by_rank):
                raise ValueError(f"engine {part.engine_id!r} has no rank {part.rank}")
        if source is not None and target is not None:
            assert tables[0] is not None
            assert tables[1] is not None
            return pair_pieces(
                tables[0], source.rank, source.block_ids, tables[1], target.rank, target.block_ids
            )
        both = [
            () if part is None or table is None else table.pieces(part.rank, part.block_ids)
            for part, table in zip((source, target), tables, strict=True)
        ]
        return both[0], both[1]

    def _take(self, move: Move) -> None:
        transfer, record, handle, _ = move
        if handle.state is TransferState.DONE:
            reason = self._accept(transfer)
            if reason is None:
                self._certified(transfer, record)
            else:
                self._failed(transfer, record, KVTransferError(reason))
            return
        try:
            handle.result(0)
        except SimplerError as error:
            if handle.state is not TransferState.UNCONFIRMED:
                self._failed(transfer, record, error)
                return
            _log.warning("KV blocks of request %r stay pinned: %s", transfer.request_id, error)
            self._ledger.counters["unconfirmed"] += 1
            self._unconfirmed.append(move)
            if transfer.target is not None:
                self._ledger.load_open(record, transfer.rank, transfer.target.block_ids, error)

    def _failed(self, transfer: KVTransfer, record: Record, error: Exception) -> None:
        if transfer.target is not None:
            self._ledger.load_bad(record, transfer.rank, transfer.target.block_ids, error)
        else:
            self._ledger.counters["save_errors"] += 1
        self._certified(transfer, record)

    def _certified(self, transfer: KVTransfer, record: Record) -> None:
        if not transfer.is_load:
            self._ledger.save_ended(record)
            return
        record.moves[transfer.rank] -= 1
        if not record.moves[transfer.rank]:
            self._ledger.load_ended(record, transfer.rank)

    def _look_at_unconfirmed(self) -> None:
        for chip in {move.handle.worker_id for move in self._unconfirmed}:
            own = [move for move in self._unconfirmed if move.handle.worker_id == chip]
            try:
                self._ask(chip, sum(move.handle.nbytes for move in own))
                still = {
                    handle.id for handle in self._worker.unconfirmed_transfers(wire.EXTENSION, worker_id=chip)
                }
            except SimplerError as error:
                _log.warning("transfers of worker %d were not confirmed: %s", chip, error)
                continue
            for move in own:
                if move.handle.id not in still:
                    self._unconfirmed.remove(move)
                    self._certified(move.transfer, move.record)

    def _ask(self, chip: int, nbytes: int) -> None:
        if nbytes > self._most_unconfirmed:
            _log.warning(
                "worker %d: %d bytes of KV are unconfirmed: its transfer engine is reset", chip, nbytes
            )
            self._ledger.counters["resets"] += 1
            self._worker.reset_provider(wire.EXTENSION, worker_id=chip)
        else:
            self._worker.confirm_transfers(wire.EXTENSION, worker_id=chip)
