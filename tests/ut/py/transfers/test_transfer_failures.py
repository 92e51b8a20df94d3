"""Transfers that fail, are unconfirmed, lose their process, or are wrong to begin with."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import simpler
from run_parts import add_one, small_worker
from simpler import (
    INOUT,
    ClosedError,
    MemoryRangeError,
    TransferError,
    TransferRange,
    TransferResult,
    TransferState,
    TransferUnconfirmedError,
    UnknownExtensionError,
    Worker,
)
from transfers.transfer_parts import (
    READ,
    WRITE,
    Engine,
    Gate,
    answers,
    copy,
    gated,
    part,
    provider,
    until_cancelled,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def worker() -> Iterator[Worker]:
    with (
        provider("answers", answers),
        provider("engine", Engine()),
        provider("copy", copy),
        small_worker(device_ids=[0, 1]) as made,
    ):
        yield made


def test_a_certified_failure_releases_the_memory(worker: Worker) -> None:
    memory = worker.malloc(64)
    handle = worker.submit_transfer("answers", [TransferRange(memory, WRITE)], b"failed:no route")
    with pytest.raises(
        TransferError, match=r"transfer 1 by 'answers' on worker 0 failed: no route"
    ) as caught:
        handle.result(20)
    assert (caught.value.transfer_id, caught.value.provider, caught.value.path) == (1, "answers", (0,))
    assert handle.state is TransferState.FAILED
    worker.copy_to(memory, b"mine")
    worker.free(memory)
    assert worker.unconfirmed_transfers() == []


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b"an error code", "an error code"),
        (b"raise", "the engine broke"),
        (b"exit", "3"),
        (b"nothing", "returned NoneType: it must return a TransferResult"),
    ],
)
def test_what_certifies_nothing_keeps_the_memory_pinned(worker: Worker, payload: bytes, text: str) -> None:
    """TR-1."""
    memory = worker.malloc(64)
    handle = worker.submit_transfer("answers", [part(memory, WRITE, 0, 32)], payload)
    with pytest.raises(TransferUnconfirmedError, match=text):
        handle.result(20)
    assert worker.unconfirmed_transfers("answers", worker_id=0) == [handle]
    with pytest.raises(MemoryRangeError, match=r"bytes 0 to 32 of .* may still be written by transfer 1"):
        worker.copy_to(memory, b"x")
    with pytest.raises(MemoryRangeError, match=r"pinned by .*unconfirmed"):
        worker.free(memory)
    add = worker.register(add_one)
    with pytest.raises(MemoryRangeError, match="may still be written"):
        worker.run(
            lambda orch, args, config: orch.submit(add, INOUT(memory.tensor((64,), "uint8")), worker=0)
        )
    worker.copy_to(memory, b"other bytes", dst_offset=32)


def test_what_may_still_be_read_can_be_read_but_not_written(worker: Worker) -> None:
    memory = worker.malloc(64)
    worker.copy_to(memory, b"a" * 64)
    worker.submit_transfer("answers", [TransferRange(memory, READ)], b"who knows").wait(20)
    seen = bytearray(64)
    worker.copy_from(seen, memory)
    assert seen == b"a" * 64
    with pytest.raises(MemoryRangeError, match="may still be read"):
        worker.copy_to(memory, b"b")


def test_a_provider_certifies_some_later_and_its_reset_the_rest(worker: Worker) -> None:
    memory = [worker.malloc(64) for _ in range(4)]
    handles = [worker.submit_transfer("engine", [TransferRange(one, WRITE)]) for one in memory]
    assert all(handle.wait(20) for handle in handles)
    assert {handle.id for handle in worker.unconfirmed_transfers("engine")} == {1, 2, 3, 4}
    assert worker.confirm_transfers("engine", worker_id=0) == 2
    worker.free(memory[0])
    with pytest.raises(MemoryRangeError, match="transfer 2"):
        worker.free(memory[1])
    assert worker.confirm_transfers("engine", worker_id=0) == 0
    assert worker.confirm_transfers("engine", worker_id=1) == 0
    assert worker.reset_provider("engine", worker_id=0) == 2
    for one in memory[1:]:
        worker.free(one)
    assert worker.unconfirmed_transfers() == []
    assert handles[1].state is TransferState.UNCONFIRMED, "what a handle says does not change again"


def test_a_provider_without_confirm_and_reset_says_so(worker: Worker) -> None:
    memory = worker.malloc(64)
    worker.submit_transfer("answers", [TransferRange(memory, WRITE)], b"?").wait(20)
    with pytest.raises(simpler.RemoteError, match=r"has no confirm\(\)"):
        worker.confirm_transfers("answers", worker_id=0)
    with pytest.raises(simpler.RemoteError, match=r"has no reset\(\)"):
        worker.reset_provider("answers", worker_id=0)
    assert len(worker.unconfirmed_transfers()) == 1


class Liar(Engine):
    def confirm(self, ids: list[int]) -> list[int]:
        return [999]


def test_ids_that_were_not_asked_about_certify_nothing() -> None:
    with provider("liar", Liar()), small_worker() as worker:
        memory = worker.malloc(64)
        worker.submit_transfer("liar", [TransferRange(memory, WRITE)]).wait(20)
        with pytest.raises(simpler.RemoteError, match="999, which it was not asked about"):
            worker.confirm_transfers("liar", worker_id=0)
        assert len(worker.unconfirmed_transfers()) == 1


def test_a_dead_provider_is_unconfirmed_until_the_chip_restarts(worker: Worker) -> None:
    host = worker.create_buffer(64)
    own = worker.malloc(64, worker_id=1)
    handle = worker.submit_transfer(
        "answers", [TransferRange(host, WRITE), TransferRange(own, WRITE)], b"die"
    )
    with pytest.raises(TransferUnconfirmedError, match="exited with code 9"):
        handle.result(20)
    with pytest.raises(MemoryRangeError, match="pinned by"):
        worker.free(host)
    with pytest.raises(MemoryRangeError, match="lost"):
        worker.free(own)
    never = worker.submit_transfer("answers", [], b"ok:", worker_id=1)
    with pytest.raises(TransferError, match="did not begin: worker 1 is dead"):
        never.result(20)
    assert never.state is TransferState.FAILED
    worker.restart(1)
    assert worker.unconfirmed_transfers() == []
    worker.free(host)
    assert worker.submit_transfer("answers", [], b"ok:back", worker_id=1).result(20) == b"back"


def test_the_engine_of_a_dead_chip_is_torn_down_with_its_process(worker: Worker) -> None:
    host = worker.create_buffer(64)
    for ask in (worker.confirm_transfers, worker.reset_provider):
        handle = worker.submit_transfer("answers", [TransferRange(host, WRITE)], b"die", worker_id=1)
        with pytest.raises(TransferUnconfirmedError):
            handle.result(20)
        assert ask("answers", worker_id=1) == 1
        host.array((64,), "uint8")[:] = 7
        worker.restart(1)
    worker.free(host)


def test_what_a_dead_process_could_only_read_is_free_at_once(worker: Worker) -> None:
    source, own = worker.malloc(64, worker_id=0), worker.malloc(64, worker_id=1)
    ranges = [TransferRange(source, READ), TransferRange(own, WRITE)]
    handle = worker.submit_transfer("answers", ranges, b"die", worker_id=1)
    with pytest.raises(TransferUnconfirmedError):
        handle.result(20)
    assert worker.unconfirmed_transfers() == []
    worker.copy_to(source, b"mine again")
    worker.free(source)


def test_what_was_left_open_and_only_read_is_free_when_its_process_dies(worker: Worker) -> None:
    read, written = worker.create_buffer(64), worker.create_buffer(64)
    for memory, access in ((read, READ), (written, WRITE)):
        worker.submit_transfer("engine", [TransferRange(memory, access)], worker_id=1).wait(20)
    with pytest.raises(MemoryRangeError, match="pinned by"):
        worker.free(read)
    worker.kill(1)
    worker.free(read)
    with pytest.raises(MemoryRangeError, match="pinned by"):
        worker.free(written)
    assert worker.reset_provider("engine", worker_id=1) == 1
    worker.free(written)


def test_a_chip_killed_under_many_transfers_ends_each(tmp_path: Path) -> None:
    """TR-4."""
    gates = [Gate(tmp_path, f"gate{i}") for i in range(8)]
    with provider("gated", gated), small_worker(device_ids=[0, 1]) as worker:
        host = [worker.create_buffer(64) for _ in range(20)]
        handles = [
            worker.submit_transfer("gated", [TransferRange(one, READ)], gates[i % 8].payload, worker_id=0)
            for i, one in enumerate(host)
        ]
        for gate in gates:
            gate.wait_begun()
        worker.kill(0)
        assert all(handle.wait(20) for handle in handles)
        states = [handle.state for handle in handles]
        assert states[:8] == [TransferState.UNCONFIRMED] * 8
        assert set(states[8:]) <= {TransferState.UNCONFIRMED, TransferState.FAILED}
        worker.restart(0)
        for one in host:
            worker.free(one)


def test_memory_lost_while_a_transfer_waits_for_it_is_not_touched(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with provider("gated", gated), small_worker(device_ids=[0, 1]) as worker:
        memory = worker.malloc(64, worker_id=0)
        first = worker.submit_transfer("gated", [TransferRange(memory, WRITE)], gate.payload, worker_id=1)
        gate.wait_begun()
        second = worker.submit_transfer("gated", [TransferRange(memory, WRITE)], gate.payload, worker_id=1)
        worker.kill(0)
        gate.open()
        assert first.wait(20)
        with pytest.raises(TransferError, match=r"did not begin: .* is lost"):
            second.result(20)


def test_close_lets_transfers_end_asks_them_to_and_says_what_did_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun, stuck = Gate(tmp_path, "begun"), Gate(tmp_path, "stuck")
    with provider("until", until_cancelled), provider("gated", gated):
        worker = small_worker(shutdown_timeout_s=1.0)
        worker.init()
        memory = worker.malloc(64)
        polite = worker.submit_transfer("until", [TransferRange(memory, WRITE)], begun.payload)
        with open(begun.path, "rb") as fifo:  # noqa: PTH123 - a plain name
            fifo.read()
        waiting = worker.submit_transfer("until", [TransferRange(memory, WRITE)])
        rude = worker.submit_transfer("gated", [], stuck.payload, worker_id=0)
        stuck.wait_begun()
        with caplog.at_level(logging.WARNING, "simpler.transfers"):
            worker.close()
        assert [h.state.value for h in (polite, waiting, rude)] == ["cancelled", "cancelled", "unconfirmed"]
        assert "which did not stop in time" in caplog.text
        assert repr(rude).split(":")[0] in caplog.text
        with pytest.raises(TransferUnconfirmedError):
            rude.result(0)
        stuck.open()


def test_an_orderly_close_waits_for_what_runs(tmp_path: Path) -> None:
    with provider("copy", copy):
        worker = small_worker()
        worker.init()
        memory = worker.malloc(1 << 19)
        halves = [part(memory, READ, 0, 1 << 18), part(memory, WRITE, 1 << 18, 1 << 19)]
        handles = [worker.submit_transfer("copy", halves) for _ in range(1)]
        worker.close()
        assert handles[0].state in (TransferState.DONE, TransferState.CANCELLED)
        with pytest.raises(ClosedError):
            worker.submit_transfer("copy", [])


def test_a_handle_that_is_kept_keeps_nothing_of_the_worker_alive(worker: Worker) -> None:
    handle = worker.submit_transfer("answers", [], b"ok:", worker_id=0)
    handle.result(20)
    node = weakref.ref(worker._engine)
    worker.close()
    gc.collect()
    assert node() is None
    assert handle.done()


def wrong_ranges(worker: Worker) -> list[tuple[Any, type[Exception], str]]:
    memory = worker.malloc(64)
    dead = worker.malloc(64)
    worker.free(dead)
    strided = memory.tensor((4, 4), "uint8", strides=(16, 2))
    return [
        ([memory], TypeError, "a range is a TransferRange"),
        ([TransferRange(memory, 7)], ValueError, "READ or WRITE"),  # type: ignore[arg-type]  # that is the mistake
        ([TransferRange(memory, READ, 60, 8)], MemoryRangeError, "not inside 64 bytes"),
        ([TransferRange(memory, READ, -1, 8)], MemoryRangeError, "not inside 64 bytes"),
        ([TransferRange(memory, READ, 0, 0)], MemoryRangeError, "not inside 64 bytes"),
        ([TransferRange(memory, READ, 64)], MemoryRangeError, "not inside 64 bytes"),
        ([TransferRange(memory, READ, 1 << 70, 1)], MemoryRangeError, "not inside 64 bytes"),
        ([TransferRange(memory, READ, "0")], TypeError, "offset is an integer"),  # type: ignore[arg-type]  # likewise
        ([TransferRange(dead, READ)], MemoryRangeError, "was freed"),
        ([TransferRange(strided, READ)], ValueError, "must be contiguous"),
        ([TransferRange(memory.address, READ)], TypeError, "names a Buffer"),  # type: ignore[arg-type]  # likewise
        ([TransferRange(np.zeros(4), READ)], TypeError, "names a Buffer"),  # type: ignore[arg-type]  # likewise
        (7, TypeError, "not iterable"),
        ([], ValueError, "belong to 0 chips"),
    ]


def test_wrong_ranges_are_refused_and_hold_nothing(worker: Worker) -> None:
    """TR-3."""
    for ranges, error, text in wrong_ranges(worker):
        with pytest.raises(error, match=text):
            worker.submit_transfer("copy", ranges)
    with contextlib.suppress(simpler.SimplerError):
        worker.submit_transfer("copy", [], b"", worker_id=0).result(20)
    with small_worker() as other:
        foreign = other.malloc(64)
        with pytest.raises(MemoryRangeError, match="belongs to another Worker"):
            worker.submit_transfer("copy", [TransferRange(foreign, READ)], worker_id=0)


def test_wrong_names_chips_and_payloads_are_refused(worker: Worker) -> None:
    with pytest.raises(UnknownExtensionError, match="was never registered"):
        worker.submit_transfer("nobody", [], worker_id=0)
    with provider("late", copy), pytest.raises(UnknownExtensionError, match=r"registered after init\(\)"):
        worker.submit_transfer("late", [], worker_id=0)
    with pytest.raises(ValueError, match="no such chip"):
        worker.submit_transfer("copy", [], worker_id=2)
    with pytest.raises(TypeError):
        worker.submit_transfer("copy", [], "text", worker_id=0)  # type: ignore[arg-type]  # that is the mistake
    with pytest.raises(ValueError, match="max_control_payload"):
        worker.submit_transfer("copy", [], bytes((64 << 20) + 1), worker_id=0)
    with pytest.raises(ValueError, match="timeout_s"):
        worker.submit_transfer("copy", [], worker_id=0, timeout_s=0)


def test_what_a_provider_may_be() -> None:
    with provider("one", copy):
        simpler.register_transfer_provider("one", copy)
        with pytest.raises(ValueError, match="already registered"):
            simpler.register_transfer_provider("one", answers)
    with pytest.raises(UnknownExtensionError):
        simpler.unregister_transfer_provider("one")
    with pytest.raises(TypeError, match="not callable"):
        simpler.register_transfer_provider("two", 3)  # type: ignore[arg-type]  # that is the mistake
    for name in ("", "x" * 256, "line\nbreak", 3):
        with pytest.raises(ValueError, match="printable"):
            simpler.register_transfer_provider(name, copy)  # type: ignore[arg-type]  # likewise
    with pytest.raises(TypeError, match="a str"):
        TransferResult.failed(b"bytes")  # type: ignore[arg-type]  # likewise
