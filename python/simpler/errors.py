"""Every error of the public API: one tree under SimplerError, all picklable with their attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

Path = tuple[int, ...]


class SimplerError(RuntimeError):
    """Base of all errors here. ``str()`` shows the cause itself: a log line is enough to act on."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args, dict(self.__dict__))


def _restore(
    cls: type[SimplerError], args: tuple[object, ...], attributes: dict[str, object]
) -> SimplerError:
    # OSError (of TimeoutError) has a layout of its own, which RuntimeError's __new__ refuses.
    error = OSError.__new__(cls, *args) if issubclass(cls, OSError) else RuntimeError.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class ClosedError(SimplerError):
    """Used in the wrong lifecycle state."""


class ConfigError(SimplerError, ValueError):
    """An option, or a combination of options, that cannot work."""


class BackPressureError(SimplerError):
    """Slots, heap or arena stayed full past the timeout; the text says what to enlarge."""


class MemoryRangeError(SimplerError):
    """Memory that is freed, lost, pinned, another's or out of range was named; nothing was touched."""


class UnknownExtensionError(SimplerError, LookupError):
    """No such extension on this worker: registered after its init(), or never."""


class WorkerError(SimplerError):
    """Something happened to one worker.

    Attributes:
        path: The worker's ids from the root down; empty when no single worker is meant.
        device_id: The chip's device, None for a worker without one.
        pid: The process, None when there is none.
    """

    path: Path
    device_id: int | None
    pid: int | None

    def __init__(
        self, message: str, *, path: Path = (), device_id: int | None = None, pid: int | None = None
    ) -> None:
        super().__init__(message)
        self.path = tuple(path)
        self.device_id = device_id
        self.pid = pid


class WorkerDiedError(WorkerError):
    """The worker's process ended. The text has the signal's name or exit code and what it was doing."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """The deadline passed first.

    Attributes:
        started: Whether the work had begun. If not, it never will.
        waited_for: What the caller was waiting for.
        timeout_s: The limit that passed, in seconds.
    """

    started: bool
    waited_for: str
    timeout_s: float | None

    def __init__(
        self,
        message: str,
        *,
        path: Path = (),
        device_id: int | None = None,
        pid: int | None = None,
        started: bool = False,
        waited_for: str = "",
        timeout_s: float | None = None,
    ) -> None:
        super().__init__(message, path=path, device_id=device_id, pid=pid)
        self.started = started
        self.waited_for = waited_for
        self.timeout_s = timeout_s


class RemoteError(SimplerError):
    """An exception in a child. Its traceback is shown as a note from Python 3.11 on.

    Attributes:
        type_name: The exception's type as the child names it; "" when a handler returned a message.
        message: The exception's own text, whole.
        traceback: The child's formatted traceback; may be empty.
        path: The worker's ids from the root down.
        device_id: The chip's device, None for a worker without one.
    """

    type_name: str
    message: str
    traceback: str
    path: Path
    device_id: int | None
    __notes__: list[str]

    def __init__(
        self,
        *,
        type_name: str,
        message: str,
        traceback: str = "",
        path: Path = (),
        device_id: int | None = None,
    ) -> None:
        kind = f"{type_name}: " if type_name else ""
        super().__init__(f"{_where(path, device_id)}: {kind}{message}")
        self.type_name = type_name
        self.message = message
        self.traceback = traceback
        self.path = tuple(path)
        self.device_id = device_id
        if traceback:
            self.__notes__ = [f"Traceback in {_where(path, device_id)}:\n{traceback.rstrip()}"]


class StartupError(SimplerError):
    """init() failed and left nothing behind.

    Attributes:
        cause: The first child's own error; None when the failure was in this process.
    """

    cause: RemoteError | WorkerError | None

    def __init__(self, message: str, *, cause: RemoteError | WorkerError | None = None) -> None:
        text = message if cause is None or str(cause) in message else f"{message}: {cause}"
        super().__init__(text)
        self.cause = cause
        self.__cause__ = cause


class ChipControlError(SimplerError):
    """A broadcast that was not wholly good. Build it with `make`, which picks the TimeoutError form.

    Attributes:
        extension: The extension's name.
        results: Replies by path.
        errors: Failures by path.
        pending: Paths still running when ``fail_fast`` ended the wait.
    """

    extension: str
    results: dict[Path, bytes]
    errors: dict[Path, RemoteError | WorkerError]
    pending: tuple[Path, ...]

    def __init__(
        self,
        extension: str,
        results: Mapping[Path, bytes],
        errors: Mapping[Path, RemoteError | WorkerError],
        pending: tuple[Path, ...] = (),
    ) -> None:
        total = len(results) + len(errors) + len(pending)
        text = f"extension {extension!r} failed on {len(errors)} of {total} chips"
        if pending:
            text += f" (still running: worker {', '.join(map(_path_text, pending))})"
        lines = [f"  {_path_text(path)}: {errors[path]}" for path in sorted(errors)]
        super().__init__("\n".join([text + ":", *lines]))
        self.extension = extension
        self.results = dict(results)
        self.errors = dict(errors)
        self.pending = tuple(pending)

    @staticmethod
    def make(
        extension: str,
        results: Mapping[Path, bytes],
        errors: Mapping[Path, RemoteError | WorkerError],
        pending: tuple[Path, ...] = (),
    ) -> ChipControlError:
        """The error of a broadcast; also a TimeoutError when every failure is a time-out."""
        timed_out = bool(errors) and all(isinstance(error, TimeoutError) for error in errors.values())
        cls = ChipControlTimeoutError if timed_out else ChipControlError
        return cls(extension, results, errors, pending)


class ChipControlTimeoutError(ChipControlError, TimeoutError):
    """A broadcast in which every failure was a time-out."""


class RunCancelledError(SimplerError):
    """A run was cancelled before all of its tasks had begun."""


class TransferError(SimplerError):
    """A transfer failed, was cancelled or never began. Its access to the memory has ended.

    Attributes:
        transfer_id: `TransferHandle.id`.
        provider: The name of the transfer provider.
        path: The chip that it was to run on.
    """

    transfer_id: int
    provider: str
    path: Path

    def __init__(self, message: str, *, transfer_id: int, provider: str, path: Path) -> None:
        super().__init__(f"transfer {transfer_id} by {provider!r} on worker {_path_text(path)} {message}")
        self.transfer_id = transfer_id
        self.provider = provider
        self.path = tuple(path)


class TransferUnconfirmedError(TransferError):
    """A transfer whose access to the memory is not certified to have ended: the memory stays pinned."""


class TaskError(SimplerError):
    """A task failed.

    Attributes:
        callable: The name of the task's function.
        path: The worker that ran it.
        cause: Why.
        poisoned: How many other tasks of the run did not run because of it.
    """

    callable: str
    path: Path
    cause: BaseException
    poisoned: int

    def __init__(
        self,
        *,
        callable: str,  # noqa: A002 - the attribute's name in the public API
        path: Path,
        cause: BaseException,
        poisoned: int = 0,
    ) -> None:
        text = f"task {callable!r} on worker {_path_text(path)} failed: {cause}"
        if poisoned:
            text += f" ({poisoned} more {'task' if poisoned == 1 else 'tasks'} did not run because of it)"
        super().__init__(text)
        self.callable = callable
        self.path = tuple(path)
        self.cause = cause
        self.poisoned = poisoned
        self.__cause__ = cause


def _path_text(path: Path) -> str:
    return ".".join(map(str, path)) if path else "this worker"


def _where(path: Path, device_id: int | None) -> str:
    worker = f"worker {_path_text(path)}" if path else "this worker"
    return worker if device_id is None else f"{worker} (device {device_id})"
