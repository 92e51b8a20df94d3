"""TaskArgs: the tensors, scalars and dependencies of one task, in the order added."""

from __future__ import annotations

import enum
import operator
from typing import TYPE_CHECKING

import numpy as np

from simpler.buffers import Buffer, HostBuffer
from simpler.tensor import Tensor
from simpler.uses import HOLD, READ, WRITE, Mode

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    Scalar = bool | int | float
    Resolve = Callable[[Tensor], int]


class Tag(enum.IntEnum):
    """What a task does with a tensor; values are simpler_tag of `simpler/kernel.h`."""

    IN = 1
    OUT = 2
    INOUT = 3
    NO_DEP = 4


_MODES: dict[Tag, Mode] = {Tag.IN: READ, Tag.OUT: WRITE, Tag.INOUT: WRITE, Tag.NO_DEP: HOLD}
_INT64 = range(-(1 << 63), 1 << 63)


class TaskArgs:
    """Arguments of one task. The kernel gets tensors and scalars as positional arguments in this order.

    Thread safety: one thread at a time. Submitting copies it: changes after that concern later tasks.
    """

    __slots__ = ("_deps", "_items", "_uses")

    def __init__(self) -> None:
        self._items: list[tuple[Tensor, Tag] | Scalar] = []
        self._uses: list[tuple[Tensor, Mode]] = []
        self._deps: list[object] = []

    def add_tensor(self, tensor: Tensor | Buffer | HostBuffer, tag: Tag) -> Self:
        """Append a tensor; a buffer is taken whole, as uint8.

        Raises:
            TypeError: Not a Tensor, Buffer or HostBuffer, or not a Tag.
            MemoryRangeError: The buffer is dead.
        """
        if isinstance(tensor, Buffer | HostBuffer):
            tensor = tensor.tensor((tensor.nbytes,), "uint8")
        if not isinstance(tensor, Tensor):
            raise TypeError(f"add_tensor() takes a Tensor, Buffer or HostBuffer, not {type(tensor).__name__}")
        if not isinstance(tag, Tag):
            raise TypeError(f"a tensor's tag is Tag.IN, OUT, INOUT or NO_DEP, not {tag!r}")
        self._items.append((tensor, tag))
        self._uses.append((tensor, _MODES[tag]))
        return self

    def add_scalar(self, value: object) -> Self:
        """Append a bool, an int64 or a float64; numpy scalars count as what they are.

        Raises:
            OverflowError: An integer that does not fit int64.
            TypeError: Neither bool, integer nor float.
        """
        self._items.append(_scalar(value))
        return self

    def add_dep(self, handle: object) -> Self:
        """Run only after the task of this handle has succeeded.

        Raises:
            TypeError: Not the handle of a submitted task.
        """
        if not callable(getattr(handle, "result", None)):
            raise TypeError(f"add_dep() takes a TaskHandle, not {type(handle).__name__}")
        self._deps.append(handle)
        return self

    def snapshot(self) -> TaskArgs:
        """A copy that later changes do not reach."""
        if not self._items and not self._deps:
            return EMPTY_ARGS
        copy = TaskArgs()
        copy._items = list(self._items)
        copy._uses = list(self._uses)
        copy._deps = list(self._deps)
        return copy

    @property
    def deps(self) -> tuple[object, ...]:
        """The handles of `add_dep`."""
        return tuple(self._deps)

    @property
    def tensors(self) -> tuple[tuple[Tensor, Tag], ...]:
        """Tensors with their tags, in order."""
        return tuple(item for item in self._items if isinstance(item, tuple))

    @property
    def uses(self) -> list[tuple[Tensor, Mode]]:
        """What the task does with memory, for `MemoryRegistry.enqueue`. Not to be changed."""
        return self._uses

    def __len__(self) -> int:
        return len(self._items)

    def pack(self, resolve: Resolve | None = None) -> list[object]:
        """Items for ``_core.pack_task``.

        Args:
            resolve: The address of a tensor's first element where the task runs; None is the address that
                its buffer has there already.
        """
        items: list[object] = []
        for item in self._items:
            if isinstance(item, tuple):
                tensor, tag = item
                address = tensor.buffer.address + tensor.offset if resolve is None else resolve(tensor)
                low, covered = tensor.span
                nbytes = low + covered - tensor.offset if covered else 0
                items.append((address, nbytes, tensor.shape, tensor.strides, tensor.dtype.code, int(tag)))
            else:
                items.append(item)
        return items


def check_args(args: TaskArgs) -> TaskArgs:
    """Raise TypeError unless `args` are TaskArgs."""
    if not isinstance(args, TaskArgs):
        raise TypeError(f"the arguments of a task are TaskArgs, not {type(args).__name__}")
    return args


EMPTY_ARGS = TaskArgs()
"""The snapshot of arguments without any; never changed."""


def _scalar(value: object) -> Scalar:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, float | np.floating):
        return float(value)
    if isinstance(value, Tensor | Buffer | HostBuffer | np.ndarray) or not hasattr(value, "__index__"):
        raise TypeError(f"a scalar is a bool, an int64 or a float64, not {type(value).__name__}")
    number = operator.index(value)
    if number not in _INT64:
        raise OverflowError(f"an integer scalar must fit int64: {number}")
    return number
