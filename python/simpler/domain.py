"""Domains: windows of device memory that several chips address alike."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, SupportsIndex

from simpler.dtypes import DType, as_dtype
from simpler.errors import MemoryRangeError, SimplerError

if TYPE_CHECKING:
    from simpler.buffers import Buffer
    from simpler.memory import MemoryRegistry
    from simpler.tensor import Tensor

ALIGNMENT = 256
WindowPart = int | tuple[int | Sequence[int], object]
"""A number of bytes, or (shape, dtype)."""
Part = tuple[int, tuple[int, ...], DType]
"""(offset in the window, shape, dtype)."""


class Host(Protocol):
    """What a domain needs of its node."""

    registry: MemoryRegistry
    maps_peers: bool
    window_registrable: bool

    def malloc(self, worker: int, nbytes: int) -> Buffer:
        """Device memory."""


class Domain:
    """A window of the same size and layout on each member chip. Any member may be given any of them.

    Attributes:
        name: As given.
        workers: The member chips.
        window_size: Bytes of each window.
    """

    def __init__(
        self,
        registry: MemoryRegistry,
        name: str,
        window_size: int,
        windows: dict[int, Buffer],
        parts: Mapping[str, Part],
    ) -> None:
        self._registry = registry
        self.name = name
        self.workers = tuple(windows)
        self.window_size = window_size
        self._windows = windows
        self._parts = parts

    def window(self, worker: int) -> Buffer:
        """The window of one member.

        Raises:
            ValueError: not a member.
        """
        if worker not in self._windows:
            raise ValueError(f"worker {worker} is not in domain {self.name!r} of {self.workers}")
        return self._windows[worker]

    def tensor(self, name: str, worker: int) -> Tensor:
        """A named part of one member's window.

        Raises:
            ValueError: no such part, or not a member.
            MemoryRangeError: the domain has been closed.
        """
        if name not in self._parts:
            raise ValueError(f"domain {self.name!r} has no part {name!r}: {', '.join(self._parts) or 'none'}")
        offset, shape, dtype = self._parts[name]
        return self.window(worker).tensor(shape, dtype, offset=offset)

    def close(self) -> None:
        """Free the windows: the memory goes when the tasks naming it have ended. Nothing the second time."""
        for window in self._windows.values():
            with contextlib.suppress(SimplerError):  # lost with its chip, or closed
                if not window.freed:
                    self._registry.free(window)

    def __repr__(self) -> str:
        return f"<Domain {self.name!r}, {self.window_size} bytes on {self.workers}>"


def make_domain(
    host: Host, name: str, workers: Sequence[int], window_size: int, buffers: Mapping[str, WindowPart]
) -> Domain:
    """See `Orchestrator.allocate_domain`."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"a domain's name is a str that is not empty: {name!r}")
    if not workers or len(set(workers)) != len(workers):
        raise ValueError(f"the members of a domain are chips, each once: {list(workers)}")
    if len(workers) > 1 and not host.maps_peers:
        raise MemoryRangeError(f"domain {name!r}: this platform does not map its chips' memory to each other")
    size = operator.index(window_size)
    parts, used = _lay_out(buffers)
    if used > size:
        raise ValueError(f"the parts of domain {name!r} take {used} bytes of a window of {size}")
    windows: dict[int, Buffer] = {}
    try:
        for worker in workers:
            windows[worker] = host.malloc(worker, size)
    except BaseException:  # whatever it is, no window stays
        for window in windows.values():
            with contextlib.suppress(SimplerError):  # lost with its chip: the first error is the one to see
                host.registry.free(window)
        raise
    if not host.window_registrable:
        for window in windows.values():
            window.allocation.pin_refusal = (
                f"the window of domain {name!r} on worker {window.worker_id} cannot be pinned: this platform "
                f"does not let a transfer engine register it"
            )
    return Domain(host.registry, name, size, windows, parts)


def _lay_out(buffers: Mapping[str, WindowPart]) -> tuple[dict[str, Part], int]:
    """Where each part is in a window, and the bytes that they take."""
    parts, end = {}, 0
    for name, what in buffers.items():
        shape, dtype = _shape_of(what)
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        parts[name] = (offset, shape, dtype)
        end = offset + math.prod(shape) * dtype.itemsize
    return parts, end


def _shape_of(part: WindowPart) -> tuple[tuple[int, ...], DType]:
    shape, dtype = part if isinstance(part, tuple) else (part, "uint8")
    dims = (shape,) if isinstance(shape, SupportsIndex) else tuple(shape)
    sizes = tuple(operator.index(n) for n in dims)
    if any(n < 0 for n in sizes):
        raise ValueError(f"a part of a window has a negative size: {sizes}")
    return sizes, as_dtype(dtype)
