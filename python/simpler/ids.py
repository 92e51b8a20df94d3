"""Worker ids and paths, and the codes of control calls."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from simpler._core import ControlOp

__all__ = ["ControlOp", "Path", "as_path"]

Path = tuple[int, ...]


def as_path(worker: int | Iterable[int]) -> Path:
    """A path of worker ids from this worker down; an int is a path of one.

    Raises:
        ValueError: An id is negative.
        TypeError: Something is not an integer.
    """
    ids = tuple(worker) if isinstance(worker, Iterable) else (worker,)
    if any(isinstance(part, bool) for part in ids):
        raise TypeError(f"a worker id is an integer, not a bool: {worker!r}")
    path = tuple(operator.index(part) for part in ids)
    if any(part < 0 for part in path):
        raise ValueError(f"a worker id is never negative: {worker!r}")
    return path
