"""Arrays of workers and scalars for many tasks at once, as the core takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from simpler import _core

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def as_workers(workers: Any, num_chips: int) -> NDArray[np.uint32]:
    """The chip of each task, shape ``(n,)``.

    Raises:
        TypeError: not integers.
        ValueError: another shape, or no such chip.
    """
    given = np.asarray(workers)
    if given.ndim != 1:
        raise ValueError(f"workers has shape (n,), not {given.shape}")
    if given.size and not np.issubdtype(given.dtype, np.integer):
        raise TypeError(f"workers are chip ids, not {given.dtype}")
    if given.size and (given.min() < 0 or given.max() >= num_chips):
        raise ValueError(f"workers are chip ids below {num_chips}, not {given.min()} to {given.max()}")
    return np.ascontiguousarray(given, np.uint32)


def as_columns(scalars: Sequence[Any], count: int) -> tuple[bytes, list[NDArray[Any]]]:
    """The packed arguments of one task, and the 8 bytes of each scalar: of every task, or one for all.

    Raises:
        TypeError: neither bool, int64 nor float64.
        ValueError: neither one value nor `count`.
    """
    kinds: list[object] = []
    columns = []
    for scalar in scalars:
        column = np.asarray(scalar)
        if column.shape not in ((), (count,)):
            raise ValueError(f"a scalar is one value or has shape ({count},), not {column.shape}")
        kind, column = _eight_bytes(column)
        kinds.append(kind)
        columns.append(np.ascontiguousarray(column.reshape(-1)))
    return _core.pack_task(kinds), columns


def _eight_bytes(column: NDArray[Any]) -> tuple[object, NDArray[Any]]:
    if column.dtype == np.bool_:
        return False, column.astype(np.uint64)
    if np.issubdtype(column.dtype, np.floating):
        return 0.0, column.astype(np.float64)
    if not np.issubdtype(column.dtype, np.integer):
        raise TypeError(f"a scalar is a bool, an int64 or a float64, not {column.dtype}")
    if column.dtype == np.uint64 and column.size and int(column.max()) >= 1 << 63:
        raise OverflowError(f"an integer scalar must fit int64: {column.max()}")
    return 0, column.astype(np.int64)
