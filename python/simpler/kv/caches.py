"""The layout of a KV cache in memory, and what a connector sees of it inside a chip's process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from simpler import MemoryRangeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from simpler import BufferView, Tensor

    Array = np.ndarray[Any, np.dtype[Any]]

Run = tuple[int, int, int]
"""(first block here, first block there, number of blocks): consecutive on both sides."""


@dataclass(frozen=True)
class KVCacheLayout:
    """How the blocks of one cache lie in its memory.

    One dimension counts blocks. Those before it (keys and values, say) split a block into parts; those after
    it must be packed, so that each part of a block is one piece of memory.

    Attributes:
        shape: Elements per dimension.
        strides: Bytes between neighbours, per dimension.
        dtype: Name of the element type.
        itemsize: Bytes of an element.
        block_dim: The dimension that counts blocks.
        block_size: Tokens in a block.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    block_dim: int
    block_size: int

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.strides) or not 0 <= self.block_dim < len(self.shape):
            raise ValueError(f"no dimension {self.block_dim} counts blocks in a cache of shape {self.shape}")
        if min(self.shape) < 1 or self.block_size < 1 or self.itemsize < 1:
            raise ValueError(f"a cache without elements: shape {self.shape}, block size {self.block_size}")
        step = self.itemsize
        for size, stride in zip(
            reversed(self.shape[self.block_dim + 1 :]),
            reversed(self.strides[self.block_dim + 1 :]),
            strict=True,
        ):
            if size > 1 and stride != step:
                raise ValueError(
                    f"the dimensions after {self.block_dim} must be packed: strides {self.strides}"
                )
            step *= size
        self._check_apart()

    def _check_apart(self) -> None:
        """No two parts of blocks overlap, and none lies before the first."""
        covered = self.part_nbytes
        outer = sorted(zip(self.strides[: self.block_dim + 1], self.shape[: self.block_dim + 1], strict=True))
        for stride, size in outer:
            if size > 1 and stride < covered:
                raise ValueError(f"blocks overlap in a cache of shape {self.shape}, strides {self.strides}")
            covered += stride * (size - 1)

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache."""
        return self.shape[self.block_dim]

    @property
    def part_nbytes(self) -> int:
        """Bytes of one piece of a block."""
        return self.itemsize * math.prod(self.shape[self.block_dim + 1 :])

    @property
    def parts(self) -> int:
        """Pieces that a block consists of."""
        return math.prod(self.shape[: self.block_dim])

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block, all its pieces together."""
        return self.part_nbytes * self.parts

    @property
    def extent(self) -> int:
        """Bytes from the first element to the end of the last."""
        steps = zip(self.strides, self.shape, strict=True)
        return sum(stride * (size - 1) for stride, size in steps) + self.itemsize

    @property
    def dense(self) -> bool:
        """Whether consecutive blocks touch, so that a run of them is one piece per part."""
        return self.strides[self.block_dim] == self.part_nbytes or self.num_blocks == 1

    def part_offsets(self) -> Iterator[int]:
        """Where the parts of block 0 begin."""
        for index in np.ndindex(*self.shape[: self.block_dim]):
            yield sum(at * stride for at, stride in zip(index, self.strides, strict=False))

    def ranges(self, block_ids: Sequence[int]) -> list[tuple[int, int]]:
        """(offset, bytes) from the first element of the pieces of some blocks, runs joined, part by part."""
        runs = pair_runs(block_ids, block_ids)
        return [(offset, nbytes) for offset, _, nbytes in pair_ranges(self, self, runs)]

    def check_blocks(self, block_ids: Sequence[int]) -> None:
        """Raise MemoryRangeError for a block that the cache does not have."""
        for block in block_ids:
            if not 0 <= block < self.num_blocks:
                raise MemoryRangeError(f"no block {block} in a cache of {self.num_blocks} blocks")


def layout_of(tensor: Tensor, block_dim: int, block_size: int) -> KVCacheLayout:
    """The layout of a cache that is this tensor."""
    if any(stride < 0 for stride in tensor.strides):
        raise ValueError(f"a KV cache has no negative strides: {tensor.strides}")
    return KVCacheLayout(
        tensor.shape, tensor.strides, tensor.dtype.name, tensor.dtype.itemsize, block_dim, block_size
    )


def pair_runs(here: Sequence[int], there: Sequence[int]) -> list[Run]:
    """The runs in which both lists of blocks go up by one.

    Raises:
        ValueError: They differ in length.
    """
    runs: list[Run] = []
    start_here = start_there = count = 0
    for a, b in zip(here, there, strict=True):
        if count and a == start_here + count and b == start_there + count:
            count += 1
            continue
        if count:
            runs.append((start_here, start_there, count))
        start_here, start_there, count = a, b, 1
    if count:
        runs.append((start_here, start_there, count))
    return runs


def pair_ranges(here: KVCacheLayout, there: KVCacheLayout, runs: Sequence[Run]) -> list[tuple[int, int, int]]:
    """(offset here, offset there, bytes) of each piece in some runs, as few as the two layouts allow.

    Raises:
        ValueError: The blocks of the two caches are not alike.
    """
    alike = (here.part_nbytes, here.parts, here.dtype) == (there.part_nbytes, there.parts, there.dtype)
    if not alike:
        raise ValueError(f"blocks of {here.parts} x {here.part_nbytes} bytes of {here.dtype} do not fit "
                         f"{there.parts} x {there.part_nbytes} bytes of {there.dtype}")  # fmt: skip
    step_here, step_there = here.strides[here.block_dim], there.strides[there.block_dim]
    pieces = []
    for base_here, base_there in zip(here.part_offsets(), there.part_offsets(), strict=True):
        for first_here, first_there, count in runs:
            at_here, at_there = base_here + first_here * step_here, base_there + first_there * step_there
            if here.dense and there.dense:
                pieces.append((at_here, at_there, count * here.part_nbytes))
                continue
            pieces += [
                (at_here + block * step_here, at_there + block * step_there, here.part_nbytes)
                for block in range(count)
            ]
    return pieces


class KVCacheView:
    """One registered cache, as a connector sees it in the process of the chip that owns the memory.

    It lives from `register_kv_caches` to the end of `unregister_kv_caches`, and the memory cannot be freed
    meanwhile.
    """

    __slots__ = ("_address", "_data", "layout", "name")

    def __init__(self, name: str, layout: KVCacheLayout, view: BufferView) -> None:
        """Take over a buffer of a call: what it names outlives the call, since the caller has pinned it."""
        self.name = name
        self.layout = layout
        self._address: int | None = view.address
        try:
            self._data: Array | None = view.array()
        except MemoryRangeError:
            self._data = None

    @property
    def address(self) -> int:
        """Of the first element, in this process.

        Raises:
            MemoryRangeError: The cache has been unregistered.
        """
        if self._address is None:
            raise MemoryRangeError(f"KV cache {self.name!r} has been unregistered")
        return self._address

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        return self.layout.extent

    @property
    def data(self) -> Array:
        """The memory as one dimension of uint8, without a copy.

        Raises:
            MemoryRangeError: The host cannot touch this memory, or the cache has been unregistered.
        """
        if self._data is None:
            raise MemoryRangeError(
                f"the host cannot touch the memory of KV cache {self.name!r} at {self.address:#x}"
            )
        return self._data

    def pieces(self, block_ids: Sequence[int]) -> list[Array]:
        """The memory of some blocks: views of uint8, runs joined, part by part; errors as `data`."""
        self.layout.check_blocks(block_ids)
        whole = self.data
        return [whole[offset : offset + nbytes] for offset, nbytes in self.layout.ranges(block_ids)]

    def read_block(self, block_id: int) -> bytes:
        """A copy of one block, its parts joined; errors as `data`."""
        return b"".join([piece.tobytes() for piece in self.pieces([block_id])])

    def write_block(self, block_id: int, data: Any) -> None:
        """Set one block from `KVCacheLayout.block_nbytes` bytes; errors as `data`, or ValueError."""
        source = np.frombuffer(data, np.uint8)
        if source.nbytes != self.layout.block_nbytes:
            raise ValueError(
                f"a block of {self.name!r} has {self.layout.block_nbytes} bytes: {source.nbytes}"
            )
        at = 0
        for piece in self.pieces([block_id]):
            piece[:] = source[at : at + piece.nbytes]
            at += piece.nbytes

    def expire(self) -> None:
        """End its life: the cache has been unregistered."""
        self._address = None
        self._data = None

    def __repr__(self) -> str:
        layout = self.layout
        return f"<KVCacheView {self.name!r}: {layout.num_blocks} blocks of {layout.block_nbytes} bytes>"


def layouts_as_json(layouts: Mapping[str, KVCacheLayout]) -> dict[str, Any]:
    """What `layouts_from_json` takes."""
    return {
        name: [
            list(layout.shape), list(layout.strides), layout.dtype,
            layout.itemsize, layout.block_dim, layout.block_size,
        ]
        for name, layout in layouts.items()
    }  # fmt: skip


def layouts_from_json(values: Mapping[str, Any]) -> dict[str, KVCacheLayout]:
    """The layouts by name, in order."""
    return {
        name: KVCacheLayout(tuple(shape), tuple(strides), dtype, itemsize, block_dim, block_size)
        for name, (shape, strides, dtype, itemsize, block_dim, block_size) in values.items()
    }
