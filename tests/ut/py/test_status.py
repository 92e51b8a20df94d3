"""What status() and stats() tell."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

import simpler
from registered import extension
from simpler import ControlOp, Worker

if TYPE_CHECKING:
    from pathlib import Path


def small_worker(**options: Any) -> Worker:
    return Worker(**{"hbm_bytes": 1 << 20, "heap_bytes": 1 << 20, "control_timeout_s": 20.0} | options)


def wait_for_fifo(_chip: object, payload: bytes, _device: int) -> None:
    with open(payload, "rb") as fifo:  # noqa: PTH123 - bytes as they came
        fifo.read()


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def test_every_child_and_the_spare_have_a_record() -> None:
    with small_worker(device_ids=[4, 2], num_sub_workers=1) as worker:
        records = worker.status()
        assert [(record.path, record.kind, record.device) for record in records] == [
            ((0,), "chip", 4),
            ((1,), "chip", 2),
            ((2,), "sub", None),
            ((), "spare", None),
        ]
        assert len({record.pid for record in records}) == 4
        for record in records:
            os.kill(record.pid, 0)
            assert record.running is None
            assert record.first_error is None
        assert dict(records[0])["pid"] == records[0]["pid"] == records[0].pid


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_stuck_chip_shows_what_it_runs_and_for_how_long(fifo: Path, concurrent: bool) -> None:
    with extension("wait", wait_for_fifo, concurrent=concurrent), small_worker(device_ids=[0, 1]) as worker:
        future = worker.submit_chip_control_extension("wait", str(fifo).encode(), worker_id=0)
        writer = fifo.open("wb")
        running = worker.status()[0].running
        assert running is not None
        assert (running.what, running.name) == ("extension", "wait")
        assert running.lane == ("service" if concurrent else "main")
        assert running.seconds >= 0
        later = worker.status()[0].running
        assert later is not None
        assert later.seconds > running.seconds
        assert worker.status()[1].running is None
        writer.close()
        future.result(20)
        assert worker.status()[0].running is None


def test_a_running_task_shows_its_functions_name(fifo: Path) -> None:
    name = str(fifo)
    with small_worker() as worker:
        handle = worker.register(lambda: wait_for_fifo(None, name.encode(), 0), name="forward")

        def fn(orch: simpler.Orchestrator, _args: object, _config: object) -> Any:
            task = orch.submit_next_level(handle, worker=0)
            writer = fifo.open("wb")
            running = worker.status()[0].running
            writer.close()
            task.result()
            return running

        running = worker.run(fn)
        assert (running.what, running.name, running.lane) == ("task", "forward", "main")


def test_a_dead_chip_shows_its_first_error() -> None:
    with small_worker(device_ids=[0, 1]) as worker:
        worker.kill(1)
        record = worker.status()[1]
        assert record.state == "dead"
        assert record.first_error is not None
        assert "SIGKILL" in record.first_error
        assert worker.status()[0].state == "ready"


def test_the_counters_count(fifo: Path) -> None:
    with extension("wait", wait_for_fifo), small_worker() as worker:
        before = worker.stats()[0]
        worker.control_payload(0, ControlOp.ECHO, b"x" * 100)
        after = worker.stats()[0]
        assert after.calls == before.calls + 1
        assert after.request_bytes == before.request_bytes + 100
        assert after.reply_bytes == before.reply_bytes + 100
        with pytest.raises(simpler.WorkerTimeoutError):
            worker.run_chip_control_extension("wait", str(fifo).encode(), worker_id=0, timeout_s=0.2)
        assert worker.stats()[0].timeouts == before.timeouts + 1
        fifo.open("wb").close()
        worker.run(worker.register(os.getpid))
        assert worker.stats()[0].tasks == 1
        while worker.stats()[0].late_replies == 0:
            worker.control_payload(0, ControlOp.PING)
        assert worker.stats()[0].late_replies == 1


def test_the_chip_of_level_2_has_one_record() -> None:
    with small_worker(level=2, device_id=6) as worker:
        (record,) = worker.status()
        assert (record.path, record.kind, record.device, record.pid) == ((0,), "chip", 6, os.getpid())
        worker.control_payload(0, ControlOp.ECHO, b"abc")
        (stats,) = worker.stats()
        assert (stats.calls, stats.request_bytes, stats.reply_bytes) == (1, 3, 3)
