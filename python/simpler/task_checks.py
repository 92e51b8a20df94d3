"""What a task must be before it is submitted."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, SupportsIndex

from simpler.callables import CallableHandle
from simpler.errors import ClosedError, MemoryRangeError

if TYPE_CHECKING:
    from simpler.task_args import TaskArgs


def ended(what: str) -> ClosedError:
    """The error of submitting after the function has returned."""
    return ClosedError(
        f"{what}: the run has ended; an Orchestrator is valid only inside the function it was given to"
    )


def foreign(handle: object) -> Exception:
    """The error of a handle that is not this Worker's, or is none."""
    if isinstance(handle, CallableHandle):
        return ValueError(f"{handle.name!r} was registered with another Worker")
    return TypeError(f"a task needs a CallableHandle from Worker.register(), not {handle!r}")


def chip_of(worker: object, count: int) -> int:
    """`worker` as the id of one of `count` chips.

    Raises:
        TypeError: No integer.
        ValueError: There is no such chip.
    """
    if isinstance(worker, bool) or not isinstance(worker, SupportsIndex):
        raise TypeError(f"worker= is one chip's id: {worker!r}")
    number = operator.index(worker)
    if not 0 <= number < count:
        raise ValueError(f"worker={worker}: there are {count} chips")
    return number


def check_host_memory(args: TaskArgs) -> None:
    """Raise MemoryRangeError when a task of a sub worker names memory of a device."""
    for tensor, _ in args.tensors:
        if tensor.buffer.allocation.worker >= 0:
            raise MemoryRangeError(
                f"a sub worker cannot be given a {tensor.buffer.allocation.text}: host memory only"
            )
