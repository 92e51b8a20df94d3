"""The bytes that a tensor covers, as the task graph orders them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simpler.tensor import Tensor

MAX_RANGES = 256
"""A strided tensor of more pieces than this counts as one range from its first byte to its last."""


def byte_ranges(tensor: Tensor) -> list[tuple[int, int]]:
    """Ranges [begin, end) of the buffer that hold the tensor's elements, in no order.

    Exact up to `MAX_RANGES` pieces; beyond, what lies between them counts too.
    """
    low, covered = tensor.span
    if tensor.contiguous or not covered:
        return [(low, low + covered)] if covered else []
    piece = tensor.dtype.itemsize
    outer: list[tuple[int, int]] = []  # (count, stride) of the dimensions that leave gaps
    count = 1
    for stride, n in sorted((abs(s), n) for s, n in zip(tensor.strides, tensor.shape, strict=True) if n > 1):
        if not outer and stride <= piece:
            piece += (n - 1) * stride
        else:
            outer.append((n, stride))
            count *= n
    if count > MAX_RANGES:
        return [(low, low + covered)]
    steps = [range(0, n * stride, stride) for n, stride in outer]
    starts = [low + sum(offsets) for offsets in itertools.product(*steps)]
    return [(start, start + piece) for start in starts]
