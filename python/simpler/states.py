"""Where an allocation stands."""

from __future__ import annotations

import enum


class State(enum.Enum):
    """Where an allocation stands."""

    LIVE = "live"
    FREED = "freed"
    LOST = "lost"
    CLOSED = "closed"
