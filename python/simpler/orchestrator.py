"""Orchestrator: how the function of a run submits its tasks."""

from __future__ import annotations

import contextlib
import operator
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex

from simpler import _core
from simpler.callables import CallableHandle, CallableTable
from simpler.config import RunConfig, check_config, run_limit
from simpler.errors import ClosedError, ConfigError, MemoryRangeError, SimplerError
from simpler.run import Run, TaskHandle
from simpler.task_args import EMPTY_ARGS, TaskArgs, check_args

if TYPE_CHECKING:
    from collections.abc import Callable

    from simpler.abandoned import Abandoned
    from simpler.failures import Failures
    from simpler.memory import MemoryRegistry
    from simpler.uses import Use

_pack_task = _core.pack_task
_NO_ARGS = _pack_task([])


class Host(Protocol):
    """What an Orchestrator needs of the node it submits to."""

    tree: _core.Tree
    callables: CallableTable
    registry: MemoryRegistry
    failures: Failures
    abandoned: Abandoned
    num_chips: int
    num_children: int

    def take_sub_worker(self) -> int:
        """A sub worker for one task."""

    def give_back_sub_worker(self, worker: int) -> None:
        """Its task has ended."""


class Orchestrator:
    """Submits the tasks of one run. Valid only inside the function that it was given to."""

    __slots__ = ("_host", "_num_chips", "_run", "_table")

    def __init__(self, host: Host, run: Run) -> None:
        self._host = host
        self._run: Run | None = run
        self._table = host.callables
        self._num_chips = host.num_chips

    def submit_next_level(
        self,
        handle: CallableHandle,
        args: TaskArgs | None = None,
        config: RunConfig | None = None,
        *,
        worker: int,
    ) -> TaskHandle:
        """Send one task to a chip. It runs when all tasks submitted before have ended.

        Args:
            handle: From `Worker.register`.
            args: Copied now. None is no arguments.
            config: May set only `priority`.
            worker: The chip's id.

        Raises:
            MemoryRangeError: memory that is dead, out of range or out of the chip's reach; nothing was sent.
            ClosedError: the run has ended.
            ValueError: no such chip, or a handle of another Worker.
        """
        run = self._run
        if run is None:
            raise _ended("submit_next_level")
        if handle.__class__ is not CallableHandle or handle.table is not self._table:
            raise _foreign(handle)
        if worker.__class__ is not int or not -1 < worker < self._num_chips:
            worker = _chip(worker, self._num_chips)
        if config is not None:
            check_config(config).check_task()
        if args is None or _is_empty(check_args(args)):
            return run.submit(handle.name, worker, handle.id, _NO_ARGS, None)
        return self._submit(run, handle, args, worker)

    def submit_sub(self, handle: CallableHandle, args: TaskArgs | None = None) -> TaskHandle:
        """Send one task to a sub worker that is idle, or else to the one with the least to do.

        Its tensors are of host buffers, and what it returns must be picklable.

        Raises:
            ConfigError: this Worker has no sub workers.
            MemoryRangeError: memory that is dead or of a device; nothing was sent.
            ClosedError: the run has ended.
        """
        run = self._run
        if run is None:
            raise _ended("submit_sub")
        if handle.__class__ is not CallableHandle or handle.table is not self._table:
            raise _foreign(handle)
        host = self._host
        if host.num_children == host.num_chips:
            raise ConfigError("this Worker has no sub workers: give it num_sub_workers=")
        args = EMPTY_ARGS if args is None else check_args(args)
        for tensor, _ in args.tensors:
            if tensor.buffer.allocation.worker >= 0:
                raise MemoryRangeError(
                    f"a sub worker cannot be given a {tensor.buffer.allocation.text}: host memory only"
                )
        worker = host.take_sub_worker()
        try:
            task = self._submit(run, handle, args, worker)
        except BaseException:
            host.give_back_sub_worker(worker)
            raise
        task.when_ended(lambda: host.give_back_sub_worker(worker))
        return task

    def end(self) -> None:
        """The function has returned."""
        self._run = None

    def _submit(self, run: Run, handle: CallableHandle, args: TaskArgs, worker: int) -> TaskHandle:
        copy = args.snapshot()
        for dep in copy.deps:
            if not isinstance(dep, TaskHandle):
                raise TypeError(f"add_dep() takes a TaskHandle, not {type(dep).__name__}")
            if dep.run is not run:
                dep.result()
        packed = _pack_task(copy.pack())
        use: Use | None = None
        if copy.uses:
            use = self._host.registry.enqueue(
                copy.uses, worker=worker, what=f"task {handle.name!r}", group=run
            )
        return run.submit(handle.name, worker, handle.id, packed, use)


def run_function(
    host: Host,
    fn: Callable[..., Any] | CallableHandle,
    args: Any,
    config: RunConfig | None,
    timeout_s: float | None,
) -> Any:
    """`Worker.run` of a node."""
    limit = run_limit(timeout_s, config)
    if isinstance(fn, CallableHandle):
        return run_function(host, _RunOne(fn), args, config, timeout_s)()
    if not callable(fn):
        raise TypeError(f"run() takes a function or a CallableHandle, not {fn!r}")
    run = Run(host.tree, host.failures.remote, limit)
    orch = Orchestrator(host, run)
    try:
        try:
            result = fn(orch, args, config)
        finally:
            orch.end()
    except Exception:
        with contextlib.suppress(
            SimplerError
        ):  # closed meanwhile: the function's own error is the one to see
            run.drain(run.left())
        raise
    else:
        run.finish()
        return result
    finally:
        if run.has_open():  # out of time, interrupted or closed: someone has to see them end
            host.abandoned.add(run)


class _RunOne:
    """The orchestration function of a run that is one task on worker 0."""

    def __init__(self, handle: CallableHandle) -> None:
        self._handle = handle

    def __call__(self, orch: Orchestrator, args: Any, config: RunConfig | None) -> Callable[[], Any]:  # noqa: ARG002 - as every such function
        return orch.submit_next_level(self._handle, args, worker=0).result


def _is_empty(args: TaskArgs) -> bool:
    return not args.uses and not len(args) and not args.deps


def _ended(what: str) -> ClosedError:
    return ClosedError(
        f"{what}: the run has ended; an Orchestrator is valid only inside the function it was given to"
    )


def _foreign(handle: object) -> Exception:
    if isinstance(handle, CallableHandle):
        return ValueError(f"{handle.name!r} was registered with another Worker")
    return TypeError(f"a task needs a CallableHandle from Worker.register(), not {handle!r}")


def _chip(worker: object, count: int) -> int:
    if isinstance(worker, bool) or not isinstance(worker, SupportsIndex):
        raise TypeError(f"worker= is one chip's id: {worker!r}")
    number = operator.index(worker)
    if not 0 <= number < count:
        raise ValueError(f"worker={worker}: there are {count} chips")
    return number
