"""A place in the order in which byte ranges are used."""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from simpler.buffers import Allocation
    from simpler.memory import MemoryRegistry


class Mode(enum.IntEnum):
    """What a use does with a range."""

    READ = 0
    WRITE = 1
    HOLD = 2  # keeps the memory from being reclaimed, orders nothing


READ, WRITE, HOLD = Mode.READ, Mode.WRITE, Mode.HOLD


class Use:
    """One task, call or transfer that uses memory. Release it when that has truly ended.

    Attributes:
        what: For messages.
        group: Uses of the same group (a run) do not wait for each other.
        entries: The allocations used.
        blockers: Earlier uses that exclude this one.
        waiter: Called without locks as ``waiter(timeout_s)`` by whoever waits for this use; it may block
            until the work has ended, and releases the use then. Without it they wait for `release`.
    """

    __slots__ = ("_registry", "blockers", "entries", "group", "released", "waiter", "what")

    def __init__(self, registry: MemoryRegistry, what: str, group: object | None) -> None:
        self._registry = registry
        self.entries: list[Allocation] = []
        self.blockers: list[Use] = []
        self.what = what
        self.group = group
        self.waiter: Callable[[float], None] | None = None
        self.released = False

    @property
    def granted(self) -> bool:
        """Whether every earlier use that excludes this one has ended."""
        return all(use.released for use in self.blockers)

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Block until `granted`; false when the time ran out. 0 polls."""
        return not self.blockers or self._registry.wait_turn(self, timeout_s)

    def release(self) -> None:
        """End the use; frees that waited for it are done here. Nothing the second time."""
        self._registry.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
