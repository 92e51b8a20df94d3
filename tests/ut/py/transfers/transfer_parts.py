"""Providers and helpers that tests of transfers share."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

import simpler
from simpler import CancelToken, TransferAccess, TransferRange, TransferRequest, TransferResult

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

READ, WRITE = TransferAccess.READ, TransferAccess.WRITE


def copy(request: TransferRequest, cancel: CancelToken) -> TransferResult:
    """Copies the first half of its ranges to the second."""
    half = len(request.ranges) // 2
    for source, target in zip(request.ranges[:half], request.ranges[half:], strict=True):
        target.copy_from(source)
    return TransferResult.ok(b"%d ranges" % len(request.ranges))


def gated(request: TransferRequest, cancel: CancelToken) -> TransferResult:
    """Opens the FIFO named by the payload, waits for its end, and adds one to what it may write."""
    with open(request.payload, "rb") as fifo:  # noqa: PTH123 - a plain name
        fifo.read()
    for part in request.ranges:
        if part.access is WRITE:
            array = part.array()
            array += 1
    return TransferResult.ok()


def until_cancelled(request: TransferRequest, cancel: CancelToken) -> TransferResult:
    """Says that it has begun by the FIFO named by the payload, and ends when it is told to."""
    if request.payload:
        with open(request.payload, "wb"):  # noqa: PTH123 - a plain name
            pass
    cancel.wait()
    return TransferResult.failed("told to stop")


def answers(request: TransferRequest, cancel: CancelToken) -> Any:
    """Whatever the payload says."""
    word = request.payload.decode()
    if word == "raise":
        raise OSError("the engine broke")
    if word == "exit":
        sys.exit(3)
    if word == "die":
        os._exit(9)
    if word == "nothing":
        return None
    if word.startswith("ok:"):
        return TransferResult.ok(word[3:].encode())
    if word.startswith("failed:"):
        return TransferResult.failed(word[7:])
    return TransferResult.unconfirmed(word)


class Engine:
    """Leaves every transfer unconfirmed; certifies the odd ids when asked."""

    def __call__(self, request: TransferRequest, cancel: CancelToken) -> TransferResult:
        return TransferResult.unconfirmed("an error code")

    def confirm(self, ids: list[int]) -> list[int]:
        return [number for number in ids if number % 2]

    def reset(self) -> None:
        """Nothing goes on."""


@contextlib.contextmanager
def provider(name: str, function: Any) -> Iterator[None]:
    """Registered for as long as the block lasts."""
    simpler.register_transfer_provider(name, function)
    try:
        yield
    finally:
        simpler.unregister_transfer_provider(name)


class Gate:
    """A FIFO that a `gated` provider opens when it begins, and that lets it end."""

    def __init__(self, folder: Path, name: str = "gate") -> None:
        self.path = folder / name
        os.mkfifo(self.path)
        self.payload = str(self.path).encode()
        self._descriptor: int | None = None

    def wait_begun(self) -> None:
        """Until the provider has begun."""
        self._descriptor = os.open(self.path, os.O_WRONLY)

    def open(self) -> None:
        """Let it end."""
        assert self._descriptor is not None
        os.close(self._descriptor)


def part(
    memory: simpler.Buffer | simpler.HostBuffer, access: TransferAccess, begin: int, end: int
) -> TransferRange:
    return TransferRange(memory, access, begin, end - begin)
