"""Transfers as a chip's process sees them: providers, what they are given, what they answer.

A provider moves data on a thread of the chip process while tasks go on. What it is given is checked memory;
what it answers says whether its access to that memory has ended (TR-1).
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from simpler import _core
from simpler.access import TransferAccess
from simpler.control.chip_view import BufferEntry, BufferView
from simpler.control.registry import same_callable
from simpler.errors import MemoryRangeError, UnknownExtensionError

if TYPE_CHECKING:
    from types import TracebackType

    import numpy as np
    from typing_extensions import Self

    from simpler.shared_map import SharedMap

_MAX_NAME = 255


class TransferOutcome(enum.IntEnum):
    """What a provider answered. OK and FAILED certify that its access has ended."""

    OK = 0
    FAILED = 1
    UNCONFIRMED = 2


@dataclass(frozen=True)
class TransferResult:
    """A provider's answer; made by `ok`, `failed` and `unconfirmed`."""

    outcome: TransferOutcome
    payload: bytes

    @classmethod
    def ok(cls, payload: bytes = b"") -> TransferResult:
        """It is done, and access has ended; `payload` is the result."""
        return cls(TransferOutcome.OK, bytes(payload))

    @classmethod
    def failed(cls, message: str) -> TransferResult:
        """It failed, and access has ended all the same. An engine's error code alone does not say that."""
        return cls(TransferOutcome.FAILED, _text(message))

    @classmethod
    def unconfirmed(cls, message: str) -> TransferResult:
        """Something may still touch the memory: it stays pinned."""
        return cls(TransferOutcome.UNCONFIRMED, _text(message))


class RangeLife:
    """How long the ranges of one transfer may be used: as long as its provider runs, in a ``with`` statement.

    Attributes:
        shared: The memory of this process that ranges may lie in.
        is_over: Whether the provider has returned.
    """

    __slots__ = ("is_over", "shared")

    def __init__(self, shared: SharedMap) -> None:
        self.shared = shared
        self.is_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_over = True


class TransferBuffer:
    """One range of a transfer, usable until the provider returns.

    Attributes:
        nbytes: Size in bytes.
        access: What the transfer does with it.
    """

    __slots__ = ("_address", "_host_visible", "_life", "access", "nbytes")

    def __init__(self, address: int, nbytes: int, host_visible: bool, writes: bool, life: RangeLife) -> None:
        """Check it.

        Raises:
            MemoryRangeError: The host is to see it, and this process does not map it.
        """
        self._address = address
        self._host_visible = host_visible
        self._life = life
        self.nbytes = nbytes
        self.access = TransferAccess.WRITE if writes else TransferAccess.READ
        if host_visible and not life.shared.covers(address, nbytes):
            raise MemoryRangeError(
                f"{nbytes} bytes at {address:#x} are not in memory that this process shares with the node"
            )

    @property
    def address(self) -> int:
        """In this process.

        Raises:
            MemoryRangeError: The provider it was given to has returned.
        """
        if self._life.is_over:
            raise MemoryRangeError(f"{self!r} is dead: the provider it was given to has returned")
        return self._address

    def array(
        self, shape: int | Sequence[int] | None = None, dtype: object = "uint8"
    ) -> np.ndarray[Any, np.dtype[Any]]:
        """A numpy view, read-only for READ; arguments and errors as `BufferView.array`."""
        address = self.address
        readonly = self.access is TransferAccess.READ
        data = None
        if self._host_visible:
            data = self._life.shared.bytes_at(address, self.nbytes)
            data = data.toreadonly() if readonly else data
        entry = BufferEntry("", address, self.nbytes, self._host_visible, readonly)
        return BufferView(entry, data).array(shape, dtype)

    def copy_from(
        self, source: TransferBuffer, *, offset: int = 0, nbytes: int | None = None, whole: int = 0
    ) -> None:
        """Copy bytes of another range of this transfer to the same place here, without the GIL.

        Args:
            source: Of the same size, or larger.
            offset: Where to begin, in both.
            nbytes: None is all from there on.
            whole: Bytes that the transfer copies altogether. From 4 MiB on copies go past the processor's
                caches, which is faster for bytes that nobody needs at once.

        Raises:
            MemoryRangeError: Out of range, not to be written, or memory that the host cannot touch.
        """
        size = self.nbytes - offset if nbytes is None else nbytes
        if self.access is not TransferAccess.WRITE:
            raise MemoryRangeError(f"{self!r} is not to be written")
        if offset < 0 or size < 0 or offset + size > min(self.nbytes, source.nbytes):
            raise MemoryRangeError(
                f"{size} bytes from offset {offset} are not inside {self!r} and {source!r}"
            )
        for part in (self, source):
            if not part._host_visible:  # noqa: SLF001 - of this class
                raise MemoryRangeError(f"{part!r} is memory that the host cannot touch: use its address")
        _core.copy_memory(self.address + offset, source.address + offset, size, whole)

    def __repr__(self) -> str:
        return f"<TransferBuffer of {self.nbytes} bytes, {self.access.name}>"


@dataclass(frozen=True)
class TransferRequest:
    """What a provider is asked to do.

    Attributes:
        id: The number of the transfer, never used again by this Worker.
        payload: The submitter's bytes.
        ranges: The memory, in the submitter's order.
        device_id: The device of this chip.
        worker_id: The path of this chip.
    """

    id: int
    payload: bytes
    ranges: tuple[TransferBuffer, ...]
    device_id: int
    worker_id: tuple[int, ...]


class CancelToken:
    """Whether somebody has asked the provider to stop."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    @property
    def cancelled(self) -> bool:
        """Whether it should stop."""
        return self._event.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it should stop; false when the time ran out."""
        return self._event.wait(timeout_s)

    def cancel(self) -> None:
        """Ask it to stop."""
        self._event.set()


Provider = Callable[[TransferRequest, CancelToken], TransferResult]


@dataclass(frozen=True)
class RegisteredProvider:
    """A provider as a Worker takes it along at init().

    Attributes:
        name: 1 to 255 printable characters.
        provider: See `register_transfer_provider`.
        id: Its position in the snapshot.
    """

    name: str
    provider: Provider
    id: int


_lock = threading.Lock()
_providers: dict[str, Provider] = {}


def register_transfer_provider(name: str, provider: Provider) -> None:
    """Register a provider for Workers that are initialised from now on.

    Registering the same one again changes nothing.

    Args:
        name: 1 to 255 printable characters.
        provider: Called as ``provider(request: TransferRequest, cancel: CancelToken) -> TransferResult`` on a
            thread of the chip's process, several at once. An exception or another result is "unconfirmed".
            An object may have more methods, which run there too: ``confirm(ids) -> Iterable[int]`` says
            which unconfirmed transfers no longer touch memory, ``reset()`` tears the engine down, after
            which none does, and ``close()`` is called once on an orderly stop.

    Raises:
        ValueError: The name is malformed, or taken by another provider.
        TypeError: `provider` is not callable.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME or not name.isprintable():
        raise ValueError(f"a provider's name is 1 to {_MAX_NAME} printable characters: {name!r}")
    if not callable(provider):
        raise TypeError(f"transfer provider {name!r} is not callable: {provider!r}")
    with _lock:
        known = _providers.setdefault(name, provider)
    if not same_callable(known, provider):
        raise ValueError(f"transfer provider {name!r} is already registered: {known!r}")


def unregister_transfer_provider(name: str) -> None:
    """Remove a name. Workers that are already initialised keep their copy.

    Raises:
        UnknownExtensionError: The name is not registered.
    """
    with _lock:
        if _providers.pop(name, None) is None:
            raise UnknownExtensionError(f"transfer provider {name!r} is not registered")


def snapshot() -> tuple[RegisteredProvider, ...]:
    """Every provider in the order registered; what a Worker takes along at init()."""
    with _lock:
        return tuple(
            RegisteredProvider(name, provider, position)
            for position, (name, provider) in enumerate(_providers.items())
        )


def unknown_provider(name: object) -> UnknownExtensionError:
    """The error for a name that a Worker does not have: registered after its init(), or never."""
    with _lock:
        is_registered = name in _providers
    if is_registered:
        return UnknownExtensionError(
            f"transfer provider {name!r} was registered after init() of this worker: it exists for later "
            "workers only"
        )
    return UnknownExtensionError(
        f"transfer provider {name!r} was never registered: call register_transfer_provider before init()"
    )


def _text(message: str) -> bytes:
    if not isinstance(message, str):
        raise TypeError(f"a transfer's message is a str, not {type(message).__name__}")
    return message.encode("utf-8", "backslashreplace")


def confirmed_ids(answer: object, asked: Sequence[int]) -> list[int]:
    """What a provider's ``confirm`` returned.

    Raises:
        TypeError: Nothing to iterate over.
        ValueError: It was not asked about one of them.
    """
    if not isinstance(answer, Iterable):
        raise TypeError(
            f"confirm() returned {type(answer).__name__}: it must return the ids that have stopped"
        )
    stopped = list(answer)
    for number in stopped:
        if number not in asked:
            raise ValueError(f"confirm() named transfer {number!r}, which it was not asked about")
    return stopped
