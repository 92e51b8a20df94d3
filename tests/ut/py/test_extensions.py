"""Registered handlers, called on one chip or all, at levels 3 and 2."""

from __future__ import annotations

import functools
import math
import os
import sys
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

import simpler
from registered import extension
from simpler import Worker

SMALL = 1 << 20


def small_worker(**options: Any) -> Worker:
    return Worker(**{"hbm_bytes": SMALL, "heap_bytes": SMALL, "control_timeout_s": 20.0} | options)


@pytest.fixture(params=[2, 3])
def any_level(request: pytest.FixtureRequest) -> functools.partial[Worker]:
    """A maker of one chip (device 4) at each level."""
    options: dict[str, Any] = {"device_id": 4} if request.param == 2 else {"device_ids": [4]}
    return functools.partial(small_worker, level=request.param, **options)


def reply(chip: simpler.ChipView, payload: bytes, device_id: int) -> bytes:
    return b"%d/%d/%s" % (chip.worker_id[0], device_id, payload)


def test_one_chip_answers_with_bytes_and_all_with_a_list_in_worker_order() -> None:
    with extension("reply", reply), small_worker(device_ids=[7, 2, 5]) as worker:
        assert worker.run_chip_control_extension("reply", b"x", worker_id=1) == b"1/2/x"
        assert worker.run_chip_control_extension("reply", b"y") == [b"0/7/y", b"1/2/y", b"2/5/y"]
        assert worker.run_chip_control_extension("reply", b"z", worker_id=(2,)) == b"2/5/z"


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (None, b""),
        ("", b""),
        (b"abc", b"abc"),
        (bytearray(b"abc"), b"abc"),
        (memoryview(b"abc"), b"abc"),
        (np.arange(3, dtype=np.uint8), b"\0\1\2"),
    ],
)
def test_what_a_handler_may_return(any_level: Any, result: Any, expected: bytes) -> None:
    with extension("returns", lambda _chip, _payload, _device: result), any_level() as worker:
        assert worker.run_chip_control_extension("returns", worker_id=0) == expected


def test_a_returned_text_is_the_failure_with_that_message(any_level: Any) -> None:
    with extension("fails", lambda _chip, _payload, _device: "engine 7 is not up"), any_level() as worker:
        with pytest.raises(RuntimeError, match="engine 7 is not up") as caught:
            worker.run_chip_control_extension("fails", worker_id=0)
        assert isinstance(caught.value, simpler.RemoteError)
        assert caught.value.message == "engine 7 is not up"


def test_anything_else_is_a_type_error_that_names_handler_and_type(any_level: Any) -> None:
    def returns_a_set(_chip: object, _payload: bytes, _device: int) -> object:
        return {1}

    with extension("odd", returns_a_set), any_level() as worker:
        with pytest.raises(simpler.RemoteError, match=r"returns_a_set.*set") as caught:
            worker.run_chip_control_extension("odd", worker_id=0)
        assert caught.value.type_name == "TypeError"


def test_cp5_an_error_arrives_whole(any_level: Any) -> None:
    text = "é\udcff" + "x" * 10_000

    def fail(_chip: object, _payload: bytes, _device: int) -> None:
        raise LookupError(text)

    with extension("fail", fail), any_level() as worker:
        with pytest.raises(simpler.RemoteError) as caught:
            worker.run_chip_control_extension("fail", worker_id=0)
        error = caught.value
        assert error.type_name == "LookupError"
        assert error.message == "é\\udcff" + "x" * 10_000
        assert "in fail" in error.traceback
        assert (error.path, error.device_id) == ((0,), 4)


def test_an_exception_whose_text_cannot_be_made_arrives_by_its_type(any_level: Any) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

        def __reduce__(self) -> Any:
            raise TypeError("no pickling")

    def fail(_chip: object, _payload: bytes, _device: int) -> None:
        raise MuteError

    with extension("mute", fail), any_level() as worker:
        with pytest.raises(simpler.RemoteError) as caught:
            worker.run_chip_control_extension("mute", worker_id=0)
        assert caught.value.type_name.endswith("MuteError")


def test_sys_exit_in_a_handler_is_its_error_and_the_chip_lives(any_level: Any) -> None:
    def leave(_chip: object, payload: bytes, _device: int) -> bytes:
        if payload:
            sys.exit(int(payload))
        return b"alive"

    with extension("leave", leave), any_level() as worker:
        with pytest.raises(simpler.RemoteError) as caught:
            worker.run_chip_control_extension("leave", b"3", worker_id=0)
        assert caught.value.type_name == "SystemExit"
        assert worker.run_chip_control_extension("leave", worker_id=0) == b"alive"


def test_a_name_registered_after_init_says_so_and_exists_for_later_workers(any_level: Any) -> None:
    with any_level() as worker:
        with extension("late", reply):
            with pytest.raises(simpler.UnknownExtensionError, match="after init"):
                worker.run_chip_control_extension("late", worker_id=0)
            with any_level() as later:
                assert later.run_chip_control_extension("late", b"!", worker_id=0) == b"0/4/!"
        with pytest.raises(simpler.UnknownExtensionError, match="never registered"):
            worker.run_chip_control_extension("late", worker_id=0)


def test_cp7_a_broadcast_that_is_not_wholly_good_has_every_reply_and_error_by_path() -> None:
    def odd_fails(chip: simpler.ChipView, _payload: bytes, _device: int) -> bytes | str:
        return f"chip {chip.worker_id[0]} says no" if chip.worker_id[0] % 2 else b"yes"

    with extension("odd", odd_fails), small_worker(device_ids=[0, 1, 2, 3]) as worker:
        worker.kill(2)
        with pytest.raises(simpler.ChipControlError) as caught:
            worker.run_chip_control_extension("odd")
        error = caught.value
        assert error.results == {(0,): b"yes"}
        assert set(error.errors) == {(1,), (2,), (3,)}
        assert isinstance(error.errors[(2,)], simpler.WorkerDiedError)
        assert error.pending == ()
        assert str(error).index("chip 1 says no") < str(error).index("SIGKILL") < str(error).index("chip 3")


def test_a_broadcast_to_one_failing_chip_is_a_chip_control_error_too(any_level: Any) -> None:
    with (
        extension("fails", lambda _chip, _payload, _device: "no"),
        any_level() as worker,
        pytest.raises(simpler.ChipControlError, match="no"),
    ):
        worker.run_chip_control_extension("fails")


def wait_for_file(chip: simpler.ChipView, payload: bytes, _device: int) -> bytes:
    """Chip 0 waits until the fifo named by the payload is opened for writing."""
    if chip.worker_id == (0,):
        with open(payload, "rb") as fifo:  # noqa: PTH123 - bytes as they came
            fifo.read()
    return b"done"


@pytest.fixture
def fifo(tmp_path: Any) -> Any:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def test_a_broadcast_of_time_outs_only_is_a_timeout_error(fifo: Any) -> None:
    with extension("wait", wait_for_file), small_worker(device_ids=[0, 1]) as worker:
        with pytest.raises(TimeoutError) as caught:
            worker.run_chip_control_extension("wait", str(fifo).encode(), timeout_s=0.3)
        assert isinstance(caught.value, simpler.ChipControlError)
        assert caught.value.results == {(1,): b"done"}
        error = caught.value.errors[(0,)]
        assert isinstance(error, simpler.WorkerTimeoutError)
        assert error.started
        fifo.open("wb").close()


def test_fail_fast_raises_at_the_first_error_and_names_those_still_running(fifo: Any) -> None:
    def wait_or_fail(chip: simpler.ChipView, payload: bytes, device: int) -> bytes | str:
        return "chip 1 failed" if chip.worker_id == (1,) else wait_for_file(chip, payload, device)

    with extension("mixed", wait_or_fail), small_worker(device_ids=[0, 1]) as worker:
        with pytest.raises(simpler.ChipControlError, match="chip 1 failed") as caught:
            worker.run_chip_control_extension("mixed", str(fifo).encode(), fail_fast=True)
        assert caught.value.pending == ((0,),)
        fifo.open("wb").close()


def test_cp1_cp8_the_late_reply_of_a_timed_out_call_answers_nobody(fifo: Any) -> None:
    with extension("wait", wait_for_file), small_worker() as worker:
        with pytest.raises(simpler.WorkerTimeoutError) as caught:
            worker.run_chip_control_extension("wait", str(fifo).encode(), worker_id=0, timeout_s=0.2)
        assert caught.value.started
        with pytest.raises(simpler.WorkerTimeoutError) as not_begun:
            worker.run_chip_control_extension("wait", b"/nowhere", worker_id=0, timeout_s=0.2)
        assert not not_begun.value.started
        fifo.open("wb").close()
        assert worker.control_payload(0, simpler.ControlOp.ECHO, b"next") == b"next"


def test_a_future_has_the_result_or_the_error() -> None:
    with extension("reply", reply), small_worker(device_ids=[1, 2]) as worker:
        assert worker.submit_chip_control_extension("reply", b"a", worker_id=1).result(20) == b"1/2/a"
        assert worker.submit_chip_control_extension("reply", b"b").result(20) == [b"0/1/b", b"1/2/b"]
        worker.kill(0)
        with pytest.raises(simpler.WorkerDiedError):
            worker.submit_chip_control_extension("reply", worker_id=0).result(20)
        with pytest.raises(simpler.ChipControlError):
            worker.submit_chip_control_extension("reply").result(20)


def test_the_payload_of_a_submitted_call_is_copied_before_submit_returns(any_level: Any) -> None:
    with extension("reply", reply), any_level() as worker:
        payload = bytearray(b"before")
        future = worker.submit_chip_control_extension("reply", payload, worker_id=0)
        payload[:] = b"after!"
        assert future.result(20) == b"0/4/before"


def test_a_future_can_be_cancelled_only_before_its_handler_begins(fifo: Any) -> None:
    with extension("wait", wait_for_file), small_worker() as worker:
        first = worker.submit_chip_control_extension("wait", str(fifo).encode(), worker_id=0)
        writer = fifo.open("wb")  # opens when the handler has opened its end
        second = worker.submit_chip_control_extension("wait", b"/nowhere", worker_id=0)
        assert second.cancel()
        with pytest.raises(CancelledError):
            second.result(20)
        assert not first.cancel()
        writer.close()
        assert first.result(20) == b"done"


def test_callbacks_of_a_future_that_raise_harm_no_later_call(any_level: Any) -> None:
    def raises(_future: object) -> None:
        raise ValueError("in a callback")

    with extension("reply", reply), any_level() as worker:
        future = worker.submit_chip_control_extension("reply", worker_id=0)
        future.add_done_callback(raises)
        future.result(20)
        assert worker.submit_chip_control_extension("reply", b"2", worker_id=0).result(20) == b"0/4/2"


def test_state_is_kept_between_calls_and_separate_by_extension(any_level: Any) -> None:
    def count(chip: simpler.ChipView, _payload: bytes, _device: int) -> bytes:
        chip.state["calls"] = chip.state.get("calls", 0) + 1
        return b"%d" % chip.state["calls"]

    def count_too(chip: simpler.ChipView, payload: bytes, device: int) -> bytes:
        return count(chip, payload, device)

    with extension("one", count), extension("two", count_too), any_level() as worker:
        assert worker.run_chip_control_extension("one", worker_id=0) == b"1"
        assert worker.run_chip_control_extension("one", worker_id=0) == b"2"
        assert worker.run_chip_control_extension("two", worker_id=0) == b"1"


def test_concurrent_handlers_run_while_an_exclusive_one_is_stuck(fifo: Any) -> None:
    with (
        extension("wait", wait_for_file),
        extension("beside", reply, concurrent=True),
        small_worker() as worker,
    ):
        stuck = worker.submit_chip_control_extension("wait", str(fifo).encode(), worker_id=0)
        writer = fifo.open("wb")
        assert worker.run_chip_control_extension("beside", b"1", worker_id=0) == b"0/0/1"
        writer.close()
        assert stuck.result(20) == b"done"


def double(chip: simpler.ChipView, _payload: bytes, _device: int) -> bytes:
    view = chip.buffers["data"]
    array = view.array((view.nbytes // 4,), np.int32)
    array *= 2
    return b"%d %d" % (len(chip.buffers), view.nbytes)


def test_a_handler_touches_the_memory_named_in_its_call(any_level: Any) -> None:
    with extension("double", double), any_level() as worker:
        device = worker.malloc(64, worker_id=0)
        worker.copy_to(device, np.arange(16, dtype=np.int32))
        assert worker.run_chip_control_extension("double", worker_id=0, buffers={"data": device}) == b"1 64"
        part = device.tensor((4,), "int32", offset=16)
        worker.run_chip_control_extension("double", worker_id=0, buffers={"data": part})
        host = np.empty(16, np.int32)
        worker.copy_from(host, device)
        expected = np.arange(16, dtype=np.int32) * 2
        expected[4:8] *= 2
        assert np.array_equal(host, expected)


def test_a_handler_copies_a_peers_buffer_without_the_parent() -> None:
    def fetch(chip: simpler.ChipView, _payload: bytes, _device: int) -> None:
        source, target = chip.buffers
        target.array((target.nbytes,), np.uint8)[:] = source.array((source.nbytes,), np.uint8)

    with extension("fetch", fetch), small_worker(device_ids=[0, 1]) as worker:
        source, target = worker.malloc(256, worker_id=0), worker.malloc(256, worker_id=1)
        worker.copy_to(source, bytes(range(256)))
        worker.run_chip_control_extension("fetch", worker_id=1, buffers=[source, target])
        result = bytearray(256)
        worker.copy_from(result, target)
        assert result == bytes(range(256))


def test_in_a_broadcast_each_chip_sees_its_own_buffers_and_the_hosts() -> None:
    def names(chip: simpler.ChipView, _payload: bytes, _device: int) -> bytes:
        return ",".join(view.name for view in chip.buffers).encode()

    with extension("names", names), small_worker(device_ids=[0, 1]) as worker:
        buffers: dict[str, simpler.Buffer | simpler.HostBuffer] = {
            "a": worker.malloc(8, worker_id=0),
            "h": worker.create_buffer(8),
            "b": worker.malloc(8, worker_id=1),
        }
        assert worker.run_chip_control_extension("names", buffers=buffers) == [b"a,h", b"h,b"]
        assert worker.submit_chip_control_extension("names", buffers=buffers).result(20) == [b"a,h", b"h,b"]


def test_buffers_are_dead_once_the_handler_has_returned(any_level: Any) -> None:
    def keep(chip: simpler.ChipView, payload: bytes, _device: int) -> bytes:
        if payload:
            chip.state["view"] = chip.buffers[0]
        return b"%d" % chip.state["view"].nbytes if payload else bytes(chip.state["view"].array())

    with extension("keep", keep), any_level() as worker:
        buffer = worker.malloc(8)
        assert worker.run_chip_control_extension("keep", b"1", worker_id=0, buffers=[buffer]) == b"8"
        with pytest.raises(simpler.RemoteError, match="has returned"):
            worker.run_chip_control_extension("keep", worker_id=0)


def test_memory_named_in_a_timed_out_call_is_freed_when_its_handler_has_ended(fifo: Any) -> None:
    with (
        extension("wait", wait_for_file),
        extension("committed", lambda _chip, _payload, _device: b""),
        small_worker() as worker,
    ):
        buffer = worker.malloc(256)
        with pytest.raises(simpler.WorkerTimeoutError) as caught:
            worker.run_chip_control_extension(
                "wait", str(fifo).encode(), worker_id=0, buffers=[buffer], timeout_s=0.2
            )
        assert caught.value.started
        worker.free(buffer)
        assert buffer.freed
        fifo.open("wb").close()
        while worker.committed_device_memory():  # the end of the handler is told, not asked for
            pass


def test_freed_and_foreign_memory_is_refused_before_anything_is_sent(any_level: Any) -> None:
    with extension("reply", reply), any_level() as worker, any_level() as other:
        freed = worker.malloc(8)
        worker.free(freed)
        with pytest.raises(simpler.MemoryRangeError, match="freed"):
            worker.run_chip_control_extension("reply", worker_id=0, buffers=[freed])
        foreign = other.malloc(8)
        with pytest.raises(simpler.MemoryRangeError, match="another Worker"):
            worker.run_chip_control_extension("reply", worker_id=0, buffers=[foreign])
        with pytest.raises(TypeError, match="buffers="):
            worker.run_chip_control_extension("reply", worker_id=0, buffers=[b"bytes"])


def test_on_close_runs_once_in_each_chip_newest_first(tmp_path: Any) -> None:
    def note(name: str, chip: simpler.ChipView) -> None:
        with (tmp_path / f"chip{chip.worker_id[0]}").open("a") as file:
            file.write(name)

    def fail(_chip: simpler.ChipView) -> None:
        raise ValueError("in on_close")

    with (
        extension("a", reply, on_close=functools.partial(note, "a")),
        extension("f", reply, on_close=fail),
        extension("b", reply, on_close=functools.partial(note, "b")),
    ):
        worker = small_worker(device_ids=[0, 1])
        worker.init()
        worker.close()
    assert [(tmp_path / f"chip{chip}").read_text() for chip in (0, 1)] == ["ba", "ba"]


def test_limits_are_checked_before_anything_is_sent(any_level: Any) -> None:
    with extension("reply", reply), any_level() as worker:
        for timeout_s in (0, -1.0, math.nan):
            with pytest.raises(ValueError, match="timeout_s"):
                worker.run_chip_control_extension("reply", timeout_s=timeout_s)
            with pytest.raises(ValueError, match="timeout_s"):
                worker.submit_chip_control_extension("reply", timeout_s=timeout_s)
        with pytest.raises(ValueError, match="chip"):
            worker.run_chip_control_extension("reply", worker_id=9)
