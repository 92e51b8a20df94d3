"""The real NIXL agent between real processes: bytes, refusals, and peers that die, hang or come back."""

from __future__ import annotations

import contextlib
import importlib.util
from typing import TYPE_CHECKING

import pytest

from simpler import ClosedError
from simpler.kv.engines import OutcomeKind
from simpler.kv.engines.nixl import NixlEngine

from .engine_process import EngineProcess, RemoteFailureError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simpler.kv.engines import TransferEngine

MIB = 1 << 20

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is None, reason="needs the packages of simpler[nixl]"
)
pytestmark = [pytest.mark.extra, pytest.mark.no_asan("the engine's own libraries are not built for it")]


@contextlib.contextmanager
def opened(**options: object) -> Iterator[EngineProcess]:
    with EngineProcess("nixl", **options) as engine:
        engine.call("open")
        yield engine


@pytest.fixture(params=["tcp", None], ids=["tcp", "any transport"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """A reader and a producer."""
    with opened(transports=request.param) as reader, opened(transports=request.param) as producer:
        yield reader, producer


@pytest.fixture
def tcp_pair() -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """Two that need each other for each byte: by shared memory one could read from a stopped one."""
    with opened(transports="tcp") as reader, opened(transports="tcp") as producer:
        yield reader, producer


def connected(reader: EngineProcess, producer: EngineProcess) -> str:
    return str(reader.call("connect", producer.call("metadata")))


def wait_settled(engine: EngineProcess, transfer: int) -> None:
    """The test's own time limit ends it if that never comes."""
    while not engine.call("settled", transfer):
        pass


@needs_nixl
@pytest.mark.parametrize("nbytes", [1, 4096, 64 * MIB])
def test_a_read_brings_every_byte(pair: tuple[EngineProcess, EngineProcess], nbytes: int) -> None:
    reader, producer = pair
    there, here = producer.registered(nbytes, seed=3), reader.registered(nbytes)
    assert reader.read(connected(reader, producer), here, there).kind is OutcomeKind.DONE
    assert reader.holds(here, seed=3)


@needs_nixl
def test_a_write_brings_every_byte(pair: tuple[EngineProcess, EngineProcess]) -> None:
    reader, producer = pair
    there, here = producer.registered(4 * MIB), reader.registered(4 * MIB, seed=5)
    assert reader.read(connected(reader, producer), here, there, verb="write").kind is OutcomeKind.DONE
    assert producer.holds(there, seed=5)


@needs_nixl
def test_one_transfer_of_many_copies_is_done_when_all_are(pair: tuple[EngineProcess, EngineProcess]) -> None:
    reader, producer = pair
    there, here = producer.registered(16 * MIB, seed=4), reader.registered(16 * MIB)
    peer = connected(reader, producer)
    copies = [(here.part(at, 8192), there.part(at, 8192)) for at in range(0, 16 * MIB, 8192)]
    assert reader.finish_read(reader.start_read(peer, copies)).kind is OutcomeKind.DONE
    assert reader.holds(here, seed=4)
    assert reader.finish_read(reader.start_read(peer, [])).kind is OutcomeKind.DONE


@needs_nixl
def test_a_local_side_that_is_not_registered_is_refused(
    tcp_pair: tuple[EngineProcess, EngineProcess],
) -> None:
    reader, producer = tcp_pair
    there, here = producer.registered(MIB, seed=3), reader.allocate(MIB)
    peer = connected(reader, producer)
    with pytest.raises(RemoteFailureError, match=r"MemoryRangeError: .* is not within one registered range"):
        reader.read(peer, here, there)
    assert reader.holds(here, seed=0)


@needs_nixl
def test_registrations_are_counted_and_never_overlap() -> None:
    with opened() as engine:
        memory = engine.allocate(MIB)
        assert engine.call("register", *memory) is True
        assert engine.call("register", *memory) is False
        with pytest.raises(RemoteFailureError, match=r"overlaps \[.*which is registered already"):
            engine.call("register", *memory.part(4096, 4096))
        assert engine.call("unregister", *memory) is False
        assert engine.call("unregister", *memory) is True
        with pytest.raises(RemoteFailureError, match="is not registered"):
            engine.call("unregister", *memory)


@needs_nixl
def test_memory_registered_after_the_metadata_was_given_needs_new_metadata(
    tcp_pair: tuple[EngineProcess, EngineProcess],
) -> None:
    reader, producer = tcp_pair
    here = reader.registered(MIB)
    producer.registered(4096)
    peer = connected(reader, producer)
    there = producer.registered(MIB, seed=3)
    outcome = reader.read(peer, here, there)
    assert outcome.kind is OutcomeKind.FAILED
    assert "NOT_FOUND" in outcome.message
    assert connected(reader, producer) == peer
    assert reader.read(peer, here, there).kind is OutcomeKind.DONE
    assert reader.holds(here, seed=3)


@needs_nixl
def test_a_peer_killed_during_a_read_leaves_it_unconfirmed_and_later_reads_failed(
    tcp_pair: tuple[EngineProcess, EngineProcess],
) -> None:
    reader, producer = tcp_pair
    there, here = producer.registered(64 * MIB, seed=3), reader.registered(64 * MIB)
    peer = connected(reader, producer)
    assert reader.read(peer, here.part(0, 4096), there).kind is OutcomeKind.DONE
    producer.stop()
    number = reader.start_read(peer, [(here, there)])
    producer.kill()
    outcome = reader.finish_read(number)
    assert outcome.kind is OutcomeKind.UNCONFIRMED
    assert "REMOTE_DISCONNECT" in outcome.message
    assert not reader.call("settled", outcome.transfer)
    with pytest.raises(RemoteFailureError, match="in use by transfer"):
        reader.call("unregister", *here)
    later = reader.read(peer, here, there)
    assert later.kind is OutcomeKind.FAILED
    assert "connect it anew" in later.message
    assert reader.call("close") is True
    assert reader.call("settled", outcome.transfer)


@needs_nixl
def test_a_peer_that_stops_meets_our_deadline_and_what_lands_later_settles(
    tcp_pair: tuple[EngineProcess, EngineProcess],
) -> None:
    reader, producer = tcp_pair
    there, here = producer.registered(16 * MIB, seed=3), reader.registered(16 * MIB)
    peer = connected(reader, producer)
    assert reader.read(peer, here.part(0, 4096), there).kind is OutcomeKind.DONE
    producer.stop()
    outcome = reader.read(peer, here, there, timeout_s=0.5)
    assert outcome.kind is OutcomeKind.UNCONFIRMED
    assert "the deadline passed" in outcome.message
    assert outcome.elapsed_s >= 0.5
    assert outcome.cpu_s < 0.5 * outcome.elapsed_s  # it waits, and burns no core
    assert not reader.call("settled", outcome.transfer)
    refused = reader.read(peer, here, there, timeout_s=0.2)
    assert refused.kind is OutcomeKind.FAILED  # nothing more begins with it
    assert "past its deadline" in refused.message
    producer.go_on()
    wait_settled(reader, outcome.transfer)
    assert reader.holds(here, seed=3)
    assert reader.read(peer, here.part(0, 4096), there).kind is OutcomeKind.DONE
    assert reader.call("unregister", *here)


@needs_nixl
def test_a_peer_that_accepts_and_never_answers_meets_our_deadline_and_hinders_no_other(
    tcp_pair: tuple[EngineProcess, EngineProcess],
) -> None:
    reader, producer = tcp_pair
    here, there = reader.registered(MIB), producer.registered(MIB, seed=3)
    with opened(transports="tcp") as silent:
        unreachable = silent.registered(MIB)
        dead = connected(reader, silent)
        silent.stop()  # its sockets still accept
        waiting = reader.start_read(dead, [(here.part(0, 4096), unreachable)], timeout_s=20.0)
        live = connected(reader, producer)
        assert reader.read(live, here.part(4096, 4096), there.part(4096, 4096)).kind is OutcomeKind.DONE
        assert not reader.has_replied(waiting)
        outcome = reader.read(dead, here.part(8192, 4096), unreachable, timeout_s=0.3)
        assert outcome.kind is OutcomeKind.UNCONFIRMED
        assert outcome.elapsed_s >= 0.3
        silent.kill()
        assert reader.finish_read(waiting).kind is OutcomeKind.UNCONFIRMED


@needs_nixl
def test_close_ends_what_is_unconfirmed_and_the_engine_can_be_opened_again(
    tcp_pair: tuple[EngineProcess, EngineProcess],
) -> None:
    reader, producer = tcp_pair
    there, here = producer.registered(16 * MIB, seed=3), reader.registered(16 * MIB)
    peer = connected(reader, producer)
    assert reader.read(peer, here.part(0, 4096), there).kind is OutcomeKind.DONE
    producer.stop()
    outcome = reader.read(peer, here, there, timeout_s=0.2)
    assert outcome.kind is OutcomeKind.UNCONFIRMED
    assert reader.call("close") is True
    assert reader.call("settled", outcome.transfer)
    producer.kill()
    with pytest.raises(RemoteFailureError, match="ClosedError"):
        reader.read(peer, here, there)
    reader.call("open")
    assert reader.call("register", *here)
    with opened(transports="tcp") as second:
        there = second.registered(16 * MIB, seed=4)
        assert reader.read(connected(reader, second), here, there).kind is OutcomeKind.DONE
        assert reader.holds(here, seed=4)


@needs_nixl
def test_a_restarted_peer_is_another_one(tcp_pair: tuple[EngineProcess, EngineProcess]) -> None:
    reader, producer = tcp_pair
    there, here = producer.registered(MIB, seed=3), reader.registered(MIB)
    first = connected(reader, producer)
    assert reader.read(first, here, there).kind is OutcomeKind.DONE
    producer.kill()
    with opened(transports="tcp") as restarted:
        there = restarted.registered(MIB, seed=4)
        second = connected(reader, restarted)
        assert second != first
        assert reader.read(second, here, there).kind is OutcomeKind.DONE
        assert reader.holds(here, seed=4)
    reader.call("disconnect", first)
    with pytest.raises(RemoteFailureError, match="is connected"):
        reader.read(first, here, there)


@needs_nixl
def test_a_cancelled_transfer_is_not_begun(tcp_pair: tuple[EngineProcess, EngineProcess]) -> None:
    reader, producer = tcp_pair
    there, here = producer.registered(MIB, seed=3), reader.registered(MIB)
    peer = connected(reader, producer)
    reader.call("cancel")
    outcome = reader.read(peer, here, there)
    assert outcome.kind is OutcomeKind.FAILED
    assert "cancelled" in outcome.message
    assert reader.holds(here, seed=0)


@needs_nixl
def test_an_engine_says_no_in_a_forked_child() -> None:
    with opened() as engine:
        other, own = engine.call("open_in_forked_child").split("\n")
    assert "EngineError: NIXL was opened in process" in other
    assert "before the fork" in own


@needs_nixl
@pytest.mark.parametrize("metadata", [b"", b"nixl/1 1234garbage", b"x" * 10_000])
def test_what_is_no_metadata_is_refused(metadata: bytes) -> None:
    with opened() as engine, pytest.raises(RemoteFailureError, match="no metadata of a NIXL engine"):
        engine.call("connect", metadata.hex())


@needs_nixl
def test_transports_without_tcp_are_refused() -> None:
    with (
        EngineProcess("nixl", transports="sm,self") as engine,
        pytest.raises(RemoteFailureError, match="leaves out tcp"),
    ):
        engine.call("open")


@needs_nixl
def test_a_backend_that_is_not_there_is_named() -> None:
    with (
        EngineProcess("nixl", backend="NOPE") as engine,
        pytest.raises(RemoteFailureError, match="does not start with backend 'NOPE'"),
    ):
        engine.call("open")


def test_a_progress_thread_without_a_delay_is_refused() -> None:
    with pytest.raises(ValueError, match="takes a core"):
        NixlEngine(progress_delay_us=0)


def test_it_is_an_engine_like_the_others() -> None:
    engine: TransferEngine = NixlEngine()
    assert engine.close() is True  # never opened, and so gone
    with pytest.raises(ClosedError):
        engine.metadata()
