"""Importing the Mooncake package: the settings that it reads only then, and its log."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from simpler.kv.engines import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

_MODULE = "mooncake.engine"
_FATAL = 3


class RawEngine(Protocol):
    """The methods of `mooncake.engine.TransferEngine` that are used. They return codes and raise nothing."""

    def initialize(self, host: str, metadata_server: str, protocol: str, device_names: str, /) -> int:
        """0 when the engine runs."""
        ...

    def get_rpc_port(self) -> int:
        """Where it listens for handshakes."""
        ...

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """0 when registered."""
        ...

    def unregister_memory(self, address: int, /) -> int:
        """0 when it was registered."""
        ...

    def batch_transfer_async_read(
        self, target: str, buffers: list[int], peer_buffers: list[int], lengths: list[int], /
    ) -> int:
        """A batch; 0 or all ones when nothing was begun."""
        ...

    def batch_transfer_async_write(
        self, target: str, buffers: list[int], peer_buffers: list[int], lengths: list[int], /
    ) -> int:
        """A batch; 0 or all ones when nothing was begun."""
        ...

    def transfer_check_status(self, batch: int, /) -> int:
        """Of a batch's first copy: 0 in progress, 1 done, -1 failed (both free the batch), -2 timed out."""
        ...


class _Settings:
    """What this process has imported the package with."""

    opened_by: int | None = None
    ports: tuple[int, int] | None = None


def load(ports: tuple[int, int] | None, *, logs: bool) -> Callable[[], RawEngine]:
    """Import the package and return the engine's class.

    Raises:
        EngineError: it is missing, or this process cannot use it as asked.
    """
    if _Settings.opened_by not in {None, os.getpid()}:
        raise EngineError(
            f"Mooncake was opened in process {_Settings.opened_by} before this one was forked from it, and "
            f"would hang here: open engines only in the processes that use them"
        )
    if "MC_LOG_DIR" in os.environ:
        raise EngineError("MC_LOG_DIR is set, with which Mooncake aborts its process: unset it")
    if _MODULE not in sys.modules:
        _set_environment(ports)
    elif ports not in {None, _Settings.ports}:
        raise EngineError(
            f"Mooncake was imported with ports={_Settings.ports}: it reads ports={ports} only then"
        )
    try:
        module = importlib.import_module(_MODULE)
    except ImportError as error:
        hint = "apt install libibverbs1" if "libibverbs" in str(error) else "pip install 'simpler[mooncake]'"
        raise EngineError(f"Mooncake's engine cannot be imported: {error} ({hint})") from error
    if not logs:
        _silence()
    _Settings.opened_by = os.getpid()
    return cast("Callable[[], RawEngine]", module.TransferEngine)


def _set_environment(ports: tuple[int, int] | None) -> None:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    _Settings.ports = ports
    if ports is not None:
        os.environ["MC_MIN_RPC_PORT"], os.environ["MC_MAX_RPC_PORT"] = map(str, ports)


def _silence() -> None:
    """Keep the errors out of the terminal too, which MC_LOG_LEVEL cannot: outcomes report them."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith("libglog"):
            try:
                level = ctypes.c_int.in_dll(ctypes.CDLL(f"/{path}"), "_ZN3fLI17FLAGS_minloglevelE")
            except (OSError, ValueError):
                return  # another build of the library
            level.value = _FATAL
            return
