"""What of the Mooncake engine can be told without its package: options, metadata, signs of life."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest

from simpler import ClosedError
from simpler.kv.engines import EngineError
from simpler.kv.engines.mooncake import MooncakeEngine
from simpler.kv.engines.mooncake_peers import Peer, PeerAddress, ask

from .mooncake_stand_ins import LIFE, Silent

if TYPE_CHECKING:
    from simpler.kv.engines import TransferEngine


@pytest.mark.parametrize("ports", [(15_000, 15_000), (15_010, 15_000), (80, 1000), (40_000, 40_010)])
def test_ports_that_the_engine_would_ignore_are_refused(ports: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="1024 to 32767"):
        MooncakeEngine(ports=ports)


def test_it_is_an_engine_like_the_others() -> None:
    engine: TransferEngine = MooncakeEngine()
    assert engine.close() is True  # never opened, and so gone
    with pytest.raises(ClosedError):
        engine.metadata()


@pytest.mark.parametrize(
    "metadata",
    [b"", b"mooncake/1 host:0 " + LIFE.encode(), b"mooncake/1 host:70000 " + LIFE.encode(), b"x" * 10_000],
)
def test_what_is_no_metadata_is_refused(metadata: bytes) -> None:
    with pytest.raises(EngineError, match="no metadata of a Mooncake engine"):
        PeerAddress.unpack(metadata)


def test_metadata_survives_the_way() -> None:
    address = PeerAddress("host-1.example", 15_000, LIFE)
    assert PeerAddress.unpack(address.pack()) == address


def test_a_peer_that_hangs_up_gives_no_sign_of_life() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            connection, _ = listener.accept()
            connection.recv(64)
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(ConnectionError, match="hung up"):
            ask("127.0.0.1", listener.getsockname()[1], 30.0)
        thread.join()


def test_each_first_contact_has_a_name_of_its_own() -> None:
    silent = Silent(answers=3)
    try:
        peer = Peer(PeerAddress.unpack(bytes.fromhex(silent.metadata())), probe=True)
        names = [peer.prepare(30.0) for _ in range(3)]
        assert len(set(names)) == 3
        assert {int(name.rpartition(":")[2]) for name in names} == {peer.address.port}
    finally:
        silent.close()
