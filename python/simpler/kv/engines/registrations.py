"""The ranges that an engine may touch, counted; engines differ in what they check, so this checks for all."""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import TYPE_CHECKING

from simpler import MemoryRangeError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from simpler.kv.engines import Copy


def _text(address: int, nbytes: int) -> str:
    return f"[{address:#x}, +{nbytes})"


class Registrations:
    """Ranges that do not overlap, each with the number of times it was registered.

    Thread safety: the caller's.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: dict[int, tuple[int, int]] = {}  # by start: bytes, times

    def __len__(self) -> int:
        return len(self._ranges)

    def ranges(self) -> list[tuple[int, int]]:
        """Address and bytes of each, by address."""
        return [(start, self._ranges[start][0]) for start in self._starts]

    def add_again(self, address: int, nbytes: int) -> bool:
        """Count a range that is registered; False when it is new.

        Raises:
            MemoryRangeError: it is empty, or overlaps a range that it is not equal to.
        """
        if nbytes <= 0 or address <= 0:
            raise MemoryRangeError(f"{_text(address, nbytes)} is no range of memory")
        known = self._ranges.get(address)
        if known is not None and known[0] == nbytes:
            self._ranges[address] = (nbytes, known[1] + 1)
            return True
        index = bisect_right(self._starts, address + nbytes - 1)
        if index:
            other = self._starts[index - 1]
            if other + self._ranges[other][0] > address:
                raise MemoryRangeError(
                    f"{_text(address, nbytes)} overlaps {_text(other, self._ranges[other][0])}, "
                    f"which is registered already"
                )
        return False

    def add(self, address: int, nbytes: int) -> None:
        """Record a new range, for which `add_again` was False."""
        insort(self._starts, address)
        self._ranges[address] = (nbytes, 1)

    def times(self, address: int, nbytes: int) -> int:
        """How often the range is registered.

        Raises:
            MemoryRangeError: never, or not with this size.
        """
        known = self._ranges.get(address)
        if known is None or known[0] != nbytes:
            raise MemoryRangeError(f"{_text(address, nbytes)} is not registered")
        return known[1]

    def remove(self, address: int, nbytes: int) -> None:
        """Take one registration back."""
        times = self.times(address, nbytes) - 1
        if times:
            self._ranges[address] = (nbytes, times)
        else:
            del self._ranges[address]
            self._starts.remove(address)

    def check(self, copies: Iterable[Copy]) -> None:
        """Find the local side of each copy within one registered range.

        Raises:
            MemoryRangeError: one is not; it is named.
        """
        for copy in copies:
            index = bisect_right(self._starts, copy.local_address)
            start = self._starts[index - 1] if index else 0
            end = start + self._ranges[start][0] if index else 0
            if copy.nbytes <= 0 or copy.local_address + copy.nbytes > end:
                raise MemoryRangeError(
                    f"{_text(copy.local_address, copy.nbytes)} is not within one registered range"
                )

    def clear(self) -> None:
        """Forget all."""
        self._starts.clear()
        self._ranges.clear()
