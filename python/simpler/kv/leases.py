"""Leases on blocks that a producer offers to its peers.

A lease ends when the reader gives it back, or when nobody has renewed it in time. A reader that finds the
generation of its lease gone after reading has read what may have been overwritten.

Thread safety: any thread.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class _Lease:
    generation: int
    until: float


class BlockLeases:
    """The offers of one producer, by request."""

    def __init__(self, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with none.

        Args:
            ttl_s: How long a lease lasts that nobody renews.
            clock: Seconds that only grow.
        """
        if not ttl_s > 0:
            raise ValueError(f"a lease lasts more than 0 s: {ttl_s}")
        self.ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._generations = itertools.count(1)
        self._leases: dict[str, _Lease] = {}

    def offer(self, request_id: str) -> int:
        """Begin a lease; its generation, which no other lease has."""
        with self._lock:
            generation = next(self._generations)
            self._leases[request_id] = _Lease(generation, self._clock() + self.ttl_s)
            return generation

    def renew(self, request_id: str, generation: int) -> bool:
        """Have it last from now; false when it has ended."""
        with self._lock:
            lease = self._leases.get(request_id)
            if lease is None or lease.generation != generation:
                return False
            lease.until = self._clock() + self.ttl_s
            return True

    def is_valid(self, request_id: str, generation: int) -> bool:
        """Whether the blocks are still as they were offered."""
        with self._lock:
            lease = self._leases.get(request_id)
            return lease is not None and lease.generation == generation

    def give_back(self, request_id: str, generation: int) -> bool:
        """The reader is done; false when the lease had ended before."""
        with self._lock:
            lease = self._leases.get(request_id)
            if lease is None or lease.generation != generation:
                return False
            del self._leases[request_id]
            return True

    def take_lapsed(self) -> list[str]:
        """End the leases that nobody has renewed; whose they were."""
        with self._lock:
            now = self._clock()
            lapsed = [request_id for request_id, lease in self._leases.items() if lease.until < now]
            for request_id in lapsed:
                del self._leases[request_id]
            return lapsed

    def __len__(self) -> int:
        return len(self._leases)
