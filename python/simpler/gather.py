"""One submitted extension call, on one chip or on all: its Future, its outcomes and what it keeps alive."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any, Protocol

from simpler.errors import (
    ChipControlError,
    ClosedError,
    Path,
    RemoteError,
    SimplerError,
    WorkerError,
    WorkerTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from simpler.deliveries import Deliveries, Outcome

_WITHDRAWN = "withdrawn by cancel() before its handler began"


class Canceller(Protocol):
    """Withdraws a submitted call."""

    def cancel(self, token: int, /) -> bool:
        """True when it had not begun and now never will."""


class CallFuture(Future[Any]):
    """A Future whose cancel() succeeds only before the handler begins."""

    def __init__(self, gather: Gather) -> None:
        super().__init__()
        self._gather = gather

    def cancel(self) -> bool:
        """Withdraw the call.

        Of a broadcast that has begun on some chips, those that have not begun report an error and the
        answer is False.
        """
        if self.done():
            return self.cancelled()
        return self._gather.cancel()

    def mark_cancelled(self) -> None:
        """Tell those that wait."""
        if super().cancel():
            self.set_running_or_notify_cancel()


class Gather:
    """Collects one outcome a chip and completes its Future.

    Thread safety: any thread.
    """

    def __init__(
        self,
        name: str,
        chips: Sequence[int],
        *,
        directed: bool,
        fail_fast: bool = False,
        ended: Callable[[int], None] | None = None,
    ) -> None:
        """Wait for every chip.

        Args:
            name: The extension's.
            chips: Worker ids, in order.
            directed: One chip: the Future gets its bytes or its error instead of a list.
            fail_fast: Complete at the first error.
            ended: Called for each chip whose handler has ended or never will begin, with its outcome;
                not for one that still runs then.
        """
        self.future: CallFuture = CallFuture(self)
        self._name = name
        self._chips = tuple(chips)
        self._directed = directed
        self._fail_fast = fail_fast
        self._ended = ended
        self._lock = threading.Lock()
        self._outcomes: list[Outcome | None] = [None] * len(self._chips)
        self._left = len(self._chips)
        self._tokens: list[int] = []
        self._canceller: Canceller | None = None
        self._deliveries: Deliveries | None = None

    def attach(self, tokens: Sequence[int], canceller: Canceller, deliveries: Deliveries) -> None:
        """The calls are on their way under these tokens."""
        self._tokens = list(tokens)
        self._canceller = canceller
        self._deliveries = deliveries
        for position, token in enumerate(tokens):
            deliveries.expect(token, functools.partial(self.arrive, position))

    def arrive(self, position: int, outcome: Outcome) -> None:
        """One chip's outcome."""
        self._let_go(position, outcome)
        with self._lock:
            self._outcomes[position] = outcome
            self._left -= 1
            complete = self._left == 0 or (self._fail_fast and isinstance(outcome, BaseException))
            if self._left == 0:  # a Future that is kept keeps nothing of the Worker alive
                self._canceller = self._deliveries = self._ended = None
        if complete:
            self._complete()

    def cancel(self) -> bool:
        """Withdraw what has not begun; True when that was all of it."""
        canceller, deliveries = self._canceller, self._deliveries
        if canceller is None or deliveries is None:
            return False
        withdrawn = []
        for position, token in enumerate(self._tokens):
            if self._outcomes[position] is None and canceller.cancel(token):
                deliveries.forget(token)
                withdrawn.append(position)
        if len(withdrawn) == len(self._tokens):
            for position in withdrawn:
                self._let_go(position, b"")
            self._canceller = self._deliveries = self._ended = None
            self.future.mark_cancelled()
            return True
        for position in withdrawn:
            self.arrive(position, WorkerError(_WITHDRAWN, path=(self._chips[position],)))
        return False

    def _let_go(self, position: int, outcome: Outcome) -> None:
        if self._ended is not None and not still_runs(outcome):
            self._ended(self._chips[position])

    def _complete(self) -> None:
        if self._directed:
            outcome = self._outcomes[0]
        else:
            try:
                outcome = broadcast_result(self._name, self._outcomes)
            except SimplerError as error:
                outcome = error
        try:
            if isinstance(outcome, BaseException):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)
        except InvalidStateError:
            return  # completed before, by fail_fast


def still_runs(outcome: Outcome | None) -> bool:
    """Whether the handler may still be running after this outcome of its call."""
    return outcome is None or (isinstance(outcome, WorkerTimeoutError) and outcome.started)


def broadcast_result(name: str, outcomes: Sequence[Outcome | None]) -> Any:
    """The replies in worker order when all are good.

    Raises:
        ChipControlError: some chip failed; None among the outcomes is a chip still running.
        ClosedError: the worker was closed meanwhile.
    """
    results: dict[Path, bytes] = {}
    errors: dict[Path, RemoteError | WorkerError] = {}
    pending: list[Path] = []
    for chip, outcome in enumerate(outcomes):
        if outcome is None:
            pending.append((chip,))
        elif isinstance(outcome, RemoteError | WorkerError):
            errors[(chip,)] = outcome
        elif isinstance(outcome, bytes):
            results[(chip,)] = outcome
        elif isinstance(outcome, SimplerError) and not isinstance(outcome, ClosedError):
            error = WorkerError(str(outcome), path=(chip,))  # no room for its reply: this chip's own trouble
            error.__cause__ = outcome
            errors[(chip,)] = error
        else:
            raise outcome
    if errors or pending:
        raise ChipControlError.make(name, results, errors, tuple(pending))
    return list(results.values())
