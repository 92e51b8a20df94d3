"""One transfer of a Mooncake engine: the copies that have begun, and what the engine said of them."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, NamedTuple

from simpler.kv.engines import Copy, Outcome, OutcomeKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from simpler.kv.engines.mooncake_module import RawEngine

# Copies under way at once; past some hundreds the engine gives some of them up.
_WINDOW = 64

_DONE, _FAILED = 1, -1
_NOTHING_BEGUN = frozenset({0, -1, (1 << 64) - 1})


_DONE_OUTCOME = Outcome(OutcomeKind.DONE)


class Direction(NamedTuple):
    """Reading or writing, as the engine calls it."""

    verb: str
    submit: Callable[[RawEngine, str, Copy], int]


def _read(raw: RawEngine, segment: str, copy: Copy) -> int:
    return raw.batch_transfer_async_read(segment, [copy.local_address], [copy.remote_address], [copy.nbytes])


def _write(raw: RawEngine, segment: str, copy: Copy) -> int:
    return raw.batch_transfer_async_write(segment, [copy.local_address], [copy.remote_address], [copy.nbytes])


READ = Direction("read", _read)
WRITE = Direction("write", _write)


class Transfer:
    """The state of one transfer.

    Thread safety: the thread that runs it, then whoever holds the engine's lock.

    Attributes:
        number: The engine's name for it.
        refused: Why copies were not begun; empty when all were, or may still be.
        lost: Why a copy that had begun may never be certified.
    """

    def __init__(self, number: int, direction: Direction, copies: Sequence[Copy]) -> None:
        self.number = number
        self.refused = ""
        self.lost = ""
        self._direction = direction
        self._copies = copies
        self._begun = 0
        self._batches: deque[int] = deque()  # under way, one copy each
        self._first: Future[int] | None = None  # a first contact that has not come back

    @property
    def open(self) -> bool:
        """Whether anything of it may still go on."""
        return bool(self.lost or self._batches or self._first is not None)

    @property
    def waiting(self) -> bool:
        """Whether copies are under way of which the engine can be asked."""
        return bool(self._batches) and self._first is None

    @property
    def may_begin(self) -> bool:
        """Whether another copy is to begin now."""
        stopped = self.refused or self.lost or self._first is not None
        return not stopped and self._begun < len(self._copies) and len(self._batches) < _WINDOW

    def touches(self, address: int, nbytes: int) -> bool:
        """Whether a copy's local side overlaps the range."""
        return any(
            copy.local_address < address + nbytes and address < copy.local_address + copy.nbytes
            for copy in self._copies
        )

    def abandon(self, reason: str) -> None:
        """Stop where it is: what has begun is not looked at any more."""
        if self._batches or self._first is not None:
            self.lost = reason
        elif self._begun < len(self._copies):
            self.refused = reason

    def cancel(self) -> None:
        """Begin no more; without effect when all have begun."""
        if self._begun < len(self._copies) and not self.refused:
            self.refused = "cancelled"

    def begin(self, raw: RawEngine, segment: str) -> bool:
        """Begin the next copy; whether the engine does."""
        batch = self._direction.submit(raw, segment, self._copies[self._begun])
        if batch in _NOTHING_BEGUN:
            self.refused = "the engine does not begin it"
            return False
        self._batches.append(batch)
        self._begun += 1
        return True

    def begin_first(self, raw: RawEngine, segment: str, timeout_s: float) -> bool:
        """Begin the first copy where a call that does not come back blocks nobody; whether it has begun."""
        self._first = first = Future[int]()
        self._begun = 1
        threading.Thread(
            target=_call_into,
            args=(first, self._direction, raw, segment, self._copies[0]),
            name="mooncake contact",
            daemon=True,
        ).start()
        try:
            first.exception(timeout_s)
        except FutureTimeoutError:
            return False
        self._take_first()
        return bool(self._batches)

    def look(self, raw: RawEngine) -> bool:
        """Ask about the oldest copy under way; whether it has ended."""
        status = raw.transfer_check_status(self._batches[0])
        if status not in {_DONE, _FAILED}:
            return False
        self._batches.popleft()
        if status == _FAILED:
            self.lost = "the engine says that a copy failed"
        return True

    def settle(self, raw: RawEngine) -> bool:
        """Ask about all copies under way; whether nothing goes on any more."""
        self._take_first()
        for _ in range(len(self._batches)):
            if not self.look(raw):
                self._batches.rotate(-1)
        return not self.open

    def outcome(self, peer: str) -> Outcome:
        """What is known now."""
        if not (self.open or self.refused):
            return _DONE_OUTCOME
        what = f"Mooncake {self._direction.verb} with {peer}"
        if self.open:
            return Outcome(
                OutcomeKind.UNCONFIRMED,
                f"{what}: {self.lost or 'the deadline passed'}; {self._begun} of {len(self._copies)} copies "
                f"have begun and may go on",
                self.number,
            )
        return Outcome(OutcomeKind.FAILED, f"{what}: {self.refused}")

    def _take_first(self) -> None:
        """Take in the first contact if it has come back."""
        first = self._first
        if first is None or not first.done():
            return
        self._first = None
        error = first.exception()
        if error is not None:
            self.lost = f"the engine raised {error!r}"
        elif first.result() in _NOTHING_BEGUN:
            self.refused = "the peer does not tell the engine where its memory is"
        else:
            self._batches.append(first.result())


def _call_into(future: Future[int], direction: Direction, raw: RawEngine, segment: str, copy: Copy) -> None:
    try:
        batch = direction.submit(raw, segment, copy)
    except Exception as error:  # noqa: BLE001  # whatever it is goes to the thread that waits
        future.set_exception(error)
    else:
        future.set_result(batch)
