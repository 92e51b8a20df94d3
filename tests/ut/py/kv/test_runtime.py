"""The runtime calls the hooks in order, carries what they say, and keeps the books."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

import simpler
from kv.scripted_connector import BLOCK_BYTES, BLOCKS, MODULE, Script, rig
from simpler import kv

if TYPE_CHECKING:
    from pathlib import Path


def test_the_hooks_of_a_chip_are_called_in_order_around_the_compute_of_a_step(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        assert made.hooks() == ["register_kv_caches k v", "get_handshake_metadata"]
        made.step(r0={})
        begin = [
            "bind_connector_metadata",
            "start_load_kv",
            "wait_for_layer_load k",
            "wait_for_layer_load v",
            "get_finished",
            "get_block_ids_with_load_errors",
        ]
        end = ["save_kv_layer k k", "save_kv_layer v v", "wait_for_save", "clear_connector_metadata"]
        assert made.hooks() == begin
        made.step(r0={})
        assert made.hooks() == end + begin
        made.step()
        assert made.hooks() == [*end, *begin[4:]]
        made.step()
        assert made.hooks() == begin[4:]
        made.runtime.close()
        made.runtime.close()
        assert made.hooks() == ["unregister_kv_caches", "shutdown"]


def test_a_step_that_is_still_bound_is_ended_before_the_memory_goes(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.step(r0={})
        made.hooks()
        made.runtime.unregister_kv_caches()
        assert made.hooks() == [
            "save_kv_layer k k",
            "save_kv_layer v v",
            "wait_for_save",
            "clear_connector_metadata",
            "unregister_kv_caches",
        ]


def test_handshake_metadata_goes_to_the_scheduler_side_and_to_peers(tmp_path: Path) -> None:
    with rig(tmp_path, chips=2) as made:
        handshake = {0: b"rank 0", 1: b"rank 1"}
        assert made.runtime.handshake == handshake
        assert made.connector.told == [("scripted", handshake)]
        made.runtime.connect_engine("far", {0: b"there"})
        assert made.connector.told[1] == ("far", {0: b"there"})
        for rank in (0, 1):
            assert made.hooks(rank)[-1] == "set_handshake_metadata far b'there'"


def test_a_synchronous_load_is_there_after_its_step(tmp_path: Path) -> None:
    with rig(tmp_path, chips=2) as made:
        made.begin("a")
        assert made.runtime.state("a") is kv.KVRequestState.PENDING
        assert made.step().loaded == ("a",)
        assert made.runtime.state("a") is kv.KVRequestState.READY
        assert ("a", (1, 2), 8) in made.connector.told
        assert kv.KVConnectorOutput(finished_recving=frozenset("a")) in made.connector.told


def test_an_asynchronous_load_is_there_when_every_chip_has_said_so(tmp_path: Path) -> None:
    with rig(tmp_path, chips=3) as made:
        made.begin("a", beside=True)
        assert made.step(r0={"received": ["a"]}, r2={"received": ["a"]}).loaded == ()
        assert made.step().loaded == ()
        assert made.runtime.state("a") is kv.KVRequestState.LOADING
        assert made.step(r1={"received": ["a"]}).loaded == ("a",)


def test_duplicate_and_unknown_completions_are_counted_and_ignored(tmp_path: Path) -> None:
    with rig(tmp_path, chips=2) as made:
        made.begin("a", beside=True)
        made.step(r0={"received": ["a", "a", "nobody"], "sent": ["nobody", "a"], "bad": {7: "whose?"}})
        assert made.runtime.state("a") is kv.KVRequestState.LOADING
        stats = made.runtime.stats()
        assert (stats["duplicate"], stats["unknown"]) == (2, 3)
        assert made.step(r1={"received": ["a"]}).loaded == ("a",)
        assert made.step(r0={"received": ["a"]}) == kv.KVStepOutput()
        assert made.runtime.stats()["duplicate"] == 3


def test_blocks_that_are_sent_stay_held_until_every_chip_has_sent_them(tmp_path: Path) -> None:
    with rig(tmp_path, chips=2) as made:
        request = made.begin("a", tokens=0, keep=True)
        assert made.runtime.request_finished(request, [1, 2, 3]) == (True, {"blocks": [1, 2, 3]})
        assert made.runtime.held() == {"a": ((1, 2, 3), ((0,), (1,)))}
        assert made.step(r0={"sent": ["a"]}).freed == ()
        assert made.runtime.held() == {"a": ((1, 2, 3), ((1,),))}
        assert made.step(r1={"sent": ["a"]}).freed == (("a", (1, 2, 3)),)
        assert kv.KVConnectorOutput(finished_sending=frozenset("a")) in made.connector.told
        assert made.runtime.state("a") is None


def test_blocks_of_an_aborted_request_are_offered_to_no_peer(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.begin("a", tokens=0, keep=True)
        assert made.runtime.abort("a") is False
        assert made.runtime.held() == {}


def test_the_end_of_a_request_is_told_to_the_chips_with_the_next_step(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.runtime.request_finished(made.begin("b", tokens=0))
        made.runtime.request_finished(made.begin("a", tokens=0))
        made.hooks()
        made.step()
        assert made.hooks()[0] == "get_finished a b"
        assert made.connector.told[-1] == ("finished", "a", "b")
        made.step()
        assert made.hooks()[0] == "get_finished"


def test_a_bad_block_fails_its_request_and_says_why(tmp_path: Path) -> None:
    with rig(tmp_path, chips=2) as made:
        made.begin("a", [1, 2, 3])
        made.begin("b", [4])
        output = made.step(r1={"bad": {3: "checksum", 2: "torn"}})
        assert output.loaded == ("b",)
        error = output.failed["a"]
        assert isinstance(error, kv.KVLoadError)
        assert error.block_ids == (2, 3)
        assert str(error) == "request 'a': 2 KV blocks were not loaded: worker 1: torn"
        assert output.freed == (("a", (1, 2, 3)),)
        told = [item for item in made.connector.told if isinstance(item, kv.KVConnectorOutput)]
        assert told == [
            kv.KVConnectorOutput(finished_recving=frozenset("ab"), invalid_block_ids=frozenset({2, 3}))
        ]
        assert ("request_finished", "a", (1, 2, 3)) in made.connector.told


def test_a_bad_block_is_computed_under_the_other_policy(tmp_path: Path) -> None:
    with rig(tmp_path, policy="recompute") as made:
        request = made.begin("a", [1, 2, 3, 5])
        output = made.step(r0={"bad": {3: "torn"}})
        assert (output.loaded, dict(output.failed), output.freed) == ((), {}, ())
        answer = output.recompute["a"]
        assert (answer.num_computed_tokens, answer.replace) == (8, ())
        assert made.runtime.request_finished(request) == (False, None)


def test_a_save_that_fails_is_reported_and_harms_no_request(tmp_path: Path) -> None:
    with rig(tmp_path, chips=2) as made:
        made.begin("a")
        assert made.step(r1={"raise": "save_kv_layer"}).loaded == ("a",)
        output = made.step()
        assert "the engine broke in save_kv_layer" in str(output.errors[1,])
        assert not output.failed
        assert made.step().errors == {}
        assert made.runtime.stats()["save_errors"] == 1


def test_an_engine_may_have_some_of_the_chips_in_any_order(tmp_path: Path) -> None:
    with rig(tmp_path, chips=3, on=[2, 0]) as made:
        made.begin("a", beside=True)
        made.step(r0={"received": ["a"]})
        assert made.runtime.held() == {}
        assert made.step(r1={"received": ["a"]}).loaded == ("a",)
        chips = made.runtime.stats()["chips"]
        assert chips == {(2,): {"rank": 0.0}, (0,): {"rank": 1.0}}


def test_two_engines_on_one_worker_do_not_meet(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        other = kv.KVTransferConfig("ScriptedConnector", "kv_both", "other", {"log": str(tmp_path)}, MODULE)
        with kv.KVRuntime(made.worker, other, block_size=4) as second:
            made.begin("a", beside=True)
            second.step(payload=Script({0: {"received": ["a"]}}))
            assert made.runtime.state("a") is kv.KVRequestState.PENDING
            assert second.stats()["unknown"] == 1
        assert made.step(r0={"received": ["a"]}).loaded == ("a",)


def test_events_come_from_the_scheduler_side(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        assert made.runtime.take_events() == [kv.KVEvent("stored", (b"x",), "disk")]


def test_not_known_yet_is_passed_on(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        request = kv.KVRequest("a", 8, kv_transfer_params={"tokens": None, "beside": True})
        assert made.runtime.get_num_new_matched_tokens(request) == (None, True)


# Registration


def test_a_refused_registration_names_the_range_and_leaves_nothing_registered(tmp_path: Path) -> None:
    with rig(tmp_path, chips=2, extra={"refuse_rank": 1}, registered=False) as made:
        with pytest.raises(simpler.ChipControlError, match=r"worker 1.*refuses 512 bytes at 0x"):
            made.register()
        assert made.hooks(0) == ["register_kv_caches k v", "unregister_kv_caches"]
        for buffer in made.buffers:
            made.worker.free(buffer)


def test_what_is_registered_is_pinned_by_the_name_of_the_engine(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        with pytest.raises(simpler.MemoryRangeError, match="'KV engine scripted'"):
            made.worker.free(made.buffers[0])
        with pytest.raises(ValueError, match="already"):
            made.register()
        made.runtime.unregister_kv_caches()
        made.register()
        made.runtime.close()
        made.worker.free(made.buffers[0])


def test_layouts_that_cannot_be_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    with rig(tmp_path, chips=2, registered=False) as made:
        caches = made.caches()
        bad: list[tuple[dict[str, Any], str]] = [
            ({}, "no KV caches"),
            ({"k": caches["k"][:1]}, "1 tensors for 2 chips"),
            ({"k": caches["k"], "v": [t[:4] for t in caches["v"]]}, "one number of blocks"),
            ({"k": caches["k"], "again": [t[2:10] for t in made_wide(made)]}, "overlap"),
            ({"k": [t[:, ::2] for t in caches["k"]]}, "packed"),
            ({"k": [t[::-1] for t in caches["k"]]}, "negative"),
        ]
        for wrong, text in bad:
            with pytest.raises(ValueError, match=text):
                made.runtime.register_kv_caches(wrong)
        with pytest.raises(simpler.MemoryRangeError, match="is memory of worker 1"):
            made.runtime.register_kv_caches({"k": list(reversed(caches["k"]))})
        assert made.hooks(0) == []
        for buffer in made.buffers:
            made.worker.free(buffer)


def made_wide(made: Any) -> list[simpler.Tensor]:
    return [buffer.tensor((2 * BLOCKS, BLOCK_BYTES), "uint8") for buffer in made.buffers]


def test_a_worker_that_was_initialised_before_says_what_is_missing(tmp_path: Path) -> None:
    simpler.unregister_chip_control_extension("simpler.kv")
    try:
        with simpler.Worker(device_ids=[0], hbm_bytes=1 << 20, heap_bytes=1 << 20) as worker:
            config = kv.KVTransferConfig("shm")
            with pytest.raises(simpler.UnknownExtensionError, match="never registered"):
                kv.KVRuntime(worker, config, block_size=4)
    finally:
        kv.register()


@pytest.mark.parametrize("chips", [[], [0, 0], [5]])
def test_chips_that_the_worker_does_not_have_are_refused(tmp_path: Path, chips: list[int]) -> None:
    with pytest.raises(ValueError, match="the worker has"), rig(tmp_path, chips=2, on=chips):
        pass


# Wrong use


def test_blocks_and_requests_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        request = kv.KVRequest("a", 8, kv_transfer_params={"tokens": 8})
        made.runtime.get_num_new_matched_tokens(request)
        with pytest.raises(ValueError, match="has 8 blocks"):
            made.runtime.update_state_after_alloc(request, [1, 8], 8)
        with pytest.raises(ValueError, match="too few"):
            made.runtime.update_state_after_alloc(request, [1], 8)
        made.runtime.update_state_after_alloc(request, [1, 2], 8)
        with pytest.raises(ValueError, match="is pending"):
            made.runtime.update_state_after_alloc(request, [1, 2], 8)
        assert made.runtime.abort("nobody") is True
        assert made.runtime.request_finished(kv.KVRequest("nobody", 8), [1]) == (True, None)


def test_a_closed_runtime_says_so(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.runtime.close()
        for call in (made.runtime.step, made.runtime.unregister_kv_caches, made.runtime.stats):
            with pytest.raises(simpler.ClosedError, match="'scripted' is closed"):
                call()


def test_a_config_is_what_both_sides_get(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        config = made.connector.config
        assert dataclasses.asdict(made.connector.context)["num_ranks"] == 1
        assert config is made.runtime.config
