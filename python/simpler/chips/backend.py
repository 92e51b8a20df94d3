"""ChipBackend: what a platform provides so that simpler can own one of its devices.

A package offers one under the entry point group ``simpler.chip_backends``: the name is the platform, the
value a factory that takes a `ChipConfig`. The rules below are checked by
`simpler.testing.ChipBackendContract`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from simpler.kernels import NativeKernel

if TYPE_CHECKING:
    from simpler._core import SharedRegion

Kernel = Callable[..., object] | NativeKernel


@dataclass(frozen=True)
class ChipConfig:
    """What a factory is given.

    Attributes:
        device_id: The device to own.
        worker_id: The chip's id in its Worker.
        hbm_bytes: Device memory to manage.
        name: For names of mappings and messages.
    """

    device_id: int
    worker_id: int
    hbm_bytes: int
    name: str = "simpler"


class ChipBackend(Protocol):
    """One device.

    Process: the factory runs in the parent before the fork and must not touch the device or start a
    thread; every method runs after it, in the chip's own process (at level 2 in the only one).
    Thread safety: called by one thread at a time; extension handlers on other threads never see it.
    Failure: an exception reaches the caller with its type, text and traceback; the chip lives on.
    """

    @property
    def platform(self) -> str:
        """The platform's name."""

    @property
    def window_registrable(self) -> bool:
        """Whether a transfer engine may register the window of a collective on this platform."""

    @property
    def maps_peers(self) -> bool:
        """Whether a chip can address the memory of other chips of the same Worker."""

    @property
    def host_memory(self) -> SharedRegion | None:
        """The region that all device memory lies in; None when the host cannot touch device memory.

        With it the parent copies without asking this process, and peers can map it.
        """

    def open(self, shared: Sequence[SharedRegion]) -> None:
        """Take the device, with no memory allocated.

        Args:
            shared: Memory that kernels may be given beside the device's own: the host heap, and the
                `host_memory` of the other chips.

        Raises:
            ClosedError: It is open already.
        """

    def close(self) -> None:
        """Give the device and all its memory back. May be opened again. Nothing when it is not open."""

    def malloc(self, nbytes: int) -> int:
        """Device memory; the address is a multiple of 256. The contents are undefined.

        Raises:
            MemoryError: No block of that size; the text names the size, what is used and the largest free.
            ValueError: `nbytes` is below 1.
        """

    def free(self, address: int) -> None:
        """Give back what `malloc` returned; neighbouring free blocks become one.

        Raises:
            MemoryRangeError: Not the start of a live block.
        """

    def copy_in(self, address: int, source: memoryview) -> None:
        """Copy contiguous host bytes to the device; done when this returns.

        Raises:
            MemoryRangeError: The range is not device memory.
        """

    def copy_out(self, address: int, destination: memoryview) -> None:
        """Copy device memory to contiguous, writable host bytes; done when this returns.

        Raises:
            MemoryRangeError: The range is not device memory.
        """

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy between two device addresses, of a peer too when `maps_peers`; ranges may overlap.

        Raises:
            MemoryRangeError: A range is not memory that this chip can address.
        """

    def run(self, kernel: Kernel, args: bytes) -> object:
        """Run one kernel to its end; what a Python kernel returns. A native one returns None.

        Args:
            kernel: A Python function, called with views (IN read-only) and scalars in the order added,
                or a NativeKernel.
            args: From ``_core.pack_task``.

        Raises:
            MemoryRangeError: A tensor is not memory that this chip can address; the kernel did not run.
            RuntimeError: A native kernel failed; its own text.
        """

    def committed_bytes(self) -> int:
        """Device memory in live blocks, with what alignment adds: always the truth."""


BackendFactory = Callable[[ChipConfig], ChipBackend]
