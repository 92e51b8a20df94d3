"""The compiled core: shared memory, the process tree, control calls and the task rings.

Internal: the public names are in `simpler`. Times are seconds (float; `math.inf` for ever). Failures of a
child's calls are built by the `make_error` given to `Tree`; everything else raises ValueError (the
caller's mistake), MemoryError (no block of that size), OSError (a system call) or RuntimeError.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any, Literal, final

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
    TRANSFER = 13
    TRANSFER_CONTROL = 14

def require_platform() -> None:
    """Raise RuntimeError naming what this system lacks (Linux 5.10, pidfd calls, memfd)."""

def usable_cores() -> int: ...
def process_epoch() -> int:
    """Changes in every forked copy of this process, so that an inherited object can tell it is a copy."""

def memory_at(address: int, nbytes: int, readonly: bool) -> memoryview:
    """A view of raw memory. The caller answers for its lifetime and bounds."""

def copy_memory(dst_address: int, src_address: int, nbytes: int, whole: int = 0) -> None:
    """One memcpy (memmove when the ranges overlap) without the GIL.

    From 4 MiB on, of it or of the `whole` move that it is part of, it goes past the processor's caches.
    """

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
RunDone = tuple[Literal["run"], int, int]  # ("run", -1, Run.number): see Run.watch
TurnCame = tuple[Literal["turn"], int, int]  # ("turn", -1, HostTask.number): see HostTask.watch
BuffersIdle = tuple[Literal["idle"], int, int]  # there is something for TaskEngine.take_idle_buffers()
Event = Replied | Logged | Lost | Died | Ended | RunDone | TurnCame | BuffersIdle

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
LANE_SERVICE: int  # concurrent: a service thread, four at once
LANE_TRANSFER: int  # a service thread, beside those four

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
        max_pending_tasks: int,
        patience_s: float,
        keep_fds: Sequence[int],
        name: str,
        make_error: MakeError,
    ) -> None:
        """Map the shared regions. MemoryError when control memory cannot be had.

        Submission waits beyond max_pending_tasks, and fails ("backpressure") when none ended for patience_s.
        """
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
    def kill(self, worker: int) -> None:
        """SIGKILL, and wait until the process is reaped."""
    def restart(self, worker: int, timeout_s: float) -> bytes:
        """Replace a dead worker through the spare process; the new START's reply."""
    def close(self, timeout_s: float) -> None:
        """Stop every child in order; then SIGTERM, then SIGKILL. Calls in flight fail with "closed"."""
    def alive(self, worker: int, /) -> bool: ...
    def generation(self, worker: int, /) -> int: ...
    def name_provider(self, provider_id: int, name: str) -> None: ...
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

TaskFailure = tuple[int, int, tuple[str, str, str] | None, str]
"""(callable, worker, the exception in the child or None, how the worker died)"""
RunSummary = tuple[int, int, int, int, bool, bool, TaskFailure | None]
"""(tasks, failed, poisoned, cancelled, cut short by its deadline, cut short by close(), first failure)"""
TaskOutcome = tuple[int, int, Any]
"""(outcome, worker, value). The outcome is 0 done, 1 failed, 2 lost, 3 poisoned, 4 cancelled or 5 closed; the
value then is the result's bytes (of a group a list of them), else a TaskFailure or None."""

class Task:
    """A submitted task; made by Run.submit alone."""

    @property
    def core_run(self) -> Run: ...
    @property
    def callable_id(self) -> int: ...
    @property
    def worker(self) -> int:
        """The chip of a single task; -1 for groups and sub tasks."""
    def done(self) -> bool:
        """Whether it has ended: done, failed, or not run because something before it failed."""
    def fetch(self, timeout_s: float, /) -> TaskOutcome | None:
        """Wait until it has ended; None when the time ran out (0 polls)."""

def set_task_type(task_type: type[Task]) -> None:
    """The class that Run.submit makes its tasks of: derived from Task, without a state of its own."""

@final
class Run:
    """The tasks of one run; made by TaskEngine.open_run alone. Letting go of it cancels nothing."""

    @property
    def context(self) -> Any:
        """As given to open_run."""
    @property
    def number(self) -> int:
        """Its name in events."""
    def submit(
        self,
        callable_id: int,
        targets: int | Sequence[int] | None,
        args: bytes | Sequence[bytes],
        accesses: Sequence[tuple[int, int, int, int]] | None,
        buffers: Sequence[int] | None,
        deps: Sequence[object] | None,
        priority: int | None,
        timeout_s: float,
        /,
    ) -> Any:
        """One task, of the class given to set_task_type.

        targets: one chip; several, for a group; None is any sub worker, -n a group of n of them. args: packed,
        or one for each member. accesses: (region, writes, begin, end). buffers: of open_buffer. deps: Tasks.
        """
    def submit_many(
        self,
        callable_id: int,
        workers: Any,
        args: bytes,
        columns: Sequence[Any],
        priority: int | None,
        timeout_s: float,
        /,
    ) -> None:
        """A task for each uint32 of the buffer `workers`. `args` are packed scalars; column i, a buffer of 8
        bytes a task or 8 in all, replaces scalar i."""
    def launch(
        self, captured: CapturedGraph, values: Sequence[tuple[int, int]], timeout_s: float, /
    ) -> list[Any]:
        """Submit a captured graph; the tasks of those nodes whose results are kept. values: for each
        parameter its address and buffer, or its 8 bytes and 0."""
    def trace(self) -> RunTrace:
        """Of what is submitted from now on; to be read when the run is done."""
    def seal(self) -> None:
        """Nothing more comes: the run is done when its tasks have ended."""
    def cancel(self) -> None:
        """What has not begun never does."""
    def watch(self) -> bool:
        """Have an event ("run", -1, number) follow when it is done; True when it is, and none follows."""
    def wait(self, timeout_s: float, /) -> bool: ...
    def finish(self, timeout_s: float, /) -> RunSummary | Literal[True] | None:
        """Seal it and wait: None when the time ran out; True when every task succeeded, and once this has
        given another answer."""

TracedMember = tuple[int, int, int, int]  # (worker, sent, started, ended)
TracedTask = tuple[int, int, int, int, list[TracedMember], list[int]]
"""(callable, outcome, submitted, ended, members, producers); ns since the run was opened, -1 for never."""

@final
class RunTrace:
    """When the tasks of one run were submitted, sent, begun and ended (`sched/run_trace.h`)."""

    def tasks(self) -> list[TracedTask]:
        """In the order of their submission. REQUIRES: the run is done."""

@final
class CapturedGraph:
    """Tasks recorded once, to be submitted again (`sched/captured_graph.h`)."""

    def __init__(self, parameters: int) -> None: ...
    def add(
        self,
        callable_id: int,
        chips: Sequence[int],
        sub_members: int,
        args: Sequence[bytes],
        accesses: Sequence[tuple[int, bool, int, int, int]],
        buffers: Sequence[tuple[int, int]],
        deps: Sequence[int],
        priority: int | None,
        patches: Sequence[tuple[int, int, int, int]],
        is_kept: bool,
    ) -> int:
        """One task; its index.

        chips: empty for sub workers. accesses: (region, writes, begin, end, parameter), from the parameter's
        first byte modulo 2**64 when it is not -1. buffers: (buffer, parameter or -1). deps: indices. patches:
        (member, place, parameter, plus): 8 bytes of its arguments are the parameter's bits plus `plus`.
        """
    def task(self, index: int, /) -> tuple[int, list[int]]:
        """Its callable and chips."""
    def __len__(self) -> int: ...
    def edges(self, values: Sequence[tuple[int, int]], chips: int, sub_workers: int) -> list[tuple[int, int]]:
        """(earlier, later) for each direct dependency."""

def task_places(packed: bytes) -> list[int]:
    """For each item of packed arguments where its 8 bytes are: a tensor's address, or a scalar."""

@final
class HostTask:
    """Work of this process in its turn; made by TaskEngine.host_task. Collecting it ends it."""

    def wait(self, timeout_s: float) -> bool:
        """Whether it is its turn. Raises make_error("closed") when that will never come."""
    @property
    def number(self) -> int: ...
    def watch(self) -> bool:
        """Have an event ("turn", -1, number) say when its turn has come or never will.

        True when that has happened already; no event follows then.
        """
    def end(self) -> None: ...

@final
class TaskEngine:
    """The task graph over the rings of a tree's children (`sched/task_engine.h`).

    Buffers are ints, which name memory from open_buffer() until it is idle.
    """

    @staticmethod
    def of(tree: Tree) -> TaskEngine:
        """That of a running tree."""
    @staticmethod
    def local(make_error: MakeError, chips: int) -> TaskEngine:
        """Orders host tasks alone, on the memory of the host and of so many chips."""
    def close(self) -> None:
        """Everything ends, and from now on every call raises make_error("closed")."""
    def open_run(self, context: object, priority: int, timeout_s: float, /) -> Run:
        """At its time-out what has not begun is cancelled."""
    def open_buffer(self) -> int: ...
    def release_buffer(self, buffer: int) -> None:
        """Its owner lets go: it is idle once no task names it. Call take_idle_buffers() next."""
    def busy_buffers(self) -> int:
        """How many have been released and are named by tasks still."""
    def wait_idle_buffers(self, timeout_s: float) -> bool:
        """Until another one is idle, or none is busy; False when the time ran out."""
    def take_idle_buffers(self) -> list[int]:
        """Those that became idle since the last call; their ids are used up."""
    def worker_back(self, worker: int) -> None:
        """A restarted child takes tasks again."""
    def host_task(
        self, accesses: Sequence[tuple[int, int, int, int]], buffers: Sequence[int]
    ) -> HostTask: ...
    def counts(self) -> dict[str, int]:
        """unfinished and unsent tasks, records kept, tasks ended, takeovers by the engine's own thread."""

GraphAccess = tuple[int, bool, int, int]  # (region, writes, begin, end)
GraphProducer = tuple[int, int, int, bool]  # (task, member, worker, must_succeed)
GraphSend = tuple[Literal["send"], int, int, int | None, list[GraphProducer]]  # task, member, worker
GraphRecall = tuple[Literal["recall"], int, int, int | None]  # task, member, worker
# Its id, its outcome, and of a poisoned one the task that failed or was lost, if one did.
GraphEnded = tuple[
    Literal["ended"], int, Literal["ok", "failed", "lost", "poisoned", "cancelled"], int | None
]
# Of a run: its id, cause, whether it was cancelled, and numbers of tasks: all, failed, poisoned, cancelled.
GraphDone = tuple[Literal["done"], int, int | None, bool, int, int, int, int]
GraphNews = tuple[Literal["passed", "empty", "idle"], int]  # a task, a scope, a buffer
GraphAction = GraphSend | GraphRecall | GraphEnded | GraphDone | GraphNews

@final
class TaskGraph:
    """The state machine of `graph/task_graph.h`, for tests that drive it against a model.

    Ids are ints. A worker is 0..chips-1 for a chip, then the sub workers; None for work of the host.
    """

    def __init__(
        self,
        chips: int = 1,
        sub_workers: int = 0,
        ring_depth: int = 64,
        sub_depth: int = 2,
        regions: int = 1,
        capacity: int = 65536,
        send_ahead: bool = False,
    ) -> None: ...
    def open_run(self, priority: int = 0) -> int: ...
    def seal_run(self, run: int) -> None: ...
    def cancel_run(self, run: int) -> None: ...
    def open_scope(self, run: int) -> int: ...
    def close_scope(self, scope: int) -> None: ...
    def open_buffer(self) -> int: ...
    def release_buffer(self, buffer: int) -> None: ...
    def submit(
        self,
        run: int,
        kind: Literal["chip", "sub", "host"],
        targets: Sequence[int] = (),
        sub_members: int = 1,
        accesses: Sequence[GraphAccess] = (),
        deps: Sequence[int] = (),
        buffers: Sequence[int] = (),
        scope: int | None = None,
        priority: int | None = None,
    ) -> int | None:
        """The task's id; None when the table is full. ValueError for a mistake."""
    def finished(self, task: int, member: int, report: Literal["ok", "failed", "skipped"]) -> bool:
        """False when that is no news."""
    def take_back(self, task: int) -> bool:
        """A sub worker has not begun it and never will; False when it is not such a task."""
    def passed_over(self, worker: int) -> None:
        """It has come past an entry that was taken back."""
    def worker_lost(self, worker: int) -> None: ...
    def worker_back(self, worker: int) -> None: ...
    def take_actions(self) -> list[GraphAction]:
        """What happened since the last call, in order."""
    def sizes(self) -> dict[str, int]:
        """unfinished_tasks, task_records, edges, intervals, range_uses: all 0 when nothing is left."""
