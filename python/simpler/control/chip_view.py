"""ChipView: all that an extension's handler sees of the chip it runs in.

Nothing here allocates, runs, resets or leads to what does.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from simpler.dtypes import as_dtype
from simpler.errors import MemoryRangeError
from simpler.tensor import array_over

if TYPE_CHECKING:
    import logging
    from types import TracebackType

    from typing_extensions import Self

    from simpler.shared_map import SharedMap

_ENTRY = struct.Struct("<QQHBx")  # address, nbytes, bytes of the name that follows, flags
_HOST_VISIBLE = 1
_READONLY = 2


@dataclass(frozen=True)
class BufferEntry:
    """A buffer as it is named to a child.

    Attributes:
        name: The key of a mapping; "" for a sequence.
        address: In the child's process.
        nbytes: Size.
        host_visible: Whether the host can touch it there.
        readonly: Whether arrays of it are read-only.
    """

    name: str
    address: int
    nbytes: int
    host_visible: bool = True
    readonly: bool = False


def pack_buffers(entries: Sequence[BufferEntry]) -> bytes:
    """The meta bytes that carry buffers to a child, in order; empty for none.

    Raises:
        ValueError: A name above 65,535 bytes, or two equal names.
    """
    names = [entry.name for entry in entries if entry.name]
    if len(set(names)) != len(names):
        raise ValueError(f"two buffers have the same name: {names}")
    packed = []
    for entry in entries:
        name = entry.name.encode("utf-8", "surrogateescape")
        if len(name) > 0xFFFF:
            raise ValueError(f"a buffer's name is too long: {len(name)} bytes")
        flags = (_HOST_VISIBLE if entry.host_visible else 0) | (_READONLY if entry.readonly else 0)
        packed.append(_ENTRY.pack(entry.address, entry.nbytes, len(name), flags) + name)
    return b"".join(packed)


def unpack_buffers(meta: bytes) -> list[BufferEntry]:
    """The reverse of `pack_buffers`.

    Raises:
        ValueError: The bytes do not decode.
    """
    entries = []
    at = 0
    while at < len(meta):
        if at + _ENTRY.size > len(meta):
            raise ValueError(f"the buffers of a call end in the middle: {len(meta)} bytes")
        address, nbytes, name_bytes, flags = _ENTRY.unpack_from(meta, at)
        at += _ENTRY.size
        if at + name_bytes > len(meta):
            raise ValueError(f"the buffers of a call end in the middle: {len(meta)} bytes")
        name = meta[at : at + name_bytes].decode("utf-8", "surrogateescape")
        at += name_bytes
        entries.append(
            BufferEntry(name, address, nbytes, bool(flags & _HOST_VISIBLE), bool(flags & _READONLY))
        )
    return entries


class BufferView:
    """One buffer of a call, usable until the handler returns."""

    __slots__ = ("_address", "_data", "_host_visible", "_nbytes", "name")

    def __init__(self, entry: BufferEntry, data: memoryview | None) -> None:
        self.name = entry.name
        self._address: int | None = entry.address
        self._nbytes = entry.nbytes
        self._host_visible = entry.host_visible
        self._data = data

    @property
    def address(self) -> int:
        """In this process.

        Raises:
            MemoryRangeError: The handler it was given to has returned.
        """
        return self._alive()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._nbytes

    def array(
        self, shape: int | Sequence[int] | None = None, dtype: object = "uint8"
    ) -> np.ndarray[Any, np.dtype[Any]]:
        """A numpy view from the start of the buffer; without a shape, of all of it in one dimension.

        Raises:
            MemoryRangeError: It is larger than the buffer, the host cannot touch this memory, or the handler
                has returned.
            ValueError: No such dtype.
        """
        self._alive()
        element = as_dtype(dtype)
        if not self._host_visible:
            raise MemoryRangeError(f"{self!r} is memory that the host cannot touch: use its address")
        dims = self._nbytes // element.itemsize if shape is None else shape
        count = int(np.prod(dims, dtype=object))
        if count < 0 or count * element.itemsize > self._nbytes:
            raise MemoryRangeError(
                f"{dims} x {element} is {count * element.itemsize} bytes, more than {self!r}"
            )
        if self._data is None:
            return np.empty(dims, element.numpy)
        return array_over(self._data, dims, element.numpy)

    def _alive(self) -> int:
        if self._address is None:
            raise MemoryRangeError(f"{self!r} is dead: the handler it was given to has returned")
        return self._address

    def expire(self) -> None:
        """End its life: the handler has returned."""
        self._address = None
        self._data = None

    def __repr__(self) -> str:
        label = f" {self.name!r}" if self.name else ""
        return f"<BufferView{label} of {self._nbytes} bytes>"


class BufferViews(Sequence[BufferView]):
    """The buffers of a call, by position and by name. Dead once the handler has returned."""

    __slots__ = ("_by_name", "_views")

    def __init__(self, views: Sequence[BufferView] = ()) -> None:
        self._views = tuple(views)
        self._by_name = {view.name: view for view in views if view.name}

    def __getitem__(self, key: int | slice | str) -> Any:
        """A buffer by position or name (KeyError, IndexError), or several by slice."""
        if isinstance(key, str):
            if key not in self._by_name:
                raise KeyError(f"no buffer {key!r} in this call; there are {list(self._by_name)}")
            return self._by_name[key]
        return self._views[key]

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[BufferView]:
        return iter(self._views)

    def __contains__(self, item: object) -> bool:
        return item in self._by_name if isinstance(item, str) else item in self._views

    @property
    def names(self) -> tuple[str, ...]:
        """Names in order, of those that have one."""
        return tuple(self._by_name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End their life: the handler has returned."""
        for view in self._views:
            view.expire()


NO_BUFFERS = BufferViews()


def make_buffers(meta: bytes, shared: SharedMap) -> BufferViews:
    """The views of one call; use it in a ``with`` that lasts as long as the handler runs.

    Raises:
        ValueError: The meta bytes do not decode.
        MemoryRangeError: Host-visible memory that this process does not map.
    """
    views = []
    for entry in unpack_buffers(meta):
        data = None
        if entry.host_visible and entry.nbytes:
            data = shared.bytes_at(entry.address, entry.nbytes)
            if entry.readonly:
                data = data.toreadonly()
        views.append(BufferView(entry, data))
    return BufferViews(views)


class ChipView:
    """What a handler gets as its first argument.

    Attributes:
        device_id: The device of this chip.
        worker_id: The path of this chip from the root worker.
        platform: The backend's name.
        log: A logger whose records reach the parent with path and device.
        state: A dict of this extension on this chip, kept between calls. Concurrent handlers share it and
            lock it themselves.
        buffers: The buffers named in this call.
    """

    __slots__ = ("buffers", "device_id", "log", "platform", "state", "worker_id")

    device_id: int
    worker_id: tuple[int, ...]
    platform: str
    log: logging.Logger
    state: dict[Any, Any]
    buffers: BufferViews

    def __init__(
        self,
        *,
        device_id: int,
        worker_id: tuple[int, ...],
        platform: str,
        log: logging.Logger,
        state: dict[Any, Any],
        buffers: BufferViews = NO_BUFFERS,
    ) -> None:
        put = object.__setattr__
        put(self, "device_id", device_id)
        put(self, "worker_id", tuple(worker_id))
        put(self, "platform", platform)
        put(self, "log", log)
        put(self, "state", state)
        put(self, "buffers", buffers)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"ChipView.{name} cannot be set: keep things in ChipView.state")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"ChipView.{name} cannot be deleted")

    def __repr__(self) -> str:
        path = ".".join(map(str, self.worker_id))
        return f"<ChipView worker {path}, {self.platform} device {self.device_id}>"


def with_buffers(view: ChipView, buffers: BufferViews) -> ChipView:
    """The same view for a call that names buffers; `state` is shared."""
    return ChipView(
        device_id=view.device_id,
        worker_id=view.worker_id,
        platform=view.platform,
        log=view.log,
        state=view.state,
        buffers=buffers,
    )
