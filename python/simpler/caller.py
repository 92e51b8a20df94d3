"""What carries control calls: `_core.Tree` at level 3, the chip inside this process at level 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer


class Caller(Protocol):
    """Control calls to numbered workers; meanings and errors as in `_core.Tree`."""

    def call(
        self, worker: int, op: int, arg: int, lane: int, meta: bytes, payload: Buffer, timeout_s: float, /
    ) -> bytes:
        """One call."""

    def call_held(
        self,
        worker: int,
        op: int,
        arg: int,
        lane: int,
        meta: bytes,
        payload: Buffer,
        timeout_s: float,
        hold: int,
        /,
    ) -> bytes:
        """One call that names memory."""

    def broadcast(
        self,
        op: int,
        arg: int,
        lane: int,
        metas: Sequence[bytes],
        payload: Buffer,
        timeout_s: float,
        fail_fast: bool,
        hold: int,
        /,
    ) -> list[bytes | BaseException | None]:
        """One call on every chip."""

    def submit(
        self,
        worker: int,
        op: int,
        arg: int,
        lane: int,
        meta: bytes,
        payload: Buffer,
        timeout_s: float,
        hold: int,
        /,
    ) -> int:
        """Start a call; its token."""

    def submit_broadcast(
        self,
        op: int,
        arg: int,
        lane: int,
        metas: Sequence[bytes],
        payload: Buffer,
        timeout_s: float,
        hold: int,
        /,
    ) -> list[int]:
        """Start a call on every chip; a token each."""

    def cancel(self, token: int, /) -> bool:
        """Withdraw a submitted call that has not begun."""
