"""Level 2: one chip inside this process, with the rules of a chip in a process of its own.

A deadline cannot interrupt work here: it bounds the wait for the chip's turn, and what took longer than its
limit is reported as a time-out when it has ended.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from simpler import _core
from simpler.callables import CallableHandle, CallableTable, Target
from simpler.chip_service import ChipService
from simpler.chips.backend import ChipConfig
from simpler.chips.registry import find_backend
from simpler.config import RunConfig, run_limit
from simpler.control import registry as extension_registry
from simpler.control import transfers as transfer_registry
from simpler.deliveries import Deliveries
from simpler.device_memory import DeviceMemory
from simpler.errors import ClosedError, ConfigError, TaskError
from simpler.extensions import ExtensionCalls
from simpler.failures import Failures
from simpler.holds import Holds
from simpler.local_caller import LocalCaller, Work, is_interrupt
from simpler.memory import HostHeap, MemoryRegistry
from simpler.shared_map import SharedMap
from simpler.status import ChildStats, ChildStatus, Names, Running, name_work
from simpler.task_args import EMPTY_ARGS, check_args
from simpler.transfer_service import TransferService
from simpler.transfers import Transfers

if TYPE_CHECKING:
    from collections.abc import Callable

    from simpler.buffers import Buffer
    from simpler.config import WorkerConfig
    from simpler.uses import Use

_PATH = (0,)


class LocalChip:
    """A Worker's inside at level 2."""

    def __init__(self, config: WorkerConfig, name: str, callables: CallableTable) -> None:
        """Map the memory; the device is taken by `start()`."""
        self.config = config
        self._callables = callables
        self._device_id = config.device_ids[0]
        chip = ChipConfig(device_id=self._device_id, worker_id=0, hbm_bytes=config.hbm_bytes, name=name)
        backend = find_backend(config.platform)(chip)
        heap = _core.SharedRegion(config.heap_bytes, f"{name}-heap")
        extensions = extension_registry.snapshot()
        providers = transfer_registry.snapshot()
        extension_names = [extension.name for extension in extensions]
        provider_names = [provider.name for provider in providers]

        def name_of(work: Work) -> tuple[str, str]:
            names = Names(extension_names, provider_names, callables.names())
            return name_work(work.what, work.op, work.arg, names)

        self._name_of = name_of
        region = backend.host_memory
        shared = SharedMap([heap] if region is None else [heap, region])
        self._service = ChipService(
            backend,
            device_id=self._device_id,
            worker_id=_PATH,
            generation=0,
            extensions=extensions,
            transfers=TransferService(providers, device_id=self._device_id, worker_id=_PATH, shared=shared),
            regions=[heap],
            shared=shared,
        )
        holds = Holds()
        deliveries = Deliveries()
        self.caller = LocalCaller(
            self._service,
            self._device_id,
            config.max_control_payload,
            deliveries,
            holds,
            name_of,
        )
        self.memory = DeviceMemory(
            self.caller,
            holds,
            [region],
            maps_peers=backend.maps_peers,
            timeout_s=config.control_timeout_s,
            chunk_bytes=config.max_control_payload,
            expect=deliveries.expect,
        )
        self.registry = MemoryRegistry(
            malloc=self.memory.malloc,
            free=self.memory.free,
            heap=HostHeap(heap),
            maps_peers=backend.maps_peers,
        )
        self.memory.registry = self.registry
        self.extensions = ExtensionCalls(self.caller, extensions, [region], self.registry, holds, deliveries)
        self.transfers = Transfers(
            config,
            weakref.proxy(self),
            self.caller,
            providers,
            [region is not None],
            self.registry,
            deliveries,
        )
        self._open = False

    def start(self) -> None:
        """Take the device."""
        self._service.open()
        self._open = True
        self.registry.engine = _core.TaskEngine.local(Failures(self.config.device_ids, 1), 1)

    def abandon(self) -> None:
        """init() failed: give back what is held."""
        self.close()

    def close(self) -> None:
        """Give the device back; work that still runs is left to its thread."""
        ended = self.transfers.close(self.config.shutdown_timeout_s / 2)
        idle = self.caller.close(self.config.shutdown_timeout_s)
        self.transfers.end_all()
        if self._open and idle and ended:
            self._open = False
            self._service.close()
        if self.registry.engine is not None:
            self.registry.engine.close()
        self.registry.close()

    def watch_turn(self, use: Use, call: Callable[[], None]) -> None:
        """See `TransferHost`: nobody tells of turns here, so a thread waits for one that has not come."""

        def wait() -> None:
            with contextlib.suppress(ClosedError):
                use.wait()
            call()

        if use.granted:
            call()
        else:
            threading.Thread(target=wait, name="simpler-turn", daemon=True).start()

    def may_block(self) -> bool:
        """See `TransferHost`."""
        return True

    def is_alive(self, worker: int) -> bool:  # noqa: ARG002 - there is one chip
        """See `TransferHost`."""
        return self._open

    def wait_gone(self, worker: int) -> None:
        """See `TransferHost`: this process lives."""

    def process_number(self, worker: int) -> int:  # noqa: ARG002 - there is one chip
        """See `TransferHost`: this process is never replaced."""
        return 0

    def note_death(self, worker: int) -> None:
        """See `TransferHost`: this process lives."""

    def malloc(self, worker: int, nbytes: int) -> Buffer:
        """`Worker.malloc`."""
        return self.registry.malloc(worker, nbytes, device_id=self._device_id)

    def register(self, target: Target, name: str | None) -> CallableHandle:
        """`Worker.register`."""
        return self._callables.add(target, name, ship=False)[0]

    def run(
        self,
        fn: Callable[..., Any] | CallableHandle,
        args: Any,
        config: RunConfig | None,
        timeout_s: float | None,
    ) -> Any:
        """One kernel; what a Python function returned."""
        if not isinstance(fn, CallableHandle) or fn.table is not self._callables:
            raise TypeError(
                "level 2 runs one registered kernel: run(handle, args), with a handle of this Worker"
            )
        limit = run_limit(timeout_s, config)
        if config is not None and config.trace is not None:
            raise ConfigError("level 2 has no task graph to trace: RunConfig.trace needs level 3")
        copy = EMPTY_ARGS if args is None else check_args(args).snapshot()
        packed = _core.pack_task(copy.pack())
        deadline = time.monotonic() + limit
        with self.registry.acquire(copy.uses, limit, worker=0, what=f"task {fn.name!r}"):
            left = math.inf if limit == math.inf else max(deadline - time.monotonic(), 0.0)
            self.caller.counts["tasks"] += 1
            with self.caller.turn("task", 0, fn.id, _core.LANE_MAIN, left):
                try:
                    return self._service.run(self._callables.target(fn.id), packed)
                except BaseException as error:
                    if is_interrupt(error):
                        raise
                    cause = self.caller.remote(error)
                    raise TaskError(callable=fn.name, path=_PATH, cause=cause) from error

    def status(self) -> list[ChildStatus]:
        """One record for the chip."""
        now = time.monotonic()
        running = sorted(self._running(work, now) for work in list(self.caller.running.values()))
        return [
            ChildStatus(
                path=_PATH,
                kind="chip",
                device=self._device_id,
                pid=os.getpid(),
                state="ready" if self._open else "closed",
                running=running[0][2] if running else None,
                first_error=None,
                generation=0,
                also_running=tuple(item for _, _, item in running[1:]),
            )
        ]

    def stats(self) -> list[ChildStats]:
        """Counters of the chip."""
        counts = self.caller.counts
        return [
            ChildStats(
                path=_PATH,
                calls=counts["calls"],
                timeouts=counts["timeouts"],
                late_replies=0,
                request_bytes=counts["request_bytes"],
                reply_bytes=counts["reply_bytes"],
                tasks=counts["tasks"],
                restarts=0,
                queued=self.caller.queued(),
            )
        ]

    def _running(self, work: Work, now: float) -> tuple[bool, float, Running]:
        service = work.lane != _core.LANE_MAIN
        what, name = self._name_of(work)
        seconds = now - work.started
        return service, -seconds, Running(what, name, seconds, "service" if service else "main")
