"""The Mooncake transfer engine in a chip's process: reads and writes over TCP, RDMA or what its build knows.

What is known of the engine (0.3.13) and looked after here: functions return codes; an asynchronous batch
reports on its first copy only, so each copy is a batch of its own, a few at a time; TCP does not check that
the local side is registered; the first contact with a peer blocks, and all others with it (see
`mooncake_peers`); a transfer that failed or timed out may still land.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import threading
import weakref
from typing import TYPE_CHECKING

from simpler import ClosedError, MemoryRangeError
from simpler.kv.engines import EngineError
from simpler.kv.engines.life import life
from simpler.kv.engines.mooncake_module import load
from simpler.kv.engines.mooncake_peers import Peer, PeerAddress
from simpler.kv.engines.mooncake_transfer import READ, WRITE, Direction, Transfer
from simpler.kv.engines.pace import Pace
from simpler.kv.engines.registrations import Registrations

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from simpler.kv.engines import Copy, Outcome
    from simpler.kv.engines.mooncake_module import RawEngine

P2P = "P2PHANDSHAKE"

# The engine ignores others without a word.
_LOWEST_PORT, _HIGHEST_PORT = 1024, 32767

_CODES = {-1: "failed", -3: "not registered", -7: "overlaps what is registered"}

_CLOSE_WAIT_S = 5.0


def _never() -> bool:
    return False


class MooncakeEngine:
    """A `TransferEngine` over Mooncake's.

    Thread safety: any thread.
    Fork: open it in the process that uses it.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        protocol: str = "tcp",
        device_names: str = "",
        metadata_server: str = P2P,
        location: str = "*",
        ports: tuple[int, int] | None = None,
        logs: bool = False,
    ) -> None:
        """Describe the engine; `open` starts it.

        Args:
            host: The address under which peers reach this process.
            protocol: ``"tcp"``, ``"rdma"``, or what the installed build knows.
            device_names: The devices of RDMA, comma separated; empty for all.
            metadata_server: Without one the engines shake hands among themselves.
            location: Where the memory is, as the engine names it (``"cpu:0"``); ``"*"`` asks it to find out.
            ports: The first and last port that its two listeners may take, from 1024 to 32767; otherwise
                15000 to 17000. The package takes it up once, when it is imported.
            logs: Let its log through to standard error. `MC_LOG_LEVEL` sets the level.
        """
        if ports is not None and not _LOWEST_PORT <= ports[0] < ports[1] <= _HIGHEST_PORT:
            raise ValueError(
                f"ports={ports}: two or more from {_LOWEST_PORT} to {_HIGHEST_PORT}, first and last"
            )
        self._host = host
        self._protocol = protocol
        self._device_names = device_names
        self._metadata_server = metadata_server
        self._location = location
        self._ports = ports
        self._logs = logs
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._raw: RawEngine | None = None
        self._gone: weakref.ref[RawEngine] | None = None
        self._pid = 0
        self._life = -1
        self._own: PeerAddress | None = None
        self._registered = Registrations()
        self._peers: dict[str, Peer] = {}
        self._former: dict[str, Peer] = {}
        self._numbers = itertools.count(1)
        self._transfers: dict[int, Transfer] = {}  # in flight or unconfirmed
        self._users = 0

    @property
    def name(self) -> str:
        """For messages."""
        return "mooncake"

    def open(self) -> None:
        """Start the engine; see `TransferEngine.open`."""
        with self._lock:
            if self._raw is not None:
                raise EngineError("this Mooncake engine is open already")
            raw = load(self._ports, logs=self._logs)()
            code = raw.initialize(self._host, self._metadata_server, self._protocol, self._device_names)
            if code != 0:
                first, last = self._ports or (15000, 17000)
                raise EngineError(
                    f"Mooncake does not start on {self._host} with protocol {self._protocol!r} "
                    f"(code {code}): it needs two free ports from {first} to {last}, "
                    f"and the protocol's devices"
                )
            self._raw, self._gone = raw, weakref.ref(raw)
            self._pid, self._life = os.getpid(), life()
            self._own = PeerAddress(self._host, raw.get_rpc_port(), secrets.token_hex(8))

    def metadata(self) -> bytes:
        """Host, port and life of this engine."""
        with self._lock:
            self._opened()
            assert self._own is not None
            return self._own.pack()

    def connect(self, metadata: bytes) -> str:
        """Make a peer known; see `TransferEngine.connect`."""
        address = PeerAddress.unpack(metadata)
        with self._lock:
            self._opened()
            known = self._peers.get(address.name) or self._former.pop(address.name, None)
            if known is None:
                known = Peer(address, probe=self._metadata_server == P2P)
            elif known.address != address:
                known.address = address  # it was restarted on its port
                known.failed()
            self._peers[address.name] = known
        return address.name

    def disconnect(self, peer: str) -> None:
        """Forget a peer; it is contacted anew if it is connected again."""
        with self._lock:
            known = self._peers.pop(peer, None)
            if known is not None:
                known.failed()
                self._former[peer] = known  # the engine has not forgotten how it was called

    def register(self, address: int, nbytes: int) -> bool:
        """Let the engine use a range; see `TransferEngine.register`."""
        with self._lock:
            raw = self._opened()
            if self._registered.add_again(address, nbytes):
                return False
            self._accept("register", address, nbytes, raw.register_memory(address, nbytes, self._location))
            self._registered.add(address, nbytes)
            return True

    def unregister(self, address: int, nbytes: int) -> bool:
        """Take a registration back; see `TransferEngine.unregister`."""
        with self._lock:
            raw = self._opened()
            last = self._registered.times(address, nbytes) == 1
            if last:
                for transfer in self._transfers.values():
                    if transfer.touches(address, nbytes):
                        raise MemoryRangeError(
                            f"[{address:#x}, +{nbytes}) is in use by transfer {transfer.number}, "
                            f"of which nothing certifies that it has stopped"
                        )
                self._accept("unregister", address, nbytes, raw.unregister_memory(address))
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
        return self._move(READ, peer, copies, timeout_s, cancelled)

    def write(
        self,
        peer: str,
        copies: Sequence[Copy],
        *,
        timeout_s: float,
        cancelled: Callable[[], bool] = _never,
    ) -> Outcome:
        """Copy to a peer; see `TransferEngine.write`."""
        return self._move(WRITE, peer, copies, timeout_s, cancelled)

    def settled(self, transfer: int) -> bool:
        """Whether the engine has reported since that every copy of the transfer arrived, or is gone."""
        with self._lock:
            known = self._transfers.get(transfer)
            if known is None:
                return True
            if self._raw is None:
                return self._is_gone()
            if not known.settle(self._raw):
                return False
            del self._transfers[transfer]
            return True

    def close(self) -> bool:
        """Tear the engine down; see `TransferEngine.close`."""
        with self._lock:
            self._raw = None
            self._peers.clear()
            self._former.clear()
            self._registered.clear()
            self._idle.wait_for(lambda: self._users == 0, _CLOSE_WAIT_S)
            if not self._is_gone():
                return False
            self._transfers.clear()
            return True

    def _is_gone(self) -> bool:
        """Whether the engine's object is, and with it every thread that touches memory."""
        return self._gone is None or self._gone() is None

    def _opened(self) -> RawEngine:
        if self._raw is None:
            raise ClosedError("this Mooncake engine is not open")
        if self._life != life():
            raise EngineError(f"this Mooncake engine was opened in process {self._pid}, before the fork")
        return self._raw

    def _accept(self, verb: str, address: int, nbytes: int, code: int) -> None:
        if code != 0:
            raise EngineError(
                f"Mooncake does not {verb} [{address:#x}, +{nbytes}): code {code}"
                f"{f' ({_CODES[code]})' if code in _CODES else ''}"
            )

    def _enter(self, direction: Direction, peer: str, copies: Sequence[Copy]) -> tuple[Peer, Transfer]:
        """Count a transfer in, so that `close` waits for its thread and `unregister` knows of it."""
        with self._lock:
            self._opened()
            known = self._peers.get(peer)
            if known is None:
                raise EngineError(f"no peer {peer!r} is connected")
            self._registered.check(copies)
            transfer = Transfer(next(self._numbers), direction, copies)
            self._transfers[transfer.number] = transfer
            self._users += 1
        return known, transfer

    def _leave(self, transfer: Transfer) -> None:
        with self._lock:
            self._users -= 1
            if not transfer.open:
                self._transfers.pop(transfer.number, None)
            if self._raw is None:
                self._idle.notify_all()

    def _move(
        self,
        direction: Direction,
        peer: str,
        copies: Sequence[Copy],
        timeout_s: float,
        cancelled: Callable[[], bool],
    ) -> Outcome:
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s={timeout_s} must be positive and finite")
        pace = Pace(timeout_s)
        known, transfer = self._enter(direction, peer, tuple(copies))
        try:
            if cancelled():
                transfer.cancel()
            elif copies:
                segment = known.segment() or self._contact(known, transfer, pace)
                self._run(known, segment, transfer, pace, cancelled)
            return transfer.outcome(peer)
        finally:
            self._leave(transfer)

    def _contact(self, peer: Peer, transfer: Transfer, pace: Pace) -> str:
        """Make the first contact with the first copy, if it is still to be made; the peer's segment."""
        if not peer.lock.acquire(timeout=max(pace.left_s(), 0)):
            transfer.refused = "others were still trying to reach the peer"
            return ""
        try:
            known = peer.segment()
            if known is not None:
                return known
            segment = peer.prepare(max(pace.left_s(), 0.001))
            raw = self._raw
            if raw is None:
                transfer.abandon("the engine is being closed")
            elif transfer.begin_first(raw, segment, max(pace.left_s(), 0.001)):
                peer.contacted(segment)
        except OSError as error:
            transfer.refused = f"the peer does not answer: {error}"
            return ""
        else:
            return segment
        finally:
            peer.lock.release()

    def _run(
        self, peer: Peer, segment: str, transfer: Transfer, pace: Pace, cancelled: Callable[[], bool]
    ) -> None:
        """Begin the rest, a window at a time, and wait for the end of what has begun or the deadline."""
        while True:
            raw = self._raw
            if raw is None:
                transfer.abandon("the engine is being closed")
                break
            while transfer.may_begin:
                if not transfer.begin(raw, segment):
                    peer.failed()
            if not transfer.waiting:
                break
            ended = transfer.look(raw)
            del raw  # while this thread sleeps, `close` may want to be rid of it
            if not ended and not pace.pause():
                break
            if cancelled():
                transfer.cancel()
        if transfer.open:
            peer.failed()
