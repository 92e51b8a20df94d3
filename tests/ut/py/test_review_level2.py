"""Level 2 keeps the rules of a chip in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

import simpler
from registered import extension
from simpler import RemoteError, TaskError, Worker, WorkerTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 60.0
BASES = [GeneratorExit, asyncio.CancelledError, SystemExit]

_begun = threading.Event()
_go_on = threading.Event()


def _raise(chip: simpler.ChipView, payload: bytes, device_id: int) -> bytes:
    kind = KeyboardInterrupt if payload == b"ctrl-c" else BASES[int(payload)]
    raise kind("the handler's own")


def _wait(chip: simpler.ChipView, payload: bytes, device_id: int) -> bytes:
    if payload == b"hold":
        _begun.set()
        assert _go_on.wait(LIMIT_S)
    return payload


def _answer(chip: simpler.ChipView, payload: bytes, device_id: int) -> bytes:
    return payload


@pytest.fixture
def chip() -> Iterator[Worker]:
    with (
        extension("review-raise", _raise),
        extension("review-wait", _wait),
        extension("review-beside", _answer, concurrent=True),
        Worker(2, hbm_bytes=1 << 20, heap_bytes=1 << 20) as ready,
    ):
        _begun.clear()
        _go_on.clear()
        yield ready
        _go_on.set()


@pytest.mark.parametrize("number", range(len(BASES)))
def test_an_exception_of_any_kind_in_a_handler_is_a_remote_error(chip: Worker, number: int) -> None:
    payload = str(number).encode()
    with pytest.raises(RemoteError, match="the handler's own"):
        chip.run_chip_control_extension("review-raise", payload, worker_id=0)
    with pytest.raises(RemoteError, match="the handler's own"):
        chip.submit_chip_control_extension("review-raise", payload, worker_id=0).result(LIMIT_S)


def test_a_submitted_handler_that_raises_keyboard_interrupt_ends_its_future(chip: Worker) -> None:
    with pytest.raises(RemoteError, match="KeyboardInterrupt"):
        chip.submit_chip_control_extension("review-raise", b"ctrl-c", worker_id=0).result(LIMIT_S)


def test_an_exception_of_any_kind_in_a_kernel_is_a_task_error(chip: Worker) -> None:
    def kernel() -> None:
        raise asyncio.CancelledError("the kernel's own")

    with pytest.raises(TaskError, match="the kernel's own"):
        chip.run(chip.register(kernel))


def test_a_concurrent_handler_runs_beside_any_number_of_waiting_ones(chip: Worker) -> None:
    held = chip.submit_chip_control_extension("review-wait", b"hold", worker_id=0)
    waiting = [
        chip.submit_chip_control_extension("review-wait", str(number).encode(), worker_id=0)
        for number in range(8)
    ]
    beside = chip.submit_chip_control_extension("review-beside", b"beside", worker_id=0)
    assert beside.result(LIMIT_S) == b"beside"
    assert not held.done()
    _go_on.set()
    assert [call.result(LIMIT_S) for call in waiting] == [str(number).encode() for number in range(8)]


def test_a_submitted_call_whose_time_is_over_never_begins(chip: Worker) -> None:
    held = chip.submit_chip_control_extension("review-wait", b"hold", worker_id=0)
    assert _begun.wait(LIMIT_S)
    late = chip.submit_chip_control_extension("review-wait", b"late", worker_id=0, timeout_s=1e-6)
    _go_on.set()
    with pytest.raises(WorkerTimeoutError, match=r"extension 'review-wait' .* did not begin") as error:
        late.result(LIMIT_S)
    assert not error.value.started
    assert held.result(LIMIT_S) == b"hold"


def test_a_call_that_never_ends_does_not_keep_the_interpreter_from_ending() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", NEVER_ENDS], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "closed\n"), ended.stderr


NEVER_ENDS = """
import threading
import simpler

begun = threading.Event()

def never_end(chip, payload, device_id):
    begun.set()
    threading.Event().wait()

simpler.register_chip_control_extension("never", never_end)
worker = simpler.Worker(2, shutdown_timeout_s=0.05)
worker.init()
worker.submit_chip_control_extension("never", worker_id=0)
begun.wait()
worker.close()
print("closed")
"""


@pytest.mark.parametrize("level", [2, 3])
def test_a_callback_that_raises_anything_stops_no_later_outcome(level: int) -> None:
    def leave(_done: object) -> None:
        raise SystemExit("the callback's own")

    with extension("review-beside", _answer), Worker(level) as worker:
        first = worker.submit_chip_control_extension("review-beside", b"first", worker_id=0)
        with contextlib.suppress(SystemExit):  # raised here should the reply be there already
            first.add_done_callback(leave)
        later = worker.submit_chip_control_extension("review-beside", b"later", worker_id=0)
        assert (first.result(LIMIT_S), later.result(LIMIT_S)) == (b"first", b"later")


def _log(chip: simpler.ChipView, payload: bytes, device_id: int) -> None:
    chip.log.warning("one line: %s %d", payload, device_id)
    chip.log.debug("not enabled")


@pytest.mark.parametrize("level", [2, 3])
def test_a_handlers_records_have_the_chips_path_and_device(
    level: int, caplog: pytest.LogCaptureFixture
) -> None:
    devices: dict[str, Any] = {"device_id": 7} if level == 2 else {"device_ids": [7]}
    with (
        caplog.at_level(logging.INFO, "simpler"),
        extension("review-log", _log),
        Worker(level, **devices) as worker,
    ):
        worker.run_chip_control_extension("review-log", b"x")
    (record,) = [record for record in caplog.records if record.name == "simpler.extension.review-log"]
    fields = vars(record)
    assert (record.getMessage(), fields["path"], fields["device_id"]) == ("one line: b'x' 7", (0,), 7)
    assert record.funcName == "_log"
