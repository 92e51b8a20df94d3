"""Worker ids and paths, and the codes of control calls."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import SupportsIndex

from simpler._core import ControlOp

__all__ = ["ControlOp", "Path", "as_path"]

Path = tuple[int, ...]


def as_path(worker: int | Iterable[int]) -> Path:
    """A path of worker ids from this worker down; an int is a path of one.

    Raises:
        ValueError: An id is negative.
        TypeError: Something is not an integer.
    """
    if isinstance(worker, Iterable) and not isinstance(worker, str | bytes):
        ids: tuple[object, ...] = tuple(worker)
    else:
        ids = (worker,)
    path = tuple(_id(part) for part in ids)
    if any(part < 0 for part in path):
        raise ValueError(f"a worker id is never negative: {worker!r}")
    return path


def _id(part: object) -> int:
    if isinstance(part, bool) or not isinstance(part, SupportsIndex):
        raise TypeError(f"a worker id is an integer, or a tuple of them for a path: {part!r}")
    return operator.index(part)
