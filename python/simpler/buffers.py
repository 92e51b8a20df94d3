"""Buffer and HostBuffer: handles to memory that the registry of one Worker keeps.

Thread safety: handles may be used from any thread. Made by the registry (`memory.py`) only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simpler import _core
from simpler.errors import MemoryRangeError
from simpler.states import State
from simpler.tensor import Tensor, array_over, make_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    import numpy as np
    from typing_extensions import Self

    from simpler.memory import MemoryRegistry
    from simpler.pins import Unconfirmed

HOST = -1
"""The owner of host memory, in place of a worker's index."""


class Allocation:
    """What the registry knows about one block of memory. The registry's lock guards all that changes."""

    __slots__ = (
        "address", "device_id", "generation", "graph_id", "holds", "key", "nbytes", "pin_refusal", "pins",
        "registry", "state", "unconfirmed", "worker",
    )  # fmt: skip

    def __init__(
        self,
        registry: MemoryRegistry,
        key: int,
        worker: int,
        device_id: int,
        address: int,
        nbytes: int,
        generation: int,
        graph_id: int,
    ) -> None:
        self.registry = registry
        self.key = key
        self.worker = worker
        self.device_id = device_id
        self.address = address
        self.nbytes = nbytes
        self.generation = generation
        self.graph_id = graph_id  # the engine's name for it
        self.state = State.LIVE
        self.holds = 0  # uses other than tasks
        self.pins: list[Pin] = []
        self.pin_refusal: str | None = None  # why it cannot be pinned, if so
        self.unconfirmed: tuple[Unconfirmed, ...] = ()  # what transfers may still touch

    @property
    def text(self) -> str:
        """For messages: what it is and where."""
        if self.worker == HOST:
            return f"host buffer of {self.nbytes} bytes"
        return f"buffer of {self.nbytes} bytes on worker {self.worker}"

    def unusable(self) -> MemoryRangeError:
        """The error that says why it cannot be used. REQUIRES: it is not LIVE."""
        if self.state is State.LOST:
            return MemoryRangeError(
                f"{self.text} is lost: the process that held it (generation {self.generation}) is gone"
            )
        how = "by free()" if self.state is State.FREED else "when its Worker closed"
        return MemoryRangeError(f"{self.text} was freed {how}")


class Pin:
    """A name on a buffer that an engine keeps registered: the buffer cannot be freed until `release`."""

    __slots__ = ("_allocation", "name")

    def __init__(self, allocation: Allocation, name: str) -> None:
        self._allocation = allocation
        self.name = name

    @property
    def active(self) -> bool:
        """Whether it still holds: false after `release`, and after the death of the chip."""
        return self in self._allocation.pins

    def release(self) -> None:
        """Let the buffer be freed again; nothing if that has happened already."""
        self._allocation.registry.pins.unpin(self._allocation, self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Pin {self.name!r} on {self._allocation.text}>"


class Buffer:
    """Device memory of one chip, made by ``Worker.malloc``."""

    __slots__ = ("__weakref__", "_allocation")

    def __init__(self, allocation: Allocation) -> None:
        self._allocation = allocation

    @property
    def allocation(self) -> Allocation:
        """The registry's record."""
        return self._allocation

    @property
    def nbytes(self) -> int:
        """Size in bytes, as asked for."""
        return self._allocation.nbytes

    @property
    def worker_id(self) -> int:
        """The id of the chip that owns it."""
        return self._allocation.worker

    @property
    def device_id(self) -> int:
        """The device of the chip that owns it."""
        return self._allocation.device_id

    @property
    def address(self) -> int:
        """Where it is in the chip's process: for engines and logs, never accepted back."""
        return self._allocation.address

    @property
    def freed(self) -> bool:
        """Whether the handle is dead: freed, lost with its chip, or its Worker closed."""
        return self._allocation.state is not State.LIVE

    def pin(self, name: str) -> Pin:
        """Forbid `free` until the pin is released; the name shows in the error.

        Raises:
            MemoryRangeError: The buffer is dead.
        """
        return self._allocation.registry.pins.pin(self._allocation, name)

    def tensor(
        self,
        shape: int | Sequence[int],
        dtype: object,
        *,
        offset: int = 0,
        strides: Sequence[int] | None = None,
    ) -> Tensor:
        """A typed part of this memory.

        Args:
            shape: Elements per dimension, 16 dimensions at most; zeros are allowed.
            dtype: A numpy dtype or a name such as ``"bfloat16"``.
            offset: Bytes from the start to the first element.
            strides: Bytes between neighbours per dimension; None is C order.

        Raises:
            MemoryRangeError: It does not lie inside the buffer, or the buffer is dead.
            ValueError: A shape, dtype or alignment that cannot be.
        """
        if self._allocation.state is not State.LIVE:
            raise self._allocation.unusable()
        return make_tensor(self, shape, dtype, offset, strides)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a Buffer belongs to one Worker of one process and cannot be pickled: name it in the call"
        )

    def __repr__(self) -> str:
        state = self._allocation.state
        return f"<Buffer {self.nbytes} bytes, worker {self.worker_id}, {state.value}>"


class HostBuffer(_core.SharedBuffer):
    """Memory that the parent and all its children share at one address, made by ``Worker.create_buffer``.

    Supports the buffer protocol (unsigned bytes, writable) and DLPack. Views stay readable after the
    Worker has closed: the mapping goes with the last of them.
    """

    def __init__(self, region: _core.SharedRegion, offset: int, allocation: Allocation) -> None:
        super().__init__(region, offset, allocation.nbytes)
        self._allocation = allocation

    @property
    def allocation(self) -> Allocation:
        """The registry's record."""
        return self._allocation

    @property
    def freed(self) -> bool:
        """Whether the handle is dead: freed, or its Worker closed."""
        return self._allocation.state is not State.LIVE

    def array(
        self, shape: int | Sequence[int], dtype: object, *, offset: int = 0, readonly: bool = False
    ) -> np.ndarray[Any, np.dtype[Any]]:
        """A numpy array on this memory, without a copy. It counts as a view until it is collected.

        Args:
            shape: Elements per dimension.
            dtype: A numpy dtype or a name; see `DType.numpy` for the type that views get.
            offset: Bytes from the start.
            readonly: The array cannot be written, nor made writable.

        Raises:
            MemoryRangeError: It does not lie inside the buffer, or the buffer is dead.
        """
        part = self.tensor(shape, dtype, offset=offset)
        view = memoryview(self)
        return array_over(view.toreadonly() if readonly else view, part.shape, part.dtype.numpy, offset)

    def pin(self, name: str) -> Pin:
        """Forbid `free` until the pin is released; the name shows in the error.

        Raises:
            MemoryRangeError: The buffer is dead.
        """
        return self._allocation.registry.pins.pin(self._allocation, name)

    def tensor(
        self,
        shape: int | Sequence[int],
        dtype: object,
        *,
        offset: int = 0,
        strides: Sequence[int] | None = None,
    ) -> Tensor:
        """A typed part of this memory; arguments and errors as `Buffer.tensor`."""
        if self._allocation.state is not State.LIVE:
            raise self._allocation.unusable()
        return make_tensor(self, shape, dtype, offset, strides)

    def __dlpack__(self, **options: Any) -> Any:
        """A capsule of the bytes as one dimension of uint8; options as numpy's ``ndarray.__dlpack__``."""
        return self.array(self.nbytes, "uint8").__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # kDLCPU

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a HostBuffer belongs to one Worker and cannot be pickled: name it in the call")

    def __repr__(self) -> str:
        return f"<HostBuffer {self.nbytes} bytes, {self._allocation.state.value}>"


class ScratchBuffer(HostBuffer):
    """Host memory of `Orchestrator.alloc`, which nobody frees by hand."""

    def retire_unless_viewed(self) -> bool:
        """End the handle; false while something views the memory, which then stays."""
        try:
            self.retire()
        except BufferError:
            return False
        return True

    def __del__(self) -> None:
        if "_allocation" in self.__dict__:
            self._allocation.registry.drop_later(self._allocation)
