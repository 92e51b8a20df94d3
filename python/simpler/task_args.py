"""TaskArgs: the tensors, scalars and dependencies of one task, in the order added."""

from __future__ import annotations

import enum
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from simpler import _core
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


class Tagged(NamedTuple):
    """A tensor and what a task does with it: made by `IN`, `OUT`, `INOUT` and `NO_DEP`."""

    tensor: Tensor | Buffer | HostBuffer
    tag: Tag


def IN(tensor: Tensor | Buffer | HostBuffer) -> Tagged:  # noqa: N802 - as the tag
    """The task reads it."""
    return Tagged(tensor, Tag.IN)


def OUT(tensor: Tensor | Buffer | HostBuffer) -> Tagged:  # noqa: N802 - as the tag
    """The task writes all of it; undefined before."""
    return Tagged(tensor, Tag.OUT)


def INOUT(tensor: Tensor | Buffer | HostBuffer) -> Tagged:  # noqa: N802 - as the tag
    """The task reads and writes it."""
    return Tagged(tensor, Tag.INOUT)


def NO_DEP(tensor: Tensor | Buffer | HostBuffer) -> Tagged:  # noqa: N802 - as the tag
    """The task may touch it, and that orders nothing."""
    return Tagged(tensor, Tag.NO_DEP)


_MODES: dict[Tag, Mode] = {Tag.IN: READ, Tag.OUT: WRITE, Tag.INOUT: WRITE, Tag.NO_DEP: HOLD}
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True)
class CapturedScalar:
    """Stands for a scalar argument of a function that is captured: each launch may give another value.

    It can be given to tasks and to nothing else, since what is computed from it would not change with it.
    """

    name: str
    value: Scalar


class RecordedTask:
    """Stands for a task's handle while a function is captured: a dependency of later tasks, and a result.

    Attributes:
        recorder: Of the capture that it belongs to.
        index: Its place among the tasks of that.
    """

    __slots__ = ("index", "recorder")

    def __init__(self, recorder: object, index: int) -> None:
        self.recorder = recorder
        self.index = index

    def done(self) -> NoReturn:
        """Not while it is recorded."""
        raise _not_yet()

    def result(self, timeout_s: float | None = None) -> NoReturn:  # noqa: ARG002 - as TaskHandle's
        """Not while it is recorded: return the task from the function to get it from each launch."""
        raise _not_yet()


class TaskArgs:
    """Arguments of one task. The kernel gets tensors and scalars as positional arguments in this order.

    Thread safety: one thread at a time. Submitting copies it: changes after that concern later tasks.
    """

    __slots__ = ("_deps", "_items", "_uses")

    def __init__(self) -> None:
        self._items: list[tuple[Tensor, Tag] | Scalar | CapturedScalar] = []
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

    @classmethod
    def of(cls, *items: object) -> Self:
        """From `IN(x)`, `OUT(y)`, ... and scalars, in order."""
        args = cls()
        for item in items:
            if isinstance(item, Tagged):
                args.add_tensor(item.tensor, item.tag)
            elif isinstance(item, Tensor | Buffer | HostBuffer):
                raise TypeError(f"say what the task does with a tensor: IN(x), OUT(x), ..., not {item!r}")
            else:
                args.add_scalar(item)
        return args

    def add_scalar(self, value: object) -> Self:
        """Append a bool, an int64 or a float64; numpy scalars count as what they are.

        In a function that is captured also a scalar of its arguments.

        Raises:
            OverflowError: An integer that does not fit int64.
            TypeError: Neither bool, integer nor float.
        """
        self._items.append(value if isinstance(value, CapturedScalar) else _scalar(value))
        return self

    def add_dep(self, handle: object) -> Self:
        """Run only after the task of this handle: if that is of the same run, only when it has succeeded.

        Raises:
            TypeError: Not the handle of a submitted task.
        """
        if not isinstance(handle, _core.Task | RecordedTask):
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
    def deps(self) -> list[object]:
        """The handles of `add_dep`. Not to be changed."""
        return self._deps

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it at all."""
        return not self._items and not self._deps

    @property
    def tensors(self) -> tuple[tuple[Tensor, Tag], ...]:
        """Tensors with their tags, in order."""
        return tuple(item for item in self._items if isinstance(item, tuple))

    @property
    def items(self) -> list[tuple[Tensor, Tag] | Scalar | CapturedScalar]:
        """Tensors with their tags, and scalars, in order. Not to be changed."""
        return self._items

    @property
    def uses(self) -> list[tuple[Tensor, Mode]]:
        """What the task does with memory, for `MemoryRegistry.resolve`. Not to be changed."""
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
                items.append(item.value if isinstance(item, CapturedScalar) else item)
        return items


def check_args(args: TaskArgs) -> TaskArgs:
    """Raise TypeError unless `args` are TaskArgs."""
    if not isinstance(args, TaskArgs):
        raise TypeError(f"the arguments of a task are TaskArgs, not {type(args).__name__}")
    return args


EMPTY_ARGS = TaskArgs()
"""The snapshot of arguments without any; never changed."""


def _not_yet() -> RuntimeError:
    return RuntimeError(
        "the function is being captured and its tasks have no results: return a task from it to get its "
        "result from each launch"
    )


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
