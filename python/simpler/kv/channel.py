"""The runtime's calls to the chips of one engine.

Thread safety: one call at a time; the runtime locks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simpler import ChipControlError, RemoteError, SimplerError, WorkerError
from simpler.kv import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from simpler import Buffer, HostBuffer, Tensor, Worker

    Buffers = Mapping[str, Buffer | HostBuffer | Tensor]

Outcome = bytes | SimplerError


class KVChannel:
    """One engine's chips, by rank."""

    def __init__(self, worker: Worker, number: int, chips: Sequence[int], timeout_s: float | None) -> None:
        """Keep the arguments; nothing is sent.

        Args:
            worker: A Worker that is READY.
            number: The engine's, in this process.
            chips: Worker ids, by rank.
            timeout_s: The limit of each call; None is the Worker's.
        """
        self.worker = worker
        self.number = number
        self.chips = tuple(chips)
        self.timeout_s = timeout_s
        self._all = self.chips == worker.worker_ids
        self._call = worker.run_chip_control_extension

    def step(self, payload: bytes) -> Sequence[Outcome]:
        """What each chip answered, or why it did not."""
        if not self._all:
            return self._gather([self._submit(rank, payload, {}) for rank in range(len(self.chips))])
        try:
            replies: list[bytes] = self._call(wire.EXTENSION, payload, timeout_s=self.timeout_s)
        except ChipControlError as error:
            return [
                error.results[chip,] if (chip,) in error.results else error.errors[chip,]
                for chip in self.chips
            ]
        except SimplerError as error:
            return [error] * len(self.chips)
        return replies

    def order(
        self,
        verb: wire.Verb,
        content: Callable[[int], Any],
        buffers: Callable[[int], Buffers] = lambda _rank: {},
    ) -> list[bytes]:
        """Have every chip do something, and wait.

        Args:
            verb: What.
            content: What JSON can hold, for each rank.
            buffers: What the chip may touch, for each rank.

        Raises:
            ChipControlError: Not every chip was good.
            SimplerError: Something could not be sent.
        """
        outcomes = self.try_order(verb, content, buffers)
        good: dict[tuple[int, ...], bytes] = {}
        bad: dict[tuple[int, ...], RemoteError | WorkerError] = {}
        for chip, outcome in zip(self.chips, outcomes, strict=True):
            if isinstance(outcome, bytes):
                good[chip,] = outcome
            elif isinstance(outcome, RemoteError | WorkerError):
                bad[chip,] = outcome
            else:
                raise outcome
        if bad:
            raise ChipControlError.make(wire.EXTENSION, good, bad)
        return list(good.values())

    def try_order(
        self,
        verb: wire.Verb,
        content: Callable[[int], Any],
        buffers: Callable[[int], Buffers] = lambda _rank: {},
    ) -> list[Outcome]:
        """As `order`, with the errors among the outcomes."""
        return self._gather(
            [
                self._submit(rank, wire.pack_order(verb, self.number, content(rank)), buffers(rank))
                for rank in range(len(self.chips))
            ]
        )

    def _submit(self, rank: int, payload: bytes, buffers: Buffers) -> Future[bytes] | SimplerError:
        try:
            return self.worker.submit_chip_control_extension(
                wire.EXTENSION, payload, worker_id=self.chips[rank], timeout_s=self.timeout_s, buffers=buffers
            )
        except SimplerError as error:
            return error

    @staticmethod
    def _gather(calls: Sequence[Future[bytes] | SimplerError]) -> list[Outcome]:
        return [call if isinstance(call, SimplerError) else _outcome(call) for call in calls]


def _outcome(call: Future[bytes]) -> Outcome:
    try:
        return call.result()
    except SimplerError as error:
        return error
