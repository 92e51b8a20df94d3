"""The life of a Worker: its options, its five states, its children."""

from __future__ import annotations

import itertools
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

from simpler import _core, lifecycle, logs, thread_limits
from simpler.callables import CallableTable
from simpler.chips.registry import find_backend
from simpler.config import DEFAULT_DEVICE_IDS, WorkerConfig
from simpler.errors import ClosedError, StartupError
from simpler.failures import startup_error
from simpler.ids import as_path
from simpler.lifecycle import Lifecycle, WorkerState
from simpler.local_chip import LocalChip
from simpler.node import Node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from simpler.status import ChildStats, ChildStatus

_numbers = itertools.count(1)


class WorkerBase:
    """A Worker's options, states and helpers; `Worker` adds the calls.

    Thread safety: any thread.
    """

    def __init__(
        self,
        level: int = 3,
        *,
        platform: str = "cpu",
        device_ids: Sequence[int] = DEFAULT_DEVICE_IDS,
        device_id: int | None = None,
        num_sub_workers: int = 0,
        name: str | None = None,
        control_timeout_s: float = 30.0,
        startup_timeout_s: float = 60.0,
        shutdown_timeout_s: float = 10.0,
        max_control_payload: int = 64 << 20,
        hbm_bytes: int = 1 << 30,
        heap_bytes: int = 1 << 30,
        spin_us: float = 50.0,
        max_pending_tasks: int = 8192,
        max_transfers: int = 256,
        max_transfer_bytes: int | None = None,
        keep_fds: Sequence[int] = (),
        restart: None = None,
    ) -> None:
        """Plan a worker; nothing is started.

        Args:
            level: 2 for one chip in this process, 3 for a node of child processes.
            platform: The chip backend.
            device_ids: Level 3: one chip process each; their worker ids are their positions.
            device_id: Level 2: the device; None is 0.
            num_sub_workers: Processes for Python functions on the host; their ids follow the chips'.
            name: Shown in logs, errors and process names.
            control_timeout_s: The limit of control, memory and copy calls that give none.
            startup_timeout_s: The limit of init().
            shutdown_timeout_s: The limit of close(); what still runs then is killed.
            max_control_payload: Bytes of the largest payload, each way.
            hbm_bytes: Device memory of each cpu chip.
            heap_bytes: Host memory shared by all processes of this worker.
            spin_us: How long a waiting process spins before it sleeps; 0 never spins.
            max_pending_tasks: Tasks submitted and not ended, of all runs together; submission waits beyond.
            max_transfers: Transfers submitted to one chip and not ended; submission waits beyond.
            max_transfer_bytes: Bytes of their ranges together; None is `hbm_bytes`.
            keep_fds: Descriptors that children keep although they are sockets, pipes or the like.
            restart: None: a dead child stays dead until restart().

        Raises:
            ConfigError: an option, or a combination of options, cannot work.
        """
        self._config = WorkerConfig(
            level=level,
            platform=platform,
            device_ids=device_ids,
            device_id=device_id,
            num_sub_workers=num_sub_workers,
            name=name,
            control_timeout_s=control_timeout_s,
            startup_timeout_s=startup_timeout_s,
            shutdown_timeout_s=shutdown_timeout_s,
            max_control_payload=max_control_payload,
            hbm_bytes=hbm_bytes,
            heap_bytes=heap_bytes,
            spin_us=spin_us,
            max_pending_tasks=max_pending_tasks,
            max_transfers=max_transfers,
            max_transfer_bytes=max_transfer_bytes,
            keep_fds=keep_fds,
            restart=restart,
        )
        find_backend(platform)  # says at once when there is none
        logs.configure_from_environment()
        if level != 2:
            thread_limits.prepare()  # here rather than in init(), which is short
        self._name = name if name is not None else f"worker-{next(_numbers)}"
        self._life = Lifecycle(self._name)
        self._callables = CallableTable()
        self._engine: Node | LocalChip | None = None
        self._control_timeout_s = self._config.control_timeout_s
        self._num_chips = len(self._config.device_ids)
        self._extensions: dict[str, tuple[int, int]] = {}
        self._call: Callable[..., bytes] = self._refuse_call

    @property
    def level(self) -> int:
        """2 or 3."""
        return self._config.level

    @property
    def name(self) -> str:
        """As given, or one of its own."""
        return self._name

    @property
    def state(self) -> WorkerState:
        """NEW, STARTING, READY, CLOSING or CLOSED; equal to its name."""
        return self._life.state

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The ids of the chips, in the order of `device_ids`."""
        return tuple(range(self._num_chips))

    @property
    def sub_worker_ids(self) -> tuple[int, ...]:
        """The ids of the sub workers."""
        return tuple(range(self._num_chips, self._num_chips + self._config.num_sub_workers))

    def init(self) -> None:
        """Start everything; return when all of it is ready.

        Raises:
            StartupError: something failed or took longer than `startup_timeout_s`; nothing is left of it.
            ClosedError: it has been called before.
        """
        self._life.begin_start()
        engine: Node | LocalChip | None = None
        try:
            _core.require_platform()
            if "t" in sys.abiflags:
                raise RuntimeError(
                    "a free-threaded interpreter cannot fork safely with threads running: "
                    "use a build with the GIL"
                )
            engine_type = LocalChip if self._config.level == 2 else Node
            engine = engine_type(self._config, self._name, self._callables)
            engine.start()
        except BaseException as error:
            if engine is not None:
                engine.abandon()
                engine = None
            traceback.clear_frames(error.__traceback__)  # what they name would live as long as the error
            self._life.end_start(ready=False)
            if isinstance(error, Exception) and not isinstance(error, ClosedError):
                raise startup_error(error) from error
            raise
        self._engine = engine
        self._extensions = engine.extensions.table
        self._call = engine.caller.call
        lifecycle.track(self)
        self._life.end_start(ready=True)
        if self._life.close_wanted:
            self.close()
            raise ClosedError(f"init: {self._name} was closed while it started; make a new Worker")

    def close(self) -> None:
        """Stop everything within `shutdown_timeout_s`; again, or before init(), it does nothing.

        Calls and tasks in flight fail with ClosedError.
        """
        if not self._life.begin_close():
            return
        self._call = self._refuse_call
        self._extensions = {}
        lifecycle.untrack(self)
        try:
            if self._engine is not None:
                self._engine.close()
        finally:
            self._engine = None
            self._life.end_close()

    def __enter__(self) -> Self:
        self.init()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if "_life" in self.__dict__:
            self.close()

    def refuse_copy(self) -> None:
        """Called in a forked copy of the process: refuse everything from now on."""
        self._call = self._refuse_call
        self._extensions = {}

    def kill(self, worker_id: int | Iterable[int]) -> None:
        """End one child now (SIGKILL) and wait until it is gone.

        Raises:
            ValueError: no such child.
        """
        self._node("kill").kill(self._child(worker_id))

    def restart(self, worker_id: int | Iterable[int]) -> None:
        """Bring a dead child back under its id. Its device memory starts empty.

        Raises:
            StartupError: it did not become ready, or the spare process that forks replacements is gone.
            ValueError: no such child, or it is alive.
        """
        self._node("restart").restart(self._child(worker_id))

    def status(self) -> list[ChildStatus]:
        """One record for each child, then the spare process; at level 2 one for this chip."""
        return self._ready("status").status()

    def stats(self) -> list[ChildStats]:
        """Counters of each child since init()."""
        return self._ready("stats").stats()

    def _ready(self, what: str) -> Node | LocalChip:
        self._life.require_ready(what)
        engine = self._engine
        if engine is None:
            raise StartupError(f"{what}: {self._name} did not start")
        return engine

    def _node(self, what: str) -> Node:
        engine = self._ready(what)
        if not isinstance(engine, Node):
            raise ValueError(f"{what}: level 2 has no children")  # noqa: TRY004 - the level is a value
        return engine

    def _child(self, worker_id: int | Iterable[int]) -> int:
        return self._position(worker_id, self._num_chips + self._config.num_sub_workers, "worker")

    def _chip(self, worker_id: int | Iterable[int]) -> int:
        return self._position(worker_id, self._num_chips, "chip")

    def _position(self, worker_id: int | Iterable[int], count: int, kind: str) -> int:
        path = as_path(worker_id)
        if len(path) != 1 or path[0] >= count:
            raise ValueError(f"worker_id={worker_id!r}: {self._name} has no such {kind}; there are {count}")
        return path[0]

    def _refuse_call(self, *_args: object) -> NoReturn:
        raise self._life.refusal("a control call")
