"""Host memory for a run: waits for what running tasks will give back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from simpler.errors import BackPressureError

if TYPE_CHECKING:
    from simpler import _core
    from simpler.buffers import ScratchBuffer
    from simpler.memory import MemoryRegistry


def wait_scratch(
    registry: MemoryRegistry, engine: _core.TaskEngine, nbytes: int, timeout_s: float
) -> ScratchBuffer:
    """A block, waiting while tasks that have not ended hold memory that nobody else does.

    Raises:
        BackPressureError: nothing would come back, or not enough did in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        registry.settle(max(deadline - time.monotonic(), 0.0))
        busy = engine.busy_buffers()
        try:
            return registry.scratch(nbytes)
        except BackPressureError as error:
            left = deadline - time.monotonic()
            if not busy:
                raise BackPressureError(
                    f"{error}; all of it is held by buffers and open scopes, and no task that ends would "
                    f"give any back"
                ) from error
            if left <= 0 or not engine.wait_idle_buffers(left):
                raise BackPressureError(
                    f"{error}; waited {timeout_s:g} s for tasks to end and give some back"
                ) from error
