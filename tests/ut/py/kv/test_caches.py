"""Where the bytes of blocks are, for every layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpler import MemoryRangeError, Worker
from simpler.kv import KVCacheLayout
from simpler.kv.cache_table import CacheTable, pair_pieces
from simpler.kv.caches import layouts_as_json, layouts_from_json, pair_ranges, pair_runs

if TYPE_CHECKING:
    from collections.abc import Iterator


@st.composite
def layouts(draw: st.DrawFn) -> KVCacheLayout:
    """Outer dimensions, blocks, inner ones; with gaps or without."""
    outer = draw(st.lists(st.integers(1, 3), max_size=2))
    blocks = draw(st.integers(1, 6))
    inner = draw(st.lists(st.integers(1, 4), max_size=2))
    itemsize = draw(st.sampled_from([1, 2, 4]))
    strides: list[int] = []
    step = itemsize
    for size in reversed(inner):
        strides.append(step)
        step *= size
    for size in reversed([*outer, blocks]):
        step += itemsize * draw(st.integers(0, 2))
        strides.append(step)
        step *= size
    return KVCacheLayout(
        (*outer, blocks, *inner), tuple(reversed(strides)), f"uint{8 * itemsize}", itemsize, len(outer), 16
    )


def block_bytes(layout: KVCacheLayout, memory: bytes, block: int) -> bytes:
    """By numpy, element by element."""
    array: Any = np.ndarray(layout.shape, layout.dtype, memory, 0, layout.strides)
    taken: bytes = np.ascontiguousarray(np.take(array, block, axis=layout.block_dim)).tobytes()
    return taken


@given(layouts(), st.data())
def test_the_pieces_of_blocks_are_what_numpy_finds_there(layout: KVCacheLayout, data: st.DataObject) -> None:
    memory = np.random.default_rng(0).bytes(layout.extent)
    block = data.draw(st.integers(0, layout.num_blocks - 1))
    found = b"".join(memory[offset : offset + nbytes] for offset, nbytes in layout.ranges([block]))
    assert found == block_bytes(layout, memory, block)
    assert layout.block_nbytes == len(found)


@given(layouts(), st.data())
def test_runs_of_blocks_are_joined_and_nothing_else_is_named(
    layout: KVCacheLayout, data: st.DataObject
) -> None:
    blocks = data.draw(st.lists(st.integers(0, layout.num_blocks - 1), unique=True))
    named = [at for offset, nbytes in layout.ranges(blocks) for at in range(offset, offset + nbytes)]
    single = [
        at
        for block in blocks
        for offset, nbytes in layout.ranges([block])
        for at in range(offset, offset + nbytes)
    ]
    assert sorted(named) == sorted(single)
    assert len(set(named)) == len(named)


@given(layouts(), st.data())
def test_copying_pair_by_pair_copies_block_by_block(layout: KVCacheLayout, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, layout.num_blocks))
    here = data.draw(st.permutations(range(layout.num_blocks)))[:count]
    there = data.draw(st.permutations(range(layout.num_blocks)))[:count]
    source = np.random.default_rng(1).bytes(layout.extent)
    target = bytearray(np.random.default_rng(2).bytes(layout.extent))
    before = bytes(target)
    for offset, to, nbytes in pair_ranges(layout, layout, pair_runs(here, there)):
        target[to : to + nbytes] = source[offset : offset + nbytes]
    for a, b in zip(here, there, strict=True):
        assert block_bytes(layout, bytes(target), b) == block_bytes(layout, source, a)
    for block in set(range(layout.num_blocks)) - set(there):
        assert block_bytes(layout, bytes(target), block) == block_bytes(layout, before, block)


@given(st.dictionaries(st.text(max_size=3), layouts(), max_size=3))
def test_layouts_go_to_json_and_back(named: dict[str, KVCacheLayout]) -> None:
    assert layouts_from_json(layouts_as_json(named)) == named


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"block_dim": 2}, "no dimension 2"),
        ({"block_dim": -1}, "no dimension -1"),
        ({"strides": (8,)}, "no dimension 0"),
        ({"shape": (0, 2)}, "without elements"),
        ({"block_size": 0}, "without elements"),
        ({"strides": (8, 8)}, "must be packed"),
        ({"strides": (4, 4)}, "overlap"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(change: dict[str, Any], text: str) -> None:
    good: dict[str, Any] = {
        "shape": (4, 2),
        "strides": (8, 4),
        "dtype": "float32",
        "itemsize": 4,
        "block_dim": 0,
        "block_size": 16,
    }
    KVCacheLayout(**good)
    with pytest.raises(ValueError, match=text):
        KVCacheLayout(**good | change)


def test_blocks_that_are_not_there_or_not_alike_are_refused() -> None:
    layout = KVCacheLayout((4, 2), (8, 4), "float32", 4, 0, 16)
    with pytest.raises(MemoryRangeError, match="no block 4"):
        layout.check_blocks([1, 4])
    other = KVCacheLayout((4, 3), (12, 4), "float32", 4, 0, 16)
    with pytest.raises(ValueError, match="1 x 8 bytes of float32 do not fit 1 x 12 bytes"):
        pair_ranges(layout, other, [(0, 0, 1)])


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker(device_ids=[0, 1], hbm_bytes=1 << 20, heap_bytes=1 << 20) as made:
        yield made


def test_caches_that_lie_side_by_side_are_moved_as_one(worker: Worker) -> None:
    tables = []
    for chip in (0, 1):
        buffer = worker.malloc(3 * 4 * 64, worker_id=chip)
        named = {f"layer {n}": [buffer.tensor((4, 64), "uint8", offset=n * 256)] for n in range(3)}
        tables.append(CacheTable(named, [chip], 0, 16))
    reads, writes = pair_pieces(tables[0], 0, [0, 1, 2, 3], tables[1], 0, [0, 1, 2, 3])
    assert [(piece.offset, piece.nbytes) for piece in reads + writes] == [(0, 768)] * 2
    reads, writes = pair_pieces(tables[0], 0, [1, 2], tables[1], 0, [2, 3])
    assert [(piece.offset, piece.nbytes) for piece in reads] == [(64, 128), (320, 128), (576, 128)]
    assert [(piece.offset, piece.nbytes) for piece in writes] == [(128, 128), (384, 128), (640, 128)]
    assert [piece.nbytes for piece in tables[0].pieces(0, [0, 1, 2, 3])] == [256] * 3
