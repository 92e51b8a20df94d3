"""Tensor: a typed, strided part of a buffer."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from simpler.dtypes import DType, as_dtype
from simpler.errors import MemoryRangeError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import EllipsisType

    from simpler.buffers import Buffer, HostBuffer

    Index = int | slice | EllipsisType | None

MAX_DIMS = 16


@dataclass(frozen=True)
class Tensor:
    """A typed, strided part of a buffer; holds no memory of its own. Made by ``buffer.tensor(...)``.

    Attributes:
        buffer: What it is a part of.
        offset: Bytes from the buffer's start to the first element.
        shape: Elements per dimension.
        strides: Bytes between neighbours, one per dimension; may be negative after slicing.
        dtype: The element type.
        nbytes: Bytes of all elements: their number times the element's size.
        span: (first byte, number of bytes) of the buffer that the elements touch; (0, 0) without elements.
    """

    __slots__ = ("buffer", "dtype", "nbytes", "offset", "shape", "span", "strides")

    buffer: Buffer | HostBuffer
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    nbytes: int
    span: tuple[int, int]

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one after another in C order."""
        return (
            self.nbytes == 0
            or self.strides == packed_strides(self.shape, self.dtype.itemsize)
            or self._packed_slow()
        )

    def _packed_slow(self) -> bool:
        # The stride of a dimension of one element means nothing.
        packed = packed_strides(self.shape, self.dtype.itemsize)
        return all(n == 1 or a == b for n, a, b in zip(self.shape, self.strides, packed, strict=True))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Tensor:
        """A part, as numpy's basic indexing: ints, slices, ``...`` and None."""
        offset, shape, strides = self.offset, list[int](), list[int]()
        dimension = 0
        for item in _expand(index, self.ndim):
            if item is None:
                shape.append(1)
                strides.append(0)
                continue
            size, stride = self.shape[dimension], self.strides[dimension]
            dimension += 1
            if isinstance(item, slice):
                start, stop, step = item.indices(size)
                count = len(range(start, stop, step))
                offset += start * stride if count else 0
                shape.append(count)
                strides.append(stride * step)
            else:
                offset += _position(item, size, dimension - 1) * stride
        return build_tensor(self.buffer, tuple(shape), self.dtype, offset, tuple(strides))


def make_tensor(
    buffer: Buffer | HostBuffer,
    shape: int | Sequence[int],
    dtype: object,
    offset: int = 0,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Check and build a Tensor of `buffer`; see `Buffer.tensor` for arguments and errors."""
    dims = _ints("shape", (shape,) if isinstance(shape, SupportsIndex) else shape)
    if any(n < 0 for n in dims):
        raise ValueError(f"shape has a negative dimension: {dims}")
    if len(dims) > MAX_DIMS:
        raise ValueError(f"a tensor has at most {MAX_DIMS} dimensions: {len(dims)}")
    element = as_dtype(dtype)
    steps = packed_strides(dims, element.itemsize) if strides is None else _ints("strides", strides)
    if len(steps) != len(dims):
        raise ValueError(f"{len(steps)} strides for {len(dims)} dimensions")
    first = operator.index(offset)
    alignment = element.numpy.alignment
    if first % alignment or any(step % alignment for step in steps):
        raise ValueError(f"offset {first} and strides {steps} must be multiples of {alignment} for {element}")
    return build_tensor(buffer, dims, element, first, steps)


def build_tensor(
    buffer: Buffer | HostBuffer, shape: tuple[int, ...], dtype: DType, offset: int, strides: tuple[int, ...]
) -> Tensor:
    """A Tensor from values already checked but for bounds (MemoryRangeError)."""
    low, covered, count = extent(shape, strides, dtype.itemsize)
    if offset < 0 or (count and (offset + low < 0 or offset + low + covered > buffer.nbytes)):
        raise MemoryRangeError(
            f"bytes {offset + low}..{offset + low + covered} are outside {buffer!r} of {buffer.nbytes} bytes"
        )
    span = (offset + low, covered) if count else (0, 0)
    return Tensor(buffer, offset, shape, strides, dtype, count * dtype.itemsize, span)


def array_over(
    view: memoryview, shape: int | Sequence[int], dtype: np.dtype[Any], offset: int = 0, strides: Any = None
) -> np.ndarray[Any, np.dtype[Any]]:
    """A numpy array on `view`'s memory; like it, it counts as an export of the memory's owner."""
    # np.ndarray(buffer=view) would release the export at once and keep only the owner alive.
    flat = np.frombuffer(view, np.uint8)
    array: np.ndarray[Any, np.dtype[Any]] = np.ndarray(
        shape, dtype, buffer=flat, offset=offset, strides=strides
    )
    return array


def extent(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int, int]:
    """(lowest byte from the first element, at most 0; bytes covered from there; number of elements)."""
    low, high, count = 0, itemsize, 1
    for n, stride in zip(shape, strides, strict=True):
        count *= n
        if stride < 0:
            low += (n - 1) * stride
        else:
            high += (n - 1) * stride
    return (low, high - low, count) if count else (0, 0, 0)


def packed_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides of C order."""
    strides = []
    step = itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def _ints(what: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise TypeError(f"{what} must be integers: {values!r}") from error


def _position(item: object, size: int, dimension: int) -> int:
    if isinstance(item, bool) or not hasattr(item, "__index__"):
        raise TypeError(f"a tensor is indexed by ints, slices, ... and None: {item!r}")
    position = operator.index(item)
    if not -size <= position < size:
        raise IndexError(f"index {position} is out of bounds for dimension {dimension} of {size}")
    return position % size


def _expand(index: Index | tuple[Index, ...], ndim: int) -> list[int | slice | None]:
    """The index with ``...`` replaced, one item for every dimension, plus Nones."""
    items = index if isinstance(index, tuple) else (index,)
    given = sum(item is not None and item is not Ellipsis for item in items)
    if given > ndim:
        raise IndexError(f"{given} indices for a tensor of {ndim} dimensions")
    if sum(item is Ellipsis for item in items) > 1:
        raise IndexError("an index has one ... at most")
    rest: list[int | slice | None] = [slice(None)] * (ndim - given)
    expanded: list[int | slice | None] = []
    for item in items:
        if item is Ellipsis:
            expanded.extend(rest)
            rest = []
        else:
            expanded.append(item)
    return expanded + rest
