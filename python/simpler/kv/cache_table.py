"""The caches that an engine has registered, as the parent knows them: tensors, layouts, pins."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from simpler import Buffer, HostBuffer, MemoryRangeError, Tensor
from simpler.kv.caches import KVCacheLayout, layout_of, pair_ranges, pair_runs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from simpler import Pin


class Piece(NamedTuple):
    """Bytes of a buffer."""

    buffer: Buffer | HostBuffer
    offset: int
    nbytes: int

    def ends_where(self, other: Piece) -> bool:
        """Whether the other one begins at the end of this."""
        return self.buffer is other.buffer and self.offset + self.nbytes == other.offset

    def longer(self, nbytes: int) -> Piece:
        """With more bytes at its end."""
        return self._replace(nbytes=self.nbytes + nbytes)


class Cache(NamedTuple):
    """One cache on one chip."""

    tensor: Tensor
    layout: KVCacheLayout

    def piece(self, offset: int, nbytes: int) -> Piece:
        """Bytes counted from the first element."""
        return Piece(self.tensor.buffer, self.tensor.offset + offset, nbytes)


class CacheTable:
    """The caches of one engine: by rank, by name in the order registered.

    The buffers are pinned from `pin` to `unpin`, so that nobody frees what an engine may touch.
    """

    def __init__(
        self,
        caches: Mapping[str, Tensor | Sequence[Tensor]],
        chips: Sequence[int],
        block_dim: int,
        block_size: int,
    ) -> None:
        """Check caches; nothing is pinned.

        Args:
            caches: By layer: a tensor for each chip, in the order of the chips.
            chips: Worker ids.
            block_dim: The dimension that counts blocks.
            block_size: Tokens in a block.

        Raises:
            ValueError: Another number of tensors than of chips, of blocks than in the other caches, a layout
                that cannot be, or two caches that overlap.
            MemoryRangeError: Memory of another chip.
        """
        if not caches:
            raise ValueError("there are no KV caches to register")
        self.by_rank: tuple[dict[str, Cache], ...] = tuple({} for _ in chips)
        for name, tensors in caches.items():
            each = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            if len(each) != len(chips):
                raise ValueError(f"KV cache {name!r} has {len(each)} tensors for {len(chips)} chips")
            for rank, tensor in enumerate(each):
                self.by_rank[rank][name] = Cache(tensor, layout_of(tensor, block_dim, block_size))
        for own, chip in zip(self.by_rank, chips, strict=True):
            _check(own, chip)
        counts = {cache.layout.num_blocks for own in self.by_rank for cache in own.values()}
        if len(counts) > 1:
            raise ValueError(f"the KV caches of an engine have one number of blocks, not {sorted(counts)}")
        self.num_blocks = counts.pop()
        self._pins: list[list[Pin]] = [[] for _ in chips]

    def pin(self, name: str) -> None:
        """Keep the buffers from being freed.

        Raises:
            MemoryRangeError: One is freed or lost already; none is pinned then.
        """
        try:
            for own, pins in zip(self.by_rank, self._pins, strict=True):
                buffers = {id(cache.tensor.buffer): cache.tensor.buffer for cache in own.values()}
                pins += [buffer.pin(name) for buffer in buffers.values()]
        except BaseException:
            for rank in range(len(self._pins)):
                self.unpin(rank)
            raise

    def unpin(self, rank: int) -> None:
        """Let the buffers of one chip be freed; nothing if that has happened."""
        for pin in self._pins[rank]:
            pin.release()
        self._pins[rank] = []

    def views(self, rank: int) -> dict[str, Tensor]:
        """What the chip is given of each cache: all bytes from the first element to the last."""
        return {
            name: cache.tensor.buffer.tensor((cache.layout.extent,), "uint8", offset=cache.tensor.offset)
            for name, cache in self.by_rank[rank].items()
        }

    def layouts(self, rank: int) -> dict[str, KVCacheLayout]:
        """By name."""
        return {name: cache.layout for name, cache in self.by_rank[rank].items()}

    def pieces(self, rank: int, blocks: Sequence[int]) -> list[Piece]:
        """The memory of some blocks, cache by cache, runs joined.

        Raises:
            MemoryRangeError: No such block.
        """
        pieces = []
        for cache in self.by_rank[rank].values():
            cache.layout.check_blocks(blocks)
            pieces += [cache.piece(offset, nbytes) for offset, nbytes in cache.layout.ranges(blocks)]
        return pieces


def pair_pieces(
    source: CacheTable, source_rank: int, source_blocks: Sequence[int],
    target: CacheTable, target_rank: int, target_blocks: Sequence[int],
) -> tuple[list[Piece], list[Piece]]:  # fmt: skip
    """The memory of blocks to copy and of where they go, piece by piece, in as few as the two sides allow.

    Raises:
        ValueError: The caches of the two engines are not alike.
        MemoryRangeError: No such block.
    """
    here, there = source.by_rank[source_rank], target.by_rank[target_rank]
    if len(here) != len(there):
        raise ValueError(f"an engine with {len(here)} KV caches gives no blocks to one with {len(there)}")
    runs = pair_runs(source_blocks, target_blocks)
    reads: list[Piece] = []
    writes: list[Piece] = []
    for a, b in zip(here.values(), there.values(), strict=True):
        a.layout.check_blocks(source_blocks)
        b.layout.check_blocks(target_blocks)
        for offset_a, offset_b, nbytes in pair_ranges(a.layout, b.layout, runs):
            reads.append(a.piece(offset_a, nbytes))
            writes.append(b.piece(offset_b, nbytes))
    return _joined(reads, writes)


def _joined(reads: Sequence[Piece], writes: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
    """The same bytes, with pieces that touch on both sides as one: caches may lie side by side."""
    pairs: list[tuple[Piece, Piece]] = []
    for pair in zip(reads, writes, strict=True):
        if pairs and all(old.ends_where(new) for old, new in zip(pairs[-1], pair, strict=True)):
            read, write = pairs.pop()
            pairs.append((read.longer(pair[0].nbytes), write.longer(pair[1].nbytes)))
        else:
            pairs.append(pair)
    return [read for read, _ in pairs], [write for _, write in pairs]


def _check(caches: Mapping[str, Cache], chip: int) -> None:
    """All memory is the chip's or the host's, and no two caches share any."""
    spans: list[tuple[int, int, int, str]] = []
    for name, cache in caches.items():
        buffer = cache.tensor.buffer
        if isinstance(buffer, Buffer) and buffer.worker_id != chip:
            raise MemoryRangeError(
                f"KV cache {name!r} of worker {chip} is memory of worker {buffer.worker_id}"
            )
        start = cache.tensor.offset
        for _, begin, end, other in (span for span in spans if span[0] == id(buffer)):
            if start < end and begin < start + cache.layout.extent:
                raise ValueError(f"the KV caches {other!r} and {name!r} overlap")
        spans.append((id(buffer), start, start + cache.layout.extent, name))
