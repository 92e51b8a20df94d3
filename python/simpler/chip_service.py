"""What one chip does when asked: extensions, memory and Python kernels.

The same in a chip's own process (level 3) and in the caller's (level 2).
"""

from __future__ import annotations

import pickle
import threading
from typing import TYPE_CHECKING, Any

from simpler import _core
from simpler.callables import pickled
from simpler.chip_log import ChipLogger, log_errors
from simpler.chips.cpu import CpuChip
from simpler.control.chip_view import ChipView, make_buffers, with_buffers
from simpler.memory_wire import FREE, MALLOC, PEER, RANGE, WORD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from simpler.chips.backend import ChipBackend
    from simpler.control.registry import Extension
    from simpler.kernels import NativeKernel
    from simpler.shared_map import SharedMap
    from simpler.transfer_service import TransferService

_OP = _core.ControlOp


class ExtensionFailure(Exception):  # noqa: N818 - a handler's own word for what went wrong, not an error of ours
    """A handler returned a str that is not empty: its convention for a failure with that message."""


class ChipService:
    """One chip's backend and extensions.

    Thread safety: concurrent extensions on any thread, everything else by one thread at a time.
    """

    def __init__(
        self,
        backend: ChipBackend,
        *,
        device_id: int,
        worker_id: tuple[int, ...],
        generation: int,
        extensions: Sequence[Extension],
        transfers: TransferService,
        regions: Sequence[_core.SharedRegion],
        shared: SharedMap,
    ) -> None:
        """Prepare; `open` takes the device.

        Args:
            backend: The chip's, not yet open.
            device_id: The device.
            worker_id: The chip's path.
            generation: Of its process.
            extensions: In the order of their numbers.
            transfers: The chip's providers.
            regions: Shared memory that kernels may be given beside the device's own.
            shared: All memory that extensions may be given.
        """
        self._backend = backend
        self._device_id = device_id
        self._generation = generation
        self.extensions = tuple(extensions)
        self._transfers = transfers
        # Running a native kernel on it is nothing but calling the function.
        self.runs_on_host = type(backend) is CpuChip
        self._regions = tuple(regions)
        self._shared = shared
        self._tickets: dict[int, int] = {}  # address -> ticket of every live allocation
        self._tickets_lock = threading.Lock()
        self.views = [
            ChipView(
                device_id=device_id,
                worker_id=worker_id,
                platform=backend.platform,
                log=ChipLogger(f"simpler.extension.{extension.name}", worker_id, device_id),
                state={},
            )
            for extension in extensions
        ]

    def open(self) -> None:
        """Take the device."""
        self._backend.open(self._regions)

    def close(self) -> None:
        """Tell the extensions, newest first, and give the device back. Errors are logged."""
        for extension, view in zip(reversed(self.extensions), reversed(self.views), strict=True):
            if extension.on_close is not None:
                log_errors(f"on_close of extension {extension.name!r}", extension.on_close, view)
        self._transfers.close()
        log_errors(f"closing device {self._device_id}", self._backend.close)

    def control(self, op: int, arg: int, meta: bytes, payload: Buffer) -> Buffer | None:
        """Answer one control code. Raises what the work raises."""
        if op == _OP.EXTENSION:
            return self.extension(arg, meta, bytes(payload))
        if op == _OP.TRANSFER:
            return self._transfers.run(arg, meta, bytes(payload))
        if op == _OP.TRANSFER_CONTROL:
            return self._transfers.control(arg, bytes(payload))
        if op == _OP.MALLOC:
            return self._malloc(*MALLOC.unpack(payload))
        if op == _OP.FREE:
            return self._free(*FREE.unpack(payload))
        if op == _OP.COMMITTED:
            return WORD.pack(self._backend.committed_bytes())
        if op == _OP.COPY_IN:
            self._backend.copy_in(RANGE.unpack(meta)[0], memoryview(payload))
            return b""
        if op == _OP.COPY_OUT:
            address, nbytes = RANGE.unpack(meta)
            data = bytearray(nbytes)
            self._backend.copy_out(address, memoryview(data))
            return data
        if op == _OP.COPY_PEER:
            self._backend.copy(*PEER.unpack(meta))
            return b""
        raise refused(op, "a chip")

    def extension(self, ext_id: int, meta: bytes, payload: bytes) -> Buffer:
        """Run a handler; its reply. With `meta` the memory it names is in ``chip.buffers`` meanwhile."""
        handler = self.extensions[ext_id].handler
        view = self.views[ext_id]
        if not meta:
            return self.reply_of(ext_id, handler(view, payload, self._device_id))
        with make_buffers(meta, self._shared) as buffers:
            return self.reply_of(ext_id, handler(with_buffers(view, buffers), payload, self._device_id))

    def reply_of(self, ext_id: int, result: object) -> Buffer:
        """A handler's result as the reply.

        Raises:
            ExtensionFailure: it is a str that is not empty.
            TypeError: it is nothing that can be a reply.
        """
        if isinstance(result, bytes):
            return result
        if result is None:
            return b""
        if isinstance(result, str):
            if result:
                raise ExtensionFailure(result)
            return b""
        extension = self.extensions[ext_id]
        try:
            return pickle.PickleBuffer(result).raw()  # type: ignore[arg-type]  # any object: it says what is none
        except TypeError:
            raise TypeError(
                f"the handler {extension.handler!r} of extension {extension.name!r} returned "
                f"{type(result).__name__}: it must return bytes-like, None or a str"
            ) from None
        except BufferError as error:
            raise TypeError(
                f"the handler {extension.handler!r} of extension {extension.name!r} returned a "
                f"{type(result).__name__} that is not contiguous: {error}"
            ) from None

    def run(self, target: Any, args: bytes) -> object:
        """Run one kernel; what a Python function returned."""
        kernel: NativeKernel | Any = target
        return self._backend.run(kernel, args)

    def _malloc(self, nbytes: int, ticket: int) -> bytes:
        address = self._backend.malloc(nbytes)
        with self._tickets_lock:
            self._tickets[address] = ticket
        return WORD.pack(address)

    def _free(self, address: int, ticket: int, generation: int) -> bytes:
        with self._tickets_lock:
            if address == 0:
                address = next((known for known, number in self._tickets.items() if number == ticket), 0)
            elif generation != self._generation:
                address = 0
            self._tickets.pop(address, None)
        if address:
            self._backend.free(address)
        return b""


def pack_result(result: object) -> bytes:
    """What a Python function returned, for `TaskHandle.result`; empty for None."""
    return b"" if result is None else pickled(result)


def refused(op: int, who: str) -> ValueError:
    """The error for a control code that `who` does not handle."""
    try:
        name = _OP(op).name
    except ValueError:
        name = str(op)
    return ValueError(f"control op {name} is not handled by {who}")
