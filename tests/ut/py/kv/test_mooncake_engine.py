"""The real Mooncake engine between real processes: bytes, refusals, and peers that die, hang or come back."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
from typing import TYPE_CHECKING

import pytest

from simpler.kv.engines import OutcomeKind
from simpler.kv.engines.mooncake_peers import PeerAddress

from .engine_process import WATCHDOG_S, EngineProcess, Memory, Read, RemoteFailureError
from .mooncake_stand_ins import LIFE, Forwarder, Silent

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20

needs_mooncake = pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None, reason="needs the package of simpler[mooncake]"
)
pytestmark = [pytest.mark.extra, pytest.mark.no_asan("the engine's own libraries are not built for it")]


@contextlib.contextmanager
def opened(**options: object) -> Iterator[EngineProcess]:
    with EngineProcess("mooncake", **options) as engine:
        engine.call("open")
        yield engine


@pytest.fixture
def reader() -> Iterator[EngineProcess]:
    with opened() as engine:
        yield engine


@pytest.fixture
def producer() -> Iterator[EngineProcess]:
    with opened() as engine:
        yield engine


def connected(reader: EngineProcess, producer: EngineProcess) -> str:
    return str(reader.call("connect", producer.call("metadata")))


def wait_settled(engine: EngineProcess, transfer: int) -> None:
    """The test's own time limit ends it if that never comes."""
    while not engine.call("settled", transfer):
        pass


@needs_mooncake
@pytest.mark.parametrize("nbytes", [1, 4096, 64 * MIB])
def test_a_read_brings_every_byte(reader: EngineProcess, producer: EngineProcess, nbytes: int) -> None:
    there, here = producer.registered(nbytes, seed=3), reader.registered(nbytes)
    peer = connected(reader, producer)
    assert reader.read(peer, here, there).kind is OutcomeKind.DONE
    assert reader.holds(here, seed=3)


@needs_mooncake
def test_a_write_brings_every_byte(reader: EngineProcess, producer: EngineProcess) -> None:
    there, here = producer.registered(4 * MIB), reader.registered(4 * MIB, seed=5)
    assert reader.read(connected(reader, producer), here, there, verb="write").kind is OutcomeKind.DONE
    assert producer.holds(there, seed=5)


@needs_mooncake
def test_one_transfer_of_many_copies_is_done_when_all_are(
    reader: EngineProcess, producer: EngineProcess
) -> None:
    there, here = producer.registered(32 * MIB, seed=4), reader.registered(32 * MIB)
    sizes = [4096] * 300 + [28 * MIB]
    offsets = [sum(sizes[:index]) for index in range(len(sizes))]
    copies = [
        (here.part(offset, size), there.part(offset, size))
        for offset, size in zip(offsets, sizes, strict=True)
    ]
    peer = connected(reader, producer)
    assert reader.finish_read(reader.start_read(peer, copies)).kind is OutcomeKind.DONE
    assert reader.holds(here.part(0, sum(sizes)), seed=4)
    assert reader.holds(here.part(sum(sizes), 32 * MIB - sum(sizes)), seed=0)
    assert reader.finish_read(reader.start_read(peer, [])).kind is OutcomeKind.DONE


@needs_mooncake
def test_a_local_side_that_is_not_registered_is_refused(
    reader: EngineProcess, producer: EngineProcess
) -> None:
    there, here = producer.registered(MIB, seed=3), reader.allocate(MIB)
    peer = connected(reader, producer)
    with pytest.raises(RemoteFailureError, match=r"MemoryRangeError: .* is not within one registered range"):
        reader.read(peer, here, there)
    assert reader.call("register", here.address, 4096)
    with pytest.raises(RemoteFailureError, match="not within one registered range"):
        reader.read(peer, here.part(0, 4097), there)
    assert reader.holds(here, seed=0)
    assert reader.read(peer, here.part(0, 4096), there).kind is OutcomeKind.DONE


@needs_mooncake
def test_registrations_are_counted_and_never_overlap(reader: EngineProcess) -> None:
    memory = reader.allocate(MIB)
    assert reader.call("register", *memory) is True
    assert reader.call("register", *memory) is False
    for part in (memory.part(4096, 4096), memory.part(0, 4096), memory.part(4096, MIB)):
        with pytest.raises(RemoteFailureError, match=r"overlaps \[.*which is registered already"):
            reader.call("register", *part)
    with pytest.raises(RemoteFailureError, match="is no range of memory"):
        reader.call("register", memory.address, 0)
    with pytest.raises(RemoteFailureError, match="is not registered"):
        reader.call("unregister", memory.address, 4096)
    assert reader.call("unregister", *memory) is False
    assert reader.call("unregister", *memory) is True
    with pytest.raises(RemoteFailureError, match="is not registered"):
        reader.call("unregister", *memory)
    assert reader.call("register", memory.address, 4096) is True


@needs_mooncake
def test_what_the_engine_refuses_is_an_error_with_the_range(reader: EngineProcess) -> None:
    memory = reader.allocate(MIB)
    assert reader.call("register_behind_its_back", *memory) == 0
    wanted = rf"EngineError: Mooncake does not register \[{memory.address + 4096:#x}, \+4096\): code -7"
    with pytest.raises(RemoteFailureError, match=wanted):
        reader.call("register", *memory.part(4096, 4096))


@needs_mooncake
def test_a_peer_killed_during_a_read_leaves_it_unconfirmed_and_later_reads_failed(
    reader: EngineProcess, producer: EngineProcess
) -> None:
    there, here = producer.registered(64 * MIB, seed=3), reader.registered(64 * MIB)
    peer = connected(reader, producer)
    assert reader.read(peer, here.part(0, 4096), there).kind is OutcomeKind.DONE
    producer.stop()
    number = reader.start_read(peer, [(here, there)])
    producer.kill()
    outcome = reader.finish_read(number)
    assert outcome.kind is OutcomeKind.UNCONFIRMED
    assert "may go on" in outcome.message
    assert not reader.call("settled", outcome.transfer)
    with pytest.raises(RemoteFailureError, match="in use by transfer"):
        reader.call("unregister", *here)
    later = reader.read(peer, here, there)
    assert later.kind is OutcomeKind.FAILED
    assert "does not answer" in later.message
    assert reader.call("close") is True
    assert reader.call("settled", outcome.transfer)


@needs_mooncake
def test_a_peer_that_stops_meets_our_deadline_and_what_lands_later_settles(
    reader: EngineProcess, producer: EngineProcess
) -> None:
    there, here = producer.registered(16 * MIB, seed=3), reader.registered(16 * MIB)
    peer = connected(reader, producer)
    assert reader.read(peer, here.part(0, 4096), there).kind is OutcomeKind.DONE
    producer.stop()
    outcome = reader.read(peer, here, there, timeout_s=0.5)
    assert outcome.kind is OutcomeKind.UNCONFIRMED
    assert "the deadline passed" in outcome.message
    assert outcome.elapsed_s >= 0.5
    assert outcome.cpu_s < 0.5 * outcome.elapsed_s  # it waits, and burns no core
    refused = reader.read(peer, here, there, timeout_s=0.2)
    assert refused.kind is OutcomeKind.FAILED  # and begins nothing more with a peer that does not answer
    assert not reader.call("settled", outcome.transfer)
    producer.go_on()
    wait_settled(reader, outcome.transfer)
    assert reader.holds(here, seed=3)
    assert reader.call("unregister", *here)


@needs_mooncake
def test_close_ends_what_is_unconfirmed(reader: EngineProcess, producer: EngineProcess) -> None:
    there, here = producer.registered(16 * MIB, seed=3), reader.registered(16 * MIB)
    peer = connected(reader, producer)
    assert reader.read(peer, here.part(0, 4096), there).kind is OutcomeKind.DONE
    producer.stop()
    outcome = reader.read(peer, here, there, timeout_s=0.2)
    assert outcome.kind is OutcomeKind.UNCONFIRMED
    assert reader.call("close") is True
    assert reader.call("settled", outcome.transfer)
    producer.go_on()
    assert producer.holds(there, seed=3)  # it runs again
    assert not reader.holds(here, seed=3)
    with pytest.raises(RemoteFailureError, match="ClosedError"):
        reader.read(peer, here, there)
    reader.call("open")
    assert reader.call("register", *here)
    assert reader.read(connected(reader, producer), here, there).kind is OutcomeKind.DONE
    assert reader.holds(here, seed=3)


@needs_mooncake
def test_a_peer_that_accepts_and_never_answers_fails_in_time_and_hinders_no_other(
    reader: EngineProcess, producer: EngineProcess
) -> None:
    silent = Silent()
    try:
        there, here = producer.registered(MIB, seed=3), reader.registered(MIB)
        dead = reader.call("connect", silent.metadata())
        waiting = reader.start_read(dead, [(here, there)], timeout_s=20.0)
        assert reader.read(connected(reader, producer), here, there).kind is OutcomeKind.DONE
        assert not reader.has_replied(waiting)
        outcome = reader.read(dead, here, there, timeout_s=0.3)
        assert outcome.kind is OutcomeKind.FAILED
        assert outcome.elapsed_s >= 0.3
    finally:
        silent.close()
    assert reader.finish_read(waiting).kind is OutcomeKind.FAILED


@needs_mooncake
def test_a_peer_that_falls_silent_during_the_first_contact_meets_our_deadline(reader: EngineProcess) -> None:
    silent = Silent(answers=1)
    try:
        here = reader.registered(MIB)
        dead = reader.call("connect", silent.metadata())
        outcome = reader.read(dead, here, Memory(4096, MIB), timeout_s=0.5)
        assert outcome.kind is OutcomeKind.UNCONFIRMED
        assert not reader.call("settled", outcome.transfer)
    finally:
        silent.close()
    wait_settled(reader, outcome.transfer)  # the contact failed, and so nothing was begun
    assert reader.call("close") is True


@needs_mooncake
@pytest.mark.parametrize("told", [True, False])
def test_a_peer_restarted_on_its_address_is_reached_again(reader: EngineProcess, told: bool) -> None:
    forwarder = Forwarder()
    try:
        here = reader.registered(MIB)
        with opened() as first:
            there = first.registered(MIB, seed=3)
            peer = reader.call("connect", forwarder.lead_to(first))
            assert reader.read(peer, here, there).kind is OutcomeKind.DONE
        with opened() as second:
            there = second.registered(MIB, seed=4)
            metadata = forwarder.lead_to(second)
            if told:
                assert reader.call("connect", metadata) == peer
            else:
                assert reader.read(peer, here, there).kind is not OutcomeKind.DONE
            assert reader.read(peer, here, there).kind is OutcomeKind.DONE
            assert reader.holds(here, seed=4)
    finally:
        forwarder.close()


@needs_mooncake
def test_a_peer_that_is_not_there_is_a_failure_at_once(reader: EngineProcess) -> None:
    here = reader.registered(4096)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = PeerAddress("127.0.0.1", listener.getsockname()[1], LIFE)
    peer = reader.call("connect", address.pack().hex())
    outcome = reader.read(peer, here, here)
    assert outcome.kind is OutcomeKind.FAILED
    assert "refused" in outcome.message
    with pytest.raises(RemoteFailureError, match="no peer 'nobody' is connected"):
        reader.read("nobody", here, here)


@needs_mooncake
def test_a_peer_that_was_disconnected_can_be_connected_again(
    reader: EngineProcess, producer: EngineProcess
) -> None:
    there, here = producer.registered(MIB, seed=3), reader.registered(MIB)
    peer = connected(reader, producer)
    assert reader.read(peer, here.part(0, 4096), there).kind is OutcomeKind.DONE
    reader.call("disconnect", peer)
    reader.call("disconnect", "nobody")
    with pytest.raises(RemoteFailureError, match="is connected"):
        reader.read(peer, here, there)
    assert connected(reader, producer) == peer
    assert reader.read(peer, here, there).kind is OutcomeKind.DONE
    assert reader.holds(here, seed=3)


@needs_mooncake
def test_memory_that_the_peer_has_not_registered_is_not_read(
    reader: EngineProcess, producer: EngineProcess
) -> None:
    there, here = producer.allocate(MIB, seed=3), reader.registered(MIB)
    producer.registered(4096)
    outcome = reader.read(connected(reader, producer), here, there)
    assert outcome.kind is OutcomeKind.UNCONFIRMED
    assert reader.holds(here, seed=0)


@needs_mooncake
def test_a_cancelled_transfer_begins_nothing_more(reader: EngineProcess, producer: EngineProcess) -> None:
    there, here = producer.registered(MIB, seed=3), reader.registered(MIB)
    peer = connected(reader, producer)
    reader.call("cancel")
    outcome = reader.read(peer, here, there)
    assert outcome.kind is OutcomeKind.FAILED
    assert "cancelled" in outcome.message
    assert reader.holds(here, seed=0)
    reader.call("go_on")
    assert reader.read(peer, here, there).kind is OutcomeKind.DONE


@needs_mooncake
def test_reads_of_several_threads_go_on_at_once(reader: EngineProcess, producer: EngineProcess) -> None:
    there, here = producer.registered(16 * MIB, seed=3), reader.registered(16 * MIB)
    peer = connected(reader, producer)
    parts = [(here.part(at, MIB), there.part(at, MIB)) for at in range(0, 16 * MIB, MIB)]
    numbers = [reader.start_read(peer, [part]) for part in parts]
    outcomes: list[Read] = [reader.finish_read(number) for number in numbers]
    assert {outcome.kind for outcome in outcomes} == {OutcomeKind.DONE}
    assert reader.holds(here, seed=3)


@needs_mooncake
def test_ports_that_are_taken_are_named() -> None:
    taken, port = a_port_the_engine_may_have()
    with taken, EngineProcess("mooncake", ports=[port, port + 1]) as engine:
        with pytest.raises(RemoteFailureError, match=f"two free ports from {port} to {port + 1}"):
            engine.call("open")
        with pytest.raises(RemoteFailureError, match="ClosedError"):
            engine.call("metadata")


@needs_mooncake
def test_ports_can_be_chosen() -> None:
    taken, port = a_port_the_engine_may_have()
    with taken, opened(ports=[port, port + 20]) as engine:
        assert port < PeerAddress.unpack(bytes.fromhex(engine.call("metadata"))).port <= port + 20


def a_port_the_engine_may_have() -> tuple[socket.socket, int]:
    """One that is taken now, below those that the system hands out."""
    for port in range(20_000, 30_000, 50):
        with contextlib.suppress(OSError):
            return socket.create_server(("0.0.0.0", port)), port
    pytest.fail("no port is free")


@needs_mooncake
def test_several_engines_of_one_host_have_ports_of_their_own() -> None:
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(opened()) for _ in range(4)]
        ports = {PeerAddress.unpack(bytes.fromhex(engine.call("metadata"))).port for engine in engines}
        assert len(ports) == 4


@needs_mooncake
def test_a_transfer_that_waits_for_a_peer_when_the_engine_is_closed_has_not_begun(
    reader: EngineProcess,
) -> None:
    silent = Silent()
    try:
        here = reader.registered(MIB)
        waiting = reader.start_read(reader.call("connect", silent.metadata()), [(here, here)], timeout_s=1.0)
        assert silent.accepted.wait(WATCHDOG_S)
        assert reader.call("close") is True
    finally:
        silent.close()
    outcome = reader.finish_read(waiting)
    assert outcome.kind is OutcomeKind.FAILED


@needs_mooncake
def test_an_engine_says_no_in_a_forked_child_where_it_would_hang(reader: EngineProcess) -> None:
    other, own = reader.call("open_in_forked_child").split("\n")
    assert "EngineError: Mooncake was opened in process" in other
    assert "before the fork" in own


@needs_mooncake
def test_a_log_folder_which_aborts_the_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_LOG_DIR", "/tmp")
    with EngineProcess("mooncake") as engine, pytest.raises(RemoteFailureError, match="MC_LOG_DIR is set"):
        engine.call("open")
