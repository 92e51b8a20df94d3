"""Functions that tasks run: registered with a Worker, inherited by its children or shipped to them."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it ships no types

from simpler.errors import ConfigError
from simpler.kernels import NativeKernel

Target = Callable[..., Any] | NativeKernel


@dataclass(frozen=True, eq=False, slots=True)
class CallableHandle:
    """A function registered with one Worker: what its tasks name.

    Attributes:
        id: Its number in that Worker.
        name: Shown in errors and in `status()`.
        native: Whether it is a native kernel.
    """

    id: int
    name: str
    native: bool
    table: CallableTable = field(repr=False)


@dataclass(slots=True)
class _Entry:
    target: Target
    name: str
    blob: bytes | None
    """How it is shipped; None when the children inherited it, or when shipping failed."""


class CallableTable:
    """Every callable of one Worker. Its position is its number; numbers are never used again.

    Thread safety: any thread. Fork: children read the copy they inherit.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []

    def add(self, target: Target, name: str | None, *, ship: bool) -> tuple[CallableHandle, bytes | None]:
        """Add one; with `ship`, also the bytes that tell a running child of it.

        Raises:
            TypeError: not callable, or (with `ship`) it cannot be pickled.
        """
        native = isinstance(target, NativeKernel)
        if not native and not callable(target):
            raise TypeError(f"register() takes a Python function or a NativeKernel, not {target!r}")
        label = name if name is not None else _name_of(target)
        if not isinstance(label, str) or not label:
            raise ConfigError(f"the name of a callable must be a str that is not empty: {name!r}")
        blob = _pack(target) if ship else None
        with self._lock:
            number = len(self._entries)
            self._entries.append(_Entry(target, label, blob))
        return CallableHandle(number, label, native, self), blob

    def drop_blob(self, handle: CallableHandle) -> None:
        """Shipping failed: do not ship it again to a restarted child."""
        with self._lock:
            self._entries[handle.id].blob = None

    def inherited(self) -> dict[int, Target]:
        """What a child forked now has, by number."""
        return {number: entry.target for number, entry in enumerate(self._entries)}

    def target(self, number: int) -> Target:
        """The function of one number."""
        return self._entries[number].target

    def shipped(self) -> list[tuple[int, bytes]]:
        """What a restarted child has to be told again."""
        with self._lock:
            return [
                (number, entry.blob) for number, entry in enumerate(self._entries) if entry.blob is not None
            ]

    def name(self, number: int) -> str:
        """The name of one."""
        return self._entries[number].name

    def names(self) -> list[str]:
        """Names by number."""
        with self._lock:
            return [entry.name for entry in self._entries]


def _name_of(target: Target) -> str:
    if isinstance(target, NativeKernel):
        return target.symbol
    return str(getattr(target, "__name__", None) or type(target).__name__)


def _pack(target: Target) -> bytes:
    if isinstance(target, NativeKernel):
        return pickle.dumps(("native", str(target.path), target.symbol))
    return pickle.dumps(("python", cloudpickle.dumps(target), None))


def pickled(value: object) -> bytes:
    """By the pickle module if that can, else by cloudpickle, which also takes lambdas and local classes."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:  # noqa: BLE001 - whatever it is, cloudpickle says it better if it cannot either
        return bytes(cloudpickle.dumps(value))


def unpack_target(blob: bytes) -> Target:
    """In a child: the function that `CallableTable.add` packed. Raises whatever loading it raises."""
    kind, what, symbol = pickle.loads(blob)
    if kind == "native":
        return NativeKernel.load(what, symbol)
    target: Callable[..., Any] = cloudpickle.loads(what)
    return target
