"""Transfers that go well: what a provider is given, what its submitter gets, in which order things happen."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import simpler
from run_parts import add_one, device_array, host_copy, small_worker
from simpler import (
    IN,
    INOUT,
    BackPressureError,
    CancelToken,
    MemoryRangeError,
    TransferBuffer,
    TransferRange,
    TransferRequest,
    TransferResult,
    TransferState,
    Worker,
    WorkerTimeoutError,
)
from transfers.transfer_parts import READ, WRITE, Gate, answers, copy, gated, part, provider, until_cancelled

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=[2, 3])
def any_level(request: pytest.FixtureRequest) -> functools.partial[Worker]:
    """A maker of one chip at each level."""
    options: dict[str, Any] = {"device_id": 4} if request.param == 2 else {"device_ids": [4]}
    return functools.partial(small_worker, **({"level": request.param} | options))


def test_a_provider_copies_between_ranges_of_one_chip(any_level: Any) -> None:
    with provider("copy", copy), any_level() as worker:
        memory = worker.malloc(4096)
        worker.copy_to(memory, bytes(range(256)) * 16)
        handle = worker.submit_transfer("copy", [part(memory, READ, 16, 80), part(memory, WRITE, 1024, 1088)])
        assert handle.result(20) == b"2 ranges"
        assert (handle.state, handle.done(), handle.nbytes) == (TransferState.DONE, True, 128)
        seen = bytearray(64)
        worker.copy_from(seen, memory, src_offset=1024)
        assert seen == bytes(range(16, 80))


def test_a_provider_is_told_what_it_was_asked_for(any_level: Any) -> None:
    def describe(request: TransferRequest, cancel: CancelToken) -> TransferResult:
        ranges = [(r.address, r.nbytes, r.access.name, r.array().flags.writeable) for r in request.ranges]
        return TransferResult.ok(
            repr((request.id, request.payload, request.device_id, request.worker_id, ranges)).encode()
        )

    with provider("describe", describe), any_level() as worker:
        memory, host = worker.malloc(4096), worker.create_buffer(512)
        tensor = memory.tensor((4, 8), "float32", offset=256)
        handle = worker.submit_transfer(
            "describe",
            [TransferRange(memory, READ, 8, 8), TransferRange(tensor, WRITE), TransferRange(host, READ, 500)],
            b"hello",
        )
        assert handle.result(20).decode() == repr(
            (
                handle.id,
                b"hello",
                4,
                (0,),
                [
                    (memory.address + 8, 8, "READ", False),
                    (memory.address + 256, 128, "WRITE", True),
                    (host.address + 500, 12, "READ", False),
                ],
            )
        )


def test_the_provider_of_one_chip_reads_another_chips_memory() -> None:
    with provider("copy", copy), small_worker(device_ids=[0, 1]) as worker:
        source = device_array(worker, np.arange(64, dtype=np.int32), 0)
        target = device_array(worker, np.zeros(64, np.int32), 1)
        ranges = [TransferRange(source, READ), TransferRange(target, WRITE)]
        with pytest.raises(ValueError, match="its ranges belong to 2 chips"):
            worker.submit_transfer("copy", ranges)
        handle = worker.submit_transfer("copy", ranges, worker_id=1)
        assert handle.worker_id == 1
        handle.result(20)
        np.testing.assert_array_equal(host_copy(worker, target), np.arange(64))


def test_compute_waits_only_for_the_bytes_it_conflicts_with(tmp_path: Path) -> None:
    """TR-2."""
    gate = Gate(tmp_path)
    with provider("gated", gated), small_worker() as worker:
        add = worker.register(add_one)
        memory = worker.malloc(3072)
        worker.copy_to(memory, bytes(3072))
        parts = [memory.tensor((1024,), "uint8", offset=1024 * i) for i in range(3)]
        handle = worker.submit_transfer(
            "gated", [TransferRange(parts[0], WRITE), TransferRange(parts[1], READ)], gate.payload
        )
        gate.wait_begun()

        def use(which: int, tag: Any) -> simpler.RunHandle:
            def fn(orch: simpler.Orchestrator, args: Any, config: Any) -> None:
                target = parts[2] if tag is IN else parts[which]
                orch.submit(add, INOUT(target), worker=0) if tag is INOUT else orch.submit(
                    look, IN(parts[which]), worker=0
                )

            return worker.submit(fn)

        look = worker.register(int_sum)
        assert use(2, INOUT).wait(20), "other bytes"
        assert use(1, IN).wait(20), "reads share"
        conflicts = [use(1, INOUT), use(0, INOUT), use(0, IN)]
        assert not any(run.done() for run in conflicts)
        assert handle.state is TransferState.RUNNING
        gate.open()
        assert all(run.wait(20) for run in conflicts)
        handle.result(20)
        assert [host_copy(worker, one)[0] for one in parts] == [2, 1, 1]


def int_sum(x: np.ndarray[Any, Any]) -> None:
    x.sum()


def test_a_transfer_waits_for_the_tasks_before_it_that_conflict(tmp_path: Path) -> None:
    """TR-2, the other way."""
    gate = Gate(tmp_path)
    with provider("copy", copy), small_worker() as worker:
        slow = worker.register(add_one_after)
        x = device_array(worker, np.zeros(64, np.uint8))
        y = device_array(worker, np.zeros(64, np.uint8))
        path = worker.create_buffer(512)
        path.array((512,), "uint8")[: len(gate.payload)] = np.frombuffer(gate.payload, np.uint8)
        run = worker.submit(
            lambda orch, args, config: orch.submit(
                slow, INOUT(x), IN(path.tensor((len(gate.payload),), "uint8")), worker=0
            )
        )
        gate.wait_begun()
        handle = worker.submit_transfer("copy", [TransferRange(x, READ), TransferRange(y, WRITE)])
        assert not handle.wait(0)
        assert handle.state is TransferState.WAITING
        gate.open()
        assert run.wait(20)
        handle.result(20)
        assert host_copy(worker, y)[0] == 1


def add_one_after(x: np.ndarray[Any, Any], path: np.ndarray[Any, Any]) -> None:
    with open(bytes(path), "rb") as fifo:  # noqa: PTH123 - a plain name
        fifo.read()
    x += 1


def test_transfers_over_the_same_bytes_go_in_order_and_readers_share(tmp_path: Path) -> None:
    gates = [Gate(tmp_path, f"gate{i}") for i in range(4)]
    with provider("gated", gated), small_worker() as worker:
        memory = worker.malloc(1024)
        worker.copy_to(memory, bytes(1024))
        modes = [READ, READ, WRITE, READ]
        handles = [
            worker.submit_transfer("gated", [TransferRange(memory, mode)], gate.payload)
            for mode, gate in zip(modes, gates, strict=True)
        ]
        gates[0].wait_begun()
        gates[1].wait_begun()
        assert [handle.state.value for handle in handles] == ["running", "running", "waiting", "waiting"]
        gates[0].open()
        handles[0].result(20)
        assert not handles[2].done()
        gates[1].open()
        gates[2].wait_begun()
        assert handles[3].state is TransferState.WAITING
        gates[2].open()
        gates[3].wait_begun()
        gates[3].open()
        assert handles[3].wait(20)


def test_copies_wait_for_transfers_within_their_own_limit(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with provider("gated", gated), small_worker() as worker:
        memory = worker.malloc(1024)
        handle = worker.submit_transfer("gated", [part(memory, WRITE, 0, 512)], gate.payload)
        gate.wait_begun()
        worker.copy_to(memory, b"beside", dst_offset=512)
        with pytest.raises(WorkerTimeoutError):
            worker.copy_to(memory, b"same", timeout_s=0.01)
        gate.open()
        worker.copy_to(memory, b"same")
        assert handle.done()


def test_memory_freed_meanwhile_goes_when_the_transfer_has_ended(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with provider("gated", gated), small_worker() as worker:
        memory = worker.malloc(1024)
        committed = worker.committed_device_memory()
        handle = worker.submit_transfer("gated", [TransferRange(memory, WRITE)], gate.payload)
        gate.wait_begun()
        worker.free(memory)
        assert worker.committed_device_memory() == committed
        with pytest.raises(MemoryRangeError):
            worker.submit_transfer("gated", [TransferRange(memory, WRITE)], gate.payload)
        gate.open()
        handle.result(20)
        assert worker.committed_device_memory() < committed


def test_more_than_eight_run_as_places_come_free(tmp_path: Path) -> None:
    gates = [Gate(tmp_path, f"gate{i}") for i in range(10)]
    with provider("gated", gated), small_worker() as worker:
        handles = [worker.submit_transfer("gated", [], gate.payload, worker_id=0) for gate in gates]
        for gate in gates[:8]:
            gate.wait_begun()
        assert [handle.state.value for handle in handles[8:]] == ["waiting", "waiting"]
        gates[3].open()
        gates[8].wait_begun()
        for gate in [*gates[:3], *gates[4:9]]:
            gate.open()
        gates[9].wait_begun()
        gates[9].open()
        assert all(handle.wait(20) for handle in handles)


def test_transfers_take_no_place_of_concurrent_handlers(tmp_path: Path) -> None:
    gates = [Gate(tmp_path, f"gate{i}") for i in range(8)]
    simpler.register_chip_control_extension("poll", poll, concurrent=True)
    try:
        with provider("gated", gated), small_worker() as worker:
            handles = [worker.submit_transfer("gated", [], gate.payload, worker_id=0) for gate in gates]
            for gate in gates:
                gate.wait_begun()
            assert worker.run_chip_control_extension("poll", worker_id=0) == b"here"
            for gate in gates:
                gate.open()
            assert all(handle.wait(20) for handle in handles)
    finally:
        simpler.unregister_chip_control_extension("poll")


def poll(chip: simpler.ChipView, payload: bytes, device_id: int) -> bytes:
    return b"here"


@pytest.mark.parametrize("options", [{"max_transfers": 1}, {"max_transfer_bytes": 1500}])
def test_too_much_in_flight_is_back_pressure_that_names_what_to_enlarge(
    tmp_path: Path, options: dict[str, int]
) -> None:
    gate = Gate(tmp_path)
    with provider("gated", gated), provider("copy", copy), small_worker(**options) as worker:
        memory, other = worker.malloc(1024), worker.malloc(1024)
        first = worker.submit_transfer("gated", [TransferRange(memory, WRITE)], gate.payload)
        gate.wait_begun()
        with pytest.raises(BackPressureError, match=next(iter(options))):
            worker.submit_transfer("copy", [TransferRange(other, READ)], timeout_s=0.01)
        gate.open()
        worker.submit_transfer("copy", [part(other, READ, 0, 8), part(other, WRITE, 8, 16)]).result(20)
        assert first.wait(20)


def test_one_larger_than_the_limit_goes_alone() -> None:
    with provider("copy", copy), small_worker(max_transfer_bytes=16) as worker:
        memory = worker.malloc(1024)
        assert worker.submit_transfer(
            "copy", [part(memory, READ, 0, 512), part(memory, WRITE, 512, 1024)]
        ).wait(20)


def test_a_transfer_can_be_awaited_and_dropped(tmp_path: Path) -> None:
    gate = Gate(tmp_path)

    async def main(worker: Worker) -> tuple[bytes, bool]:
        waiting = asyncio.ensure_future(result_of(worker))
        await asyncio.to_thread(gate.wait_begun)
        was_done = waiting.done()
        gate.open()
        return await waiting, was_done

    async def result_of(worker: Worker) -> bytes:
        return await worker.submit_transfer("gated", [], gate.payload, worker_id=0)

    with provider("gated", gated), provider("answers", answers), small_worker() as worker:
        assert asyncio.run(main(worker)) == (b"", False)
        worker.submit_transfer("answers", [], b"ok:dropped", worker_id=0)
        assert asyncio.run(result_of_answer(worker)) == b"kept"


async def result_of_answer(worker: Worker) -> bytes:
    return await worker.submit_transfer("answers", [], b"ok:kept", worker_id=0)


def test_cancelling_what_waits_ends_it_and_what_runs_is_asked(tmp_path: Path) -> None:
    begun = Gate(tmp_path, "begun")
    with provider("until", until_cancelled), small_worker() as worker:
        memory = worker.malloc(64)
        running = worker.submit_transfer("until", [TransferRange(memory, WRITE)], begun.payload)
        with open(begun.path, "rb") as fifo:  # noqa: PTH123 - a plain name
            fifo.read()
        waiting = worker.submit_transfer("until", [TransferRange(memory, WRITE)])
        waiting.cancel()
        assert waiting.state is TransferState.CANCELLED
        assert not running.done()
        running.cancel()
        assert running.wait(20)
        assert running.state is TransferState.CANCELLED
        with pytest.raises(simpler.TransferError, match=r"was cancelled: told to stop"):
            running.result()
        with pytest.raises(simpler.TransferError, match=r"was cancelled before it began"):
            waiting.result()
        running.cancel()  # nothing the second time
        worker.copy_to(memory, b"free again")


def test_a_running_transfer_is_shown_in_the_status_by_name(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with provider("gated", gated), small_worker() as worker:
        handle = worker.submit_transfer("gated", [], gate.payload, worker_id=0)
        gate.wait_begun()
        running = worker.status()[0].running
        assert running is not None
        assert (running.what, running.name, running.lane) == ("transfer", "gated", "service")
        with pytest.raises(WorkerTimeoutError, match="has not ended within 0 s"):
            handle.result(0)
        gate.open()
        handle.result(20)


def test_a_large_payload_and_result_pass_whole() -> None:
    data = bytes(range(256)) * 8192
    with provider("echo", echo), small_worker() as worker:
        assert worker.submit_transfer("echo", [], data, worker_id=0).result(20) == data


def echo(request: TransferRequest, cancel: CancelToken) -> TransferResult:
    return TransferResult.ok(request.payload)


def is_refused(target: TransferBuffer, source: TransferBuffer, **options: int) -> bool:
    try:
        target.copy_from(source, **options)
    except MemoryRangeError:
        return True
    return False


def try_copies(request: TransferRequest, cancel: CancelToken) -> TransferResult:
    """Copies that cannot be, then one in the middle."""
    source, target = request.ranges
    refused = [is_refused(source, target), is_refused(target, source, offset=-1)]
    refused += [is_refused(target, source, nbytes=nbytes) for nbytes in (65, -1)]
    refused.append(is_refused(target, source, offset=60, nbytes=8))
    target.copy_from(source, offset=8, nbytes=16, whole=1 << 23)
    return TransferResult.ok(b"%d" % sum(refused))


def test_copies_inside_a_transfer_stay_inside_its_ranges() -> None:
    with provider("try", try_copies), small_worker() as worker:
        data = np.random.default_rng(3).integers(0, 256, 1024, np.uint8).tobytes()
        memory = worker.malloc(1024)
        worker.copy_to(memory, data)
        handle = worker.submit_transfer("try", [part(memory, READ, 0, 64), part(memory, WRITE, 512, 576)])
        assert handle.result(20) == b"5"
        seen = bytearray(1024)
        worker.copy_from(seen, memory)
        expected = bytearray(data)
        expected[520:536] = expected[8:24]
        assert seen == expected
