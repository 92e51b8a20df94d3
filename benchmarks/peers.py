"""The peers: the same exchange by multiprocessing.Pipe, pyzmq over ipc, and ProcessPoolExecutor."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.sampling import sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from benchmarks.figures import Sampler
    from benchmarks.sampling import Effort

PIPE = "multiprocessing.Pipe"
ZMQ = "pyzmq over ipc"
POOL = "ProcessPoolExecutor"

# Forked, as ours are: the cheapest start, and functions need no import path.
fork = multiprocessing.get_context("fork")


class PipePeer:
    """One duplex multiprocessing.Pipe to each child."""

    def __init__(self, links: list[Connection[bytes, bytes]]) -> None:
        self._links = links

    def call(self, child: int, payload: bytes) -> bytes:
        link = self._links[child]
        link.send_bytes(payload)
        return link.recv_bytes()

    def broadcast(self, payload: bytes) -> None:
        for link in self._links:
            link.send_bytes(payload)
        for link in self._links:
            link.recv_bytes()


class ZmqPeer:
    """One PAIR socket over ipc to each child."""

    def __init__(self, sockets: list[Any]) -> None:
        self._sockets = sockets

    def call(self, child: int, payload: bytes) -> bytes:
        socket = self._sockets[child]
        socket.send(payload)
        return bytes(socket.recv())

    def broadcast(self, payload: bytes) -> None:
        for socket in self._sockets:
            socket.send(payload)
        for socket in self._sockets:
            socket.recv()


class PoolPeer:
    """A pool with one process; `children` of them cannot be addressed one by one."""

    def __init__(self, pool: ProcessPoolExecutor, answer: Callable[[bytes], bytes]) -> None:
        self._pool = pool
        self._answer = answer

    def call(self, child: int, payload: bytes) -> bytes:  # noqa: ARG002 - there is one
        return self._pool.submit(self._answer, payload).result()


Peer = PipePeer | ZmqPeer | PoolPeer


def serve_pipe(link: Connection[bytes, bytes], answer: Callable[[bytes], bytes]) -> None:
    """A child of PipePeer: answer until the other end is closed."""
    with contextlib.suppress(EOFError):
        while True:
            link.send_bytes(answer(link.recv_bytes()))


def _serve_zmq(address: str, answer: Callable[[bytes], bytes]) -> None:
    zmq = importlib.import_module("zmq")
    socket = zmq.Context().socket(zmq.PAIR)
    socket.connect(address)
    while True:
        socket.send(answer(socket.recv()))


@contextlib.contextmanager
def _pipe_peer(children: int, answer: Callable[[bytes], bytes]) -> Iterator[PipePeer]:
    links: list[Connection[bytes, bytes]] = []
    with contextlib.ExitStack() as stack:
        for _ in range(children):
            ours, theirs = fork.Pipe()
            process = fork.Process(target=serve_pipe, args=(theirs, answer), daemon=True)
            process.start()
            stack.callback(_end, process)
            theirs.close()
            stack.callback(ours.close)
            links.append(ours)
        yield PipePeer(links)


@contextlib.contextmanager
def _zmq_peer(children: int, answer: Callable[[bytes], bytes]) -> Iterator[ZmqPeer]:
    zmq = importlib.import_module("zmq")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="simpler-benchmarks-"))
        addresses = [f"ipc://{Path(folder) / str(child)}" for child in range(children)]
        for address in addresses:  # before the context, which starts a thread
            process = fork.Process(target=_serve_zmq, args=(address, answer), daemon=True)
            process.start()
            stack.callback(_end, process)
        context = stack.enter_context(zmq.Context())
        sockets = []
        for address in addresses:
            socket = stack.enter_context(context.socket(zmq.PAIR))
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
            sockets.append(socket)
        yield ZmqPeer(sockets)


@contextlib.contextmanager
def _pool_peer(answer: Callable[[bytes], bytes]) -> Iterator[PoolPeer]:
    with ProcessPoolExecutor(1, mp_context=fork) as pool:
        yield PoolPeer(pool, answer)


def _end(process: Any) -> None:
    process.kill()
    process.join()


class Peers:
    """All peers that can be had, running."""

    def __init__(self, running: dict[str, Peer], skipped: dict[str, str]) -> None:
        self.running = running
        self.skipped = skipped

    def samplers(
        self,
        effort: Effort,
        count: int,
        payload: bytes,
        *,
        children: int = 1,
        pace_s: float = 0.0,
        broadcast: bool = False,
    ) -> dict[str, Sampler]:
        """A sampler of each: calls of one child after another, or broadcasts."""
        taken: dict[str, Sampler] = {}
        for name, peer in self.running.items():
            names: dict[str, object] = {"payload": payload}
            if isinstance(peer, PoolPeer):
                if broadcast or children > 1:
                    continue
                names["ask"] = peer.call
            else:
                names["ask"] = peer.broadcast if broadcast else peer.call
            statement = "ask(payload)" if broadcast else "ask(next(child), payload)"
            names["child"] = cycle(range(children))
            warm_up = 8 if len(payload) < 65536 else 1
            taken[name] = sample(statement, names, effort.samples(count), pace_s=pace_s, warm_up=warm_up)
        return taken


@contextlib.contextmanager
def peers(answer: Callable[[bytes], bytes], *, children: int = 1, pool: bool = True) -> Iterator[Peers]:
    """Start the peers; enter this before a Worker, so that they are forked from a process without threads.

    Args:
        answer: What each child does with a payload.
        children: Processes behind Pipe and pyzmq.
        pool: With ProcessPoolExecutor, which has one process and takes no broadcasts.
    """
    skipped: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        running: dict[str, Peer] = {PIPE: stack.enter_context(_pipe_peer(children, answer))}
        if pool:
            pooled = stack.enter_context(_pool_peer(answer))
            pooled.call(0, b"x")
            running[POOL] = pooled
        try:
            running[ZMQ] = stack.enter_context(_zmq_peer(children, answer))
        except ImportError as error:
            skipped[ZMQ] = f"{error}; pip install pyzmq"
        yield Peers(running, skipped)


def answer_same(payload: bytes) -> bytes:
    """The no-op handler: the payload comes back."""
    return payload
