"""What stands where a Mooncake engine is expected: a listener that says nothing, an address that moves."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

from simpler.kv.engines.mooncake_peers import PeerAddress

if TYPE_CHECKING:
    from .engine_process import EngineProcess

LIFE = "0123456789abcdef"


class Silent:
    """A listener that accepts, and answers as many connections as it is told with one byte."""

    def __init__(self, answers: int = 0) -> None:
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self.accepted = threading.Event()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def metadata(self) -> str:
        return PeerAddress("127.0.0.1", self._listener.getsockname()[1], LIFE).pack().hex()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                self.accepted.set()
                if self._answers > 0:
                    self._answers -= 1
                    connection.recv(1)
                    connection.sendall(b"\x16")

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for each in (self._listener, *self._connections):
            each.close()


class Forwarder:
    """One address for whichever engine is behind it: what a peer restarted on its address looks like."""

    def __init__(self) -> None:
        self.port_behind = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def lead_to(self, engine: EngineProcess) -> str:
        """Lead to this engine; the metadata that a peer with this address would have."""
        behind = PeerAddress.unpack(bytes.fromhex(engine.call("metadata")))
        self.port_behind = behind.port
        return PeerAddress("127.0.0.1", self._listener.getsockname()[1], behind.life).pack().hex()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with (
            connection,
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port_behind)) as behind,
        ):
            back = threading.Thread(target=self._pump, args=(behind, connection), daemon=True)
            back.start()
            self._pump(connection, behind)
            back.join()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()
