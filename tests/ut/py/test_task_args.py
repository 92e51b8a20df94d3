"""Arguments keep their order, their exact types and what they were when submitted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import simpler
from simpler import _core
from simpler.errors import MemoryRangeError
from simpler.memory import HOLD, READ, WRITE, HostHeap, MemoryRegistry
from simpler.task_args import Tag, TaskArgs

if TYPE_CHECKING:
    from simpler.buffers import Buffer

ADDRESS = 1 << 20
YES, NO = True, False


def make_registry() -> MemoryRegistry:
    heap = HostHeap(_core.SharedRegion(1 << 16, "test-heap"))
    return MemoryRegistry(malloc=lambda _worker, _nbytes: ADDRESS, free=lambda *_: None, heap=heap)


def make_buffer() -> Buffer:
    return make_registry().malloc(0, 4096)


@pytest.fixture(scope="module")
def handles() -> list[simpler.TaskHandle]:
    with simpler.Worker(hbm_bytes=1 << 20, heap_bytes=1 << 20) as worker:
        nothing = worker.register(dict)
        tasks: list[simpler.TaskHandle] = worker.run(
            lambda orch, _a, _c: [orch.submit(nothing, worker=0) for _ in range(2)]
        )
        return tasks


def test_items_keep_the_order_added() -> None:
    tensor = make_buffer().tensor((2, 3), "float32", offset=8)
    args = TaskArgs().add_scalar(1).add_tensor(tensor, Tag.IN).add_scalar(0.5).add_scalar(YES)
    assert args.pack() == [1, (ADDRESS + 8, 24, (2, 3), (12, 4), 10, 1), 0.5, True]
    assert len(args) == 4
    assert args.tensors == ((tensor, Tag.IN),)


def test_what_is_packed_can_be_unpacked() -> None:
    tensor = make_buffer().tensor((2, 3), "float32", offset=8)
    items = TaskArgs().add_tensor(tensor, Tag.INOUT).add_scalar(-3).add_scalar(NO).add_scalar(math.pi).pack()
    unpacked = _core.unpack_task(_core.pack_task(items))
    assert unpacked == items
    assert [type(item) for item in unpacked] == [tuple, int, bool, float]


def test_addresses_can_be_resolved_elsewhere() -> None:
    tensor = make_buffer().tensor((4,), "uint8")
    (item,) = TaskArgs().add_tensor(tensor, Tag.OUT).pack(lambda t: 77 if t is tensor else 0)
    assert isinstance(item, tuple)
    assert item[0] == 77


def test_the_bytes_spanned_are_counted_from_the_first_element() -> None:
    whole = make_buffer().tensor((8,), "int32")
    for part, address, nbytes in [
        (whole[2::3], ADDRESS + 8, 16),
        (whole[::-1], ADDRESS + 28, 4),
        (whole[3:3], ADDRESS + 0, 0),
    ]:
        (item,) = TaskArgs().add_tensor(part, Tag.IN).pack()
        assert isinstance(item, tuple)
        assert (item[0], item[1]) == (address, nbytes)


def test_a_buffer_is_taken_whole_as_bytes() -> None:
    registry = make_registry()
    args = (
        TaskArgs().add_tensor(registry.malloc(0, 100), Tag.IN).add_tensor(registry.create_buffer(50), Tag.OUT)
    )
    assert [(tensor.shape, str(tensor.dtype)) for tensor, _ in args.tensors] == [
        ((100,), "uint8"),
        ((50,), "uint8"),
    ]


@pytest.mark.parametrize(
    ("tag", "mode"), [(Tag.IN, READ), (Tag.OUT, WRITE), (Tag.INOUT, WRITE), (Tag.NO_DEP, HOLD)]
)
def test_tags_say_how_memory_is_used(tag: Tag, mode: int) -> None:
    tensor = make_buffer().tensor((4,), "uint8")
    assert TaskArgs().add_tensor(tensor, tag).uses == [(tensor, mode)]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (YES, True),
        (np.bool_(NO), NO),
        (5, 5),
        (np.int8(-5), -5),
        (np.uint64(7), 7),
        ((1 << 63) - 1, (1 << 63) - 1),
        (-(1 << 63), -(1 << 63)),
        (0.25, 0.25),
        (np.float32(0.5), 0.5),
        (math.inf, math.inf),
    ],
    ids=repr,
)
def test_scalars_are_bool_int64_or_float64(given: object, kept: object) -> None:
    (item,) = TaskArgs().add_scalar(given).pack()
    assert item == kept
    assert type(item) is type(kept)


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1, np.uint64(1 << 63)])
def test_integers_beyond_int64_are_refused(value: object) -> None:
    with pytest.raises(OverflowError, match="int64"):
        TaskArgs().add_scalar(value)


@pytest.mark.parametrize("value", ["3", None, 1j, b"x", np.array(3), np.complex64(1), [1]])
def test_other_scalars_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="scalar"):
        TaskArgs().add_scalar(value)


@pytest.mark.parametrize("tensor", [np.zeros(3), 4096, b"x", None])
def test_only_known_memory_is_a_tensor(tensor: Any) -> None:
    with pytest.raises(TypeError, match="add_tensor"):
        TaskArgs().add_tensor(tensor, Tag.IN)


@pytest.mark.parametrize("tag", [1, "in", None])
def test_a_tag_is_a_tag(tag: Any) -> None:
    with pytest.raises(TypeError, match="Tag"):
        TaskArgs().add_tensor(make_buffer(), tag)


def test_a_freed_buffer_is_refused_when_added() -> None:
    registry = make_registry()
    buffer = registry.malloc(0, 16)
    registry.free(buffer)
    with pytest.raises(MemoryRangeError, match="freed"):
        TaskArgs().add_tensor(buffer, Tag.IN)


def test_dependencies_are_kept(handles: list[simpler.TaskHandle]) -> None:
    first, second = handles
    assert TaskArgs().add_dep(first).add_dep(second).deps == [first, second]
    with pytest.raises(TypeError, match="TaskHandle"):
        TaskArgs().add_dep(17)


def test_a_snapshot_does_not_see_later_changes(handles: list[simpler.TaskHandle]) -> None:
    args = TaskArgs().add_scalar(1)
    taken = args.snapshot()
    args.add_scalar(2).add_tensor(make_buffer(), Tag.IN).add_dep(handles[0])
    assert taken.pack() == [1]
    assert (len(taken.uses), taken.deps) == (0, [])


def test_a_snapshot_of_nothing_stays_empty() -> None:
    args = TaskArgs()
    taken = args.snapshot()
    args.add_scalar(1)
    assert (taken.pack(), TaskArgs().snapshot().pack()) == ([], [])
