"""The records of `Worker.status()` and `Worker.stats()`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from simpler import _core

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Record:
    """A frozen record whose fields can also be read like a mapping's: ``record["pid"]``, ``dict(record)``."""

    __slots__ = ()

    def keys(self) -> Iterator[str]:
        """The names of the fields."""
        return (field.name for field in fields(self))  # type: ignore[arg-type]  # every subclass is a dataclass

    def __getitem__(self, name: str) -> Any:
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)


@dataclass(frozen=True, slots=True)
class Running(Record):
    """What a child is running."""

    what: str
    """``"control"``, ``"extension"``, ``"transfer"`` or ``"task"``."""
    name: str
    """The control code's, the extension's, the transfer provider's or the callable's name."""
    seconds: float
    lane: str
    """``"main"``, or ``"service"`` for a transfer or a concurrent extension."""


@dataclass(frozen=True, slots=True)
class ChildStatus(Record):
    """One child, as the parent knows it now."""

    path: tuple[int, ...]
    """Empty for the spare process."""
    kind: str
    """``"chip"``, ``"sub"`` or ``"spare"``."""
    device: int | None
    pid: int
    state: str
    """``"starting"``, ``"ready"``, ``"dead"`` or ``"closed"``."""
    running: Running | None
    """On the main thread; when that is idle, the concurrent handler that has run longest."""
    first_error: str | None
    generation: int
    """0 for the process of init(), one more at each restart."""
    also_running: tuple[Running, ...] = ()


@dataclass(frozen=True, slots=True)
class ChildStats(Record):
    """Counters of one child since init(); they go on over a restart."""

    path: tuple[int, ...]
    calls: int
    timeouts: int
    late_replies: int
    """Replies that came after their caller had given up, and were dropped."""
    request_bytes: int
    reply_bytes: int
    tasks: int
    restarts: int
    queued: int
    """Submitted calls that wait for this child now."""


def name_of(names: Sequence[str], index: int) -> str:
    """The name at `index`, or the number itself."""
    return names[index] if 0 <= index < len(names) else f"#{index}"


def op_name(op: int) -> str:
    """The name of a control code, or the number itself."""
    try:
        return _core.ControlOp(op).name
    except ValueError:
        return f"#{op}"


class Names(NamedTuple):
    """The names of what runs, by number."""

    extensions: Sequence[str]
    providers: Sequence[str]
    callables: Sequence[str]


def name_work(what: str, op: int, arg: int, names: Names) -> tuple[str, str]:
    """`Running.what` and `Running.name` of work given by numbers."""
    if what == "task":
        return "task", name_of(names.callables, arg)
    if op == _core.ControlOp.EXTENSION:
        return "extension", name_of(names.extensions, arg)
    if op == _core.ControlOp.TRANSFER:
        return "transfer", name_of(names.providers, arg)
    return "control", op_name(op)


def make_running(raw: dict[str, Any], names: Names) -> Running:
    """A core's record of one running thing, with names for its numbers."""
    what, name = name_work(raw["what"], raw["op"], raw["arg"], names)
    return Running(what=what, name=name, seconds=raw["seconds"], lane=raw["lane"])


def make_status(raw: dict[str, Any], names: Names) -> ChildStatus:
    """One record from the core's."""
    running = [make_running(item, names) for item in raw["running"]]
    running.sort(key=lambda item: (item.lane != "main", -item.seconds))
    return ChildStatus(
        path=(raw["worker"],) if raw["worker"] >= 0 else (),
        kind=raw["kind"],
        device=raw["device_id"] if raw["device_id"] >= 0 else None,
        pid=raw["pid"],
        state=raw["state"],
        running=running[0] if running else None,
        first_error=raw["first_error"],
        generation=raw["generation"],
        also_running=tuple(running[1:]),
    )


def make_stats(worker: int, raw: dict[str, int]) -> ChildStats:
    """One record from the core's counters."""
    return ChildStats(
        path=(worker,),
        calls=raw["calls"],
        timeouts=raw["timeouts"],
        late_replies=raw["late_replies"],
        request_bytes=raw["request_bytes"],
        reply_bytes=raw["reply_bytes"],
        tasks=raw["tasks"],
        restarts=raw["restarts"],
        queued=raw["queued"],
    )
