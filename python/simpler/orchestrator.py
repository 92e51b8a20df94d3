"""Orchestrator: how the function of a run submits its tasks."""

from __future__ import annotations

import contextlib
import math
import operator
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex

from simpler import _core
from simpler.callables import CallableHandle, CallableTable
from simpler.columns import as_columns, as_workers
from simpler.config import RunConfig, check_config
from simpler.domain import Domain, make_domain
from simpler.dtypes import as_dtype
from simpler.errors import ConfigError
from simpler.scratch import wait_scratch
from simpler.task_args import TaskArgs, check_args
from simpler.task_checks import check_host_memory, chip_of, ended, foreign

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from simpler.buffers import Buffer
    from simpler.config import WorkerConfig
    from simpler.domain import WindowPart
    from simpler.failures import Failures
    from simpler.memory import MemoryRegistry
    from simpler.run import RunContext, TaskHandle
    from simpler.tensor import Tensor

_pack_task = _core.pack_task
_NO_ARGS = _pack_task([])
Targets = int | tuple[int, ...] | None
"""One chip; several, for a group; None is any sub worker, -n a group of n of them."""


class Host(Protocol):
    """What an Orchestrator needs of the node it submits to."""

    callables: CallableTable
    config: WorkerConfig
    engine: _core.TaskEngine
    failures: Failures
    registry: MemoryRegistry
    name: str
    num_chips: int
    maps_peers: bool
    window_registrable: bool

    def malloc(self, worker: int, nbytes: int) -> Buffer:
        """Device memory."""

    def watch(self, run: _core.Run, call: Callable[[], None]) -> None:
        """See `run.Host`."""

    def unwatch(self, run: _core.Run, call: Callable[[], None]) -> None:
        """See `run.Host`."""


class Orchestrator:
    """Submits the tasks of one run. Valid only inside the function that it was given to.

    Tasks run as soon as what they depend on has ended. Dependencies come from the tags of their tensors: a
    task that reads bytes comes after the last one that writes them, a task that writes bytes after the last
    one that writes and all that read them since (TG-1).
    """

    __slots__ = ("_context", "_host", "_num_chips", "_run", "_scopes", "_table")

    def __init__(self, host: Host, run: _core.Run, context: RunContext) -> None:
        self._host = host
        self._run: _core.Run | None = run
        self._context = context
        self._table = host.callables
        self._num_chips = host.num_chips
        self._scopes: list[list[Callable[[], None]]] | None = None  # what each has to release

    def submit_next_level(
        self,
        handle: CallableHandle,
        args: TaskArgs | None = None,
        config: RunConfig | None = None,
        *,
        worker: int,
    ) -> TaskHandle:
        """Submit one task to a chip.

        Args:
            handle: From `Worker.register`.
            args: Copied now. None is no arguments.
            config: May set only `priority`.
            worker: The chip's id.

        Raises:
            MemoryRangeError: memory that is dead, out of range or out of the chip's reach; nothing was sent.
            BackPressureError: too many tasks have not ended, and none did for `control_timeout_s`.
            ClosedError: the run has ended.
            ValueError: no such chip, or a handle of another Worker.
        """
        run = self._run
        if run is None:
            raise ended("submit_next_level")
        if handle.__class__ is not CallableHandle or handle.table is not self._table:
            raise foreign(handle)
        if worker.__class__ is not int or not -1 < worker < self._num_chips:
            worker = chip_of(worker, self._num_chips)
        priority = None if config is None else check_config(config).task_priority()
        if args is None or (args.__class__ is TaskArgs and args.is_empty):
            return self._send(run, handle.id, worker, _NO_ARGS, None, None, None, priority)
        return self._submit(run, handle, worker, args, priority)

    def submit_next_level_group(
        self,
        handle: CallableHandle,
        args_list: Sequence[TaskArgs | None],
        config: RunConfig | None = None,
        *,
        workers: Sequence[int],
    ) -> TaskHandle:
        """Submit one task that runs on several chips at once: it begins when all of them can (TG-5).

        Args:
            handle: From `Worker.register`.
            args_list: The arguments of each member, copied now.
            config: May set only `priority`.
            workers: The chips, each once.

        Raises:
            ValueError: not as many arguments as chips, a chip twice, or none.
        """
        run = self._begin("submit_next_level_group", handle)
        chips = tuple(chip_of(worker, self._num_chips) for worker in workers)
        if not chips or len(set(chips)) != len(chips):
            raise ValueError(f"workers= are the chips of the group, each once: {workers!r}")
        if len(args_list) != len(chips):
            raise ValueError(f"{len(args_list)} arguments for a group of {len(chips)}")
        priority = None if config is None else check_config(config).task_priority()
        if len(chips) == 1:
            return self._submit(run, handle, chips, args_list[0], priority)
        return self._submit_group(run, handle, chips, args_list, priority)

    def submit_sub(
        self, handle: CallableHandle, args: TaskArgs | None = None, config: RunConfig | None = None
    ) -> TaskHandle:
        """Submit one task to a sub worker, chosen among the idle ones when it can begin.

        Its tensors are of host buffers, and what it returns must be picklable.

        Raises:
            ConfigError: this Worker has no sub workers.
            MemoryRangeError: memory that is dead or of a device; nothing was sent.
            ClosedError: the run has ended.
        """
        run = self._begin("submit_sub", handle)
        self._check_subs(1)
        priority = None if config is None else check_config(config).task_priority()
        if args is not None:
            check_host_memory(check_args(args))
        return self._submit(run, handle, None, args, priority)

    def submit_sub_group(
        self,
        handle: CallableHandle,
        args_list: Sequence[TaskArgs | None],
        config: RunConfig | None = None,
    ) -> TaskHandle:
        """Submit one task that runs on as many sub workers at once as there are arguments.

        Raises:
            ConfigError: there are not so many sub workers.
        """
        run = self._begin("submit_sub_group", handle)
        if not args_list:
            raise ValueError("a group has at least one member")
        self._check_subs(len(args_list))
        for args in args_list:
            if args is not None:
                check_host_memory(check_args(args))
        priority = None if config is None else check_config(config).task_priority()
        if len(args_list) == 1:
            return self._submit(run, handle, None, args_list[0], priority)
        return self._submit_group(run, handle, -len(args_list), args_list, priority)

    def submit(
        self,
        handle: CallableHandle,
        *items: object,
        worker: int | None = None,
        after: Sequence[TaskHandle] = (),
        priority: int | None = None,
    ) -> TaskHandle:
        """The short form: ``orch.submit(kernel, IN(x), OUT(y), 3, worker=0)``.

        Args:
            handle: From `Worker.register`.
            items: Tensors as `IN(x)`, `OUT(x)`, `INOUT(x)`, `NO_DEP(x)`, and scalars, in the kernel's order.
            worker: A chip; None is a sub worker.
            after: Tasks that it comes after for other reasons than its tensors.
            priority: Among tasks that can begin; None is the run's.
        """
        args = TaskArgs.of(*items)
        for task in after:
            args.add_dep(task)
        config = None if priority is None else RunConfig(priority=priority)
        if worker is None:
            return self.submit_sub(handle, args, config)
        return self.submit_next_level(handle, args, config, worker=worker)

    def submit_many(
        self, handle: CallableHandle, workers: Any, *scalars: Any, config: RunConfig | None = None
    ) -> int:
        """Submit many independent tasks in one call, without a handle for each.

        Args:
            handle: From `Worker.register`.
            workers: The chip of each task, shape ``(n,)``, any integer type.
            scalars: For each scalar of the kernel its values, shape ``(n,)``, or one value for all: bool,
                int64 or float64.
            config: May set only `priority`.

        Returns:
            n. Failures show in the run's result.

        Raises:
            ValueError: shapes that do not fit, or no such chip; nothing was sent.
        """
        run = self._begin("submit_many", handle)
        chips = as_workers(workers, self._num_chips)
        pattern, columns = as_columns(scalars, len(chips))
        priority = None if config is None else check_config(config).task_priority()
        run.submit_many(handle.id, chips, pattern, columns, priority, self._context.left())
        return len(chips)

    def alloc(self, shape: int | Sequence[int], dtype: object) -> Tensor:
        """Host memory for what tasks hand to each other; undefined content.

        It is freed when the tasks naming it have ended and its scope, or the run, has closed, or the Tensor
        and all parts of it have been collected.

        Args:
            shape: Elements per dimension.
            dtype: A numpy dtype or a name such as ``"bfloat16"``.

        Raises:
            BackPressureError: the heap is full: at once when only open scopes and live buffers hold it, else
                when not enough came back within `control_timeout_s`.
        """
        if self._run is None:
            raise ended("alloc")
        dims = (shape,) if isinstance(shape, SupportsIndex) else tuple(shape)
        nbytes = max(math.prod(operator.index(n) for n in dims) * as_dtype(dtype).itemsize, 1)
        host = self._host
        limit = min(host.config.control_timeout_s, self._context.left())
        buffer = wait_scratch(host.registry, host.engine, nbytes, limit)
        record = buffer.allocation
        self._open_scopes()[-1].append(lambda: host.registry.drop(record))
        return buffer.tensor(dims, dtype)

    def allocate_domain(
        self,
        name: str,
        workers: Sequence[int],
        window_size: int,
        buffers: Mapping[str, WindowPart] | None = None,
    ) -> Domain:
        """A window of device memory on each of several chips that every one of them can address.

        Freed as `alloc` is, when its scope or the run has closed and its tasks have ended.

        Args:
            name: For messages.
            workers: The member chips.
            window_size: Bytes of each window.
            buffers: Named parts, at the same place in every window: `(shape, dtype)` or a number of bytes.

        Raises:
            MemoryRangeError: the platform does not map its chips' memory into each other.
            ValueError: the parts do not fit into the window.
        """
        if self._run is None:
            raise ended("allocate_domain")
        chips = [chip_of(worker, self._num_chips) for worker in workers]
        domain = make_domain(self._host, name, chips, window_size, buffers or {})
        self._open_scopes()[-1].append(domain.close)
        return domain

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """What is allocated inside goes when the tasks naming it have ended, without waiting for the run."""
        if self._run is None:
            raise ended("scope")
        depth = len(self._open_scopes())
        self._open_scopes().append([])
        try:
            yield
        finally:
            self._close_scopes(depth)

    def end(self) -> None:
        """The function has returned."""
        self._run = None
        if self._scopes is not None:
            self._close_scopes(0)

    def _open_scopes(self) -> list[list[Callable[[], None]]]:
        if self._scopes is None:
            self._scopes = [[]]
        return self._scopes

    def _close_scopes(self, depth: int) -> None:
        """Close all but the outer `depth`, inner ones first."""
        scopes = self._open_scopes()
        while len(scopes) > depth:
            for release in reversed(scopes.pop()):
                release()

    def _begin(self, what: str, handle: CallableHandle) -> _core.Run:
        if self._run is None:
            raise ended(what)
        if handle.__class__ is not CallableHandle or handle.table is not self._table:
            raise foreign(handle)
        return self._run

    def _check_subs(self, count: int) -> None:
        there = self._host.config.num_sub_workers
        if there < count:
            have = f"{there} sub workers" if there else "no sub workers"
            raise ConfigError(f"this Worker has {have}: give it num_sub_workers={count} or more")

    def _submit(
        self,
        run: _core.Run,
        handle: CallableHandle,
        targets: Targets,
        args: TaskArgs | None,
        priority: int | None,
    ) -> TaskHandle:
        if args is None or check_args(args).is_empty:
            return self._send(run, handle.id, targets, _NO_ARGS, None, None, None, priority)
        worker = targets[0] if isinstance(targets, tuple) else targets
        accesses, buffers = self._host.registry.resolve(args.uses, worker) if args.uses else (None, None)
        packed = _pack_task(args.pack())
        try:
            return self._send(run, handle.id, targets, packed, accesses, buffers, args.deps, priority)
        except ValueError:
            self._host.registry.resolve(args.uses, worker)  # says so if memory has gone meanwhile
            raise

    def _submit_group(
        self,
        run: _core.Run,
        handle: CallableHandle,
        targets: tuple[int, ...] | int,
        args_list: Sequence[TaskArgs | None],
        priority: int | None,
    ) -> TaskHandle:
        members = [TaskArgs() if args is None else check_args(args) for args in args_list]
        accesses, buffers, deps = [], [], list[object]()
        for index, args in enumerate(members):
            worker = targets[index] if isinstance(targets, tuple) else None
            touched, held = self._host.registry.resolve(args.uses, worker)
            accesses += touched
            buffers += held
            deps += args.deps
        packed = [_pack_task(args.pack()) for args in members]
        try:
            return self._send(run, handle.id, targets, packed, accesses, buffers, deps, priority)
        except ValueError:
            for args in members:
                self._host.registry.resolve(args.uses)  # says so if memory has gone meanwhile
            raise

    def _send(
        self,
        run: _core.Run,
        callable_id: int,
        targets: Targets,
        packed: bytes | list[bytes],
        accesses: list[tuple[int, int, int, int]] | None,
        buffers: list[int] | None,
        deps: list[object] | None,
        priority: int | None,
    ) -> TaskHandle:
        task: TaskHandle = run.submit(
            callable_id, targets, packed, accesses, buffers, deps, priority, self._context.left()
        )
        return task
