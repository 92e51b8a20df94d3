"""What is done with memory, and a call's turn at it."""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING

from simpler.errors import WorkerTimeoutError
from simpler.states import State

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from simpler import _core
    from simpler.buffers import Allocation
    from simpler.memory import MemoryRegistry


class Mode(enum.IntEnum):
    """What a use does with a range."""

    READ = 0
    WRITE = 1
    HOLD = 2  # keeps the memory from being reclaimed, orders nothing


READ, WRITE, HOLD = Mode.READ, Mode.WRITE, Mode.HOLD


class Use:
    """One call that uses memory of its own accord, beside the tasks. Release it when that has ended.

    Attributes:
        what: For messages.
    """

    __slots__ = ("_registry", "_turn", "held", "released", "what")

    def __init__(
        self, registry: MemoryRegistry, what: str, held: list[Allocation], turn: _core.HostTask | None
    ) -> None:
        self._registry = registry
        self._turn = turn
        self.held = held
        self.what = what
        self.released = False

    @property
    def granted(self) -> bool:
        """Whether everything that came before and excludes this has ended."""
        return self.wait(0.0)

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Block until `granted`; false when the time ran out. 0 polls."""
        return self._turn is None or self._turn.wait(timeout_s)

    @property
    def turn(self) -> _core.HostTask | None:
        """Its place in the order; None when it excludes nobody."""
        return self._turn

    def wait_turn(self, timeout_s: float, worker: int | None) -> None:
        """`wait`, and be sure that the memory is there; else the use is released.

        Raises:
            WorkerTimeoutError: The turn did not come in time.
            MemoryRangeError: The memory was lost meanwhile.
        """
        try:
            if not self.wait(timeout_s):
                raise self._late(timeout_s, worker)
            for record in self.held:
                if record.state in (State.LOST, State.CLOSED):
                    raise record.unusable()
        except BaseException:  # an interrupt too leaves the queue
            self.release()
            raise

    def _late(self, timeout_s: float, worker: int | None) -> WorkerTimeoutError:
        before = "the tasks and calls before it that use the same memory"
        return WorkerTimeoutError(
            f"{self.what} waited {timeout_s:g} s for {before} to end",
            path=() if worker is None else (worker,),
            started=False,
            waited_for=before,
            timeout_s=timeout_s,
        )

    def release(self) -> None:
        """End the use; frees that waited for it are done here. Nothing the second time."""
        if self.released:
            return
        self.released = True
        if self._turn is not None:
            self._turn.end()
        self._registry.let_go(self.held)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
