"""Control calls to the one chip of level 2, made in this process.

A deadline cannot interrupt work here: it bounds the wait for the chip's turn, and what took longer than its
limit is reported as a time-out when it has ended.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simpler import _core
from simpler.call_threads import CallThreads
from simpler.child_main import describe
from simpler.errors import BackPressureError, ClosedError, RemoteError, WorkerTimeoutError
from simpler.payloads import payload_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Buffer as BytesLike

    from simpler.chip_service import ChipService
    from simpler.deliveries import Deliveries, Outcome
    from simpler.holds import Holds


_OP = _core.ControlOp
_MAX_WAITING = 1024
_CONCURRENT = 4  # as many handlers at once as a chip in a process of its own runs
_PATH = (0,)


@dataclass(slots=True)
class Work:
    """What a thread has the chip do now."""

    what: str
    op: int
    arg: int
    lane: int
    started: float


class LocalCaller:
    """Control calls to the one chip, in the caller's thread; see `Caller`."""

    def __init__(
        self,
        service: ChipService,
        device_id: int,
        max_payload: int,
        deliveries: Deliveries,
        holds: Holds,
        name_of: Callable[[Work], tuple[str, str]],
    ) -> None:
        self._service = service
        self._device_id = device_id
        self._max_payload = max_payload
        self._deliveries = deliveries
        self._holds = holds
        self._name_of = name_of
        self._turn = threading.Lock()  # exclusive handlers, memory calls and kernels
        self._threads_lock = threading.Lock()
        self._in_turn = CallThreads(1, "simpler-chip")
        self._beside = CallThreads(_CONCURRENT, "simpler-chip")
        self._submitted: dict[int, None] = {}  # in order; whoever takes a token out decides about its call
        self._tokens = itertools.count(1)
        self.running: dict[int, Work] = {}
        self.counts = dict.fromkeys(("calls", "timeouts", "request_bytes", "reply_bytes", "tasks"), 0)
        self.closed = False

    def call(
        self, worker: int, op: int, arg: int, lane: int, meta: bytes, payload: BytesLike, timeout_s: float, /
    ) -> bytes:
        """One call, made here and now."""
        if worker != 0:
            raise ValueError(f"worker_id={worker}: level 2 is one chip, worker 0")
        data = payload_bytes(payload, self._max_payload)
        self.counts["calls"] += 1
        self.counts["request_bytes"] += len(data)
        with self.turn("control", op, arg, lane, timeout_s):
            reply = self._answer(op, arg, meta, data)
        if len(reply) > self._max_payload:
            raise self.remote(
                ValueError(f"a reply of {len(reply)} bytes is above max_control_payload={self._max_payload}")
            )
        self.counts["reply_bytes"] += len(reply)
        return reply

    def call_held(
        self,
        worker: int,
        op: int,
        arg: int,
        lane: int,
        meta: bytes,
        payload: BytesLike,
        timeout_s: float,
        hold: int,
        /,
    ) -> bytes:
        """One call that names memory: over when this returns, also late."""
        try:
            return self.call(worker, op, arg, lane, meta, payload, timeout_s)
        except WorkerTimeoutError as error:
            if error.started:
                self._holds.end(worker, hold)
            raise

    def broadcast(
        self,
        op: int,
        arg: int,
        lane: int,
        metas: Sequence[bytes],
        payload: BytesLike,
        timeout_s: float,
        fail_fast: bool,  # noqa: ARG002 - the core's positional-only signature
        hold: int,
        /,
    ) -> list[bytes | BaseException | None]:
        """The call on every chip: on this one."""
        try:
            return [self.call_held(0, op, arg, lane, metas[0] if metas else b"", payload, timeout_s, hold)]
        except (RemoteError, WorkerTimeoutError) as error:
            return [error]

    def submit(
        self,
        worker: int,
        op: int,
        arg: int,
        lane: int,
        meta: bytes,
        payload: BytesLike,
        timeout_s: float,
        hold: int,
        /,
    ) -> int:
        """Start a call on another thread; calls that wait for a turn have one thread and keep their order."""
        data = payload_bytes(payload, self._max_payload)
        token = next(self._tokens)
        begun = time.monotonic()

        def work() -> None:
            if not self.cancel(token):
                return
            left = timeout_s - (time.monotonic() - begun)
            outcome: Outcome
            try:
                if left <= 0:
                    raise self._late(Work("control", op, arg, lane, begun), timeout_s, started=False)
                outcome = self.call_held(worker, op, arg, lane, meta, data, left, hold)
            except BaseException as error:  # noqa: BLE001 - whatever it is belongs to the one who waits
                outcome = error
            self._deliveries.arrive(token, outcome)

        with self._threads_lock:
            if self.closed:
                raise ClosedError("the worker is closed")
            if len(self._submitted) >= _MAX_WAITING:
                raise BackPressureError(f"{_MAX_WAITING} submitted calls wait for the chip already")
            self._submitted[token] = None
            (self._in_turn if _is_exclusive(op, lane) else self._beside).add(work)
        return token

    def submit_broadcast(
        self,
        op: int,
        arg: int,
        lane: int,
        metas: Sequence[bytes],
        payload: BytesLike,
        timeout_s: float,
        hold: int,
        /,
    ) -> list[int]:
        """Start the call on every chip: on this one."""
        return [self.submit(0, op, arg, lane, metas[0] if metas else b"", payload, timeout_s, hold)]

    def cancel(self, token: int, /) -> bool:
        """Withdraw a submitted call that no thread has taken."""
        return self._submitted.pop(token, token) is None

    def queued(self) -> int:
        """Submitted calls that no thread has taken."""
        return len(self._submitted)

    def close(self, timeout_s: float) -> bool:
        """Refuse calls from now on and wait for the chip's turn; false when it stays busy."""
        with self._threads_lock:
            self.closed = True
        for token in list(self._submitted):
            if self.cancel(token):
                self._deliveries.arrive(token, ClosedError("the worker was closed before the call began"))
        self._in_turn.end()
        self._beside.end()
        deadline = time.monotonic() + timeout_s
        if threading.get_ident() in self.running or not self._turn.acquire(timeout=timeout_s):
            return False
        self._turn.release()
        return not self.running or time.monotonic() < deadline

    @contextlib.contextmanager
    def turn(self, what: str, op: int, arg: int, lane: int, timeout_s: float) -> Iterator[None]:
        """Wait for the chip unless the work may run beside other work; report what took too long."""
        begun = time.monotonic()
        work = Work(what, op, arg, lane, begun)
        exclusive = _is_exclusive(op, lane)
        me = threading.get_ident()
        if timeout_s <= 0 or (
            exclusive and not self._turn.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))
        ):
            raise self._late(work, timeout_s, started=False)
        outer = self.running.get(me)
        try:
            if self.closed and what != "close":
                raise ClosedError("the worker is closed")
            work.started = time.monotonic()
            self.running[me] = work
            yield
        finally:
            if outer is None:
                self.running.pop(me, None)
            else:
                self.running[me] = outer
            if exclusive:
                self._turn.release()
        if time.monotonic() - begun > timeout_s:
            raise self._late(work, timeout_s, started=True)

    def remote(self, error: BaseException) -> RemoteError:
        """What an exception in the chip's work is to the caller."""
        type_name, message, traceback = describe(error)
        remote = RemoteError(
            type_name=type_name, message=message, traceback=traceback, path=_PATH, device_id=self._device_id
        )
        remote.__cause__ = error
        return remote

    def _answer(self, op: int, arg: int, meta: bytes, data: bytes) -> bytes:
        if op == _OP.PING:
            return b""
        if op == _OP.ECHO:
            return data
        try:
            reply = self._service.control(op, arg, meta, data)
        except BaseException as error:
            if is_interrupt(error):
                raise
            raise self.remote(error) from error
        return b"" if reply is None else bytes(reply)

    def _late(self, work: Work, timeout_s: float, *, started: bool) -> WorkerTimeoutError:
        self.counts["timeouts"] += 1
        what, called = self._name_of(work)
        name = f"{what} {called!r}"
        state = "ran longer than" if started else "did not begin within"
        return WorkerTimeoutError(
            f"{name} on the chip in this process {state} {timeout_s:g} s",
            path=_PATH,
            device_id=self._device_id,
            pid=os.getpid(),
            started=started,
            waited_for=name,
            timeout_s=timeout_s,
        )


def _is_exclusive(op: int, lane: int) -> bool:
    return lane == _core.LANE_MAIN and op not in (_OP.PING, _OP.ECHO)


def is_interrupt(error: BaseException) -> bool:
    """Whether this may be the program's own Ctrl-C, which only its main thread gets, and not a handler's."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
