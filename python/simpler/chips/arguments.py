"""Arguments of a kernel by address, for those who call a backend without a Worker."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simpler import _core
from simpler.dtypes import as_dtype
from simpler.task_args import Tag
from simpler.tensor import extent, packed_strides

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class TensorSpec:
    """A tensor argument.

    Attributes:
        address: Of the first element, where the kernel runs.
        shape: Elements per dimension.
        dtype: A numpy dtype or a name.
        tag: What the kernel does with it.
        strides: Bytes between neighbours, per dimension; None is C order.
    """

    address: int
    shape: tuple[int, ...]
    dtype: object = "uint8"
    tag: Tag = Tag.INOUT
    strides: tuple[int, ...] | None = None


def pack_arguments(items: Iterable[TensorSpec | bool | int | float]) -> bytes:
    """The `args` of `ChipBackend.run`: tensors and scalars in order.

    Raises:
        ValueError: No such dtype, or not one stride per dimension.
        OverflowError: An integer that does not fit int64.
    """
    return _core.pack_task([_item(item) if isinstance(item, TensorSpec) else item for item in items])


def _item(spec: TensorSpec) -> tuple[object, ...]:
    dtype = as_dtype(spec.dtype)
    strides = packed_strides(spec.shape, dtype.itemsize) if spec.strides is None else spec.strides
    if len(strides) != len(spec.shape):
        raise ValueError(f"{len(strides)} strides for {len(spec.shape)} dimensions")
    low, covered, _ = extent(spec.shape, strides, dtype.itemsize)
    nbytes = low + covered if math.prod(spec.shape) else 0
    return (spec.address, nbytes, spec.shape, strides, dtype.code, int(spec.tag))
