"""The NIXL agent in a chip's process, on its UCX backend over host memory.

What is known of it (1.5.1) and looked after here: without its progress thread nothing arrives, and without a
delay that thread takes a core; a transfer with a peer that stopped stays in progress for ever; releasing a
transfer in progress says success and the bytes land all the same; overlapping registrations are accepted.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import secrets
import threading
import weakref
import zlib
from typing import TYPE_CHECKING, Any

from simpler import ClosedError, MemoryRangeError
from simpler.kv.engines import Copy, EngineError, Outcome, OutcomeKind
from simpler.kv.engines.life import life
from simpler.kv.engines.nixl_module import load
from simpler.kv.engines.pace import Pace
from simpler.kv.engines.registrations import Registrations

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_MAGIC = b"nixl/1 "
_CRC_BYTES = 4
_LONGEST_METADATA = 64 << 20
_CLOSE_WAIT_S = 5.0


def _never() -> bool:
    return False


class _Transfer:
    """One transfer: the engine's handle while it may go on, and why it may never be certified."""

    def __init__(self, number: int, copies: Sequence[Copy]) -> None:
        self.number = number
        self.copies = copies
        self.handle: int | None = None
        self.lost = ""
        self.refused = ""

    @property
    def open(self) -> bool:
        """Whether anything of it may still go on."""
        return bool(self.lost or self.handle is not None)

    def touches(self, address: int, nbytes: int) -> bool:
        """Whether a copy's local side overlaps the range."""
        return any(
            copy.local_address < address + nbytes and address < copy.local_address + copy.nbytes
            for copy in self.copies
        )

    def outcome(self, operation: str, peer: str) -> Outcome:
        """What is known now."""
        if not (self.open or self.refused):
            return Outcome(OutcomeKind.DONE)
        what = f"{operation.replace('_', ' ').lower()} with {peer}"
        if self.open:
            reason = self.lost or "the deadline passed"
            return Outcome(OutcomeKind.UNCONFIRMED, f"{what}: {reason}; it may go on", self.number)
        return Outcome(OutcomeKind.FAILED, f"{what}: {self.refused}")


class _Peer:
    """What a peer's metadata was, why it is lost, and the transfer with it that ran past its deadline."""

    def __init__(self, metadata: bytes) -> None:
        self.metadata = metadata
        self.lost = ""
        self.stalled = 0


class NixlEngine:
    """A `TransferEngine` over NIXL's agent.

    Thread safety: any thread.
    Fork: open it in the process that uses it.
    """

    def __init__(
        self,
        *,
        transports: str | None = None,
        backend: str = "UCX",
        parameters: Mapping[str, str] | None = None,
        progress_delay_us: int = 100,
        logs: bool = False,
    ) -> None:
        """Describe the engine; `open` starts it.

        Args:
            transports: Sets `UCX_TLS`; tcp has to be among them. All that are there by default.
            backend: The agent's backend.
            parameters: For the backend.
            progress_delay_us: The pause of the progress thread, which also answers peers.
            logs: Let its logs through. `NIXL_LOG_LEVEL` and `UCX_LOG_LEVEL` set the levels.
        """
        if progress_delay_us < 1:
            raise ValueError(f"progress_delay_us={progress_delay_us}: 1 or more, or it takes a core")
        self._transports = transports
        self._backend_name = backend
        self._parameters = dict(parameters or {})
        self._progress_delay_us = progress_delay_us
        self._logs = logs
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._nixl: Any = None
        self._agent: Any = None
        self._backend = 0
        self._gone: weakref.ref[Any] | None = None
        self._pid = 0
        self._life = -1
        self._registered = Registrations()
        self._peers: dict[str, _Peer] = {}
        self._numbers = itertools.count(1)
        self._transfers: dict[int, _Transfer] = {}  # in flight or unconfirmed
        self._users = 0

    @property
    def name(self) -> str:
        """For messages."""
        return "nixl"

    def open(self) -> None:
        """Start the agent; see `TransferEngine.open`."""
        with self._lock:
            if self._agent is not None:
                raise EngineError("this NIXL engine is open already")
            nixl = load(self._transports, logs=self._logs)
            settings = nixl.nixlAgentConfig()
            settings.useProgThread = True
            settings.pthrDelay = self._progress_delay_us
            settings.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
            try:
                agent = nixl.nixlAgent(f"simpler-{secrets.token_hex(8)}", settings)
                self._backend = agent.createBackend(self._backend_name, self._parameters)
            except Exception as error:
                raise EngineError(
                    f"NIXL does not start with backend {self._backend_name!r}: {error}"
                ) from error
            self._nixl, self._agent, self._gone = nixl, agent, weakref.ref(agent)
            self._pid, self._life = os.getpid(), life()

    def metadata(self) -> bytes:
        """The agent's own, with what is registered now."""
        with self._lock:
            data = bytes(self._opened().getLocalMD())
        return _MAGIC + zlib.crc32(data).to_bytes(_CRC_BYTES, "little") + data

    def connect(self, metadata: bytes) -> str:
        """Make a peer known; see `TransferEngine.connect`."""
        data = _unpack(metadata)
        with self._lock:
            agent = self._opened()
            for name, peer in self._peers.items():
                if peer.metadata == data and not peer.lost:
                    return name
            lost = [name for name, peer in self._peers.items() if peer.metadata == data]
            try:
                for name in lost:
                    agent.invalidateRemoteMD(name)
                name = _text(agent.loadRemoteMD(data))
            except Exception as error:
                raise EngineError(f"NIXL does not take the peer's metadata: {error}") from error
            self._peers[name] = _Peer(data)
            return name

    def disconnect(self, peer: str) -> None:
        """Forget a peer and close the connection; see `TransferEngine.disconnect`."""
        with self._lock:
            if self._peers.pop(peer, None) is not None and self._agent is not None:
                with contextlib.suppress(Exception):  # lost already
                    self._agent.invalidateRemoteMD(peer)

    def register(self, address: int, nbytes: int) -> bool:
        """Let the engine use a range; see `TransferEngine.register`."""
        with self._lock:
            agent = self._opened()
            if self._registered.add_again(address, nbytes):
                return False
            self._accept("register", address, nbytes, agent.registerMem)
            self._registered.add(address, nbytes)
            return True

    def unregister(self, address: int, nbytes: int) -> bool:
        """Take a registration back; see `TransferEngine.unregister`."""
        with self._lock:
            agent = self._opened()
            last = self._registered.times(address, nbytes) == 1
            if last:
                for transfer in self._transfers.values():
                    if transfer.touches(address, nbytes):
                        raise MemoryRangeError(
                            f"[{address:#x}, +{nbytes}) is in use by transfer {transfer.number}, "
                            f"of which nothing certifies that it has stopped"
                        )
                self._accept("unregister", address, nbytes, agent.deregisterMem)
            self._registered.remove(address, nbytes)
            return last

    def read(
        self,
        peer: str,
        copies: Sequence[Copy],
        *,
        timeout_s: float,
        cancelled: Callable[[], bool] = _never,
    ) -> Outcome:
        """Copy from a peer; see `TransferEngine.read`."""
        return self._move("NIXL_READ", peer, copies, timeout_s, cancelled)

    def write(
        self,
        peer: str,
        copies: Sequence[Copy],
        *,
        timeout_s: float,
        cancelled: Callable[[], bool] = _never,
    ) -> Outcome:
        """Copy to a peer; see `TransferEngine.write`."""
        return self._move("NIXL_WRITE", peer, copies, timeout_s, cancelled)

    def settled(self, transfer: int) -> bool:
        """Whether the engine has reported since that the transfer is complete, or is gone."""
        with self._lock:
            known = self._transfers.get(transfer)
            if known is None:
                return True
            if self._agent is None:
                return self._is_gone()
            if known.handle is not None:
                self._look(self._agent, known)
            if known.open:
                return False
            del self._transfers[transfer]
            return True

    def close(self) -> bool:
        """Tear the agent down; see `TransferEngine.close`."""
        with self._lock:
            self._agent = None
            self._peers.clear()
            self._registered.clear()
            self._idle.wait_for(lambda: self._users == 0, _CLOSE_WAIT_S)
            if not self._is_gone():
                return False
            self._transfers.clear()
            return True

    def _is_gone(self) -> bool:
        """Whether the agent's object is, and with it every thread that touches memory."""
        return self._gone is None or self._gone() is None

    def _opened(self) -> Any:
        if self._agent is None:
            raise ClosedError("this NIXL engine is not open")
        if self._life != life():
            raise EngineError(f"this NIXL engine was opened in process {self._pid}, before the fork")
        return self._agent

    def _accept(self, verb: str, address: int, nbytes: int, call: Callable[[Any, list[int]], object]) -> None:
        ranges = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, nbytes, 0, "")])
        try:
            call(ranges, [self._backend])
        except Exception as error:
            raise EngineError(f"NIXL does not {verb} [{address:#x}, +{nbytes}): {error}") from error

    def _enter(self, peer: str, copies: Sequence[Copy]) -> tuple[_Peer, _Transfer]:
        """Count a transfer in, so that `close` waits for its thread and `unregister` knows of it."""
        with self._lock:
            self._opened()
            known = self._peers.get(peer)
            if known is None:
                raise EngineError(f"no peer {peer!r} is connected")
            self._registered.check(copies)
            transfer = _Transfer(next(self._numbers), copies)
            self._transfers[transfer.number] = transfer
            self._users += 1
        return known, transfer

    def _leave(self, transfer: _Transfer) -> None:
        with self._lock:
            self._users -= 1
            if not transfer.open:
                self._transfers.pop(transfer.number, None)
            if self._agent is None:
                self._idle.notify_all()

    def _move(
        self,
        operation: str,
        peer: str,
        copies: Sequence[Copy],
        timeout_s: float,
        cancelled: Callable[[], bool],
    ) -> Outcome:
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s={timeout_s} must be positive and finite")
        pace = Pace(timeout_s)
        known, transfer = self._enter(peer, tuple(copies))
        try:
            if known.lost:
                transfer.refused = f"the peer was lost ({known.lost}): connect it anew"
            elif known.stalled and not self.settled(known.stalled):
                transfer.refused = f"transfer {known.stalled} with it is still in progress past its deadline"
            elif cancelled():
                transfer.refused = "cancelled"
            elif copies:
                self._begin(operation, peer, transfer)
                self._wait(transfer, pace)
                if transfer.lost:
                    known.lost = transfer.lost
                elif transfer.open:
                    known.stalled = transfer.number
            return transfer.outcome(operation, peer)
        finally:
            self._leave(transfer)

    def _begin(self, operation: str, peer: str, transfer: _Transfer) -> None:
        agent = self._agent
        if agent is None:
            transfer.refused = "the engine is being closed"
            return
        nixl = self._nixl
        here = [(copy.local_address, copy.nbytes, 0) for copy in transfer.copies]
        there = [(copy.remote_address, copy.nbytes, 0) for copy in transfer.copies]
        try:
            handle = agent.createXferReq(
                getattr(nixl, operation),
                nixl.nixlXferDList(nixl.DRAM_SEG, here),
                nixl.nixlXferDList(nixl.DRAM_SEG, there),
                peer,
                "",
                [self._backend],
            )
        except Exception as error:  # noqa: BLE001  # whatever it is, nothing has begun
            transfer.refused = (
                f"the engine does not begin it: {error} (is the peer's memory in its metadata?)"
            )
            return
        transfer.handle = handle
        try:
            status = agent.postXferReq(handle, "")
        except Exception as error:  # noqa: BLE001  # whatever it is becomes the outcome
            transfer.lost = str(error)
        else:
            self._take(agent, transfer, status)

    def _wait(self, transfer: _Transfer, pace: Pace) -> None:
        while transfer.handle is not None and not transfer.lost:
            agent = self._agent
            if agent is None:
                transfer.lost = "the engine is being closed"
                return
            self._look(agent, transfer)
            del agent  # while this thread sleeps, `close` may want to be rid of it
            if transfer.handle is not None and not pace.pause():
                return

    def _look(self, agent: Any, transfer: _Transfer) -> None:
        """Ask the engine how far a transfer is."""
        try:
            status = agent.getXferStatus(transfer.handle)
        except Exception as error:  # noqa: BLE001  # whatever it is becomes the outcome
            transfer.lost = str(error)
        else:
            self._take(agent, transfer, status)

    def _take(self, agent: Any, transfer: _Transfer, status: object) -> None:
        if status == self._nixl.NIXL_SUCCESS:
            agent.releaseXferReq(transfer.handle)
            transfer.handle, transfer.lost = None, ""
        elif status != self._nixl.NIXL_IN_PROG:
            transfer.lost = str(status)


def _unpack(metadata: bytes) -> bytes:
    head = len(_MAGIC) + _CRC_BYTES
    data = metadata[head:]
    if (
        len(metadata) > _LONGEST_METADATA
        or not metadata.startswith(_MAGIC)
        or metadata[len(_MAGIC) : head] != zlib.crc32(data).to_bytes(_CRC_BYTES, "little")
    ):
        raise EngineError(f"this is no metadata of a NIXL engine: {metadata[:64]!r}")
    return data


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name
