"""The orchestrator that records tasks instead of submitting them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

from simpler import _core
from simpler.columns import as_columns, as_workers
from simpler.orchestrator import Orchestrator
from simpler.run import RunContext
from simpler.task_args import CapturedScalar, RecordedTask, TaskArgs, check_args
from simpler.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from simpler.buffers import Allocation
    from simpler.callables import CallableHandle
    from simpler.config import RunConfig
    from simpler.memory import MemoryRegistry
    from simpler.orchestrator import Host, Targets
    from simpler.run import TaskHandle

_WORD = 1 << 64
_NONE = -1


class Recorder:
    """The tasks recorded so far.

    Attributes:
        memory: The allocations that the tasks name and that are no parameters, by key.
    """

    def __init__(self, parameters: Mapping[str, Tensor | CapturedScalar], registry: MemoryRegistry) -> None:
        self._parameters = parameters
        self._numbers = {name: number for number, name in enumerate(parameters)}
        self._tensors = [(n, t) for n, t in enumerate(parameters.values()) if isinstance(t, Tensor)]
        self._registry = registry
        self._tasks: list[dict[str, Any]] = []
        self.memory: dict[int, Allocation] = {}

    def add(
        self, callable_id: int, targets: Targets, members: Sequence[TaskArgs], priority: int | None
    ) -> RecordedTask:
        """Record one task."""
        chips, subs = _split(targets)
        task: dict[str, Any] = {name: [] for name in ("args", "accesses", "buffers", "deps", "patches")}
        task |= {"callable_id": callable_id, "chips": chips, "sub_members": subs}
        task |= {"priority": priority, "is_kept": False}
        for number, args in enumerate(members):
            self._add_member(task, number, args, chips[number] if chips else None)
        self._tasks.append(task)
        return RecordedTask(self, len(self._tasks) - 1)

    def keep(self, task: RecordedTask) -> None:
        """Its result is wanted of each launch."""
        self._tasks[task.index]["is_kept"] = True

    def build(self) -> _core.CapturedGraph:
        """What the core launches."""
        core = _core.CapturedGraph(len(self._numbers))
        for task in self._tasks:
            core.add(**task)
        return core

    def tasks_in(self, value: Any) -> list[RecordedTask]:
        """Those in it, through lists, tuples and dicts."""
        if isinstance(value, RecordedTask):
            if value.recorder is not self:
                raise ValueError("a captured function returned a task of another capture")
            return [value]
        if type(value) is dict:
            return self.tasks_in(list(value.values()))
        if type(value) in (list, tuple):
            return [task for item in value for task in self.tasks_in(item)]
        return []

    def _add_member(self, task: dict[str, Any], number: int, args: TaskArgs, worker: int | None) -> None:
        packed = _core.pack_task(args.pack())
        places = _core.task_places(packed)
        task["args"].append(packed)
        for place, item in zip(places, args.items, strict=True):
            if isinstance(item, CapturedScalar):
                if self._parameters.get(item.name) is not item:
                    raise ValueError(f"{item.name!r} is a scalar of another capture")
                # A launch replaces the captured value as a whole.
                task["patches"].append((number, place, self._numbers[item.name], 0))
            elif isinstance(item, tuple):
                found = self._parameter_of(item[0])
                if found is not None:
                    parameter, base = found
                    address = item[0].buffer.address + item[0].offset
                    task["patches"].append((number, place, parameter, (address - base) % _WORD))
        for memory, mode in args.uses:
            self._add_use(task, memory, mode, worker)
        for dep in args.deps:
            if not isinstance(dep, RecordedTask) or dep.recorder is not self:
                raise ValueError("a captured task can depend on tasks of the same capture only")
            task["deps"].append(dep.index)

    def _add_use(self, task: dict[str, Any], tensor: Tensor, mode: Any, worker: int | None) -> None:
        accesses, buffers = self._registry.resolve([(tensor, mode)], worker)
        found = self._parameter_of(tensor)
        parameter, base = (_NONE, 0) if found is None else found
        for region, writes, begin, end in accesses:
            entry = (region, bool(writes), (begin - base) % _WORD, (end - base) % _WORD, parameter)
            task["accesses"].append(entry)
        for buffer in buffers:
            if (buffer, parameter) not in task["buffers"]:
                task["buffers"].append((buffer, parameter))
        if found is None:
            record = tensor.buffer.allocation
            self.memory[record.key] = record

    def _parameter_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """The tensor parameter that it is a part of, with the address of that one's first byte."""
        low, size = tensor.span
        for number, parameter in self._tensors:
            start, length = parameter.span
            if parameter.buffer is not tensor.buffer or not (low < start + length and start < low + size):
                continue
            if start <= low and low + size <= start + length:
                return number, parameter.buffer.address + parameter.offset
            name = next(name for name, n in self._numbers.items() if n == number)
            raise ValueError(
                f"a tensor of bytes {low}..{low + size} overlaps the captured argument {name!r} (bytes "
                f"{start}..{start + length}) and is not a part of it"
            )
        return None


def _split(targets: Targets) -> tuple[list[int], int]:
    """Chips, and the number of sub workers if there are none."""
    if targets is None:
        return [], 1
    if isinstance(targets, int):
        return ([targets], 1) if targets >= 0 else ([], -targets)
    return list(targets), 1


class RecordingOrchestrator(Orchestrator):
    """Records what its function submits. What it allocates belongs to the graph."""

    __slots__ = ("_kept", "_recorder", "_releases")

    def __init__(self, host: Host, recorder: Recorder) -> None:
        super().__init__(host, _RECORDING, RunContext(host, math.inf))
        self._recorder = recorder
        self._releases: list[Callable[[], None]] = []
        self._kept: list[Tensor] = []

    def alloc(self, shape: int | Sequence[int], dtype: object) -> Tensor:
        """As when it is run, but kept for the launches when the function has let go of it."""
        tensor = super().alloc(shape, dtype)
        self._kept.append(tensor)
        return tensor

    def submit_many(
        self, handle: CallableHandle, workers: Any, *scalars: Any, config: RunConfig | None = None
    ) -> int:
        """As when it is run, task by task."""
        self._begin("submit_many", handle)
        chips = as_workers(workers, self._num_chips)
        _, columns = as_columns(scalars, len(chips))
        for i, chip in enumerate(chips):
            args = TaskArgs()
            for scalar, column in zip(scalars, columns, strict=True):
                args.add_scalar(scalar if column.size == 1 else scalar[i])
            self.submit_next_level(handle, args, config, worker=int(chip))
        return len(chips)

    def release(self) -> None:
        """The graph has gone."""
        while self._releases:
            self._releases.pop()()
        self._kept.clear()

    def _close_scopes(self, depth: int) -> None:
        scopes = self._open_scopes()
        while len(scopes) > depth:
            self._releases += scopes.pop()

    def _submit(
        self, run: Any, handle: CallableHandle, targets: Targets, args: TaskArgs | None, priority: int | None
    ) -> TaskHandle:
        return self._submit_group(run, handle, targets, [args], priority)

    def _submit_group(
        self,
        run: Any,  # noqa: ARG002 - as Orchestrator's
        handle: CallableHandle,
        targets: Targets,
        args_list: Sequence[TaskArgs | None],
        priority: int | None,
    ) -> TaskHandle:
        members = [TaskArgs() if args is None else check_args(args) for args in args_list]
        return cast("TaskHandle", self._recorder.add(handle.id, targets, members, priority))

    def _send(
        self,
        run: Any,  # noqa: ARG002 - as Orchestrator's
        callable_id: int,
        targets: Targets,
        packed: Any,  # noqa: ARG002 - as Orchestrator's
        accesses: Any,  # noqa: ARG002 - as Orchestrator's
        buffers: Any,  # noqa: ARG002 - as Orchestrator's
        deps: Any,  # noqa: ARG002 - as Orchestrator's
        priority: int | None,
    ) -> TaskHandle:
        return cast("TaskHandle", self._recorder.add(callable_id, targets, [TaskArgs()], priority))


_RECORDING: Any = object()
