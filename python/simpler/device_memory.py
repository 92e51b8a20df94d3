"""Device memory of a Worker's chips: allocation by control calls, copies by memcpy or in chunks."""

from __future__ import annotations

import itertools
import logging
import math
import pickle
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from simpler import _core
from simpler.buffers import HOST, Buffer, HostBuffer
from simpler.errors import ClosedError, MemoryRangeError, SimplerError, WorkerTimeoutError
from simpler.memory import READ, WRITE, MemoryRegistry
from simpler.memory_wire import FREE, MALLOC, PEER, RANGE, WORD
from simpler.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from simpler.caller import Caller
    from simpler.holds import Holds

_log = logging.getLogger("simpler.memory")
_OP = _core.ControlOp
_CHUNK_BYTES = 16 << 20
_FREE_WAIT_S = 1.0
_MOST = (1 << 64) - 1  # what the wire can say; no chip has it


class _Part:
    """One side of a copy: bytes [address, address + nbytes) of a worker, or of this process (HOST)."""

    __slots__ = ("address", "keep", "memory", "nbytes", "worker")

    def __init__(self, worker: int, address: int, nbytes: int, memory: Any, keep: object) -> None:
        self.worker = worker
        self.address = address
        self.nbytes = nbytes
        self.memory = memory  # what the registry knows, None for memory of the program's own
        self.keep = keep  # keeps the program's memory exported

    def cut(self, offset: int, nbytes: int, what: str) -> None:
        """Narrow it to [offset, offset + nbytes)."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise MemoryRangeError(
                f"bytes {offset}..{offset + nbytes} are outside the {what} of {self.nbytes} bytes"
            )
        if self.memory is not None:
            start = self.address - self.memory.allocation.address + offset
            self.memory = self.memory.tensor((nbytes,), "uint8", offset=start)
        self.address += offset
        self.nbytes = nbytes


class DeviceMemory:
    """Memory calls of one Worker.

    Thread safety: any thread.
    """

    def __init__(
        self,
        caller: Caller,
        holds: Holds,
        host_regions: Sequence[_core.SharedRegion | None],
        *,
        maps_peers: bool,
        timeout_s: float,
        chunk_bytes: int,
        expect: Callable[[int, Callable[[object], None]], None],
        may_block: Callable[[], bool] = lambda: True,
    ) -> None:
        """Share the Worker's parts; `registry` is set by their owner.

        Args:
            caller: Carries the calls.
            holds: Where an allocation whose caller has gone is kept until it can be undone.
            host_regions: For each chip its memory, when this process can touch it.
            maps_peers: Whether a chip can read another's memory.
            timeout_s: The limit of allocations and frees.
            chunk_bytes: The largest payload of a call.
            expect: Has a function called with the outcome of a submitted call.
            may_block: Whether this thread may wait for a chip (the one that takes events must not).
        """
        self._caller = caller
        self._holds = holds
        self._regions = tuple(host_regions)
        self._maps_peers = maps_peers
        self._timeout_s = timeout_s
        self._chunk = min(_CHUNK_BYTES, chunk_bytes)
        self._tickets = itertools.count(1)
        self.registry: MemoryRegistry
        self._may_block = may_block
        self._expect = expect
        self._frees_posted = threading.Condition()
        self._frees_open: Counter[int] = Counter()  # by chip: submitted and not answered

    def malloc(self, worker: int, nbytes: int) -> int:
        """The registry's malloc: the address in the chip's process."""
        ticket = next(self._tickets)
        hold = self._holds.open([(worker, lambda: self._undo(worker, ticket))])
        try:
            reply = self._caller.call_held(
                worker, _OP.MALLOC, 0, 0, b"", MALLOC.pack(min(nbytes, _MOST), ticket), self._timeout_s, hold
            )
        except WorkerTimeoutError as error:
            if not error.started:
                self._holds.drop(worker, hold)
            raise
        except Exception:
            self._holds.drop(worker, hold)
            raise
        self._holds.drop(worker, hold)
        return int(WORD.unpack(reply)[0])

    def free(self, worker: int, address: int, generation: int) -> None:
        """The registry's free. A chip that is busy gives the memory back when it gets to it."""
        payload = FREE.pack(address, 0, generation)
        try:
            if not self._may_block() or not self._free_now(worker, payload):
                self._free_later(worker, payload)
        except ClosedError:
            return  # the memory has gone with its process

    def _free_later(self, worker: int, payload: bytes) -> None:
        with self._frees_posted:
            self._frees_open[worker] += 1
        try:
            token = self._caller.submit(worker, _OP.FREE, 0, 0, b"", payload, math.inf, 0)
        except BaseException:
            self._free_ended(worker)
            raise
        self._expect(token, lambda _outcome: self._free_ended(worker))

    def _free_ended(self, worker: int) -> None:
        with self._frees_posted:
            self._frees_open[worker] -= 1
            self._frees_posted.notify_all()

    def _free_now(self, worker: int, payload: bytes) -> bool:
        try:
            self._caller.call(worker, _OP.FREE, 0, 0, b"", payload, min(self._timeout_s, _FREE_WAIT_S))
        except WorkerTimeoutError as error:
            return error.started
        return True

    def committed(self, worker: int, timeout_s: float) -> int:
        """Bytes allocated on a chip, as its backend counts them, without what has been given back before."""
        if self._may_block():
            deadline = time.monotonic() + timeout_s
            self.registry.settle(timeout_s)
            with self._frees_posted:
                left = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
                self._frees_posted.wait_for(lambda: not self._frees_open[worker], left)
            timeout_s = max(deadline - time.monotonic(), 1e-6)
        return int(WORD.unpack(self._caller.call(worker, _OP.COMMITTED, 0, 0, b"", b"", timeout_s))[0])

    def copy(
        self,
        dst: Any,
        src: Any,
        sides: str,
        dst_offset: int,
        src_offset: int,
        nbytes: int | None,
        timeout_s: float,
    ) -> None:
        """Copy bytes; `sides` is ``"to"``, ``"from"`` or ``"between"`` and says which sides are devices.

        Without `nbytes` all that the program's side (between devices: the source) has from its offset
        is copied.
        """
        deadline = time.monotonic() + timeout_s
        to = (
            _device_part(dst, "destination")
            if sides != "from"
            else _host_part(dst, "destination", writable=True)
        )
        of = _device_part(src, "source") if sides != "to" else _host_part(src, "source", writable=False)
        if nbytes is None:
            nbytes = to.nbytes - dst_offset if sides == "from" else of.nbytes - src_offset
        to.cut(dst_offset, nbytes, "destination")
        of.cut(src_offset, nbytes, "source")
        uses = [(part.memory, mode) for part, mode in ((of, READ), (to, WRITE)) if part.memory is not None]
        with self.registry.acquire(uses, timeout_s, what=f"a copy of {nbytes} bytes"):
            if nbytes:
                self._move(to, of, deadline)

    def _undo(self, worker: int, ticket: int) -> None:
        """Free what an allocation made after its caller had gone."""
        try:
            self._caller.submit(worker, _OP.FREE, 0, 0, b"", FREE.pack(0, ticket, 0), math.inf, 0)
        except SimplerError as error:
            _log.debug("the chip of an abandoned allocation is gone: %s", error)

    def _move(self, to: _Part, of: _Part, deadline: float) -> None:
        if self._reachable(to) and self._reachable(of):
            _core.copy_memory(to.address, of.address, to.nbytes)
        elif to.worker == HOST:
            self._read(to.address, of, deadline)
        elif of.worker == HOST:
            self._write(to, of.address, deadline)
        elif self._maps_peers or to.worker == of.worker:
            meta = PEER.pack(to.address, of.address, to.nbytes)
            self._call(to.worker, _OP.COPY_PEER, meta, b"", deadline)
        else:
            self._stage(to, of, deadline)

    def _reachable(self, part: _Part) -> bool:
        """Whether this process can touch it; memory of a chip must lie inside that chip's region."""
        if part.worker == HOST:
            return True
        region = self._regions[part.worker]
        if region is None:
            return False
        if not region.address <= part.address <= region.address + region.nbytes - part.nbytes:
            raise MemoryRangeError(
                f"{part.nbytes} bytes at {part.address:#x} are outside the memory of its chip"
            )
        return True

    def _read(self, address: int, of: _Part, deadline: float) -> None:
        for start, size in self._chunks(of.nbytes):
            data = self._call(of.worker, _OP.COPY_OUT, RANGE.pack(of.address + start, size), b"", deadline)
            _core.copy_memory(address + start, _address_of(data), size)

    def _write(self, to: _Part, address: int, deadline: float) -> None:
        for start, size in self._chunks(to.nbytes):
            data = _core.memory_at(address + start, size, True)  # noqa: FBT003 - readonly, as the core names it
            self._call(to.worker, _OP.COPY_IN, RANGE.pack(to.address + start, size), data, deadline)

    def _stage(self, to: _Part, of: _Part, deadline: float) -> None:
        for start, size in self._chunks(to.nbytes):
            data = self._call(of.worker, _OP.COPY_OUT, RANGE.pack(of.address + start, size), b"", deadline)
            self._call(to.worker, _OP.COPY_IN, RANGE.pack(to.address + start, size), data, deadline)

    def _chunks(self, nbytes: int) -> list[tuple[int, int]]:
        return [(start, min(self._chunk, nbytes - start)) for start in range(0, nbytes, self._chunk)]

    def _call(self, worker: int, op: int, meta: bytes, payload: Any, deadline: float) -> bytes:
        left = max(deadline - time.monotonic(), 1e-6)
        return self._caller.call(worker, op, 0, 0, meta, payload, left)


def _device_part(memory: object, what: str) -> _Part:
    buffer = memory.buffer if isinstance(memory, Tensor) else memory
    if not isinstance(buffer, Buffer):
        raise TypeError(
            f"the {what} must be device memory (a Buffer or a Tensor of one), not {type(memory).__name__}"
        )
    return _known_part(buffer, memory, what)


def _known_part(buffer: Buffer | HostBuffer, memory: object, what: str) -> _Part:
    if isinstance(memory, Tensor):
        if not memory.contiguous:
            raise ValueError(f"the {what} is not contiguous")
        return _Part(buffer.allocation.worker, buffer.address + memory.offset, memory.nbytes, buffer, None)
    return _Part(buffer.allocation.worker, buffer.address, buffer.nbytes, buffer, None)


def _host_part(memory: Any, what: str, *, writable: bool) -> _Part:
    buffer = memory.buffer if isinstance(memory, Tensor) else memory
    if isinstance(buffer, HostBuffer):
        return _known_part(buffer, memory, what)
    if isinstance(buffer, Buffer):
        raise TypeError(f"the {what} must be host memory, not a Buffer; copy() copies between chips")
    try:
        view = memoryview(memory)
    except TypeError:
        raise TypeError(f"the {what} has no buffer protocol: {type(memory).__name__}") from None
    if not view.c_contiguous:
        raise ValueError(f"the {what} is not contiguous in C order")
    if writable and view.readonly:
        raise ValueError(f"the {what} is read-only: {type(memory).__name__}")
    return _Part(HOST, _address_of(view) if view.nbytes else 0, view.nbytes, None, view)


def _address_of(data: Any) -> int:
    """Where contiguous memory with the buffer protocol begins."""
    # raw(): numpy does not know every element format there is
    array = np.frombuffer(pickle.PickleBuffer(data).raw(), np.uint8)
    return int(array.__array_interface__["data"][0])
