"""The compiled core: shared memory, the process tree, control calls and the task rings.

Internal: the public names are in `simpler`. Times are seconds (float; `math.inf` for ever). Failures of a
child's calls are built by the `make_error` given to `Tree`; everything else raises ValueError (the
caller's mistake), MemoryError (no block of that size), OSError (a system call) or RuntimeError.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Literal, final

from typing_extensions import Buffer

class ControlOp(enum.IntEnum):
    """Every control code; generated from the one C++ enum (`ipc/control_op.h`)."""

    PING = 1
    ECHO = 2
    START = 3
    STOP = 4
    EXTENSION = 5
    MALLOC = 6
    FREE = 7
    COMMITTED = 8
    COPY_IN = 9
    COPY_OUT = 10
    COPY_PEER = 11
    REGISTER = 12

def require_platform() -> None:
    """Raise RuntimeError naming what this system lacks (Linux 5.10, pidfd calls, memfd)."""

def usable_cores() -> int: ...
def process_epoch() -> int:
    """Changes in every forked copy of this process, so that an inherited object can tell it is a copy."""

def memory_at(address: int, nbytes: int, readonly: bool) -> memoryview:
    """A view of raw memory. The caller answers for its lifetime and bounds."""

def copy_memory(dst_address: int, src_address: int, nbytes: int) -> None:
    """One memcpy (memmove when the ranges overlap) without the GIL."""

def pack_task(items: Sequence[object]) -> bytes:
    """Encode task arguments in order: bool, int, float, or a tensor as a tuple
    ``(address, nbytes, shape, strides, dtype_code, tag)``. int must fit int64 (OverflowError)."""

def unpack_task(wire: bytes) -> list[object]:
    """The reverse of pack_task; ValueError when the bytes do not decode."""

def call_native(function_address: int, args: bytes, device_id: int) -> str | None:
    """Call a native kernel on packed arguments without the GIL: None for success, else the error text."""

@final
class SharedRegion:
    """Nameless shared memory at one address in this process and every child forked later."""

    def __init__(self, nbytes: int, name: str, commit: bool = False) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    def release_pages(self, offset: int, nbytes: int) -> None: ...

@final
class ArenaAllocator:
    """Offsets inside a region: best fit, coalescing, aligned. Not thread-safe by itself: the GIL serves."""

    def __init__(self, nbytes: int, alignment: int = 256) -> None: ...
    def allocate(self, nbytes: int) -> int:
        """An aligned offset; MemoryError when no free block is large enough, ValueError for nbytes < 1."""
    def release(self, offset: int) -> int:
        """The aligned size freed; ValueError when `offset` does not start a live block."""
    @property
    def capacity(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def largest_free(self) -> int: ...
    @property
    def block_count(self) -> int: ...

class SharedBuffer:
    """A range of a SharedRegion with the buffer protocol (1-D, unsigned bytes, writable); counts its exports.

    Keeps the mapping alive as long as it or one of its exports lives.
    """

    def __init__(self, region: SharedRegion, offset: int, nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def exports(self) -> int: ...
    @property
    def retired(self) -> bool: ...
    def retire(self) -> None:
        """No more exports from now on; BufferError while there are any."""
    def __buffer__(self, flags: int, /) -> memoryview: ...

Replied = tuple[Literal["reply"], int, bytes | BaseException]  # ("reply", token, reply or error)
Logged = tuple[Literal["log"], int, bytes]  # ("log", worker, frame)
Died = tuple[Literal["died"], int, str]  # ("died", worker, how)
Ended = tuple[Literal["ended"], int, int]  # ("ended", worker, hold): see Tree.call_held
Lost = tuple[Literal["lost"], int, int]  # ("lost", -1, log frames dropped because nobody took events)
Event = Replied | Logged | Lost | Died | Ended

MakeError = Callable[
    [str, int, str, bool, tuple[str, str, str] | None, tuple[str, float] | None], BaseException
]
"""make_error(kind, worker, message, started, remote, limit) -> exception to raise.

kind is "remote" (remote = type name, message, traceback), "died", "timeout" (started says whether the
child had begun; limit is what was waited for and its limit in seconds), "closed", "protocol", "backpressure" or "startup". worker is the index, -1 for none.
"""

@final
class ChildPort:
    """A child's end of its channel: handed to `child_main` in the new process."""

    @property
    def worker(self) -> int: ...
    @property
    def is_chip(self) -> bool: ...
    @property
    def device_id(self) -> int:
        """-1 in a sub worker."""
    @property
    def generation(self) -> int:
        """0 for the process of init(), one more at each restart."""
    def set_extension(self, ext_id: int, handler: Callable[..., object], chip_view: object) -> None:
        """Calls of `ext_id` without meta bytes run `handler(chip_view, payload, device_id)` directly; a
        bytes result is the reply, any other goes through `reply_of(ext_id, result)` of serve()."""
    def set_native_kernel(self, callable_id: int, function_address: int) -> None:
        """Tasks of `callable_id` call this function without the GIL and without Python."""
    def send_log(self, frame: bytes) -> None:
        """Send one whole frame to the parent (any thread; releases the GIL)."""
    def serve(
        self,
        *,
        on_control: Callable[[int, int, bytes, memoryview], Buffer | None],
        on_task: Callable[[int, bytes], bytes],
        reply_of: Callable[[int, object], Buffer],
        describe: Callable[[BaseException], tuple[str, str, str]],
    ) -> None:
        """Run the child loop until STOP has been answered. Waits in C++ without the GIL.

        on_control(op, arg, meta, payload) answers START, STOP and every op but PING, ECHO and plain
        EXTENSION calls; it runs on the main thread, for a concurrent extension on a service thread. The payload view
        is valid during the call. on_task(callable_id, args) runs Python kernels and sub tasks on the main
        thread and returns the result's bytes. What either raises is described by
        describe(exc) -> (type name, message, traceback) and sent as the failure.
        """

LANE_MAIN: int  # exclusive: the child's main thread, between tasks
LANE_SERVICE: int  # concurrent: one of four service threads

@final
class Tree:
    """The processes of one Worker: before start() a plan, after it the running tree.

    Workers are numbered 0..n-1 for chips, then the sub workers. Every call refuses in a forked copy of the
    process that made the tree (RuntimeError).
    """

    def __init__(
        self,
        *,
        device_ids: Sequence[int],
        num_sub_workers: int,
        max_control_payload: int,
        heap_bytes: int,
        spin_us: float,
        keep_fds: Sequence[int],
        name: str,
        make_error: MakeError,
    ) -> None:
        """Map the shared regions. MemoryError when control memory cannot be had."""
    @property
    def heap(self) -> SharedRegion: ...
    def start(
        self,
        child_main: Callable[[ChildPort], None],
        keep_regions: Sequence[SharedRegion],
        timeout_s: float,
    ) -> list[bytes]:
        """Fork every child and the spare, then wait for START of each to be answered.

        Returns the START replies in worker order. On any failure everything forked is gone before this
        raises make_error("startup" | "remote" | "died" | "timeout", worker, ...). child_main(port) runs in
        the new process and returns when serve() has; the process then leaves with _exit(0).
        """
    def call(
        self, worker: int, op: int, arg: int, lane: int, meta: bytes, payload: Buffer, timeout_s: float, /
    ) -> bytes:
        """One control call, positional only: the fast path. `arg` is the extension's id for EXTENSION."""
    def call_held(
        self,
        worker: int,
        op: int,
        arg: int,
        lane: int,
        meta: bytes,
        payload: Buffer,
        timeout_s: float,
        hold: int,
        /,
    ) -> bytes:
        """`call` for a request that names memory. When the caller leaves (time-out, interrupt) after the
        handler has begun, an event ("ended", worker, hold) follows once it has ended or the child is dead;
        in all other cases the request is over when this returns or raises. When a signal ends the call (an
        exception not made by make_error) exactly one such event follows in every case, for broadcast one per
        chip. hold: any non-zero number."""
    def broadcast(
        self,
        op: int,
        arg: int,
        lane: int,
        metas: Sequence[bytes],
        payload: Buffer,
        timeout_s: float,
        fail_fast: bool,
        hold: int,
        /,
    ) -> list[bytes | BaseException | None]:
        """The call on every chip: replies or errors in worker order; None is still pending (fail_fast).
        `metas` is empty or one per chip. hold (0: none): as in call_held, one "ended" event for each child
        whose result is None or an error made with started=True."""
    def submit(
        self,
        worker: int,
        op: int,
        arg: int,
        lane: int,
        meta: bytes,
        payload: Buffer,
        timeout_s: float,
        hold: int,
        /,
    ) -> int:
        """Start a call without waiting; its token. The reply comes through next_events().
        make_error("backpressure") when 1024 calls already wait for this child."""
    def submit_broadcast(
        self,
        op: int,
        arg: int,
        lane: int,
        metas: Sequence[bytes],
        payload: Buffer,
        timeout_s: float,
        hold: int,
        /,
    ) -> list[int]: ...
    def cancel(self, token: int, /) -> bool:
        """True when the call had not begun: it never will, and no event follows."""
    def next_events(self) -> list[Event]:
        """Block without the GIL until something happened; an empty list once the tree is closed."""
    def publish(self, worker: int, callable_id: int, args: bytes, after: int, timeout_s: float, /) -> int:
        """Put one task into the worker's ring; its sequence number (from 1). The child skips it when
        the task `after` of the same ring (0: none) failed or was skipped. Waits for room in the ring."""
    def wait_task(
        self, worker: int, seq: int, timeout_s: float, /
    ) -> tuple[int, bytes, tuple[str, str, str] | None] | None:
        """(0, result, None) done, (1, b"", failure) failed, (2, b"", None) skipped; None when the time ran
        out (0 polls). Takes the result: ask once more and it is ValueError. A dead worker raises."""
    def kill(self, worker: int) -> None:
        """SIGKILL, and wait until the process is reaped."""
    def restart(self, worker: int, timeout_s: float) -> bytes:
        """Replace a dead worker through the spare process; the new START's reply."""
    def close(self, timeout_s: float) -> None:
        """Stop every child in order; then SIGTERM, then SIGKILL. Calls in flight fail with "closed"."""
    def alive(self, worker: int, /) -> bool: ...
    def generation(self, worker: int, /) -> int: ...
    def name_extension(self, ext_id: int, name: str) -> None:
        """What errors and descriptions of deaths call it."""
    def name_callable(self, callable_id: int, name: str) -> None: ...
    def status(self) -> list[dict[str, object]]:
        """One record a child, then the spare: kind ("chip" | "sub" | "spare"), worker (-1 for the spare),
        device_id, pid, state ("starting" | "ready" | "dead" | "closed"), generation, first_error (str | None),
        running: list of dicts with lane ("main" | "service"), what ("control" | "task"), op, arg (extension
        or callable id), id (request id or task sequence), seconds."""
    def counters(self) -> list[dict[str, int]]:
        """Per child: calls, timeouts, late_replies, request_bytes, reply_bytes, tasks, restarts, queued."""
