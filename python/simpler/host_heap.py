"""Host memory of a Worker: blocks of one sparse region that all its children share."""

from __future__ import annotations

from simpler import _core
from simpler.errors import BackPressureError

PAGE_BYTES = 4096


class HostHeap:
    """Blocks of one sparse shared region; the pages of a freed block go back to the kernel."""

    def __init__(self, region: _core.SharedRegion) -> None:
        self.region = region
        self._allocator = _core.ArenaAllocator(region.nbytes, PAGE_BYTES)

    def allocate(self, nbytes: int) -> int:
        """The offset of a block of at least `nbytes`.

        Raises:
            BackPressureError: No free block is large enough.
        """
        try:
            return self._allocator.allocate(min(nbytes, self._allocator.capacity + 1))
        except MemoryError as error:
            raise BackPressureError(
                f"no {nbytes} bytes of host memory: {self._allocator.used_bytes} of heap_bytes="
                f"{self._allocator.capacity} are in use, the largest free block has "
                f"{self._allocator.largest_free}; free buffers or enlarge heap_bytes"
            ) from error

    def release(self, offset: int) -> None:
        """Take a block back and give its pages to the kernel."""
        nbytes = self._allocator.release(offset)
        self.region.release_pages(offset, nbytes)

    @property
    def used_bytes(self) -> int:
        """Bytes in blocks, whole pages."""
        return self._allocator.used_bytes
