"""Whether a process is the one that opened an engine, without asking the system for its id each time."""

from __future__ import annotations

import os


class _Life:
    """Counts the forks on the way to this process."""

    number = 0


def life() -> int:
    """Another number in a child that was forked from here."""
    return _Life.number


def _next_life() -> None:
    _Life.number += 1


os.register_at_fork(after_in_child=_next_life)
