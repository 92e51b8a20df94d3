"""numpy views of memory named by address, inside the shared regions that this process maps.

Used where kernels run: chip children, sub workers, and this process at level 2. Views keep the region's
mapping alive, so that a view kept too long reads stale bytes but never faults.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Any

import numpy as np

from simpler import _core
from simpler.dtypes import DTYPES
from simpler.errors import MemoryRangeError
from simpler.task_args import Tag
from simpler.tensor import extent

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Array = np.ndarray[Any, np.dtype[Any]]


class SharedMap:
    """The shared regions of this process, by address."""

    def __init__(self, regions: Iterable[_core.SharedRegion] = ()) -> None:
        self._regions = sorted(regions, key=lambda region: region.address)
        self._starts = [region.address for region in self._regions]
        self._ends = [region.address + region.nbytes for region in self._regions]
        self._whole = [_whole(region) for region in self._regions]

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether all of [address, address + nbytes) lies in one region."""
        at = bisect.bisect_right(self._starts, address) - 1
        return at >= 0 and nbytes >= 0 and address + nbytes <= self._ends[at]

    def _locate(self, address: int, nbytes: int) -> int:
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0 or nbytes < 1 or address + nbytes > self._ends[at]:
            raise MemoryRangeError(
                f"{nbytes} bytes at {address:#x} are not in memory that this process shares with the node"
            )
        return at

    def bytes_at(self, address: int, nbytes: int) -> memoryview:
        """A writable view of raw bytes, at least one.

        Raises:
            MemoryRangeError: Not all of it lies in one region of this process.
        """
        at = self._locate(address, nbytes)
        return memoryview(_core.SharedBuffer(self._regions[at], address - self._starts[at], nbytes))

    def array_at(
        self, address: int, shape: Sequence[int], strides: Sequence[int], dtype_code: int, *, readonly: bool
    ) -> Array:
        """A numpy view.

        Args:
            address: Of the first element.
            shape: Elements per dimension.
            strides: Bytes between neighbours, per dimension.
            dtype_code: simpler_dtype of `simpler/kernel.h`.
            readonly: The view cannot be written, nor made writable.

        Raises:
            MemoryRangeError: Not all of it lies in one region of this process.
            ValueError: No such dtype.
        """
        if not 0 <= dtype_code < len(DTYPES):
            raise ValueError(f"no dtype has the code {dtype_code}")
        dtype = DTYPES[dtype_code]
        low, covered, count = extent(shape, strides, dtype.itemsize)
        if not count:
            empty: Array = np.empty(shape, dtype.numpy)
            empty.flags.writeable = not readonly
            return empty
        at = self._locate(address + low, covered)
        array: Array = np.ndarray(
            shape, dtype.numpy, self._whole[at][readonly], address - self._starts[at], strides
        )
        return array

    def arguments(self, packed: bytes) -> list[object]:
        """The positional arguments of a Python kernel: views (IN read-only) and scalars, in order.

        Raises:
            ValueError: The bytes do not decode.
            MemoryRangeError: A tensor is not in memory of this process.
        """
        return [
            self.array_at(item[0], item[2], item[3], item[4], readonly=item[5] == Tag.IN)
            if isinstance(item, tuple)
            else item
            for item in _core.unpack_task(packed)
        ]

    def check(self, packed: bytes) -> None:
        """Raise MemoryRangeError unless every tensor lies in memory of this process."""
        for item in _core.unpack_task(packed):
            if isinstance(item, tuple):
                self.array_at(item[0], item[2], item[3], item[4], readonly=True)


def _whole(region: _core.SharedRegion) -> tuple[Array, Array]:
    """All bytes of a region, writable and read-only; each keeps the mapping alive."""
    view = memoryview(_core.SharedBuffer(region, 0, region.nbytes))
    return np.frombuffer(view, np.uint8), np.frombuffer(view.toreadonly(), np.uint8)
