"""How often to ask an engine whether it is done: at once while that pays, seldom when it takes long."""

from __future__ import annotations

import time

# An engine moves a few KiB in less than this; a sleep would take longer.
_BUSY_S = 0.0002

# Of the time waited so far: what the pause may add to it, and the most.
_SHARE = 1 / 32
_LONGEST_S = 0.005


class Pace:
    """The pauses of one wait under a deadline.

    Thread safety: one thread.
    """

    def __init__(self, timeout_s: float) -> None:
        self._begun = time.monotonic()
        self._timeout_s = timeout_s

    def left_s(self) -> float:
        """Seconds until the deadline; negative when it has passed."""
        return self._timeout_s - (time.monotonic() - self._begun)

    def pause(self) -> bool:
        """Wait a little; False when the deadline has passed."""
        waited = time.monotonic() - self._begun
        left = self._timeout_s - waited
        if left <= 0:
            return False
        if waited > _BUSY_S:
            time.sleep(min(waited * _SHARE, _LONGEST_S, left))
        return True
