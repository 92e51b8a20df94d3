"""Extension calls as the parent makes them: to one chip or to all, waiting or not, with memory or without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from simpler import _core
from simpler.buffers import HOST, Buffer, HostBuffer
from simpler.control.chip_view import BufferEntry, pack_buffers
from simpler.control.registry import Extension, unknown_extension
from simpler.errors import SimplerError, WorkerTimeoutError
from simpler.gather import CallFuture, Gather, broadcast_result, still_runs
from simpler.ids import as_path
from simpler.memory import Memory, MemoryRegistry
from simpler.payloads import as_payload
from simpler.tensor import Tensor

if TYPE_CHECKING:
    from simpler.caller import Caller
    from simpler.deliveries import Deliveries
    from simpler.holds import Holds
    from simpler.payloads import BytesLike, Plain
    from simpler.uses import Use

Buffers = Sequence[Memory] | Mapping[str, Memory]
Named = tuple[str, Memory]

_EXTENSION = _core.ControlOp.EXTENSION


class ExtensionCalls:
    """The extension calls of one Worker.

    Thread safety: any thread.
    """

    def __init__(
        self,
        caller: Caller,
        extensions: Sequence[Extension],
        host_regions: Sequence[_core.SharedRegion | None],
        registry: MemoryRegistry,
        holds: Holds,
        deliveries: Deliveries,
        may_block: Callable[[], bool] = lambda: True,
    ) -> None:
        """Share the Worker's parts.

        Args:
            caller: Carries the calls.
            extensions: The Worker's snapshot.
            host_regions: For each chip its memory, when the host can touch it.
            registry: Checks the memory that calls name.
            holds: Keeps it until the handlers have ended.
            deliveries: Brings the outcomes of submitted calls.
            may_block: Whether this thread may wait for outcomes (the one that brings them must not).
        """
        self._caller = caller
        self._registry = registry
        self._holds = holds
        self._deliveries = deliveries
        self._may_block = may_block
        self._chips = range(len(host_regions))
        self._host_visible = [region is not None for region in host_regions]
        self.table: dict[str, tuple[int, int]] = {
            extension.name: (extension.id, _core.LANE_SERVICE if extension.concurrent else _core.LANE_MAIN)
            for extension in extensions
        }

    def run(
        self,
        name: str,
        payload: BytesLike,
        worker_id: int | Iterable[int] | None,
        timeout_s: float,
        buffers: Buffers,
        fail_fast: bool,
    ) -> bytes | list[bytes]:
        """`Worker.run_chip_control_extension`, whatever its arguments; `timeout_s` is checked already."""
        ext_id, lane = self._find(name)
        data = as_payload(payload)
        if worker_id is None:
            return self._broadcast(name, ext_id, lane, data, timeout_s, buffers, fail_fast)
        chip = self._chip(worker_id)
        if not buffers:
            return self._caller.call(chip, _EXTENSION, ext_id, lane, b"", data, timeout_s)
        items = _named(buffers)
        meta = self._pack(items)
        hold = self._hold(name, [(chip, items)])
        try:
            reply = self._caller.call_held(chip, _EXTENSION, ext_id, lane, meta, data, timeout_s, hold)
        except WorkerTimeoutError as error:
            if not error.started:
                self._holds.end(chip, hold)
            raise
        except (SimplerError, ValueError, TypeError):
            self._holds.end(chip, hold)
            raise
        # Anything else was raised by a signal handler: an event says when the request is over.
        self._holds.end(chip, hold)
        return reply

    def submit(
        self,
        name: str,
        payload: BytesLike,
        worker_id: int | Iterable[int] | None,
        timeout_s: float,
        buffers: Buffers,
        fail_fast: bool,
    ) -> CallFuture:
        """`Worker.submit_chip_control_extension`."""
        ext_id, lane = self._find(name)
        data = as_payload(payload)
        chips = list(self._chips) if worker_id is None else [self._chip(worker_id)]
        metas: list[bytes] = []
        hold = 0
        if buffers:
            metas, hold = self._prepare(name, chips, buffers, broadcast=worker_id is None)
        gather = Gather(
            name,
            chips,
            directed=worker_id is not None,
            fail_fast=fail_fast,
            ended=(lambda chip: self._holds.end(chip, hold)) if hold else None,
        )
        try:
            if worker_id is None:
                tokens = self._caller.submit_broadcast(_EXTENSION, ext_id, lane, metas, data, timeout_s, hold)
            else:
                meta = metas[0] if metas else b""
                tokens = [
                    self._caller.submit(chips[0], _EXTENSION, ext_id, lane, meta, data, timeout_s, hold)
                ]
        except Exception:
            self._end(chips, hold)
            raise
        gather.attach(tokens, self._caller, self._deliveries)
        return gather.future

    def _broadcast(
        self,
        name: str,
        ext_id: int,
        lane: int,
        data: Plain,
        timeout_s: float,
        buffers: Buffers,
        fail_fast: bool,
    ) -> list[bytes]:
        metas: list[bytes] = []
        hold = 0
        if buffers:
            metas, hold = self._prepare(name, self._chips, buffers, broadcast=True)
        # In a Future's callback the errors come through this very thread: there all chips are waited for.
        fail_fast = fail_fast and self._may_block()
        try:
            outcomes = self._caller.broadcast(
                _EXTENSION, ext_id, lane, metas, data, timeout_s, fail_fast, hold
            )
        except (SimplerError, ValueError, TypeError):
            self._end(self._chips, hold)
            raise
        if hold:  # what still runs is ended by an event, as after a signal
            self._end([chip for chip in self._chips if not still_runs(outcomes[chip])], hold)
        results: list[bytes] = broadcast_result(name, outcomes)
        return results

    def _find(self, name: str) -> tuple[int, int]:
        found = self.table.get(name)
        if found is None:
            raise unknown_extension(name)
        return found

    def _chip(self, worker_id: int | Iterable[int]) -> int:
        path = as_path(worker_id)
        if len(path) != 1 or path[0] not in self._chips:
            raise ValueError(
                f"worker_id={worker_id!r} is not a chip of this worker: it has {len(self._chips)}"
            )
        return path[0]

    def _prepare(
        self, name: str, chips: Sequence[int], buffers: Buffers, *, broadcast: bool
    ) -> tuple[list[bytes], int]:
        """The meta bytes for each chip, and the hold on what they name."""
        items = _named(buffers)
        self._registry.hold(
            [memory for _, memory in items], what=f"extension {name!r}"
        ).release()  # all are alive
        seen = [
            (chip, [item for item in items if not broadcast or _owner(item[1]) in (chip, HOST)])
            for chip in chips
        ]
        return [self._pack(own) for _, own in seen], self._hold(name, seen)

    def _pack(self, items: Sequence[Named]) -> bytes:
        return pack_buffers([self._entry(name, memory) for name, memory in items])

    def _entry(self, name: str, memory: Memory) -> BufferEntry:
        owner = _owner(memory)
        visible = owner == HOST or self._host_visible[owner]
        if isinstance(memory, Tensor):
            if not memory.contiguous:
                raise ValueError(f"a tensor named in buffers= must be contiguous: {name or memory.shape}")
            return BufferEntry(name, memory.buffer.address + memory.offset, memory.nbytes, visible)
        return BufferEntry(name, memory.address, memory.nbytes, visible)

    def _hold(self, name: str, wanted: Sequence[tuple[int, Sequence[Named]]]) -> int:
        uses: list[tuple[int, Use]] = []
        try:
            for chip, items in wanted:
                memories = [memory for _, memory in items]
                uses.append((chip, self._registry.hold(memories, worker=chip, what=f"extension {name!r}")))
        except BaseException:
            for _, use in uses:
                use.release()
            raise
        return self._holds.open([(chip, use.release) for chip, use in uses])

    def _end(self, chips: Iterable[int], hold: int) -> None:
        if hold:
            for chip in chips:
                self._holds.end(chip, hold)


def _named(buffers: Buffers) -> list[Named]:
    """Names (empty in a sequence) and memory, in order."""
    if isinstance(buffers, Buffer | HostBuffer | Tensor) or not isinstance(buffers, Iterable):
        raise TypeError(f"buffers= takes a sequence or a mapping, not {type(buffers).__name__}")
    if isinstance(buffers, Mapping):
        items = list(buffers.items())
        for name in buffers:
            if not isinstance(name, str) or not name:
                raise TypeError(f"a name in buffers= is a str that is not empty: {name!r}")
    else:
        items = [("", memory) for memory in buffers]
    for _, memory in items:
        if not isinstance(memory, Buffer | HostBuffer | Tensor):
            raise TypeError(
                f"buffers= takes Buffer, HostBuffer and Tensor objects, not {type(memory).__name__}"
            )
    return items


def _owner(memory: Memory) -> int:
    return (memory.buffer if isinstance(memory, Tensor) else memory).allocation.worker
