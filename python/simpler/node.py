"""Level 3: a node of chip processes and sub workers, on top of the compiled tree."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from simpler import _core, thread_limits
from simpler.capture import CapturedGraph, capture
from simpler.child_main import ChildProgram
from simpler.chips.backend import ChipBackend, ChipConfig
from simpler.chips.registry import find_backend
from simpler.control import registry as extension_registry
from simpler.control import transfers as transfer_registry
from simpler.deliveries import Deliveries, Dispatcher
from simpler.device_memory import DeviceMemory
from simpler.errors import ClosedError, SimplerError, StartupError, WorkerError
from simpler.extensions import ExtensionCalls
from simpler.failures import Failures
from simpler.function_runs import run_function, submit_function
from simpler.holds import Holds
from simpler.memory import HostHeap, MemoryRegistry
from simpler.status import ChildStats, ChildStatus, Names, make_stats, make_status
from simpler.transfers import Transfers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from simpler.buffers import Buffer
    from simpler.callables import CallableHandle, CallableTable, Target
    from simpler.config import RunConfig, WorkerConfig
    from simpler.run import RunHandle
    from simpler.uses import Use

_log = logging.getLogger("simpler.worker")
_LAST_EVENTS_S = 0.2  # what is left of a program's callbacks when the shutdown budget is used up
_REGISTER = _core.ControlOp.REGISTER


class Node:
    """A running tree and what the parent keeps about it.

    Nothing here refers to the Worker, and once it is closed there is no cycle of references in it: its shared
    memory goes with the last reference, not when the garbage collector comes by.
    Fork: `start()` forks, our thread starts only after it.
    """

    def __init__(self, config: WorkerConfig, name: str, callables: CallableTable) -> None:
        """Map everything that is shared."""
        self.config = config
        self.name = name
        self.callables = callables
        self.num_chips = len(config.device_ids)
        self.num_children = self.num_chips + config.num_sub_workers
        self.failures = Failures(config.device_ids, self.num_children)
        backends = self._make_backends(name)
        self.maps_peers = all(backend.maps_peers for backend in backends)
        self.window_registrable = all(backend.window_registrable for backend in backends)
        extensions = extension_registry.snapshot()
        providers = transfer_registry.snapshot()
        self._extension_names = [extension.name for extension in extensions]
        self._provider_names = [provider.name for provider in providers]
        self.tree = _core.Tree(
            device_ids=config.device_ids,
            num_sub_workers=config.num_sub_workers,
            max_control_payload=config.max_control_payload,
            heap_bytes=config.heap_bytes,
            spin_us=config.spin_us,
            max_pending_tasks=config.max_pending_tasks,
            patience_s=config.control_timeout_s,
            keep_fds=config.keep_fds,
            name=name,
            make_error=self.failures,
        )
        for extension in extensions:
            self.tree.name_extension(extension.id, extension.name)
        for provider in providers:
            self.tree.name_provider(provider.id, provider.name)
        self.caller = self.tree
        self._holds = Holds()
        deliveries = Deliveries()
        dispatcher = self._dispatcher = Dispatcher(self.tree, deliveries, self.failures, self, name)
        regions = [backend.host_memory for backend in backends]
        self._keep = [region for region in regions if region is not None]
        self.memory = DeviceMemory(
            self.tree,
            self._holds,
            regions,
            maps_peers=self.maps_peers,
            timeout_s=config.control_timeout_s,
            chunk_bytes=config.max_control_payload,
            expect=deliveries.expect,
            may_block=lambda: not dispatcher.is_current(),
        )
        self.registry = MemoryRegistry(
            malloc=self.memory.malloc,
            free=self.memory.free,
            heap=HostHeap(self.tree.heap),
            maps_peers=self.maps_peers,
        )
        self.memory.registry = self.registry
        self.extensions = ExtensionCalls(
            self.tree,
            extensions,
            regions,
            self.registry,
            self._holds,
            deliveries,
            lambda: not dispatcher.is_current(),
        )
        visible = [region is not None for region in regions]
        self.transfers = Transfers(
            config, weakref.proxy(self), self.tree, providers, visible, self.registry, deliveries
        )
        self._turns: dict[int, Callable[[], None]] = {}
        self.engine: _core.TaskEngine
        self._watched: dict[int, list[Callable[[], None]]] = {}
        self._watched_lock = threading.Lock()
        self._program = ChildProgram(
            backends,
            config.device_ids,
            extensions,
            providers,
            callables,
            self.tree.heap,
            thread_limits.prepare(),
        )
        self._deaths = [0] * self.num_children
        self._restart_lock = threading.Lock()
        self._restarting: set[int] = set()
        self._deaths_lock = threading.Lock()

    def _make_backends(self, name: str) -> list[ChipBackend]:
        make = find_backend(self.config.platform)
        return [
            make(ChipConfig(device_id=device, worker_id=worker, hbm_bytes=self.config.hbm_bytes, name=name))
            for worker, device in enumerate(self.config.device_ids)
        ]

    # Lifecycle

    def start(self) -> None:
        """Fork every child and wait until each is ready. Raises the first child's own error."""
        for stream in (sys.stdout, sys.stderr):  # or the children would write what is buffered again
            with contextlib.suppress(Exception):
                stream.flush()
        for number, callable_name in enumerate(self.callables.names()):
            self.tree.name_callable(number, callable_name)
        self.tree.start(self._program, self._keep, self.config.startup_timeout_s)
        self.engine = self.registry.engine = _core.TaskEngine.of(self.tree)
        self._note_pids()
        self._dispatcher.start()

    def abandon(self) -> None:
        """init() failed after this was made: leave nothing."""
        self.tree.close(self.config.shutdown_timeout_s)
        self.registry.close()

    def close(self) -> None:
        """Stop every child and free everything; bounded by shutdown_timeout_s."""
        deadline = time.monotonic() + self.config.shutdown_timeout_s
        try:
            self.transfers.close(self.config.shutdown_timeout_s / 2)
        finally:  # an interrupt ends the waiting, not the closing
            self.tree.close(max(deadline - time.monotonic(), 0.0))
            self._dispatcher.join(max(deadline - time.monotonic(), _LAST_EVENTS_S))
            self.transfers.end_all()
            self._holds.end_all()
            self.engine.close()
            self.registry.close()

    def kill(self, worker: int) -> None:
        """`Worker.kill`."""
        self.tree.kill(worker)
        self._note_death(worker)

    def restart(self, worker: int) -> None:
        """`Worker.restart`."""
        with self._restart_lock:
            if self.tree.alive(worker):
                raise ValueError(f"worker {worker} is alive: restart() is for a dead child; kill() it first")
            self._note_death(worker, restarting=True)
            try:
                self.tree.restart(worker, self.config.startup_timeout_s)
            except SimplerError as error:
                raise _restart_error(worker, error) from error
            finally:
                self._note_death(worker, restarting=False)
            self._note_pids()
            try:
                for number, blob in self.callables.shipped():
                    self.tree.call(worker, _REGISTER, number, 0, b"", blob, self.config.control_timeout_s)
                self.engine.worker_back(worker)
                self.transfers.worker_back(worker)
            except SimplerError as error:
                self.kill(worker)
                raise _restart_error(worker, error) from error

    def _note_pids(self) -> None:
        for record in self.tree.status():
            worker, pid = record["worker"], record["pid"]
            if isinstance(worker, int) and isinstance(pid, int) and worker >= 0:
                self.failures.pids[worker] = pid

    def _note_death(self, worker: int, *, restarting: bool | None = None) -> None:
        """Tell the registry of each death once, whichever way it is learnt first.

        While a restart is under way the core's figures do not tell a new process that is not there yet from
        one that has died: the restart looks before and after. It says so with `restarting`.
        """
        with self._deaths_lock:
            if restarting is None and worker in self._restarting:
                return
            if restarting:
                self._restarting.add(worker)
            else:
                self._restarting.discard(worker)
            deaths = self.tree.generation(worker) + (0 if self.tree.alive(worker) else 1)
            new = deaths - self._deaths[worker]
            self._deaths[worker] = max(deaths, self._deaths[worker])
            # Under the lock: whoever finds the death told already relies on its buffers being lost by then.
            if worker < self.num_chips:
                for _ in range(new):
                    self.registry.worker_lost(worker)
        if new:
            self.transfers.worker_died(worker)

    # What the dispatcher tells

    def on_died(self, worker: int, how: str) -> None:
        """A child is gone."""
        self._note_death(worker)
        _log.warning("%s", how)

    def on_ended(self, worker: int, hold: int) -> None:
        """A request that its caller had given up has ended."""
        self._holds.end(worker, hold)

    def on_run_done(self, number: int) -> None:
        """A watched run is done."""
        with self._watched_lock:
            calls = self._watched.pop(number, [])
        for call in calls:
            call()

    def on_turn(self, number: int) -> None:
        """A watched use's turn has come, or never will."""
        with self._watched_lock:
            call = self._turns.pop(number, None)
        if call is not None:
            call()

    def watch_turn(self, use: Use, call: Callable[[], None]) -> None:
        """See `TransferHost`."""
        turn = use.turn
        if turn is None:
            call()
            return
        with self._watched_lock:
            self._turns[turn.number] = call
        if turn.watch():
            self.on_turn(turn.number)

    def may_block(self) -> bool:
        """See `TransferHost`."""
        return not self._dispatcher.is_current()

    def is_alive(self, worker: int) -> bool:
        """See `TransferHost`."""
        return self.tree.alive(worker)

    def wait_gone(self, worker: int) -> None:
        """See `TransferHost`: a death is known before the kernel has taken the process down."""
        self.tree.kill(worker)

    def process_number(self, worker: int) -> int:
        """See `TransferHost`."""
        return self.tree.generation(worker)

    def note_death(self, worker: int) -> None:
        """See `TransferHost`."""
        self._note_death(worker)

    def on_buffers_idle(self) -> None:
        """There is memory to be given back."""
        self.registry.collect()

    def watch(self, run: _core.Run, call: Callable[[], None]) -> None:
        """See `run.Host`."""
        with self._watched_lock:
            self._watched.setdefault(run.number, []).append(call)
        if run.watch():
            self.on_run_done(run.number)

    def unwatch(self, run: _core.Run, call: Callable[[], None]) -> None:
        """See `run.Host`."""
        with self._watched_lock:
            calls = self._watched.get(run.number, [])
            if call in calls:
                calls.remove(call)

    # What it is doing

    def status(self) -> list[ChildStatus]:
        """`Worker.status`."""
        names = Names(self._extension_names, self._provider_names, self.callables.names())
        return [make_status(raw, names) for raw in self.tree.status()]

    def stats(self) -> list[ChildStats]:
        """`Worker.stats`."""
        return [make_stats(worker, raw) for worker, raw in enumerate(self.tree.counters())]

    # Memory and tasks

    def malloc(self, worker: int, nbytes: int) -> Buffer:
        """`Worker.malloc`."""
        return self.registry.malloc(worker, nbytes, device_id=self.config.device_ids[worker])

    def register(self, target: Target, name: str | None) -> CallableHandle:
        """`Worker.register` after init(): ship it to every living child."""
        with self._restart_lock:
            handle, blob = self.callables.add(target, name, ship=True)
            assert blob is not None
            self.tree.name_callable(handle.id, handle.name)
            try:
                deadline = time.monotonic() + self.config.control_timeout_s
                for worker in range(self.num_children):
                    self._ship(worker, handle.id, blob, deadline)
            except BaseException:
                self.callables.drop_blob(handle)
                raise
        return handle

    def _ship(self, worker: int, number: int, blob: bytes, deadline: float) -> None:
        left = max(deadline - time.monotonic(), 1e-3)
        try:
            self.tree.call(worker, _REGISTER, number, 0, b"", blob, left)
        except WorkerError:
            if self.tree.alive(worker):
                raise
            _log.debug("worker %d is dead: it gets callable %d when it is restarted", worker, number)

    def run(
        self,
        fn: Callable[..., Any] | CallableHandle,
        args: Any,
        config: RunConfig | None,
        timeout_s: float | None,
    ) -> Any:
        """`Worker.run`."""
        return run_function(self, fn, args, config, timeout_s)

    def submit(
        self, fn: Callable[..., Any] | CallableHandle, args: Any, config: RunConfig | None
    ) -> RunHandle:
        """`Worker.submit`."""
        return submit_function(self, fn, args, config)

    def capture(self, fn: Callable[..., Any], args: Mapping[str, Any] | None) -> CapturedGraph:
        """`Worker.capture`."""
        return capture(self, fn, args)


def _restart_error(worker: int, error: SimplerError) -> SimplerError:
    if isinstance(error, ClosedError | StartupError):
        return error
    return StartupError(f"worker {worker} could not be restarted: {error}")
