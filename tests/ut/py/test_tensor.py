"""Tensors index as numpy arrays do, and never leave their buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from simpler.errors import MemoryRangeError
from simpler.memory import MemoryRegistry
from simpler.tensor import Tensor, extent

if TYPE_CHECKING:
    from simpler.buffers import Buffer


def make_buffer(nbytes: int = 4096) -> Buffer:
    registry = MemoryRegistry(malloc=lambda _worker, _nbytes: 1 << 20, free=lambda *_: None)
    return registry.malloc(0, nbytes, device_id=5)


def test_a_tensor_knows_where_it_is() -> None:
    buffer = make_buffer()
    tensor = buffer.tensor((3, 4), "float32", offset=16)
    assert (tensor.buffer, tensor.offset, tensor.shape, tensor.strides) == (buffer, 16, (3, 4), (16, 4))
    assert (str(tensor.dtype), tensor.nbytes, tensor.span) == ("float32", 48, (16, 48))
    assert (tensor.ndim, len(tensor)) == (2, 3)


@pytest.mark.parametrize(
    ("shape", "nbytes", "strides"),
    [((), 8, ()), (5, 40, (8,)), ((0,), 0, (8,)), ((3, 0, 2), 0, (16, 16, 8)), ((1,) * 16, 8, (8,) * 16)],
)
def test_any_shape_up_to_16_dimensions(shape: Any, nbytes: int, strides: tuple[int, ...]) -> None:
    tensor = make_buffer().tensor(shape, np.int64)
    assert (tensor.nbytes, tensor.strides) == (nbytes, strides)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"shape": (1025,)}, MemoryRangeError),
        ({"shape": (1024,), "offset": 4}, MemoryRangeError),
        ({"shape": (1,), "offset": -4}, MemoryRangeError),
        ({"shape": (2,), "strides": (4096,)}, MemoryRangeError),
        ({"shape": (2,), "strides": (-4,)}, MemoryRangeError),
        ({"shape": (0,), "offset": -4}, MemoryRangeError),
        ({"shape": (1 << 62, 1 << 62)}, MemoryRangeError),
        ({"shape": (-1,)}, ValueError),
        ({"shape": (1,) * 17}, ValueError),
        ({"shape": (2,), "strides": (4, 4)}, ValueError),
        ({"shape": (2,), "offset": 2}, ValueError),
        ({"shape": (2,), "strides": (6,)}, ValueError),
        ({"shape": (2.0,)}, TypeError),
        ({"shape": (2,), "offset": 1.5}, TypeError),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        make_buffer().tensor(dtype="float32", **arguments)


def test_the_last_byte_can_be_reached_also_backwards() -> None:
    buffer = make_buffer(16)
    assert buffer.tensor((4,), "float32", offset=12, strides=(-4,)).span == (0, 16)
    assert buffer.tensor((1,), "uint8", offset=15).span == (15, 1)


def as_array(tensor: Tensor, memory: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.ndarray(
        tensor.shape, tensor.dtype.numpy, buffer=memory, offset=tensor.offset, strides=tensor.strides
    )
    return array


@given(data=st.data(), shape=npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6))
def test_indexing_is_numpys(data: st.DataObject, shape: tuple[int, ...]) -> None:
    memory = np.arange(4096, dtype=np.uint8) % 251
    tensor = make_buffer().tensor(shape, "int16", offset=64)
    array = as_array(tensor, memory)
    for _ in range(2):
        index = data.draw(
            npst.basic_indices(array.shape, allow_newaxis=True, allow_ellipsis=True, max_dims=10)
        )
        tensor, array = tensor[index], array[index]
        expected = np.asarray(array)
        assert tensor.shape == expected.shape
        assert as_array(tensor, memory).tolist() == expected.tolist()
        assert tensor.nbytes == expected.nbytes


@given(data=st.data(), shape=npst.array_shapes(max_dims=3, max_side=5))
def test_the_span_is_exactly_what_the_elements_touch(data: st.DataObject, shape: tuple[int, ...]) -> None:
    marks = np.zeros(4096, np.uint8)
    whole = make_buffer().tensor(shape, "int32", offset=128)
    part = whole[data.draw(npst.basic_indices(shape))]
    as_array(part, marks).fill(-1)
    touched = np.flatnonzero(marks)
    low, covered = part.span
    assert (low, covered) == (
        (int(touched[0]), int(touched[-1] - touched[0] + 1)) if len(touched) else (0, 0)
    )


@pytest.mark.parametrize("index", [5, -6, (0, 0, 0), (..., ...)])
def test_indices_out_of_bounds_are_refused(index: Any) -> None:
    with pytest.raises(IndexError):
        make_buffer().tensor((5, 2), "uint8")[index]


@pytest.mark.parametrize("index", ["a", 1.0, True, [0, 1], np.array([0])])
def test_only_basic_indices_are_taken(index: Any) -> None:
    with pytest.raises(TypeError):
        make_buffer().tensor((5, 2), "uint8")[index]


def test_contiguous_means_one_after_another() -> None:
    whole = make_buffer().tensor((4, 6), "float32")
    assert whole.contiguous
    assert whole[1].contiguous
    assert whole[2:3, :].contiguous
    assert whole[1:1, ::2].contiguous
    assert not whole[:, 1:].contiguous
    assert not whole[::-1].contiguous


def test_a_tensor_cannot_be_changed_and_compares_by_value() -> None:
    buffer = make_buffer()
    tensor = buffer.tensor((3,), "uint8")
    assert tensor == buffer.tensor((3,), "uint8")
    assert tensor != make_buffer().tensor((3,), "uint8")
    with pytest.raises(AttributeError):
        tensor.offset = 3  # type: ignore[misc] # what the test is about


def test_a_scalar_tensor_has_no_length() -> None:
    with pytest.raises(TypeError):
        len(make_buffer().tensor((), "uint8"))


def test_extent_of_nothing_is_nothing() -> None:
    assert extent((0, 5), (4, 4), 4) == (0, 0, 0)
    assert extent((), (), 4) == (0, 4, 1)


def test_handles_say_what_they_are() -> None:
    assert "4096 bytes" in repr(make_buffer())
