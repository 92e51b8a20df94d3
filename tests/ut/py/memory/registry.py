"""A registry with chips that only count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from simpler import _core
from simpler.failures import Failures
from simpler.memory import HostHeap, MemoryRegistry

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import ThreadPoolExecutor

WATCHDOG_S = 30.0
PAGE = 4096
FRACTIONS = st.floats(0, 1)


class Chips:
    """Device memory of two chips that only counts."""

    def __init__(self) -> None:
        self.next = 1 << 20
        self.live: dict[tuple[int, int], int] = {}
        self.frees: list[tuple[int, int, int]] = []
        self.fail: BaseException | None = None

    def malloc(self, worker: int, nbytes: int) -> int:
        if self.fail is not None:
            raise self.fail
        self.next += 1 << 20
        self.live[(worker, self.next)] = nbytes
        return self.next

    def free(self, worker: int, address: int, generation: int) -> None:
        if self.fail is not None:
            raise self.fail
        del self.live[(worker, address)]
        self.frees.append((worker, address, generation))


class Node:
    """A registry with its chips and heap."""

    def __init__(self, *, maps_peers: bool = False, heap_bytes: int = 16 * PAGE) -> None:
        self.chips = Chips()
        self.heap = HostHeap(_core.SharedRegion(heap_bytes, "test-heap"))
        self.registry = MemoryRegistry(
            malloc=self.chips.malloc,
            free=self.chips.free,
            heap=self.heap,
            maps_peers=maps_peers,
            engine=_core.TaskEngine.local(Failures([0, 1], 2), 2),
        )


def waiting(use_of: Callable[[], object], pool: ThreadPoolExecutor) -> Any:
    """A future of a wait on another thread."""
    return pool.submit(use_of)
