"""A node of chip processes and sub workers: control calls, deaths and restarts."""

from __future__ import annotations

import math
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import simpler
from registered import extension
from simpler import ControlOp, Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = 1 << 20


def small_worker(**options: Any) -> Worker:
    return Worker(level=3, **{"hbm_bytes": SMALL, "heap_bytes": SMALL, "control_timeout_s": 20.0} | options)


@pytest.fixture
def node() -> Iterator[Worker]:
    with small_worker(device_ids=[3, 5], num_sub_workers=1) as worker:
        yield worker


def test_every_child_answers_ping_and_echo(node: Worker) -> None:
    for worker_id in (*node.worker_ids, *node.sub_worker_ids):
        assert node.control_payload(worker_id, ControlOp.PING) == b""
        assert node.control_payload(worker_id, ControlOp.ECHO, b"x" * 100_000) == b"x" * 100_000


def test_ids_follow_the_order_of_the_devices_and_sub_workers_come_after(node: Worker) -> None:
    assert node.worker_ids == (0, 1)
    assert node.sub_worker_ids == (2,)
    assert [record.device for record in node.status()[:3]] == [3, 5, None]


@pytest.mark.parametrize(
    "payload", [bytearray(b"abc"), memoryview(b"abc"), np.frombuffer(b"abc", np.uint8), (b"abc")]
)
def test_a_payload_is_anything_contiguous(node: Worker, payload: Any) -> None:
    assert node.control_payload(0, ControlOp.ECHO, payload) == b"abc"


def test_arrays_of_any_shape_and_type_are_payloads(node: Worker) -> None:
    array = np.arange(12, dtype=np.complex64).reshape(3, 4)
    assert node.control_payload(0, ControlOp.ECHO, array) == array.tobytes()
    assert node.control_payload(0, ControlOp.ECHO, np.empty((0, 3))) == b""


def test_payloads_that_cannot_be_sent_are_refused(node: Worker) -> None:
    with pytest.raises(TypeError, match="encode"):
        node.control_payload(0, ControlOp.ECHO, "text")  # type: ignore[arg-type]  # what is tested
    with pytest.raises(ValueError, match="contiguous"):
        node.control_payload(0, ControlOp.ECHO, np.zeros((4, 4))[:, 1])
    with pytest.raises(TypeError):
        node.control_payload(0, ControlOp.ECHO, 7)  # type: ignore[arg-type]  # what is tested


def test_a_payload_above_the_limit_is_refused_before_anything_is_sent() -> None:
    with small_worker(max_control_payload=1000) as worker:
        assert worker.control_payload(0, ControlOp.ECHO, b"x" * 1000) == b"x" * 1000
        before = worker.stats()[0].calls
        with pytest.raises(ValueError, match="1001"):
            worker.control_payload(0, ControlOp.ECHO, b"x" * 1001)
        assert worker.stats()[0].calls == before


@pytest.mark.parametrize("op", [0, 99, -1, 1 << 40])
def test_an_unknown_control_code_is_a_value_error(node: Worker, op: int) -> None:
    with pytest.raises(ValueError, match="unknown control op"):
        node.control_payload(0, op)


def test_each_code_is_answered_or_refused_by_name_in_every_kind_of_child(node: Worker) -> None:
    answered = {ControlOp.PING, ControlOp.ECHO, ControlOp.COMMITTED}
    for op in set(ControlOp) - answered:
        with pytest.raises(ValueError, match=op.name):
            node.control_payload(0, op)
    with pytest.raises(simpler.RemoteError, match="COMMITTED is not handled by a sub worker"):
        node.control_payload(2, ControlOp.COMMITTED)


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, True, "5"])
def test_a_limit_that_cannot_be_is_a_value_error(node: Worker, timeout_s: Any) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        node.control_payload(0, ControlOp.PING, timeout_s=timeout_s)


def test_a_limit_may_be_for_ever(node: Worker) -> None:
    assert node.control_payload(0, ControlOp.PING, timeout_s=math.inf) == b""


@pytest.mark.parametrize("worker_id", [-1, 3, 1 << 40])
def test_a_worker_that_does_not_exist_is_a_value_error(node: Worker, worker_id: int) -> None:
    with pytest.raises(ValueError, match=r"worker"):
        node.control_payload(worker_id, ControlOp.PING)


def test_killed_chip_fails_only_its_own_calls(node: Worker) -> None:
    pid = node.status()[0].pid
    node.kill(0)
    for _ in range(2):  # CP-4: the first cause again
        with pytest.raises(simpler.WorkerDiedError, match="SIGKILL") as caught:
            node.control_payload(0, ControlOp.PING)
        assert caught.value.path == (0,)
        assert caught.value.device_id == 3
        assert caught.value.pid == pid
    assert node.control_payload(1, ControlOp.PING) == b""
    assert node.control_payload(2, ControlOp.PING) == b""


def test_death_in_a_handler_says_how_and_what_it_was_doing() -> None:
    def leave(_chip: object, payload: bytes, _device: int) -> None:
        if payload == b"exit":
            os._exit(7)
        os.kill(os.getpid(), int(payload))

    with extension("leave", leave), small_worker(device_ids=[0, 1, 2]) as worker:
        with pytest.raises(simpler.WorkerDiedError, match="7"):
            worker.run_chip_control_extension("leave", b"exit", worker_id=0)
        with pytest.raises(simpler.WorkerDiedError, match="SIGSEGV"):
            worker.run_chip_control_extension("leave", b"%d" % signal.SIGSEGV, worker_id=1)
        assert worker.control_payload(2, ControlOp.PING) == b""


def test_a_restarted_chip_answers_under_its_id_with_a_new_process(node: Worker) -> None:
    before = node.status()[0]
    node.kill(0)
    node.restart(0)
    after = node.status()[0]
    assert node.control_payload(0, ControlOp.PING) == b""
    assert (after.path, after.device, after.state) == (before.path, before.device, "ready")
    assert after.pid != before.pid
    assert after.generation == before.generation + 1
    assert node.stats()[0].restarts == 1


def test_only_a_dead_child_can_be_restarted(node: Worker) -> None:
    with pytest.raises(ValueError, match="alive"):
        node.restart(1)
    assert node.control_payload(1, ControlOp.PING) == b""


def test_a_sub_worker_can_be_killed_and_restarted(node: Worker) -> None:
    node.kill(2)
    with pytest.raises(simpler.WorkerDiedError):
        node.control_payload(2, ControlOp.PING)
    node.restart(2)
    assert node.control_payload(2, ControlOp.PING) == b""


def test_threads_calling_several_chips_get_their_own_replies(node: Worker) -> None:
    wrong: list[object] = []

    def call(number: int) -> None:
        for round_number in range(200):
            text = b"%d:%d" % (number, round_number)
            if node.control_payload(number % 3, ControlOp.ECHO, text) != text:
                wrong.append(text)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert sum(record.calls for record in node.stats()) >= 1200
