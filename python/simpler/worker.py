"""Worker: one chip inside this process (level 2), or one node of chip processes and sub workers (level 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simpler import _core
from simpler.config import RunConfig, call_timeout
from simpler.lifecycle import WorkerState
from simpler.payloads import as_payload
from simpler.worker_base import WorkerBase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from concurrent.futures import Future

    from simpler.buffers import Buffer, HostBuffer
    from simpler.callables import CallableHandle, Target
    from simpler.capture import CapturedGraph
    from simpler.extensions import Buffers
    from simpler.payloads import BytesLike
    from simpler.run import RunHandle
    from simpler.tensor import Tensor
    from simpler.transfer_handle import TransferHandle
    from simpler.transfer_ranges import TransferRange

_ControlOp = _core.ControlOp
_EXTENSION = _ControlOp.EXTENSION
_CALLABLE_OPS = frozenset({_ControlOp.PING, _ControlOp.ECHO, _ControlOp.COMMITTED})
_INSTEAD = {
    _ControlOp.START: "init()",
    _ControlOp.STOP: "close()",
    _ControlOp.EXTENSION: "run_chip_control_extension()",
    _ControlOp.MALLOC: "malloc()",
    _ControlOp.FREE: "free()",
    _ControlOp.COPY_IN: "copy_to()",
    _ControlOp.COPY_OUT: "copy_from()",
    _ControlOp.COPY_PEER: "copy()",
    _ControlOp.REGISTER: "register()",
    _ControlOp.TRANSFER: "submit_transfer()",
    _ControlOp.TRANSFER_CONTROL: "confirm_transfers() or reset_provider()",
}


class Worker(WorkerBase):
    """One process per accelerator under this one, with control calls, memory and tasks.

    Use it in a with statement, or call `init()` and `close()`. A Worker that is collected or alive at
    interpreter exit is closed.

    Thread safety: any thread. Fork: a copy made by the program's own os.fork() refuses every call.
    """

    def control_payload(
        self, worker_id: int, op: int, payload: BytesLike = b"", *, timeout_s: float | None = None
    ) -> bytes:
        """One control call to a chip or sub worker: what all other calls are made of.

        Args:
            worker_id: The child.
            op: A `ControlOp`. Those of the runtime's own are refused by name.
            payload: Bytes-like and contiguous, up to `max_control_payload`.
            timeout_s: None is `control_timeout_s`, `math.inf` for ever.

        Raises:
            ValueError: an op, worker, payload or limit that cannot be; nothing was sent.
            WorkerTimeoutError, WorkerDiedError, RemoteError: what happened.
        """
        timeout_s = self._control_timeout_s if timeout_s is None else call_timeout(timeout_s, 0.0)
        if op not in _CALLABLE_OPS or op.__class__ is bool:
            raise _refused_op(op)
        if worker_id.__class__ is int and payload.__class__ is bytes:
            return self._call(worker_id, op, 0, 0, b"", payload, timeout_s)
        return self._call(self._child(worker_id), op, 0, 0, b"", as_payload(payload), timeout_s)

    def run_chip_control_extension(
        self,
        name: str,
        payload: BytesLike = b"",
        *,
        worker_id: int | Iterable[int] | None = None,
        timeout_s: float | None = None,
        buffers: Buffers = (),
        fail_fast: bool = False,
    ) -> Any:
        """Run a registered handler on one chip, or on all at once.

        Args:
            name: As registered before init().
            payload: Bytes-like and contiguous, up to `max_control_payload`.
            worker_id: One chip; None is every chip.
            timeout_s: None is `control_timeout_s`, `math.inf` for ever.
            buffers: Memory that the handler may touch, by position or by name. It cannot be freed before
                the handler has ended. In a broadcast each chip sees its own and the host's.
            fail_fast: End a broadcast at its first error instead of waiting for the rest.

        Returns:
            The chip's reply (bytes), or all replies in worker order (a list).

        Raises:
            RemoteError, WorkerTimeoutError, WorkerDiedError: with `worker_id`, what happened.
            ChipControlError: without, when not every chip was good.
            UnknownExtensionError: registered after init(), or never.
            MemoryRangeError: memory that the chip cannot have; nothing was sent.
        """
        timeout_s = self._control_timeout_s if timeout_s is None else call_timeout(timeout_s, 0.0)
        if (
            worker_id.__class__ is int
            and payload.__class__ is bytes
            and not buffers
            and name in self._extensions
            and -1 < worker_id < self._num_chips
        ):
            ext_id, lane = self._extensions[name]
            return self._call(worker_id, _EXTENSION, ext_id, lane, b"", payload, timeout_s)
        engine = self._ready("run_chip_control_extension")
        return engine.extensions.run(name, payload, worker_id, timeout_s, buffers, fail_fast)

    def submit_chip_control_extension(
        self,
        name: str,
        payload: BytesLike = b"",
        *,
        worker_id: int | Iterable[int] | None = None,
        timeout_s: float | None = None,
        buffers: Buffers = (),
        fail_fast: bool = False,
    ) -> Future[Any]:
        """`run_chip_control_extension` without waiting: a Future of its result.

        The payload is copied before this returns. The Future's cancel() succeeds only before the handler
        begins. Its callbacks run on the thread that brings the outcomes: they may make calls, but not wait
        for another Future of this worker.

        Raises:
            BackPressureError: 1,024 calls wait for that child already.
        """
        limit = call_timeout(timeout_s, self._control_timeout_s)
        engine = self._ready("submit_chip_control_extension")
        return engine.extensions.submit(name, payload, worker_id, limit, buffers, fail_fast)

    def submit_transfer(
        self,
        name: str,
        ranges: Iterable[TransferRange],
        payload: BytesLike = b"",
        *,
        worker_id: int | Iterable[int] | None = None,
        timeout_s: float | None = None,
    ) -> TransferHandle:
        """Have a provider move data in a chip's process while tasks go on.

        It begins when the tasks, copies and transfers submitted before it that conflict have ended; those
        submitted after it wait for the bytes that it touches, and for nothing else. Reads share.

        Args:
            name: A provider, as registered before init().
            ranges: The memory that it may touch, and how.
            payload: For the provider; copied.
            worker_id: The chip whose provider it is; None: the one chip that owns the ranges.
            timeout_s: How long to wait while `max_transfers` or `max_transfer_bytes` are in flight.

        Raises:
            MemoryRangeError: memory that is dead, foreign, out of range, held by an unconfirmed transfer, or
                in a window that this platform cannot register.
            BackPressureError: too much stayed in flight.
            UnknownExtensionError: registered after init(), or never.
        """
        limit = call_timeout(timeout_s, self._control_timeout_s)
        engine = self._ready("submit_transfer")
        chip = None if worker_id is None else self._chip(worker_id)
        return engine.transfers.submit(name, ranges, payload, chip, limit)

    def confirm_transfers(
        self, name: str, *, worker_id: int | Iterable[int], timeout_s: float | None = None
    ) -> int:
        """Ask a provider's ``confirm(ids)`` which unconfirmed transfers have stopped; how many have."""
        limit = call_timeout(timeout_s, self._control_timeout_s)
        engine = self._ready("confirm_transfers")
        return engine.transfers.confirm(name, self._chip(worker_id), limit, reset=False)

    def reset_provider(
        self, name: str, *, worker_id: int | Iterable[int], timeout_s: float | None = None
    ) -> int:
        """Have a provider's ``reset()`` tear its engine down; how many unconfirmed transfers are released.

        Transfers that still run are told of it by their engine, and end on their own.
        """
        limit = call_timeout(timeout_s, self._control_timeout_s)
        engine = self._ready("reset_provider")
        return engine.transfers.confirm(name, self._chip(worker_id), limit, reset=True)

    def unconfirmed_transfers(
        self, name: str | None = None, *, worker_id: int | Iterable[int] | None = None
    ) -> list[TransferHandle]:
        """The transfers whose memory stays pinned since nobody certified that their access has ended."""
        engine = self._ready("unconfirmed_transfers")
        return engine.transfers.unconfirmed(name, None if worker_id is None else self._chip(worker_id))

    def malloc(self, nbytes: int, *, worker_id: int | Iterable[int] = 0) -> Buffer:
        """Allocate device memory of one chip, aligned to 256 bytes; undefined content.

        Raises:
            ValueError: `nbytes` below 1, or no such chip.
            RemoteError: the chip has no free block of that size.
        """
        return self._ready("malloc").malloc(self._chip(worker_id), nbytes)

    def free(self, buffer: Buffer | HostBuffer) -> None:
        """End a buffer: the handle is dead at once, the memory goes when its last use has ended.

        Raises:
            MemoryRangeError: freed before, lost, pinned or another worker's.
            BufferError: a HostBuffer with live views.
        """
        self._ready("free").registry.free(buffer)

    def committed_device_memory(
        self, worker_id: int | Iterable[int] = 0, *, timeout_s: float | None = None
    ) -> int:
        """Bytes allocated on one chip, as its backend counts them."""
        limit = call_timeout(timeout_s, self._control_timeout_s)
        return self._ready("committed_device_memory").memory.committed(self._chip(worker_id), limit)

    def create_buffer(self, nbytes: int) -> HostBuffer:
        """Allocate host memory that this process and all children share at one address.

        Raises:
            BackPressureError: `heap_bytes` has no free block of that size.
        """
        return self._ready("create_buffer").registry.create_buffer(nbytes)

    def copy_to(
        self,
        dst: Buffer | Tensor,
        src: BytesLike | Tensor,
        *,
        dst_offset: int = 0,
        src_offset: int = 0,
        nbytes: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Copy host to device and wait until it is done.

        Args:
            dst: Device memory.
            src: Anything contiguous with the buffer protocol, or a Tensor of a HostBuffer.
            dst_offset: Bytes from the start of `dst`.
            src_offset: Bytes from the start of `src`.
            nbytes: None is all of `src` from its offset.
            timeout_s: None is `control_timeout_s`. Tasks submitted before that touch the memory end first.

        Raises:
            MemoryRangeError: out of range, freed, lost or another worker's; nothing was touched.
            ValueError: `src` is not contiguous.
        """
        limit = call_timeout(timeout_s, self._control_timeout_s)
        self._ready("copy_to").memory.copy(dst, src, "to", dst_offset, src_offset, nbytes, limit)

    def copy_from(
        self,
        dst: BytesLike | Tensor,
        src: Buffer | Tensor,
        *,
        dst_offset: int = 0,
        src_offset: int = 0,
        nbytes: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Copy device to host and wait; arguments and errors as `copy_to`, `nbytes` None fills `dst`."""
        limit = call_timeout(timeout_s, self._control_timeout_s)
        self._ready("copy_from").memory.copy(dst, src, "from", dst_offset, src_offset, nbytes, limit)

    def copy(
        self,
        dst: Buffer | Tensor,
        src: Buffer | Tensor,
        *,
        dst_offset: int = 0,
        src_offset: int = 0,
        nbytes: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Copy between device buffers, of one chip or two, and wait; arguments and errors as `copy_to`."""
        limit = call_timeout(timeout_s, self._control_timeout_s)
        self._ready("copy").memory.copy(dst, src, "between", dst_offset, src_offset, nbytes, limit)

    def register(self, target: Target, *, name: str | None = None) -> CallableHandle:
        """Make a Python function or a NativeKernel known: what tasks name.

        Before init() the children inherit it; after it, it is shipped to them (cloudpickle; a native
        kernel by the path of its library) and again to a restarted child.

        Raises:
            RemoteError: a child could not load it.
            TypeError: neither, or it cannot be pickled.
        """
        if self._life.state is WorkerState.NEW:
            return self._callables.add(target, name, ship=False)[0]
        return self._ready("register").register(target, name)

    def run(
        self,
        fn: Callable[..., Any] | CallableHandle,
        args: Any = None,
        config: RunConfig | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """Call ``fn(orch, args, config)`` in this thread and wait for the tasks it submits.

        Tasks run side by side as far as what they read and write allows.

        Args:
            fn: The function; or a CallableHandle: one task on worker 0 with `args` (TaskArgs), whose result
                is returned.
            args: Passed as it is.
            config: Options of the run.
            timeout_s: The limit of the whole run, as `config.deadline_s`; None has no limit.

        Returns:
            What `fn` returned.

        Raises:
            TaskError: a task failed; what needed its result did not run.
            WorkerTimeoutError: the limit passed; tasks that have begun go on, no other begins.
            Exception: `fn`'s own, once its tasks have ended or been cancelled.
        """
        return self._ready("run").run(fn, args, config, timeout_s)

    def submit(
        self, fn: Callable[..., Any] | CallableHandle, args: Any = None, config: RunConfig | None = None
    ) -> RunHandle:
        """Call ``fn(orch, args, config)`` in this thread and return without waiting for its tasks.

        Several runs may be in flight at once, from one thread or many. Each waits for and fails on its own;
        where they touch the same memory they go in the order of their submissions.

        Args:
            fn: As for `run`, which is ``submit(...).result()``.
            args: Passed as it is.
            config: Options of the run.

        Raises:
            Exception: `fn`'s own, once its tasks have ended or been cancelled.
        """
        return self._node("submit").submit(fn, args, config)

    def capture(self, fn: Callable[..., Any], args: Mapping[str, Any] | None = None) -> CapturedGraph:
        """Call ``fn(orch, args, None)`` once and record the tasks that it submits; nothing is run.

        Args:
            fn: As for `run`. Tasks that it returns, in lists, tuples or dicts too, give results of launches.
            args: Names for what each launch may bind anew: Tensors, and bools, ints and floats, which come to
                `fn` as placeholders that can be given to tasks. Other values are passed as they are.

        Returns:
            A graph to be launched as often as wanted.

        Raises:
            ValueError: two of the tensors overlap, or a task's tensor overlaps one and is not a part of it.
        """
        return self._node("capture").capture(fn, args)


def _refused_op(op: object) -> Exception:
    if isinstance(op, bool) or not isinstance(op, int):
        return TypeError(f"op must be a ControlOp: {op!r}")
    try:
        known = _ControlOp(op)
    except ValueError:
        return ValueError(
            f"unknown control op {op}; there are {', '.join(known.name for known in _ControlOp)}"
        )
    return ValueError(f"control op {known.name} is the runtime's own: use {_INSTEAD[known]}")
