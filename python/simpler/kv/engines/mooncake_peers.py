"""Peers of a Mooncake engine: their names, and whether they answer.

The engine keeps for ever what it once learned of an address, and its first contact with one that never
answers lasts a minute in which it begins nothing for other peers either. So a peer is asked for a sign of
life before each first contact, and one that failed is contacted anew under another spelling of its address:
with zeros before the port.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from typing import NamedTuple

from simpler.kv.engines import EngineError

_METADATA = re.compile(rb"mooncake/1 (\[?[0-9A-Za-z.:_-]{1,253}\]?):([0-9]{1,5}) ([0-9a-f]{16})")
_LONGEST_METADATA = 512

# The engine's own handshake: a length of 8 bytes, which counts the kind of the message (3: are you there?)
# and JSON. Any answer will do.
_PROBE_TEXT = b"{}\n"
_PROBE = struct.pack("<QB", 1 + len(_PROBE_TEXT), 3) + _PROBE_TEXT


class PeerAddress(NamedTuple):
    """What the metadata of an engine says: where it listens, and which life of it that is."""

    host: str
    port: int
    life: str

    @property
    def name(self) -> str:
        """Host and port."""
        return f"{self.host}:{self.port}"

    def pack(self) -> bytes:
        """For `unpack` in another process."""
        return f"mooncake/1 {self.name} {self.life}".encode("ascii")

    @staticmethod
    def unpack(metadata: bytes) -> PeerAddress:
        """Read what `pack` wrote; EngineError for anything else."""
        match = _METADATA.fullmatch(metadata) if len(metadata) <= _LONGEST_METADATA else None
        if match is None or not 0 < int(match[2]) < 1 << 16:
            raise EngineError(f"this is no metadata of a Mooncake engine: {metadata[:64]!r}")
        return PeerAddress(match[1].decode("ascii"), int(match[2]), match[3].decode("ascii"))


class Peer:
    """One peer, and what the engine knows it as.

    Thread safety: `lock` is held during a first contact; the rest may be called at any time.

    Attributes:
        address: Where it is.
    """

    def __init__(self, address: PeerAddress, *, probe: bool) -> None:
        self.address = address
        self.lock = threading.Lock()
        self._probe = probe
        self._contacts = 0
        self._segment: str | None = None

    def segment(self) -> str | None:
        """What the engine calls the peer; None before a first contact and after a failure."""
        return self._segment

    def contacted(self, segment: str) -> None:
        """A first contact under this name went well."""
        self._segment = segment

    def failed(self) -> None:
        """The next transfer makes a first contact again."""
        self._segment = None

    def prepare(self, timeout_s: float) -> str:
        """Before a first contact: ask for a sign of life. Returns the name to give to the engine.

        Raises:
            OSError: there is none in time.
        """
        if not self._probe:
            return self.address.name
        ask(self.address.host.strip("[]"), self.address.port, timeout_s)
        zeros = "0" * self._contacts
        self._contacts += 1
        return f"{self.address.host}:{zeros}{self.address.port}"


def ask(host: str, port: int, timeout_s: float) -> None:
    """Have a Mooncake engine answer on its handshake port.

    Raises:
        OSError: it refuses, hangs up, or says nothing in time.
    """
    deadline = time.monotonic() + timeout_s
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        connection.sendall(_PROBE)
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        if not connection.recv(1):
            raise ConnectionError("it hung up")
