"""Options of a Worker and of a run, checked when they are given."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simpler.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

# A tuple of its own: Worker tells "not given" from (0,) by identity.
DEFAULT_DEVICE_IDS: tuple[int, ...] = tuple([0])  # noqa: C409 - a literal would be shared by the compiler
MAX_CONTROL_PAYLOAD = 1 << 31
MAX_CHILDREN = 1024
_MAX_NAME = 64
_MAX_BYTES = 1 << 46  # what one mapping can have on 47-bit address spaces, with room for everything else


def call_timeout(timeout_s: float | None, default_s: float) -> float:
    """Seconds for a control, memory or copy call: None is `default_s`, `math.inf` for ever.

    Raises:
        ValueError: 0, negative, NaN or no number.
    """
    if timeout_s is None:
        return default_s
    if not _is_number(timeout_s) or not timeout_s > 0:
        raise ValueError(f"timeout_s must be above 0, or math.inf for ever: {timeout_s!r}")
    return float(timeout_s)


def wait_timeout(timeout_s: float | None) -> float:
    """Seconds for waiting on runs and tasks: None has no limit, 0 polls.

    Raises:
        ValueError: Negative, NaN or no number.
    """
    if timeout_s is None:
        return math.inf
    if not _is_number(timeout_s) or not timeout_s >= 0:
        raise ValueError(f"timeout_s must be 0 or more, or None for no limit: {timeout_s!r}")
    return float(timeout_s)


def _is_number(value: object) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, bool)


@dataclass(frozen=True)
class RunConfig:
    """How a run, or one of its tasks, is executed.

    Attributes:
        deadline_s: Seconds for the whole run; None has no limit.
        priority: Higher goes first among tasks that can begin and are not yet sent; -32768 to 32767.
        trace: A file for a trace of the run, for Perfetto or chrome://tracing, written when it is done.
    """

    deadline_s: float | None = None
    priority: int = 0
    trace: str | None = None

    def __post_init__(self) -> None:
        if self.deadline_s is not None and not (_is_number(self.deadline_s) and self.deadline_s > 0):
            raise ConfigError(f"RunConfig.deadline_s must be above 0: {self.deadline_s!r}")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise ConfigError(f"RunConfig.priority must be an integer: {self.priority!r}")
        if not -(1 << 15) <= self.priority < 1 << 15:
            raise ConfigError(f"RunConfig.priority must be -32768 to 32767: {self.priority}")
        if self.trace is not None and not isinstance(self.trace, str):
            raise ConfigError(f"RunConfig.trace must be a str: {self.trace!r}")

    def task_priority(self) -> int:
        """The priority; ConfigError unless it alone is set: all that a single task may choose."""
        if self.deadline_s is not None or self.trace is not None:
            raise ConfigError("a task's config may set only priority; deadline_s and trace belong to the run")
        return self.priority


def run_limit(timeout_s: float | None, config: RunConfig | None) -> float:
    """Seconds for a whole run: the smaller of `timeout_s` and the deadline in `config`.

    Raises:
        ValueError: `timeout_s` as in `wait_timeout`.
        TypeError: `config` is no RunConfig.
    """
    limit = wait_timeout(timeout_s)
    if config is None:
        return limit
    deadline_s = check_config(config).deadline_s
    return limit if deadline_s is None else min(limit, deadline_s)


def check_config(config: RunConfig) -> RunConfig:
    """Raise TypeError unless `config` is one."""
    if not isinstance(config, RunConfig):
        raise TypeError(f"config is a RunConfig, not {type(config).__name__}")
    return config


@dataclass(frozen=True)
class WorkerConfig:
    """The options of a Worker after every check; fields are as in `Worker`.

    At level 2 `device_ids` is the one device. Sequences become tuples, numbers become int or float.

    Raises:
        ConfigError: An option, or a combination of options, cannot work.
    """

    level: int = 3
    platform: str = "cpu"
    device_ids: Sequence[int] = DEFAULT_DEVICE_IDS
    device_id: int | None = None
    num_sub_workers: int = 0
    name: str | None = None
    control_timeout_s: float = 30.0
    startup_timeout_s: float = 60.0
    shutdown_timeout_s: float = 10.0
    max_control_payload: int = 64 << 20
    hbm_bytes: int = 1 << 30
    heap_bytes: int = 1 << 30
    spin_us: float = 50.0
    max_pending_tasks: int = 8192
    max_transfers: int = 256
    max_transfer_bytes: int | None = None
    keep_fds: Sequence[int] = ()
    restart: None = None

    def __post_init__(self) -> None:
        level = self._int("level", low=0)
        if level not in (2, 3):
            raise ConfigError(f"level must be 2 (one chip in this process) or 3 (one node): {level}")
        self._put("device_ids", self._devices())
        self._put("num_sub_workers", self._int("num_sub_workers", high=MAX_CHILDREN))
        self._check_children()
        if not isinstance(self.platform, str) or not self.platform:
            raise ConfigError(f"platform must be the name of a chip backend: {self.platform!r}")
        if self.name is not None:
            _check_name(self.name)
        for option in ("control_timeout_s", "startup_timeout_s", "shutdown_timeout_s"):
            self._put(option, self._seconds(option))
        self._put("max_control_payload", self._int("max_control_payload", low=1, high=MAX_CONTROL_PAYLOAD))
        self._put("hbm_bytes", self._int("hbm_bytes", low=256, high=_MAX_BYTES))
        self._put("heap_bytes", self._int("heap_bytes", low=4096, high=_MAX_BYTES))
        self._put("spin_us", self._spin())
        self._put("max_pending_tasks", self._int("max_pending_tasks", low=1, high=1 << 20))
        self._put("max_transfers", self._int("max_transfers", low=1, high=1 << 16))
        if self.max_transfer_bytes is not None:
            self._put("max_transfer_bytes", self._int("max_transfer_bytes", low=1, high=_MAX_BYTES))
        self._put("keep_fds", self._ints("keep_fds"))
        if self.restart is not None:
            raise ConfigError(f"restart must be None, the only policy there is: {self.restart!r}")

    def _put(self, option: str, value: object) -> None:
        object.__setattr__(self, option, value)

    def _int(self, option: str, *, low: int = 0, high: int | None = None) -> int:
        value = _as_int(option, getattr(self, option))
        if value < low or (high is not None and value > high):
            limits = f"at least {low}" if high is None else f"{low} to {high}"
            raise ConfigError(f"{option} must be {limits}: {value}")
        return value

    def _ints(self, option: str) -> tuple[int, ...]:
        given = getattr(self, option)
        if isinstance(given, str | bytes) or not hasattr(given, "__iter__"):
            raise ConfigError(f"{option} must be a sequence of integers: {given!r}")
        values = tuple(_as_int(option, value) for value in given)
        if any(value < 0 for value in values):
            raise ConfigError(f"{option} must not be negative: {values}")
        if len(set(values)) != len(values):
            raise ConfigError(f"{option} has duplicates: {values}")
        return values

    def _devices(self) -> tuple[int, ...]:
        given = self.device_ids is not DEFAULT_DEVICE_IDS
        if self.device_id is not None and given:
            raise ConfigError(
                "device_id= and device_ids= exclude each other: level 2 takes one, level 3 the other"
            )
        if self.level == 2:
            if given:
                raise ConfigError("level 2 is one chip: use device_id=, not device_ids=")
            return (0,) if self.device_id is None else (self._int("device_id"),)
        if self.device_id is not None:
            raise ConfigError(f"level {self.level} has several chips: use device_ids=, not device_id=")
        return self._ints("device_ids")

    def _check_children(self) -> None:
        if self.level == 2 and self.num_sub_workers:
            raise ConfigError("level 2 has no children: num_sub_workers= needs level 3")
        children = len(self.device_ids) + self.num_sub_workers
        if not 1 <= children <= MAX_CHILDREN:
            raise ConfigError(f"a worker has 1 to {MAX_CHILDREN} chips and sub workers together: {children}")

    def _seconds(self, option: str) -> float:
        value = _as_float(option, getattr(self, option))
        if not value > 0:
            raise ConfigError(f"{option} must be above 0 seconds, or math.inf for ever: {value}")
        return value

    def _spin(self) -> float:
        value = _as_float("spin_us", self.spin_us)
        if not 0 <= value <= 1e6:
            raise ConfigError(f"spin_us must be 0 (never spin) to 1,000,000 microseconds: {value}")
        return value


def _as_int(option: str, value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(f"{option} must be an integer: {value!r}")
    return operator.index(value)


def _as_float(option: str, value: object) -> float:
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        raise ConfigError(f"{option} must be a number: {value!r}")
    return float(value)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME or not name.isprintable():
        raise ConfigError(f"name must be 1 to {_MAX_NAME} printable characters: {name!r}")
