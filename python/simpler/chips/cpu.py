"""The `cpu` platform: device memory is a shared arena, kernels are functions on host cores."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from simpler import _core
from simpler.errors import ClosedError, MemoryRangeError
from simpler.kernels import NativeKernel
from simpler.shared_map import SharedMap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simpler.chips.backend import ChipConfig, Kernel

ALIGNMENT = 256


class CpuChip:
    """One `cpu` chip (see `ChipBackend` for the methods).

    Thread safety: any thread, since at level 2 several may call.
    Fork: construct before it; the arena is then at one address in every process.
    """

    platform = "cpu"
    window_registrable = True
    maps_peers = True

    def __init__(self, config: ChipConfig) -> None:
        self._device_id = config.device_id
        self._arena = _core.SharedRegion(config.hbm_bytes, f"{config.name}-hbm{config.device_id}")
        self._hbm_bytes = config.hbm_bytes
        self._lock = threading.Lock()
        self._blocks: _core.ArenaAllocator | None = None
        self._memory = SharedMap([self._arena])
        self._reachable = self._memory

    @property
    def host_memory(self) -> _core.SharedRegion | None:
        """The arena."""
        return self._arena

    def open(self, shared: Sequence[_core.SharedRegion]) -> None:
        """Start with an empty arena."""
        with self._lock:
            if self._blocks is not None:
                raise ClosedError(f"cpu chip {self._device_id} is open already")
            self._blocks = _core.ArenaAllocator(self._hbm_bytes, ALIGNMENT)
            others = [region for region in shared if region.address != self._arena.address]
            self._reachable = SharedMap([self._arena, *others])

    def close(self) -> None:
        """Free every block and give the pages to the kernel."""
        with self._lock:
            if self._blocks is not None:
                self._blocks = None
                self._reachable = self._memory
                self._arena.release_pages(0, self._arena.nbytes)

    def malloc(self, nbytes: int) -> int:
        """A block of the arena."""
        if nbytes < 1:
            raise ValueError(f"nbytes must be at least 1: {nbytes}")
        with self._lock:
            blocks = self._opened()
            try:
                return self._arena.address + blocks.allocate(nbytes)
            except MemoryError as error:
                raise MemoryError(
                    f"no {nbytes} bytes of device memory on cpu chip {self._device_id}: "
                    f"{blocks.used_bytes} of hbm_bytes={self._hbm_bytes} are in use, the largest free block "
                    f"has {blocks.largest_free}; free buffers or enlarge hbm_bytes"
                ) from error

    def free(self, address: int) -> None:
        """Release a block; its whole pages go back to the kernel."""
        with self._lock:
            blocks = self._opened()
            offset = address - self._arena.address
            try:
                if not 0 <= offset < self._arena.nbytes:
                    raise ValueError("outside its memory")
                nbytes = blocks.release(offset)
            except ValueError as error:
                raise MemoryRangeError(
                    f"{address:#x} is not a live block of cpu chip {self._device_id}: {error}"
                ) from error
            if blocks.block_count == 0:  # also the pages that two freed neighbours shared
                offset, nbytes = 0, self._arena.nbytes
            self._arena.release_pages(offset, nbytes)

    def copy_in(self, address: int, source: memoryview) -> None:
        """One memcpy."""
        if source.nbytes:
            self._check(self._memory, address, source.nbytes)
            _core.copy_memory(address, _address_of(source), source.nbytes)

    def copy_out(self, address: int, destination: memoryview) -> None:
        """One memcpy."""
        if destination.readonly:
            raise ValueError("the destination of copy_out is read-only")
        if destination.nbytes:
            self._check(self._memory, address, destination.nbytes)
            _core.copy_memory(_address_of(destination), address, destination.nbytes)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """One memcpy, also from and to peers and the host heap."""
        if nbytes:
            self._check(self._reachable, destination, nbytes)
            self._check(self._reachable, source, nbytes)
            _core.copy_memory(destination, source, nbytes)

    def run(self, kernel: Kernel, args: bytes) -> object:
        """Call the kernel in this thread."""
        self._opened()
        if not isinstance(kernel, NativeKernel):
            return kernel(*self._reachable.arguments(args))
        self._reachable.check(args)
        failure = _core.call_native(kernel.address(), args, self._device_id)
        if failure is not None:
            raise RuntimeError(failure)
        return None

    def committed_bytes(self) -> int:
        """Bytes in live blocks; 0 when closed."""
        with self._lock:
            return 0 if self._blocks is None else self._blocks.used_bytes

    def _opened(self) -> _core.ArenaAllocator:
        if self._blocks is None:
            raise ClosedError(f"cpu chip {self._device_id} is not open")
        return self._blocks

    def _check(self, memory: SharedMap, address: int, nbytes: int) -> None:
        self._opened()
        offset = address - self._arena.address
        # The region is whole pages, the last of which may be only partly device memory.
        padding = 0 <= offset < self._arena.nbytes and offset + nbytes > self._hbm_bytes
        if padding or not memory.covers(address, nbytes):
            raise MemoryRangeError(
                f"{nbytes} bytes at {address:#x} are not memory of cpu chip {self._device_id}"
            )


def _address_of(view: memoryview) -> int:
    if not view.c_contiguous:
        raise ValueError("host memory of a copy must be contiguous")
    flat: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(view.cast("B"), np.uint8)
    return int(flat.ctypes.data)
