"""From what the compiled core reports to the errors of the public API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simpler.errors import (
    BackPressureError,
    ClosedError,
    RemoteError,
    SimplerError,
    StartupError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

Remote = tuple[str, str, str]


class Failures:
    """Makes the exceptions of one tree: the `make_error` of `_core.Tree`.

    Refers to neither the tree nor the Worker, so that collecting the Worker collects the tree.
    """

    def __init__(self, device_ids: Sequence[int], children: int) -> None:
        self._device_ids = tuple(device_ids)
        self.pids = [0] * children

    def device_of(self, worker: int) -> int | None:
        """The device of a chip, None for a sub worker or no worker."""
        return self._device_ids[worker] if 0 <= worker < len(self._device_ids) else None

    def __call__(
        self,
        kind: str,
        worker: int,
        message: str,
        started: bool,
        remote: Remote | None,
        limit: tuple[str, float] | None = None,
    ) -> SimplerError:
        """One exception; `kind` and the rest are as `_core.MakeError` says."""
        if remote is not None:
            return self.remote(worker, remote)
        if kind == "closed":
            return ClosedError(message)
        if kind == "backpressure":
            return BackPressureError(message)
        if kind == "startup":
            return StartupError(message)
        path = (worker,) if worker >= 0 else ()
        device = self.device_of(worker)
        pid = (self.pids[worker] or None) if 0 <= worker < len(self.pids) else None
        if kind == "timeout":
            waited_for, timeout_s = limit or (message, None)
            return WorkerTimeoutError(
                message,
                path=path,
                device_id=device,
                pid=pid,
                started=started,
                waited_for=waited_for,
                timeout_s=timeout_s,
            )
        if kind == "died":
            return WorkerDiedError(message, path=path, device_id=device, pid=pid)
        return WorkerError(message, path=path, device_id=device, pid=pid)

    def remote(self, worker: int, remote: Remote) -> RemoteError:
        """The error of an exception in a child."""
        type_name, message, traceback = remote
        return RemoteError(
            type_name=type_name,
            message=message,
            traceback=traceback,
            path=(worker,) if worker >= 0 else (),
            device_id=self.device_of(worker),
        )


def startup_error(error: BaseException) -> StartupError:
    """What init() raises for what Tree.start raised."""
    if isinstance(error, StartupError):
        return error
    cause = error if isinstance(error, RemoteError | WorkerError) else None
    return (
        StartupError("init() failed and left nothing behind", cause=cause)
        if cause
        else StartupError(str(error))
    )
