"""States, start and stop: init() is all or nothing, close() works from anywhere, nothing is left."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

import simpler
from registered import extension
from simpler import ControlOp, Worker

SMALL = 1 << 20


def small_worker(**options: Any) -> Worker:
    return Worker(**{"hbm_bytes": SMALL, "heap_bytes": SMALL, "control_timeout_s": 20.0} | options)


@pytest.fixture(params=[2, 3])
def level(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_lc5_each_state_and_its_transitions(level: int) -> None:
    worker = small_worker(level=level)
    assert worker.state == "NEW"
    worker.init()
    assert worker.state == "READY"
    worker.close()
    assert worker.state == "CLOSED"
    worker.close()
    assert worker.state is simpler.WorkerState.CLOSED


USES: dict[str, Any] = {
    "control call": lambda worker: worker.control_payload(0, ControlOp.PING),
    "extension": lambda worker: worker.run_chip_control_extension("x"),
    "directed extension": lambda worker: worker.run_chip_control_extension("x", worker_id=0),
    "submitted extension": lambda worker: worker.submit_chip_control_extension("x"),
    "malloc": lambda worker: worker.malloc(8),
    "create_buffer": lambda worker: worker.create_buffer(8),
    "committed": lambda worker: worker.committed_device_memory(),
    "run": lambda worker: worker.run(print),
    "status": lambda worker: worker.status(),
    "stats": lambda worker: worker.stats(),
}


@pytest.mark.parametrize("use", USES)
def test_lc5_a_call_in_the_wrong_state_says_the_state_and_what_to_do(level: int, use: str) -> None:
    worker = small_worker(level=level, name="engine")
    with pytest.raises(simpler.ClosedError, match=r"engine is NEW; call init"):
        USES[use](worker)
    worker.init()
    with pytest.raises(simpler.ClosedError, match="READY"):
        worker.init()
    worker.close()
    with pytest.raises(simpler.ClosedError, match=r"engine is CLOSED; make a new Worker"):
        USES[use](worker)
    with pytest.raises(simpler.ClosedError, match="CLOSED"):
        worker.init()


def test_closing_a_new_worker_makes_it_closed(level: int) -> None:
    worker = small_worker(level=level)
    worker.close()
    with pytest.raises(simpler.ClosedError, match="CLOSED"):
        worker.init()


def test_options_that_cannot_work_are_refused_when_the_worker_is_made() -> None:
    with pytest.raises(simpler.ConfigError, match="cpu"):
        Worker(platform="abacus")
    with pytest.raises(ValueError, match="duplicates"):
        Worker(device_ids=[1, 1])


def test_lc1_a_child_that_cannot_start_is_the_error_of_init_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from simpler.chips.cpu import CpuChip

    opened = CpuChip.open

    def broken(self: CpuChip, shared: Any) -> None:
        if self._device_id == 8:
            raise OSError("device 8 is on fire")
        opened(self, shared)

    threads = threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(CpuChip, "open", broken)
        worker = small_worker(device_ids=[7, 8])
        with pytest.raises(simpler.StartupError, match="device 8 is on fire") as caught:
            worker.init()
    cause = caught.value.cause
    assert isinstance(cause, simpler.RemoteError)
    assert (cause.type_name, cause.path, cause.device_id) == ("OSError", (1,), 8)
    assert "in broken" in cause.traceback
    assert worker.state == "CLOSED"
    assert threading.active_count() == threads
    with small_worker(device_ids=[7, 8]) as again:
        assert again.control_payload(1, ControlOp.PING) == b""


def test_lc2_closing_from_several_threads_and_again(level: int) -> None:
    worker = small_worker(level=level)
    worker.init()
    threads = [threading.Thread(target=worker.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worker.state == "CLOSED"


def wait_for_fifo(_chip: object, payload: bytes, _device: int) -> None:
    with open(payload, "rb") as fifo:  # noqa: PTH123 - bytes as they came
        fifo.read()


def test_lc2_calls_in_flight_fail_with_closed_error_and_a_stuck_chip_dies(tmp_path: Any) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    errors: list[BaseException] = []
    with extension("wait", wait_for_fifo):
        worker = small_worker(shutdown_timeout_s=0.5)
        worker.init()

        def call() -> None:
            try:
                worker.run_chip_control_extension("wait", str(fifo).encode(), worker_id=0)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        future = worker.submit_chip_control_extension("wait", b"/nowhere", worker_id=0)
        writer = fifo.open("wb")
        worker.close()
        thread.join()
        writer.close()
        assert [type(error) for error in errors] == [simpler.ClosedError]
        with pytest.raises(simpler.ClosedError):
            future.result(20)


def test_closing_from_a_callback_of_a_future() -> None:
    with extension("nothing", lambda _chip, _payload, _device: b""):
        worker = small_worker()
        worker.init()
        closed = threading.Event()

        def close(_future: object) -> None:
            worker.close()
            closed.set()

        worker.submit_chip_control_extension("nothing", worker_id=0).add_done_callback(close)
        assert closed.wait(20)
        assert worker.state == "CLOSED"


def test_a_worker_collected_without_close_is_closed() -> None:
    worker = small_worker(device_ids=[0, 1])
    worker.init()
    pids = [record.pid for record in worker.status()]
    del worker
    gc.collect()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_several_workers_open_and_close_in_any_order() -> None:
    workers = [small_worker(device_ids=[number]) for number in range(3)]
    for worker in workers:
        worker.init()
    buffers = [worker.malloc(64) for worker in workers]
    workers[1].close()
    for position in (0, 2):
        assert workers[position].control_payload(0, ControlOp.PING) == b""
        workers[position].copy_to(buffers[position], bytes(64))
    workers[0].close()
    workers[2].copy_from(bytearray(64), buffers[2])
    workers[2].close()


def test_init_in_a_thread_that_ends_leaves_the_children_alive(level: int) -> None:
    worker = small_worker(level=level)
    thread = threading.Thread(target=worker.init)
    thread.start()
    thread.join()
    assert worker.control_payload(0, ControlOp.PING) == b""
    worker.close()


def error_of(use: Any) -> str:
    try:
        use()
    except simpler.ClosedError as error:
        return str(error)
    except BaseException as error:
        return f"not ClosedError: {error!r}"
    return "no error"


def test_a_forked_copy_of_the_program_is_refused_and_the_original_goes_on(level: int) -> None:
    with extension("nothing", lambda _chip, _payload, _device: b""), small_worker(level=level) as worker:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            texts = [
                error_of(lambda: worker.control_payload(0, ControlOp.PING)),
                error_of(lambda: worker.run_chip_control_extension("nothing", worker_id=0)),
                error_of(lambda: worker.malloc(8)),
            ]
            worker.close()
            os.write(
                write_end,
                b"refused" if all("forked copy" in text for text in texts) else repr(texts).encode(),
            )
            os._exit(0)
        os.close(write_end)
        assert os.read(read_end, 100) == b"refused"
        os.close(read_end)
        os.waitpid(pid, 0)
        assert worker.control_payload(0, ControlOp.PING) == b""


EXIT_SCRIPT = """
import simpler, sys
worker = simpler.Worker(level={level}, hbm_bytes=1 << 20, heap_bytes=1 << 20)
worker.init()
print(*(record.pid for record in worker.status()))
{end}
"""


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError('end')"])
def test_a_worker_alive_at_interpreter_exit_is_closed(level: int, end: str) -> None:
    script = EXIT_SCRIPT.format(level=level, end=end)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == {"": 0, "sys.exit(3)": 3}.get(end, 1)
    assert "end" in done.stderr if "raise" in end else done.stderr == ""
    for pid in map(int, done.stdout.split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_output_buffered_at_the_fork_is_written_once() -> None:
    script = (
        "import simpler, sys\nsys.stdout.write('before ')\n"
        "simpler.register_chip_control_extension('say', lambda c, p, d: print('child ', end=''))\n"
        "with simpler.Worker(device_ids=[0, 1], hbm_bytes=1 << 20, heap_bytes=1 << 20) as worker:\n"
        "    worker.run_chip_control_extension('say')\n"
        "print('after')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "before child child after\n"
    assert done.stderr == ""
