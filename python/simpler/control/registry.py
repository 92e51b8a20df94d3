"""The process-wide register of chip-control extensions; a Worker copies it at init().

Thread safety: all functions may be called from any thread.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass

from simpler.errors import UnknownExtensionError

Handler = Callable[..., object]
OnClose = Callable[..., object]

_MAX_NAME = 255
_BOUND = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)


@dataclass(frozen=True)
class Extension:
    """One registered handler.

    Attributes:
        name: 1 to 255 printable characters.
        handler: Called as ``handler(chip, payload, device_id)``.
        concurrent: Runs beside tasks and other handlers instead of between them.
        on_close: Called as ``on_close(chip)`` at an orderly stop; None for nothing.
        id: Its position in the snapshot that a Worker took.
    """

    name: str
    handler: Handler
    concurrent: bool
    on_close: OnClose | None
    id: int


_lock = threading.Lock()
_entries: dict[str, tuple[Handler, bool, OnClose | None]] = {}


def register_chip_control_extension(
    name: str, handler: Handler, *, concurrent: bool = False, on_close: OnClose | None = None
) -> None:
    """Register a handler for Workers that are initialised from now on.

    Registering the same function again, a bound method of the same object or an equal partial changes
    nothing.

    Args:
        name: 1 to 255 printable characters.
        handler: Called in each chip's process as ``handler(chip: ChipView, payload: bytes, device_id: int)``.
            Bytes-like is the reply, None or "" an empty reply, another str a failure with that message.
        concurrent: Run on a thread beside tasks and exclusive handlers, four at once per chip.
        on_close: Called as ``on_close(chip)`` once in each chip's process on an orderly stop.

    Raises:
        ValueError: The name is malformed, or taken by another handler or other options.
        TypeError: `handler` or `on_close` is not callable.
    """
    _check_name(name)
    if not callable(handler):
        raise TypeError(f"the handler of extension {name!r} is not callable: {handler!r}")
    if on_close is not None and not callable(on_close):
        raise TypeError(f"on_close of extension {name!r} is not callable: {on_close!r}")
    with _lock:
        known = _entries.get(name)
        if known is None:
            _entries[name] = (handler, bool(concurrent), on_close)
            return
        if not same_callable(known[0], handler):
            raise ValueError(f"extension {name!r} is already registered with another handler: {known[0]!r}")
        if known[1] != bool(concurrent) or not _same_optional(known[2], on_close):
            raise ValueError(f"extension {name!r} is already registered with other options")


def unregister_chip_control_extension(name: str) -> None:
    """Remove a name. Workers that are already initialised keep their copy.

    Raises:
        UnknownExtensionError: The name is not registered.
    """
    with _lock:
        if _entries.pop(name, None) is None:
            raise UnknownExtensionError(f"extension {name!r} is not registered")


def snapshot() -> tuple[Extension, ...]:
    """Every extension in the order registered; what a Worker takes along at init()."""
    with _lock:
        return tuple(
            Extension(name, handler, concurrent, on_close, position)
            for position, (name, (handler, concurrent, on_close)) in enumerate(_entries.items())
        )


def is_registered(name: str) -> bool:
    """Whether the name is registered now, for Workers to come."""
    with _lock:
        return name in _entries


def unknown_extension(name: str) -> UnknownExtensionError:
    """The error for a name that a Worker does not have: registered after its init(), or never."""
    if is_registered(name):
        return UnknownExtensionError(
            f"extension {name!r} was registered after init() of this worker: it exists for later workers only"
        )
    return UnknownExtensionError(
        f"extension {name!r} was never registered: call register_chip_control_extension before init()"
    )


def same_callable(a: object, b: object) -> bool:
    """Whether two callables do the same: one function, one method of one object, or equal partials."""
    if a is b:
        return True
    if isinstance(a, functools.partial) and isinstance(b, functools.partial):
        return (
            same_callable(a.func, b.func)
            and len(a.args) == len(b.args)
            and all(map(_same_value, a.args, b.args))
            and a.keywords.keys() == b.keywords.keys()
            and all(_same_value(value, b.keywords[key]) for key, value in a.keywords.items())
        )
    # Equality of bound methods compares the object by identity.
    return isinstance(a, _BOUND) and isinstance(b, _BOUND) and a == b


def _same_optional(a: OnClose | None, b: OnClose | None) -> bool:
    return a is b or (a is not None and b is not None and same_callable(a, b))


def _same_value(a: object, b: object) -> bool:
    if a is b or same_callable(a, b):
        return True
    try:
        return bool(a == b)
    except Exception:  # noqa: BLE001 - values whose comparison fails (arrays) are told apart by identity
        return False


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME or not name.isprintable():
        raise ValueError(f"an extension's name is 1 to {_MAX_NAME} printable characters: {name!r}")
