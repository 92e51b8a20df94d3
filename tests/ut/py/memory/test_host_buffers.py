"""Host buffers: one memory for all views, given back to the kernel when freed."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from memory.registry import PAGE, Node
from simpler.errors import BackPressureError, MemoryRangeError
from simpler.memory import MemoryRegistry


def test_a_host_buffer_is_one_memory_for_all_its_views(node: Node) -> None:
    buffer = node.registry.create_buffer(64)
    array = buffer.array((4, 4), "float32")
    array[:] = np.arange(16).reshape(4, 4)
    assert np.frombuffer(memoryview(buffer), np.float32).tolist() == list(range(16))
    assert np.from_dlpack(buffer).view(np.float32)[3] == 3.0
    assert np.from_dlpack(array)[0, 1] == 1.0
    assert bytes(buffer)[:4] == b"\0\0\0\0"
    assert buffer.address == node.heap.region.address
    assert buffer.tensor((2,), "float32", offset=8).span == (8, 8)


def test_host_arrays_can_be_read_only_for_good(node: Node) -> None:
    array = node.registry.create_buffer(64).array((4,), "float32", offset=16, readonly=True)
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True


@pytest.mark.parametrize(("shape", "offset"), [((17,), 0), ((16,), 4), ((1,), 64), ((1,), -4)])
def test_host_arrays_stay_inside(node: Node, shape: tuple[int, ...], offset: int) -> None:
    with pytest.raises(MemoryRangeError):
        node.registry.create_buffer(64).array(shape, "float32", offset=offset)


def test_a_host_buffer_with_live_views_is_not_freed(node: Node) -> None:
    buffer = node.registry.create_buffer(64)
    array = buffer.array((16,), "float32")
    part = array[3:5]
    del array
    with pytest.raises(BufferError):
        node.registry.free(buffer)
    assert not buffer.freed
    del part
    gc.collect()
    node.registry.free(buffer)
    assert node.heap.used_bytes == 0
    with pytest.raises(MemoryRangeError, match="freed"):
        buffer.array((1,), "uint8")
    with pytest.raises(BufferError):
        memoryview(buffer)


def test_an_exhausted_heap_names_heap_bytes_and_recovers(node: Node) -> None:
    blocks = [node.registry.create_buffer(PAGE) for _ in range(16)]
    with pytest.raises(BackPressureError, match="heap_bytes"):
        node.registry.create_buffer(1)
    for block in blocks:
        node.registry.free(block)
    node.registry.free(node.registry.create_buffer(16 * PAGE))


def test_a_worker_without_a_heap_says_so() -> None:
    registry = MemoryRegistry(malloc=lambda *_: 0, free=lambda *_: None)
    with pytest.raises(BackPressureError, match="heap"):
        registry.create_buffer(8)


def test_freed_host_memory_goes_back_to_the_kernel(node: Node) -> None:
    buffer = node.registry.create_buffer(8 * PAGE)
    buffer.array((8 * PAGE,), "uint8").fill(7)
    gc.collect()
    assert node.heap.region.resident_bytes >= 8 * PAGE
    node.registry.free(buffer)
    assert node.heap.region.resident_bytes == 0


def test_views_stay_readable_after_close() -> None:
    node = Node()
    viewed, idle = node.registry.create_buffer(64), node.registry.create_buffer(64)
    device, pinned = node.registry.malloc(0, 8), node.registry.malloc(0, 8)
    pinned.pin("engine")
    array = viewed.array((16,), "float32")
    array.fill(3.0)
    node.registry.close()
    del node
    gc.collect()
    assert array.tolist() == [3.0] * 16
    for handle in (viewed, idle, device, pinned):
        assert handle.freed
        with pytest.raises(MemoryRangeError, match="closed"):
            handle.tensor((1,), "uint8")
