"""Whatever chips, engines and peers do, requests end, and blocks come back when nothing touches them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

import simpler
from kv.scripted_connector import rig
from simpler import kv
from simpler.kv import channel as kv_channel
from simpler.kv import wire

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """A FIFO: who reads it waits until it was opened for writing and closed."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


# Chips


def test_the_death_of_a_chip_fails_every_request_with_that_error(tmp_path: Path) -> None:
    with rig(tmp_path, chips=2) as made:
        made.begin("loads", beside=True)
        made.step()
        ready = made.begin("ready", tokens=0)
        made.worker.kill(1)
        output = made.step()
        assert output.failed.keys() == {"loads", "ready"}
        for error in output.failed.values():
            assert isinstance(error, simpler.WorkerDiedError)
            assert error.path == (1,)
        assert "SIGKILL" in str(output.errors[1,])
        assert output.freed == (("ready", (1, 2)),)  # chip 0 may still write the blocks of the other
        assert made.step(r0={"received": ["loads"]}).freed == (("loads", (1, 2)),)
        assert made.runtime.request_finished(ready) == (True, None)  # they have come back already


def test_after_the_death_of_a_chip_new_requests_end_at_once(tmp_path: Path) -> None:
    with rig(tmp_path, chips=2) as made:
        made.worker.kill(0)
        made.step()
        request = kv.KVRequest("late", 8, kv_transfer_params={"tokens": 8})
        assert made.runtime.get_num_new_matched_tokens(request) == (0, False)
        made.runtime.update_state_after_alloc(request, [1, 2], 0)
        output = made.step()
        assert isinstance(output.failed["late"], simpler.WorkerDiedError)
        assert output.freed == (("late", (1, 2)),)


def test_a_chip_that_dies_in_a_hook_is_no_different(tmp_path: Path) -> None:
    with rig(tmp_path, chips=2) as made:
        made.begin("a")
        output = made.step(r1={"die": True})
        assert isinstance(output.failed["a"], simpler.WorkerDiedError)
        assert "SIGABRT" in str(output.failed["a"])
        assert output.freed == (("a", (1, 2)),)


def test_closing_after_a_death_lets_go_of_the_memory(tmp_path: Path) -> None:
    with rig(tmp_path, chips=2) as made:
        made.worker.kill(1)
        made.runtime.close()
        made.worker.free(made.buffers[0])
        assert made.buffers[1].freed


def test_a_restarted_chip_has_lost_the_engine_and_holds_nothing(tmp_path: Path) -> None:
    with rig(tmp_path, chips=2) as made:
        made.begin("before", [4], beside=True)
        made.step(r0={"received": ["before"]})
        made.worker.kill(1)
        made.worker.restart(1)
        made.begin("a")
        output = made.step()
        assert output.failed.keys() == {"a", "before"}
        assert "this chip has no such KV engine: it was restarted" in str(output.failed["a"])
        assert dict(output.freed) == {"a": (1, 2), "before": (4,)}
        assert made.runtime.held() == {}


def test_a_worker_that_is_closed_ends_the_requests(tmp_path: Path) -> None:
    with rig(tmp_path, chips=2) as made:
        made.begin("a")
        made.worker.close()
        output = made.step()
        assert isinstance(output.failed["a"], simpler.ClosedError)
        assert output.freed == (("a", (1, 2)),)


def test_a_scheduler_side_that_raises_fails_what_was_to_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> list[kv.KVTransfer]:
        raise ZeroDivisionError("in take_transfers")

    with rig(tmp_path) as made:
        made.begin("a")
        monkeypatch.setattr(made.connector, "take_transfers", broken)
        with pytest.raises(ZeroDivisionError):
            made.step()
        monkeypatch.undo()
        output = made.step()
        assert isinstance(output.failed["a"], ZeroDivisionError)
        assert (output.loaded, output.freed) == ((), (("a", (1, 2)),))


def test_an_interrupted_step_fails_its_loads_and_holds_them_until_the_chips_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_channel: kv_channel.KVChannel, _payload: bytes) -> list[bytes]:
        raise KeyboardInterrupt

    with rig(tmp_path) as made:
        made.begin("a")
        monkeypatch.setattr(kv_channel.KVChannel, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.step()
        assert made.runtime.held() == {"a": ((1, 2), ((0,),))}
        monkeypatch.undo()
        output = made.step()
        assert "interrupted: KeyboardInterrupt" in str(output.failed["a"])
        assert output.freed == (("a", (1, 2)),)


def test_metadata_that_is_too_large_fails_the_loads_of_its_step_and_holds_nothing(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.begin("a", beside=True)
        with pytest.raises(ValueError, match="max_control_payload"):
            made.step(r0={"much": bytes(65 << 20)})
        assert made.runtime.held() == {}
        output = made.step()
        assert "max_control_payload" in str(output.failed["a"])
        assert output.freed == (("a", (1, 2)),)


def test_a_worker_that_closes_shuts_its_engines_down(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.hooks()
        made.worker.close()
        assert made.hooks() == ["unregister_kv_caches", "shutdown"]


def test_transfers_are_stopped_before_the_memory_is_unregistered(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.begin("a", beside=True, transfers={0: ["cancel"]})
        made.step()
        made.runtime.unregister_kv_caches()
        made.worker.free(made.buffers[0])
        outputs = made.until(lambda output: output.failed)
        assert "told to stop" in str(outputs[-1].failed["a"])


def test_a_step_that_one_chip_does_not_answer_names_it_and_loses_nothing(tmp_path: Path, fifo: Path) -> None:
    with rig(tmp_path, chips=2, step_timeout_s=0.3) as made:
        made.begin("old", [3], beside=True)
        made.step()
        made.begin("new", [1, 2])
        output = made.step(r0={"received": ["old"]}, r1={"received": ["old"], "wait": str(fifo)})
        assert isinstance(output.errors[1,], simpler.WorkerTimeoutError)
        assert "chip 1 (device 1" in str(output.failed["new"])
        assert output.loaded == ()
        assert made.runtime.held() == {"new": ((1, 2), ((1,),))}
        fifo.open("wb").close()
        outputs = made.until(lambda output: output.loaded)
        assert outputs[-1].loaded == ("old",)  # reported by a step that had been given up
        freed = [entry for output in outputs for entry in output.freed]
        assert freed == [("new", (1, 2))]
        assert made.runtime.stats()["duplicate"] == 0


def test_a_load_that_a_chip_never_reports_is_given_up_and_the_chip_is_named(tmp_path: Path) -> None:
    with rig(tmp_path, chips=2, load_timeout_s=0.05) as made:
        made.begin("a", beside=True)
        made.step(r0={"received": ["a"]})
        output = made.until(lambda output: output.failed)[-1]
        assert "has not ended on worker 1 within 0.05 s" in str(output.failed["a"])
        assert isinstance(output.failed["a"].__cause__, simpler.WorkerTimeoutError)
        assert output.freed == ()
        assert made.runtime.held() == {"a": ((1, 2), ((1,),))}
        assert made.step(r1={"received": ["a"]}).freed == (("a", (1, 2)),)
        assert made.runtime.stats()["late"] == 1


def test_blocks_that_a_peer_may_still_write_are_replaced_when_they_are_computed(tmp_path: Path) -> None:
    with rig(tmp_path, policy="recompute", load_timeout_s=0.05) as made:
        request = made.begin("a", [1, 2, 3], tokens=8, beside=True)
        made.step()
        answer = made.until(lambda output: output.recompute)[-1].recompute["a"]
        assert (answer.num_computed_tokens, answer.replace) == (0, (1, 2))
        made.runtime.update_state_after_alloc(request, [5, 6, 3], 0)
        assert made.runtime.request_finished(request) == (False, None)
        assert made.runtime.held() == {"a": ((1, 2), ((0,),))}
        assert made.step(r0={"received": ["a"]}).freed == (("a", (1, 2)),)


@pytest.mark.parametrize("beside", [False, True])
def test_a_hook_that_raises_fails_the_loads_of_its_step_alone(tmp_path: Path, beside: bool) -> None:
    with rig(tmp_path, chips=2) as made:
        made.begin("before", [4], beside=True)
        made.step()
        made.begin("a", beside=beside)
        output = made.step(r1={"raise": "start_load_kv"}, r0={"received": ["a"] if beside else []})
        assert "worker 1" in str(output.failed["a"])
        assert "OSError: the engine broke in start_load_kv" in str(output.failed["a"])
        # What goes on beside the step is not certified to have stopped by an exception.
        assert output.freed == (() if beside else (("a", (1, 2)),))
        assert made.runtime.state("before") is kv.KVRequestState.LOADING
        output = made.step(
            r0={"received": ["before"]}, r1={"received": ["before", *(["a"] if beside else [])]}
        )
        assert output.loaded == ("before",)
        assert made.runtime.held() == {}


def test_an_answer_that_does_not_decode_fails_the_loads_and_not_the_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(tmp_path, chips=2) as made:
        step = kv_channel.KVChannel.step
        made.begin("a")
        monkeypatch.setattr(
            kv_channel.KVChannel, "step", lambda self, payload: [step(self, payload)[0], b"\x80garbage"]
        )
        output = made.step()
        assert isinstance(output.errors[1,], kv.KVReplyError)
        assert "does not begin as one" in str(output.failed["a"])
        monkeypatch.undo()
        made.begin("b")
        assert made.step().loaded == ("b",)


def is_refused(report: bytes) -> bool:
    try:
        wire.unpack_report(report, 8, 0)
    except kv.KVReplyError:
        return True
    return False


def test_damaged_reports_are_refused_or_decoded_and_never_raise_anything_else() -> None:
    records = wire.pack_records(["sent"], ["received"], {3: "why", 4: ""}, ["save"])
    good = wire.pack_report([(5, records), (6, b"")])
    assert wire.unpack_report(good, 8, 0) == (6, ("sent",), ("received",), {3: "why", 4: ""}, ("save",))
    assert wire.unpack_report(good, 8, 5) == (6, (), (), {}, ())
    damaged = [good[:at] for at in range(len(good))]
    damaged += [good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :] for at in range(len(good))]
    assert sum(map(is_refused, damaged)) > len(good)
    with pytest.raises(kv.KVReplyError):
        wire.unpack_report(good, 4, 0)


@pytest.mark.parametrize("text", [b"[]", b"{", b'{"a": "x"}', b'{"a": NaN}', b"\xff", b'{"a": [1]}'])
def test_counters_that_are_none_are_refused(text: bytes) -> None:
    with pytest.raises(kv.KVReplyError):
        wire.unpack_stats(text)


# Transfers


def test_a_load_by_transfers_is_there_when_the_last_of_them_is(tmp_path: Path, fifo: Path) -> None:
    with rig(tmp_path, chips=2) as made:
        made.begin("a", beside=True, transfers={0: ["go", f"wait {fifo}"], 1: ["go"]})
        made.step()
        assert made.step(r0={"received": ["a"]}).loaded == ()
        assert made.runtime.stats()["duplicate"] == 1
        fifo.open("wb").close()
        assert made.until(lambda output: output.loaded)[-1].loaded == ("a",)
        data = bytearray(3 * 64)
        made.worker.copy_from(data, made.buffers[0], nbytes=len(data))
        assert data[64:] == bytes([7]) * 128


def test_compute_that_touches_blocks_waits_for_their_transfer_and_no_other(
    tmp_path: Path, fifo: Path
) -> None:
    with rig(tmp_path) as made:
        made.begin("a", [1, 2], beside=True, transfers={0: [f"wait {fifo}"]})
        made.step()
        cache = made.caches()["k"][0]
        made.worker.copy_to(cache[3], bytes([1]) * 64)
        with pytest.raises(simpler.WorkerTimeoutError):
            made.worker.copy_to(cache[2], bytes([1]) * 64, timeout_s=0.1)
        fifo.open("wb").close()
        made.worker.copy_to(cache[2], bytes([1]) * 64)
        assert made.until(lambda output: output.loaded)[-1].loaded == ("a",)


def test_a_transfer_that_fails_names_its_blocks_and_lets_go_of_them(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.begin("a", beside=True, transfers={0: ["fail"]})
        output = made.until(lambda output: output.failed)[-1]
        assert "no route to the peer" in str(output.failed["a"])
        assert output.freed == (("a", (1, 2)),)


def test_a_transfer_that_cannot_be_submitted_has_failed(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.begin("a", beside=True)
        target = kv.KVBlocks("nobody", 0, (1,))
        made.connector.transfers = [
            kv.KVTransfer("a", 0, None, target),
            kv.KVTransfer("who?", 0, None, target),
        ]
        output = made.step()
        assert "engine 'nobody' has no KV caches" in str(output.failed["a"])
        assert made.runtime.stats()["unknown"] == 1


def test_bytes_that_the_scheduler_side_rejects_do_not_count(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.connector.rejected = "the lease has lapsed"
        made.begin("a", beside=True, transfers={0: ["go"]})
        output = made.until(lambda output: output.failed)[-1]
        assert "the lease has lapsed" in str(output.failed["a"])


def test_the_blocks_of_an_aborted_transfer_come_back_when_it_has_stopped(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.begin("a", beside=True, transfers={0: ["cancel"]})
        made.step()
        assert made.runtime.abort("a") is True
        assert made.runtime.state("a") is kv.KVRequestState.ENDED
        outputs = made.until(lambda output: output.freed)
        assert outputs[-1].freed == (("a", (1, 2)),)
        assert not any(output.loaded or output.failed for output in outputs)
        assert made.connector.told[-1] == kv.KVConnectorOutput(finished_recving=frozenset("a"))


def test_a_transfer_that_takes_longer_than_it_may_is_asked_to_stop(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.begin("a", beside=True, transfers={0: ["cancel"]}, timeout_s=0.05)
        output = made.until(lambda output: output.failed)[-1]
        assert "told to stop" in str(output.failed["a"])
        assert output.freed == (("a", (1, 2)),)


def test_a_transfer_that_saves_holds_the_blocks_of_a_request_that_has_ended(
    tmp_path: Path, fifo: Path
) -> None:
    with rig(tmp_path) as made:
        request = made.begin("a", tokens=0)
        source = kv.KVBlocks("scripted", 0, (1, 2))
        made.connector.transfers = [kv.KVTransfer("a", 0, source, None, f"wait {fifo}".encode())]
        made.step()
        assert made.runtime.request_finished(request) == (True, None)
        assert made.step().freed == ()
        fifo.open("wb").close()
        assert made.until(lambda output: output.freed)[-1].freed == (("a", (1, 2)),)


def test_blocks_of_an_open_transfer_stay_pinned_until_it_is_certified(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.begin("a", beside=True, transfers={0: ["open"]})
        output = made.until(lambda output: output.failed)[-1]
        assert "TimeoutError: the peer says nothing" in str(output.failed["a"])
        for _ in range(3):
            assert made.step().freed == ()
        assert made.runtime.held() == {"a": ((1, 2), ((0,),))}
        with pytest.raises(simpler.MemoryRangeError, match="unconfirmed"):
            made.worker.copy_to(made.caches()["k"][0][1], bytes(64))
        (tmp_path / "confirm").touch()
        assert made.until(lambda output: output.freed)[-1].freed == (("a", (1, 2)),)
        made.worker.copy_to(made.caches()["k"][0][1], bytes(64))


def test_an_engine_with_too_much_left_open_is_reset(tmp_path: Path) -> None:
    with rig(tmp_path, max_unconfirmed_bytes=300) as made:
        made.begin("a", [1, 2], beside=True, transfers={0: ["open"]})
        made.until(lambda output: output.failed)
        assert made.step().freed == ()
        made.begin("b", [3], beside=True, transfers={0: ["open"]})
        outputs: list[kv.KVStepOutput] = made.until(lambda _output: not made.runtime.held())
        freed = {entry for output in outputs for entry in output.freed}
        assert freed == {("a", (1, 2)), ("b", (3,))}
        assert "reset_transfers" in made.hooks()
        assert made.runtime.stats()["resets"] == 1


def test_the_death_of_the_chip_under_a_transfer_ends_its_request(tmp_path: Path, fifo: Path) -> None:
    with rig(tmp_path, chips=2) as made:
        made.begin("a", beside=True, transfers={0: ["go"], 1: [f"wait {fifo}"]})
        made.step()
        made.worker.kill(1)
        outputs: list[Any] = made.until(lambda _output: not made.runtime.held())
        failed = {key: error for output in outputs for key, error in output.failed.items()}
        assert isinstance(failed["a"], simpler.WorkerDiedError)


def test_draining_says_what_is_still_held(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.begin("a", beside=True)
        made.step()
        made.runtime.abort("a")
        with pytest.raises(
            simpler.WorkerTimeoutError, match=r"still holds blocks.*'a': \(\(1, 2\), \(\(0,\),\)\)"
        ):
            made.runtime.drain(0.05)
        made.step(r0={"received": ["a"]})
        made.runtime.drain()
