"""Traces of runs in the Trace Event Format, which Perfetto and chrome://tracing show.

One track for each child. A slice is a task while it runs, an asynchronous slice before it the time from
its submission to its start, an arrow a dependency on a task of the same run that had not ended when the other
was submitted. Tasks that did not run are instants on a track of their own. Times are microseconds since the
run was opened, on the monotonic clock.

The format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from simpler import _core
    from simpler.callables import CallableTable
    from simpler.config import RunConfig, WorkerConfig

_OUTCOMES = ("done", "failed", "lost", "poisoned", "cancelled")
_PROCESS = 1
Event = dict[str, Any]


class Host(Protocol):
    """What a trace says of the node."""

    callables: CallableTable
    config: WorkerConfig
    name: str
    num_chips: int


def tracer_of(host: Host, config: RunConfig) -> Tracer | None:
    """The tracer that `config` asks for.

    Raises:
        OSError: its file cannot be written.
    """
    return None if config.trace is None else Tracer(host, config.trace)


class Tracer:
    """Writes the trace of one run, once. Thread safety: any thread."""

    def __init__(self, host: Host, path: str) -> None:
        self._host = host
        self._file = open(path, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - errors are the caller's, now
        self._lock = threading.Lock()
        self._trace: _core.RunTrace | None = None

    def attach(self, run: _core.Run) -> None:
        """What is submitted to `run` from now on."""
        self._trace = run.trace()

    def write(self) -> None:
        """Write the file. REQUIRES: the run is done. Nothing the second time."""
        with self._lock:
            trace, self._trace = self._trace, None
        if trace is None:
            return
        with self._file as file:
            json.dump({"displayTimeUnit": "ms", "traceEvents": self._events(trace.tasks())}, file)

    def _events(self, tasks: list[_core.TracedTask]) -> list[Event]:
        names = self._host.callables.names()
        events = self._tracks(any(not any(m[2] >= 0 for m in task[4]) for task in tasks))
        for index, task in enumerate(tasks):
            events += self._task(index, names[task[0]], task)
            events += self._arrows(index, task, tasks)
        return events

    def _tracks(self, has_unrun: bool) -> list[Event]:
        config, chips = self._host.config, self._host.num_chips
        tracks = [f"chip {worker} (device {device})" for worker, device in enumerate(config.device_ids)]
        tracks += [f"sub worker {chips + sub}" for sub in range(config.num_sub_workers)]
        if has_unrun:
            tracks.append("not run")
        events = [_named("process_name", 0, f"simpler {self._host.name}")]
        return events + [_named("thread_name", track, name) for track, name in enumerate(tracks)]

    def _task(self, index: int, name: str, task: _core.TracedTask) -> list[Event]:
        _, outcome, submitted, ended, members, _ = task
        about = {"task": index, "outcome": _OUTCOMES[outcome], "submitted": _us(submitted)}
        events: list[Event] = []
        for worker, sent, started, end in members:
            if started < 0:
                continue
            place = {"pid": _PROCESS, "tid": worker, "name": name}
            queued = {**place, "cat": "queued", "id": f"{index}.{worker}"}
            events.append({**queued, "ph": "b", "ts": _us(submitted), "args": {"task": index}})
            events.append({**queued, "ph": "e", "ts": _us(started)})
            run = {**place, "cat": "task", "ph": "X", "ts": _us(started), "dur": _us(end - started)}
            events.append({**run, "args": {**about, "sent": _us(sent)}})
        if not events:
            track = self._host.num_chips + self._host.config.num_sub_workers
            place = {"pid": _PROCESS, "tid": track, "name": name, "cat": "task"}
            events.append({**place, "ph": "i", "s": "t", "ts": _us(max(ended, submitted)), "args": about})
        return events

    def _arrows(self, index: int, task: _core.TracedTask, tasks: list[_core.TracedTask]) -> list[Event]:
        events: list[Event] = []
        heads = [member for member in task[4] if member[2] >= 0]
        for producer in task[5]:
            for tail in (member for member in tasks[producer][4] if member[2] >= 0):
                for head in heads:
                    if head[2] < tail[3]:  # the clocks of two processes agree, their readings need not
                        continue
                    name = f"{producer}-{index}.{tail[0]}-{head[0]}"
                    arrow = {"pid": _PROCESS, "cat": "after", "name": "after", "id": name}
                    events.append({**arrow, "ph": "s", "tid": tail[0], "ts": _us(tail[3])})
                    events.append({**arrow, "ph": "f", "bp": "e", "tid": head[0], "ts": _us(head[2])})
        return events


def _named(what: str, track: int, name: str) -> Event:
    return {"ph": "M", "pid": _PROCESS, "tid": track, "name": what, "args": {"name": name}}


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000
