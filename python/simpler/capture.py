"""Captured graphs: the tasks of a run recorded once, and submitted again with other memory and scalars."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from simpler.config import run_limit
from simpler.errors import ClosedError
from simpler.memory import READ
from simpler.recording import Recorder, RecordingOrchestrator
from simpler.run import RunContext, RunHandle
from simpler.states import State
from simpler.task_args import CapturedScalar, RecordedTask
from simpler.tensor import Tensor
from simpler.trace import tracer_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from simpler import _core
    from simpler.buffers import Allocation
    from simpler.config import RunConfig
    from simpler.orchestrator import Host
    from simpler.run import TaskHandle

_WORD = 1 << 64
Value = tuple[int, int]
"""(address, buffer) of a tensor, (its 8 bytes, 0) of a scalar."""


class CapturedGraph:
    """What `Worker.capture` recorded. `launch` submits all of it, without Python for each task.

    Its scratch memory and domains live as long as it does, so two launches of the same graph that use them
    follow each other. Thread safety: any thread.

    Attributes:
        parameters: The names that `launch` may bind.
        num_tasks: How many tasks a launch submits.
    """

    def __init__(
        self,
        host: Host,
        core: _core.CapturedGraph,
        parameters: Mapping[str, Tensor | CapturedScalar],
        memory: dict[int, Allocation],
        result: Any,
        release: Callable[[], None],
    ) -> None:
        self._host = host
        self._core = core
        self._captured = dict(parameters)
        self._values = {name: _value_of(captured) for name, captured in parameters.items()}
        self._memory = memory
        self._result = result
        self._finalizer = weakref.finalize(self, release)
        self._finalizer.atexit = False  # then all memory goes with the Worker
        self.parameters = tuple(parameters)
        self.num_tasks = len(core)

    def launch(self, *, config: RunConfig | None = None, **bindings: object) -> RunHandle:
        """Submit every task once more.

        Args:
            config: Deadline, priority and trace of this run.
            bindings: For names of the captured arguments another tensor of the same shape, strides, dtype and
                owner, or another scalar of the same kind. Names left out keep what was captured.

        Returns:
            The run. Its result is what the captured function returned, with results of this launch for tasks.

        Raises:
            MemoryRangeError: memory, of a tensor or of the graph, has been freed or lost; nothing was sent.
            ValueError: another shape, strides, dtype or owner, or no such name.
            TypeError: not what was captured under that name.
            ClosedError: the graph has been closed.
        """
        if not self._finalizer.alive:
            raise ClosedError("launch: the captured graph has been closed")
        values = self._bind(bindings)
        for record in self._memory.values():
            if record.state is not State.LIVE:
                raise record.unusable()
        limit = run_limit(None, config)
        context = RunContext(self._host, limit, None if config is None else tracer_of(self._host, config))
        run = self._host.engine.open_run(context, 0 if config is None else config.priority, limit)
        if context.tracer is not None:
            context.tracer.attach(run)
        try:
            tasks = run.launch(self._core, list(values.values()), context.left())
        except ValueError as error:
            run.cancel()
            self._check_memory(bindings)  # freed between the check and the submission: says so
            raise error from None
        except BaseException:  # an interrupt too: nobody has a handle to it
            run.cancel()
            raise
        finally:
            run.seal()
            context.trace_when_done(run)
        return RunHandle(run, context, _Results(self._result, tasks), is_task=True)

    def to_dot(self) -> str:
        """The tasks and their direct dependencies in Graphviz's language, as captured."""
        host = self._host
        edges = self._core.edges(list(self._values.values()), host.num_chips, host.config.num_sub_workers)
        lines = ["digraph tasks {", "  node [shape=box];"]
        for index in range(self.num_tasks):
            callable_id, chips = self._core.task(index)
            where = "sub" if not chips else ",".join(f"chip {chip}" for chip in chips)
            name = host.callables.name(callable_id).replace("\\", "\\\\").replace('"', '\\"')
            lines.append(f'  t{index} [label="{index}: {name}\\n{where}"];')
        lines += [f"  t{before} -> t{after};" for before, after in edges]
        return "\n".join([*lines, "}", ""])

    def close(self) -> None:
        """Let go of its memory, which goes when the last launch using it has ended. Again: nothing."""
        self._finalizer()

    def __len__(self) -> int:
        return self.num_tasks

    def __repr__(self) -> str:
        state = "" if self._finalizer.alive else ", closed"
        names = ", ".join(self.parameters) or "none"
        return f"<CapturedGraph of {self.num_tasks} tasks, parameters {names}{state}>"

    def _bind(self, bindings: Mapping[str, object]) -> dict[str, Value]:
        values = dict(self._values)
        tensors = {
            name: captured for name, captured in self._captured.items() if isinstance(captured, Tensor)
        }
        for name, given in bindings.items():
            captured = self._captured.get(name)
            if captured is None:
                raise ValueError(f"no parameter {name!r}: there are {', '.join(self.parameters) or 'none'}")
            if isinstance(captured, CapturedScalar):
                values[name] = (_bits(name, captured, given), 0)
            else:
                tensors[name] = _same_tensor(name, captured, given)
        for name, tensor in tensors.items():
            self._host.registry.resolve([(tensor, READ)])  # alive, and this Worker's
            values[name] = _value_of(tensor)
        return values

    def _check_memory(self, bindings: Mapping[str, object]) -> None:
        self._bind(bindings)
        for record in self._memory.values():
            if record.state is not State.LIVE:
                raise record.unusable()


class _Slot:
    """Where the result of a task goes: that of the `position`-th kept one."""

    def __init__(self, position: int) -> None:
        self.position = position


class _Results:
    """The value of a launch: what the function returned, with results for handles."""

    def __init__(self, shape: Any, tasks: list[TaskHandle]) -> None:
        self._shape = shape
        self._tasks = tasks

    def result(self) -> Any:
        """REQUIRES: the run is done."""
        return self._fill(self._shape)

    def _fill(self, shape: Any) -> Any:
        if isinstance(shape, _Slot):
            return self._tasks[shape.position].result()
        if type(shape) is dict:
            return {key: self._fill(item) for key, item in shape.items()}
        if type(shape) in (list, tuple):
            return type(shape)(self._fill(item) for item in shape)
        return shape


def capture(host: Host, fn: Callable[..., Any], args: Mapping[str, Any] | None) -> CapturedGraph:
    """`Worker.capture`."""
    if args is not None and not isinstance(args, Mapping):
        raise TypeError(f"the arguments of a captured function are a mapping of names, not {args!r}")
    parameters = {}
    for name, value in (args or {}).items():
        parameter = _parameter(name, value)
        if parameter is not None:
            parameters[name] = parameter
    _check_apart({name: value for name, value in parameters.items() if isinstance(value, Tensor)})
    recorder = Recorder(parameters, host.registry)
    orch = RecordingOrchestrator(host, recorder)
    given = None if args is None else {name: parameters.get(name, value) for name, value in args.items()}
    try:
        shape = _slots(fn(orch, given, None), recorder)
    except BaseException:  # whatever it is, its memory goes
        orch.end()
        orch.release()
        raise
    orch.end()
    return CapturedGraph(host, recorder.build(), parameters, recorder.memory, shape, orch.release)


def _slots(returned: Any, recorder: Recorder) -> Any:
    """`returned` with a slot for each recorded task, which is kept by every launch."""
    found = {task.index: task for task in recorder.tasks_in(returned)}
    for task in found.values():
        recorder.keep(task)
    positions = {index: position for position, index in enumerate(sorted(found))}

    def replace(value: Any) -> Any:
        if isinstance(value, RecordedTask):
            return _Slot(positions[value.index])
        if type(value) is dict:
            return {key: replace(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(replace(item) for item in value)
        return value

    return replace(returned)


def _parameter(name: str, value: object) -> Tensor | CapturedScalar | None:
    if not isinstance(name, str) or not name.isidentifier() or name == "config":
        raise ValueError(f"the name of a captured argument is an identifier other than 'config': {name!r}")
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | int | float):
        return CapturedScalar(name, value)
    return None


def _check_apart(tensors: Mapping[str, Tensor]) -> None:
    """A task's tensor must be a part of one parameter at most."""
    names = list(tensors)
    for i, one in enumerate(names):
        for other in names[:i]:
            a, b = tensors[one], tensors[other]
            (low, size), (start, length) = a.span, b.span
            if a.buffer is b.buffer and low < start + length and start < low + size:
                raise ValueError(f"the captured arguments {other!r} and {one!r} overlap")


def _value_of(captured: Tensor | CapturedScalar) -> Value:
    if isinstance(captured, Tensor):
        record = captured.buffer.allocation
        return record.address + captured.offset, record.graph_id
    return _bits(captured.name, captured, captured.value), 0


def _bits(name: str, captured: CapturedScalar, given: object) -> int:
    kind = type(captured.value)
    if kind is bool:
        if not isinstance(given, bool):
            raise TypeError(f"parameter {name!r} was captured as a bool, not {type(given).__name__}")
        return int(given)
    if isinstance(given, bool) or not hasattr(given, "__index__" if kind is int else "__float__"):
        raise TypeError(f"parameter {name!r} was captured as {kind.__name__}, not {type(given).__name__}")
    if kind is float:
        return int(struct.unpack("<Q", struct.pack("<d", given))[0])
    number = given.__index__()  # type: ignore[attr-defined]  # checked above
    if not -(1 << 63) <= number < 1 << 63:
        raise OverflowError(f"an integer scalar must fit int64: {number}")
    return int(number % _WORD)


def _same_tensor(name: str, captured: Tensor, given: object) -> Tensor:
    if not isinstance(given, Tensor):
        raise TypeError(f"parameter {name!r} was captured as a Tensor, not {type(given).__name__}")
    for what in ("shape", "dtype", "strides"):
        was, now = getattr(captured, what), getattr(given, what)
        if was != now:
            raise ValueError(f"parameter {name!r} was captured with {what} {was}, not {now}")
    was, now = captured.buffer.allocation.worker, given.buffer.allocation.worker
    if was != now:
        raise ValueError(f"parameter {name!r} was captured in memory of {_owner(was)}, not of {_owner(now)}")
    return given


def _owner(worker: int) -> str:
    return "the host" if worker < 0 else f"worker {worker}"
