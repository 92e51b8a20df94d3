"""Transfer engines as a connector uses them inside a chip's process: one surface for all.

An engine is opened after the fork, in the process whose memory it moves. What it reports is never more than
it knows: an engine's error code or a deadline that passed does not certify that the engine has stopped
touching memory, so the outcome then is UNCONFIRMED until `settled` or `close` returns True.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from simpler import SimplerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Copy", "EngineError", "Outcome", "OutcomeKind", "TransferEngine"]


class EngineError(SimplerError):
    """An engine is missing, cannot start, or refuses; the text names the engine and its own code or words."""


class Copy(NamedTuple):
    """Bytes here and bytes at the peer, by address in the two processes."""

    local_address: int
    remote_address: int
    nbytes: int


class OutcomeKind(Enum):
    """What is known about a transfer."""

    DONE = "done"
    FAILED = "failed"
    UNCONFIRMED = "unconfirmed"


class Outcome(NamedTuple):
    """How a transfer ended.

    Attributes:
        kind: DONE: all bytes are there. FAILED: not all are, and nothing of the transfer goes on, since it
            never began or what had begun has ended. UNCONFIRMED: the engine may still touch the ranges.
        message: What the engine said; empty when done.
        transfer: For `TransferEngine.settled`; 0 unless unconfirmed.
    """

    kind: OutcomeKind
    message: str = ""
    transfer: int = 0


class TransferEngine(Protocol):
    """What connectors use of an engine.

    Thread safety: any thread.
    Fork: open it in the process that uses it. An engine opened before a fork is unusable in the child.
    Memory: what is registered must stay mapped until it is unregistered or the engine is closed.
    """

    @property
    def name(self) -> str:
        """For messages."""
        ...

    def open(self) -> None:
        """Start the engine in this process.

        Raises:
            EngineError: its package is missing, or it cannot start; what it lacks is named.
        """
        ...

    def metadata(self) -> bytes:
        """What a peer needs to `connect`. Ask again after registering memory: some engines put it in here."""
        ...

    def connect(self, metadata: bytes) -> str:
        """Make a peer known by its metadata, and return the name that `read` takes. Nothing is sent yet.

        A peer that is known already, and has new metadata, is replaced.

        Raises:
            EngineError: this is no metadata of this engine.
        """
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer; unknown ones are ignored."""
        ...

    def register(self, address: int, nbytes: int) -> bool:
        """Let the engine read and write a range, also for peers.

        Returns:
            False when exactly this range was registered already; it then takes one `unregister` more.

        Raises:
            MemoryRangeError: it overlaps another range, or is none.
            EngineError: the engine refuses it.
        """
        ...

    def unregister(self, address: int, nbytes: int) -> bool:
        """Take a registration back.

        Returns:
            False when the range is still registered by others.

        Raises:
            MemoryRangeError: it is not registered, or an unconfirmed transfer may still touch it.
            EngineError: the engine refuses.
        """
        ...

    def read(
        self,
        peer: str,
        copies: Sequence[Copy],
        *,
        timeout_s: float,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Copy from the peer's memory into this process, and wait for the end of it.

        Args:
            peer: As `connect` returned it.
            copies: One transfer; the local sides are in registered ranges.
            timeout_s: For all of it, the connection included.
            cancelled: Asked now and then. Once true, nothing more is begun; what has begun is waited for.

        Raises:
            MemoryRangeError: a local side is not registered; nothing was begun.
        """
        ...

    def write(
        self,
        peer: str,
        copies: Sequence[Copy],
        *,
        timeout_s: float,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Copy from this process into the peer's memory, as `read` does in the other direction."""
        ...

    def settled(self, transfer: int) -> bool:
        """Whether it is certain by now that an unconfirmed transfer touches nothing any more."""
        ...

    def close(self) -> bool:
        """Tear the engine down; again it does nothing.

        Returns:
            Whether it is gone. False: a call into it has not come back, and memory may still be touched.
        """
        ...
