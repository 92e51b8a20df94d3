"""Device and host memory of a Worker: allocation, copies, frees, and what is refused."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import simpler
from simpler import Tag, TaskArgs, Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = 1 << 20


def small_worker(**options: Any) -> Worker:
    return Worker(**{"hbm_bytes": SMALL, "heap_bytes": SMALL, "control_timeout_s": 20.0} | options)


@pytest.fixture(params=[2, 3])
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    with small_worker(level=request.param) as made:
        yield made


@pytest.fixture
def node() -> Iterator[Worker]:
    with small_worker(device_ids=[0, 1], num_sub_workers=1) as made:
        yield made


def test_what_is_committed_follows_malloc_and_free(worker: Worker) -> None:
    assert worker.committed_device_memory() == 0
    first, second = worker.malloc(1000), worker.malloc(256)
    assert worker.committed_device_memory() == 1024 + 256
    assert first.address % 256 == 0
    worker.free(first)
    assert worker.committed_device_memory() == 256
    worker.free(second)
    assert worker.committed_device_memory() == 0


def test_running_out_of_device_memory_says_what_is_left(worker: Worker) -> None:
    held = worker.malloc(SMALL // 2)
    with pytest.raises(simpler.RemoteError, match=r"hbm_bytes") as caught:
        worker.malloc(SMALL)
    assert caught.value.type_name == "MemoryError"
    worker.free(held)
    worker.free(worker.malloc(SMALL))


@pytest.mark.parametrize("nbytes", [0, -1])
def test_sizes_that_cannot_be_are_value_errors(worker: Worker, nbytes: int) -> None:
    with pytest.raises(ValueError, match="nbytes"):
        worker.malloc(nbytes)
    with pytest.raises(ValueError, match="nbytes"):
        worker.create_buffer(nbytes)


@pytest.mark.parametrize("nbytes", [1, 255, 4096, 100_000])
def test_bytes_survive_the_way_to_the_device_and_back(worker: Worker, nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    buffer = worker.malloc(nbytes)
    worker.copy_to(buffer, data)
    targets: list[Any] = [bytearray(nbytes), np.zeros(nbytes, np.uint8), worker.create_buffer(nbytes)]
    for target in targets:
        worker.copy_from(target, buffer)
        assert bytes(memoryview(target)) == data.tobytes()


def test_copies_of_parts_touch_nothing_else(worker: Worker) -> None:
    buffer = worker.malloc(16)
    worker.copy_to(buffer, bytes(16))
    worker.copy_to(buffer, b"abcdef", dst_offset=4, src_offset=2, nbytes=3)
    whole = bytearray(16)
    worker.copy_from(whole, buffer)
    assert whole == b"\0\0\0\0cde" + bytes(9)
    part = bytearray(b"........")
    worker.copy_from(part, buffer, dst_offset=2, src_offset=4, nbytes=3)
    assert part == b"..cde..."
    worker.copy(buffer, buffer, dst_offset=0, src_offset=4, nbytes=3)
    worker.copy_from(part, buffer)
    assert part == b"cde\0cde\0"


def test_tensors_of_device_and_host_memory_are_copied(worker: Worker) -> None:
    device = worker.malloc(64).tensor((4, 4), "float32")
    host = worker.create_buffer(64)
    array = host.array((4, 4), "float32")
    array[:] = np.arange(16).reshape(4, 4)
    worker.copy_to(device, host.tensor((4, 4), "float32"))
    rows = np.zeros((2, 4), np.float32)
    worker.copy_from(rows, device[1:3])
    assert np.array_equal(rows, array[1:3])
    with pytest.raises(ValueError, match="contiguous"):
        worker.copy_from(np.zeros(4, np.float32), device[:, 1])


def test_bytes_go_from_chip_to_chip(node: Worker) -> None:
    source, target = node.malloc(1000, worker_id=0), node.malloc(1000, worker_id=1)
    node.copy_to(source, b"x" * 1000)
    node.copy(target, source)
    result = bytearray(1000)
    node.copy_from(result, target)
    assert result == b"x" * 1000


def test_ranges_outside_either_side_are_refused_and_nothing_is_touched(worker: Worker) -> None:
    buffer = worker.malloc(8)
    worker.copy_to(buffer, b"original")
    for arguments in (
        {"dst_offset": 1},
        {"dst_offset": -1},
        {"src_offset": 9},
        {"nbytes": 9},
        {"nbytes": -1},
        {"dst_offset": 8, "nbytes": 1},
    ):
        with pytest.raises(simpler.MemoryRangeError, match="outside"):
            worker.copy_to(buffer, b"replaced", **arguments)
    with pytest.raises(simpler.MemoryRangeError, match="outside"):
        worker.copy_from(bytearray(9), buffer)
    result = bytearray(8)
    worker.copy_from(result, buffer)
    assert result == b"original"


def test_sides_of_a_copy_that_cannot_be_are_refused(worker: Worker) -> None:
    buffer = worker.malloc(64)
    with pytest.raises(ValueError, match="contiguous"):
        worker.copy_to(buffer, np.zeros((8, 8), np.uint8)[:, 0])
    with pytest.raises(ValueError, match="read-only"):
        worker.copy_from(b"12345678", buffer)
    with pytest.raises(TypeError, match="device memory"):
        worker.copy_to(worker.create_buffer(8), b"12345678")  # type: ignore[arg-type]  # what is tested
    with pytest.raises(TypeError, match="host memory"):
        worker.copy_to(buffer, buffer)  # type: ignore[arg-type]  # what is tested
    with pytest.raises(TypeError, match="buffer protocol"):
        worker.copy_to(buffer, 5)  # type: ignore[arg-type]  # what is tested
    with pytest.raises(ValueError, match="timeout_s"):
        worker.copy_to(buffer, b"12345678", timeout_s=0)


def test_a_freed_buffer_is_dead_for_every_use(worker: Worker) -> None:
    for buffer in (worker.malloc(8), worker.create_buffer(8)):
        worker.free(buffer)
        assert buffer.freed
        for use in (
            functools.partial(worker.free, buffer),
            functools.partial(buffer.tensor, (8,), "uint8"),
            functools.partial(buffer.pin, "engine"),
        ):
            with pytest.raises(simpler.MemoryRangeError, match="freed"):
                use()
    dead = worker.malloc(8)
    worker.free(dead)
    with pytest.raises(simpler.MemoryRangeError, match="freed"):
        worker.copy_to(dead, b"12345678")


def test_a_pinned_buffer_cannot_be_freed(worker: Worker) -> None:
    buffer = worker.malloc(8)
    pin = buffer.pin("mooncake")
    with pytest.raises(simpler.MemoryRangeError, match="mooncake"):
        worker.free(buffer)
    pin.release()
    worker.free(buffer)


def test_a_host_buffer_with_views_cannot_be_freed_and_its_views_outlive_close() -> None:
    with small_worker() as worker:
        buffer = worker.create_buffer(16)
        view = buffer.array((16,), "uint8")
        view[:] = 7
        with pytest.raises(BufferError):
            worker.free(buffer)
        assert not buffer.freed
    assert view.tolist() == [7] * 16
    assert buffer.freed


def test_the_heap_is_seen_by_children_at_its_address(node: Worker) -> None:
    buffer = node.create_buffer(4096)
    array = buffer.array((512,), "int64")
    array[:] = 1

    def double(x: Any) -> int:
        x *= 2
        return int(x.__array_interface__["data"][0])

    handle = node.register(double)
    args = TaskArgs().add_tensor(buffer.tensor((512,), "int64"), Tag.INOUT)
    assert node.run(handle, args) == buffer.address
    assert node.run(lambda orch, a, _c: orch.submit_sub(handle, a).result(), args) == buffer.address
    assert array.tolist() == [4] * 512


def test_the_end_of_the_heap_names_heap_bytes(worker: Worker) -> None:
    held = worker.create_buffer(SMALL // 2)
    with pytest.raises(simpler.BackPressureError, match="heap_bytes"):
        worker.create_buffer(SMALL)
    worker.free(held)
    worker.free(worker.create_buffer(SMALL))


def test_memory_of_a_dead_chip_is_lost_and_the_new_process_starts_empty(node: Worker) -> None:
    lost, kept = node.malloc(1000, worker_id=0), node.malloc(1000, worker_id=1)
    pin = lost.pin("engine")
    node.kill(0)
    with pytest.raises(simpler.MemoryRangeError, match="lost"):
        node.copy_to(lost, bytes(1000))
    assert not pin.active
    node.restart(0)
    assert node.committed_device_memory(0) == 0
    with pytest.raises(simpler.MemoryRangeError, match="lost"):
        node.free(lost)
    fresh = node.malloc(1000, worker_id=0)
    assert node.committed_device_memory(0) == 1024
    node.copy(kept, fresh)
    node.free(fresh)
    assert node.committed_device_memory(0) == 0


def test_each_chip_has_its_own_memory(node: Worker) -> None:
    buffer = node.malloc(100, worker_id=1)
    assert (buffer.worker_id, buffer.device_id, buffer.nbytes) == (1, 1, 100)
    assert [node.committed_device_memory(chip) for chip in (0, 1)] == [0, 256]
    with pytest.raises(ValueError, match="chip"):
        node.malloc(8, worker_id=2)
