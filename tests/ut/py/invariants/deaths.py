"""The ways in which a child can die, and what is said of each."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def leave() -> None:
    """Leave without cleaning up."""
    os._exit(3)


def abort() -> None:
    """What a failed C assertion does."""
    os.abort()


def segfault() -> None:
    """A real one."""
    ctypes.string_at(0)


def kill_self() -> None:
    """What the kernel's out-of-memory killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


def terminate_self() -> None:
    """What an administrator does."""
    os.kill(os.getpid(), signal.SIGTERM)


WAYS: dict[str, Callable[[], None]] = {
    "exit": leave,
    "abort": abort,
    "segfault": segfault,
    "kill": kill_self,
    "terminate": terminate_self,
}
DESCRIPTIONS = {
    "exit": "exited with code 3",
    "abort": "SIGABRT",
    "segfault": "SIGSEGV",
    "kill": "SIGKILL",
    "terminate": "SIGTERM",
}


def bytes_that_fault(nbytes: int) -> memoryview:
    """Bytes of which only the first page can be read: reading on is SIGBUS."""
    with tempfile.TemporaryFile() as file:
        file.truncate(nbytes)
        mapped = mmap.mmap(file.fileno(), nbytes)
        file.truncate(mmap.PAGESIZE)
        return memoryview(mapped)


def die_handler(_chip: object, payload: bytes, _device: int) -> None:
    """An extension that dies in the way that the payload names; without one it replies."""
    if payload:
        WAYS[payload.decode()]()
