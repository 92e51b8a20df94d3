"""What runs in a child process: its setup, its answers, its end."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from simpler import _core, logs, thread_limits
from simpler.callables import CallableTable, Target, unpack_target
from simpler.chip_service import ChipService, ExtensionFailure, pack_result, refused
from simpler.kernels import NativeKernel
from simpler.shared_map import SharedMap
from simpler.transfer_service import TransferService

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from simpler.chips.backend import ChipBackend
    from simpler.control.registry import Extension
    from simpler.control.transfers import RegisteredProvider

_OP = _core.ControlOp
_log = logging.getLogger("simpler.child")


class ChildProgram:
    """Everything a child inherits. Made in the parent before the fork; called in each child with its port.

    Fork: the spare keeps its copy, so replacements start with the same.
    """

    def __init__(
        self,
        backends: Sequence[ChipBackend],
        device_ids: Sequence[int],
        extensions: Sequence[Extension],
        providers: Sequence[RegisteredProvider],
        callables: CallableTable,
        heap: _core.SharedRegion,
        blas: thread_limits.Controller,
    ) -> None:
        self._backends = tuple(backends)
        self._device_ids = tuple(device_ids)
        self._extensions = tuple(extensions)
        self._providers = tuple(providers)
        self._callables = callables
        self._heap = heap
        self._blas = blas
        self._loggers = logs.configured_loggers()

    def __call__(self, port: _core.ChildPort) -> None:
        """The life of one child."""
        gc.freeze()
        logs.forward_to_parent(port.send_log, self._loggers)
        reset_resource_tracker()
        thread_limits.limit_to_one(self._blas)
        child = Child(port, self._service(port), SharedMap([self._heap]), self._callables.inherited())
        port.serve(
            on_control=child.on_control, on_task=child.on_task, reply_of=child.reply_of, describe=describe
        )
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # a stream that is gone or closed has nothing to lose
                stream.flush()

    def _service(self, port: _core.ChildPort) -> ChipService | None:
        if not port.is_chip:
            return None
        backend = self._backends[port.worker]
        regions = [self._heap]
        if backend.maps_peers:
            peers = (other.host_memory for other in self._backends if other is not backend)
            regions += [region for region in peers if region is not None]
        own = backend.host_memory
        shared = SharedMap([*regions, *([own] if own is not None else [])])
        path = (port.worker,)
        return ChipService(
            backend,
            device_id=port.device_id,
            worker_id=path,
            generation=port.generation,
            extensions=self._extensions,
            transfers=TransferService(
                self._providers, device_id=port.device_id, worker_id=path, shared=shared
            ),
            regions=regions,
            shared=shared,
        )


class Child:
    """The answers of one child."""

    def __init__(
        self,
        port: _core.ChildPort,
        service: ChipService | None,
        shared: SharedMap,
        callables: dict[int, Target],
    ) -> None:
        self._port = port
        self._service = service
        self._shared = shared
        self._callables = callables
        self._direct = service is None or service.runs_on_host

    def on_control(self, op: int, arg: int, meta: bytes, payload: memoryview) -> Buffer | None:
        """Answer a control code that the core does not answer itself."""
        service = self._service
        if op == _OP.START:
            self._start()
            return b""
        if op == _OP.STOP:
            if service is not None:
                service.close()
            return b""
        if op == _OP.REGISTER:
            target = unpack_target(bytes(payload))
            self._callables[arg] = target
            self._publish(arg, target)
            return b""
        if service is None:
            raise refused(op, "a sub worker")
        return service.control(op, arg, meta, payload)

    def on_task(self, callable_id: int, args: bytes) -> bytes:
        """Run a task that the core does not run itself; the bytes of its result."""
        target = self._callables[callable_id]
        if self._service is not None:
            return pack_result(self._service.run(target, args))
        if isinstance(target, NativeKernel):
            self._shared.check(args)
            failure = _core.call_native(target.address(), args, -1)
            if failure is not None:
                raise RuntimeError(failure)
            return b""
        return pack_result(target(*self._shared.arguments(args)))

    def reply_of(self, ext_id: int, result: object) -> Buffer:
        """The reply of a handler that returned no bytes."""
        if self._service is None:
            raise refused(_OP.EXTENSION, "a sub worker")
        return self._service.reply_of(ext_id, result)

    def _start(self) -> None:
        """Everything that can fail, where its failure is the answer to START."""
        service = self._service
        if service is not None:
            for extension, view in zip(service.extensions, service.views, strict=True):
                self._port.set_extension(extension.id, extension.handler, view)
        for number, target in self._callables.items():
            self._publish(number, target)
        if service is not None:
            service.open()

    def _publish(self, number: int, target: Target) -> None:
        if self._direct and isinstance(target, NativeKernel):
            self._port.set_native_kernel(number, target.address())


def describe(error: BaseException) -> tuple[str, str, str]:
    """(type name, message, traceback) of an exception, as text that UTF-8 can carry, whatever it is."""
    if isinstance(error, ExtensionFailure):
        return "", _text(error), ""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        trace = "".join(traceback.format_exception(kind, error, error.__traceback__))
    except Exception as failure:  # noqa: BLE001 - the exception's own methods can raise anything
        frames = "".join(traceback.format_tb(error.__traceback__))
        trace = f"{frames}{name} (its text could not be made: {type(failure).__name__})\n"
    return _clean(name), _text(error), _clean(trace)


def _text(error: BaseException) -> str:
    try:
        return _clean(str(error))
    except Exception as failure:  # noqa: BLE001 - as in describe()
        return f"(its text could not be made: {type(failure).__name__})"


def _clean(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def reset_resource_tracker() -> None:
    """Make multiprocessing's resource tracker start anew in this child: the inherited pipe is not its own."""
    module: Any = sys.modules.get("multiprocessing.resource_tracker")
    tracker = getattr(module, "_resource_tracker", None)
    if tracker is not None:
        tracker._lock = threading.RLock()  # noqa: SLF001 - there is no public way to forget the parent's
        tracker._fd = None  # noqa: SLF001 - it has no public reset
        tracker._pid = None  # noqa: SLF001 - likewise
