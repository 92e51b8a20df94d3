"""What is kept of transfers in flight, and how many there may be."""

from __future__ import annotations

import enum
import threading
from collections import deque
from typing import TYPE_CHECKING

from simpler.errors import BackPressureError, ClosedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simpler.buffers import Allocation, Pin
    from simpler.config import WorkerConfig
    from simpler.transfer_handle import TransferHandle
    from simpler.transfer_ranges import Piece
    from simpler.uses import Use


class Phase(enum.Enum):
    """Where a transfer is on its way."""

    WAITING = "waiting"
    """For its turn at the memory."""
    READY = "ready"
    """It waits for one of the chip's places."""
    POSTED = "posted"
    """Its call is made, or about to be."""
    ENDING = "ending"
    """Somebody ends it."""
    UNCONFIRMED = "unconfirmed"
    """It has ended, and its memory is pinned."""


BEGUN_LATER = (Phase.WAITING, Phase.READY)
NOT_ENDED = (Phase.WAITING, Phase.READY, Phase.POSTED)


class InFlight:
    """One transfer until it has ended, or, when it is unconfirmed, until it is certified.

    Attributes:
        use: Its place in the order of uses, once it has one.
        tokens: Of its call, one once that is made.
        is_expected: Whether somebody waits for the call's outcome.
        is_told: Whether the provider has been told to stop, or is being told.
        process: The number of the chip's process that has the call.
    """

    __slots__ = (
        "chip", "handle", "is_cancelled", "is_expected", "is_told", "meta", "nbytes", "number", "payload",
        "phase", "pieces", "pinned", "process", "provider", "room", "tokens", "use",
    )  # fmt: skip

    use: Use

    def __init__(
        self, handle: TransferHandle, provider: int, pieces: Sequence[Piece], payload: bytes
    ) -> None:
        self.handle = handle
        self.number = handle.id
        self.provider = provider
        self.chip = handle.worker_id
        self.nbytes = handle.nbytes
        self.pieces = pieces
        self.payload = payload
        self.meta = b""
        self.phase = Phase.WAITING
        self.tokens: list[int] = []
        self.is_expected = False
        self.is_told = False
        self.is_cancelled = False
        self.process = 0
        self.pinned: list[tuple[Allocation, Pin]] = []
        self.room: TransferRoom | None = None

    @property
    def token(self) -> int:
        """Of its call."""
        return self.tokens[0]

    def give_room_back(self) -> None:
        """It is no longer in flight."""
        room, self.room = self.room, None
        if room is not None:
            room.give_back(self.nbytes)

    def let_go(self) -> None:
        """It never was: end what was taken for it so far."""
        self.give_room_back()
        if hasattr(self, "use"):
            self.use.release()


class Places:
    """The places of one chip: so many transfers run there at once, each on a thread of the process."""

    MOST = 8

    def __init__(self) -> None:
        self.posted = 0
        self.ready: deque[InFlight] = deque()


class TransferRoom:
    """Back-pressure: what may be submitted to one chip and not ended.

    Thread safety: any thread.
    """

    def __init__(self, chip: int, config: WorkerConfig) -> None:
        self._chip = chip
        self._most = config.max_transfers
        self._most_bytes = config.max_transfer_bytes or config.hbm_bytes
        self._changed = threading.Condition()
        self._count = 0
        self._nbytes = 0
        self._is_closed = False

    def take(self, transfer: InFlight, timeout_s: float, *, may_block: bool) -> None:
        """Wait until there is room, and take it. One that is larger than all the room may go alone.

        Raises:
            BackPressureError: There was none in time.
            ClosedError: The Worker is closing.
        """
        nbytes = transfer.nbytes
        wait = min(timeout_s, threading.TIMEOUT_MAX) if may_block else 0.0
        with self._changed:
            if not self._changed.wait_for(lambda: self._has_room(nbytes), wait):
                raise BackPressureError(
                    f"worker {self._chip} has {self._count} transfers of {self._nbytes} bytes in flight: "
                    f"enlarge max_transfers ({self._most}) or max_transfer_bytes ({self._most_bytes})"
                )
            if self._is_closed:
                raise ClosedError("submit_transfer: the worker is closing or closed")
            self._count += 1
            self._nbytes += nbytes
            transfer.room = self

    def give_back(self, nbytes: int) -> None:
        """A transfer has ended."""
        with self._changed:
            self._count -= 1
            self._nbytes -= nbytes
            self._changed.notify_all()

    def close(self) -> None:
        """No more; whoever waits is told."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _has_room(self, nbytes: int) -> bool:
        fits = self._nbytes + nbytes <= self._most_bytes or not self._count
        return self._is_closed or (self._count < self._most and fits)
