"""LC-1: init() is all or nothing and bounded; LC-6: after a crash the same devices can be used again."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import simpler
from invariants.bounds import BUDGET_SLACK_S
from invariants.deaths import WAYS
from invariants.gate import Gate, wait_at, wait_handler
from invariants.nodes import WATCHDOG_S, Background, error_of, node
from invariants.processes import Census, children_of, eventually, is_gone, wait_ended
from registered import extension
from simpler import ControlOp
from simpler.chips.cpu import CpuChip

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICES = (20, 21, 22)
BROKEN = 21


def break_device(monkeypatch: pytest.MonkeyPatch, what: Callable[[], object]) -> None:
    """Opening device 21 does `what` first."""
    opened = CpuChip.open

    def broken(self: CpuChip, shared: Any) -> None:
        if self._device_id == BROKEN:
            what()
        opened(self, shared)

    monkeypatch.setattr(CpuChip, "open", broken)


def on_fire() -> None:
    raise OSError("device 21 is on fire: " + "x" * 10_000 + " end")


def lost() -> None:
    raise SystemExit(4)


FAILURES: dict[str, Callable[[], object]] = {"raise": on_fire, "sys.exit": lost, **WAYS}


@pytest.fixture(autouse=True)
def everything_is_loaded() -> None:
    """What the first Worker of a process loads is no leak."""
    with node(device_ids=DEVICES) as worker:
        worker.control_payload(0, ControlOp.PING)


@pytest.mark.parametrize("failure", FAILURES)
def test_lc1_a_failed_init_leaves_no_process_thread_descriptor_or_mapping(
    monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    break_device(monkeypatch, FAILURES[failure])
    before = Census.take()
    worker = node(device_ids=DEVICES, num_sub_workers=1)
    error = error_of(worker.init)
    assert isinstance(error, simpler.StartupError)
    assert isinstance(error.cause, simpler.RemoteError | simpler.WorkerDiedError)
    assert (error.cause.path, error.cause.device_id) == ((1,), BROKEN)
    assert worker.state == "CLOSED"
    before.assert_not_grown()  # while the error and the Worker are kept


def test_lc1_the_childs_own_error_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    break_device(monkeypatch, on_fire)
    error = error_of(node(device_ids=DEVICES).init)
    assert isinstance(error, simpler.StartupError)
    cause = error.cause
    assert isinstance(cause, simpler.RemoteError)
    assert cause.type_name == "OSError"
    assert cause.message == "device 21 is on fire: " + "x" * 10_000 + " end"
    assert "in on_fire" in cause.traceback
    assert cause.message in str(error)


@pytest.mark.parametrize("limit_s", [0.3])
def test_lc1_a_child_that_never_becomes_ready_ends_init_at_its_limit(
    monkeypatch: pytest.MonkeyPatch, gate: Gate, limit_s: float
) -> None:
    break_device(monkeypatch, lambda: wait_at(gate.name))
    before = Census.take()
    worker = node(device_ids=DEVICES, startup_timeout_s=limit_s)
    began = time.monotonic()
    error = error_of(worker.init)
    took = time.monotonic() - began
    assert isinstance(error, simpler.StartupError)
    assert isinstance(error.cause, simpler.WorkerTimeoutError)
    assert error.cause.path == (1,)
    assert limit_s <= took < limit_s + BUDGET_SLACK_S
    assert worker.state == "CLOSED"
    before.assert_not_grown()  # while the error and the Worker are kept


def test_lc1_a_backend_that_cannot_be_made_is_the_error_of_init(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: CpuChip, config: simpler.ChipConfig) -> None:
        raise ValueError(f"no device {config.device_id} in this machine")

    before = Census.take()
    with monkeypatch.context() as patch:
        patch.setattr(CpuChip, "__init__", refuse)
        error = error_of(node(device_ids=DEVICES).init)
    assert isinstance(error, simpler.SimplerError)
    assert "no device 20 in this machine" in str(error)
    before.assert_not_grown()


def test_lc1_a_child_that_dies_while_others_start_ends_init_at_once(
    monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    opened = CpuChip.open

    def slow_or_dead(self: CpuChip, shared: Any) -> None:
        if self._device_id == BROKEN:
            wait_at(gate.name)
            os._exit(9)
        if self._device_id == DEVICES[2]:
            wait_at(os.fsencode(forever.path))
        opened(self, shared)

    forever = Gate(gate.path.with_name("forever"))
    monkeypatch.setattr(CpuChip, "open", slow_or_dead)
    call = Background(node(device_ids=DEVICES, startup_timeout_s=10 * WATCHDOG_S).init)
    with forever, gate:
        pass
    error = call.error()
    assert isinstance(error, simpler.StartupError)
    assert "exited with code 9" in str(error)


def test_lc1_init_is_one_threads_and_the_others_are_told(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    break_device(monkeypatch, lambda: wait_at(gate.name))
    worker = node(device_ids=DEVICES)
    call = Background(worker.init)
    with gate:
        assert worker.state == "STARTING"
        for use in (worker.init, worker.status, lambda: worker.control_payload(0, ControlOp.PING)):
            error = error_of(use)
            assert isinstance(error, simpler.ClosedError)
            assert "STARTING" in str(error)
    call.result()
    assert worker.state == "READY"
    worker.close()


def test_lc6_a_worker_is_rebuilt_on_the_same_devices_after_a_crash_and_a_close() -> None:
    with extension("wait", wait_handler):
        for _ in range(5):
            worker = node(device_ids=DEVICES)
            worker.init()
            buffer = worker.malloc(64, worker_id=1)
            worker.copy_to(buffer, bytes(range(64)))
            pids = [record.pid for record in worker.status()]
            for pid in pids[:2]:
                os.kill(pid, 9)
                wait_ended(pid)
            with pytest.raises(simpler.WorkerDiedError):
                worker.malloc(64, worker_id=1)
            worker.close()
            with pytest.raises(simpler.ClosedError):
                worker.copy_to(buffer, bytes(64))
            assert [pid for pid in pids if not is_gone(pid)] == []
        with node(device_ids=DEVICES) as again:
            assert again.run_chip_control_extension("wait") == [b"done"] * 3
            assert again.committed_device_memory(1) == 0


def test_lc6_two_workers_at_once_on_the_same_devices() -> None:
    with node(device_ids=DEVICES) as first, node(device_ids=DEVICES) as second:
        one, other = first.malloc(64), second.malloc(64)
        first.copy_to(one, b"1" * 64)
        second.copy_to(other, b"2" * 64)
        host = bytearray(64)
        first.copy_from(host, one)
        assert host == b"1" * 64
        assert second.control_payload(2, ControlOp.ECHO, b"x") == b"x"


def test_init_in_a_thread_that_ends_leaves_the_children_alive() -> None:
    worker = node(device_ids=DEVICES, num_sub_workers=1)
    thread = threading.Thread(target=worker.init)
    thread.start()
    thread.join()
    tid = thread.native_id
    eventually(lambda: not os.path.exists(f"/proc/self/task/{tid}"), "the thread is gone")  # noqa: PTH110
    assert len(children_of(os.getpid())) == 5
    for child in range(4):
        assert worker.control_payload(child, ControlOp.ECHO, b"alive") == b"alive"
    worker.close()


def test_init_while_other_threads_hold_every_lock_they_can() -> None:
    import logging

    stop = threading.Event()
    quiet = logging.getLogger("simpler.test.quiet")
    quiet.addHandler(logging.NullHandler())
    quiet.propagate = False

    def busy() -> None:
        while not stop.is_set():
            quiet.warning("%s", bytearray(1 << 16)[:10])
            __import__("decimal").Decimal(1) / 3

    threads = [threading.Thread(target=busy) for _ in range(4)]
    for thread in threads:
        thread.start()

    def use_locks(_chip: object, _payload: bytes, _device: int) -> bytes:
        quiet.warning("%s", bytearray(1 << 16)[:10])
        own = threading.Thread(target=lambda: None)
        own.start()
        own.join()
        return b"fine"

    try:
        with extension("locks", use_locks):
            for _ in range(10):
                with node(device_ids=(0, 1), num_sub_workers=1) as worker:
                    assert worker.run_chip_control_extension("locks") == [b"fine"] * 2
                    assert worker.control_payload(2, ControlOp.PING) == b""
    finally:
        stop.set()
        for thread in threads:
            thread.join()
