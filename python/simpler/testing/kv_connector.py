"""The contract of a KV connector, as tests that its own test suite inherits.

Example::

    from simpler.kv import KVTransferConfig
    from simpler.testing import KVConnectorContract

    class TestMine(KVConnectorContract):
        def make_configs(self):
            options = {"kv_connector": "Mine", "kv_connector_module_path": "my_package"}
            return (
                KVTransferConfig.from_dict({**options, "kv_role": "kv_producer"}),
                KVTransferConfig.from_dict({**options, "kv_role": "kv_consumer"}),
            )
"""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from simpler import ClosedError, MemoryRangeError, WorkerDiedError
from simpler.kv import KVLoadError, KVStepOutput
from simpler.testing.kv_pair import BLOCK_SIZE, Pair

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simpler.kv import KVTransferConfig

_LAYOUTS = ("packed", "split", "padded")


class KVConnectorContract(abc.ABC):
    """Every rule of `KVConnector`. Inherit it, name the class ``Test...`` and give `make_configs`.

    A producer computes requests that ask for ``{"do_remote_decode": True}``; a consumer loads requests with
    what the producer's `request_finished` returned, or with the same tokens and block hashes.

    Attributes:
        platform: The chip backend that the engines run on.
        ranks: Chips of an engine, where more than one is tried.
    """

    platform = "cpu"
    ranks = 2

    @abc.abstractmethod
    def make_configs(self) -> tuple[KVTransferConfig, KVTransferConfig]:
        """A producer's and a consumer's configuration that no other test has used."""

    def spoil(self, pair: Pair, params: dict[str, Any] | None) -> None:
        """Make blocks unreadable that a request would load, as their store or their producer may lose them.

        Called once the consumer has been told how many tokens it can load. Without it the tests of failures
        are skipped.

        Args:
            pair: The engines.
            params: What the producer's `request_finished` returned.
        """
        pytest.skip(f"spoil() does not say how to lose {params} of {pair}")

    @pytest.fixture
    def pair(self) -> Iterator[Pair]:
        """A producer and a consumer with one chip each, closed after the test."""
        pair = Pair(self.make_configs(), platform=self.platform)
        yield pair
        pair.close()

    def _pair(self, policy: str = "fail", **options: Any) -> Pair:
        producer, consumer = self.make_configs()
        chosen: Any = policy
        consumer = dataclasses.replace(consumer, kv_load_failure_policy=chosen)
        return Pair((producer, consumer), platform=self.platform, **options)

    # Memory

    def test_registered_memory_cannot_be_freed_until_it_is_unregistered(self, pair: Pair) -> None:
        buffer = pair.consumer.buffers["second"][0]
        with pytest.raises(MemoryRangeError, match=pair.consumer.runtime.engine_id):
            pair.worker.free(buffer)
        pair.consumer.runtime.unregister_kv_caches()
        pair.worker.free(buffer)

    def test_memory_can_be_registered_again_after_it_was_unregistered(self, pair: Pair) -> None:
        pair.consumer.runtime.unregister_kv_caches()
        pair.consumer.runtime.unregister_kv_caches()
        pair.consumer.runtime.register_kv_caches(pair.consumer.tensors())
        with pytest.raises(ValueError, match="already"):
            pair.consumer.runtime.register_kv_caches(pair.consumer.tensors())
        params = pair.produce("a.1", [1, 2])
        pair.begin_load("b.1", [3, 4], params)
        pair.finish_load("b.1")
        assert pair.consumer.block(4) == pair.producer.block(2)

    def test_handshake_metadata_is_bytes_by_rank(self, pair: Pair) -> None:
        for engine in (pair.producer, pair.consumer):
            assert set(engine.runtime.handshake) <= {0}
            assert all(isinstance(data, bytes) for data in engine.runtime.handshake.values())

    # Bytes

    @pytest.mark.parametrize("kind", _LAYOUTS)
    def test_blocks_arrive_bit_for_bit_in_every_layer(self, kind: str) -> None:
        pair = self._pair(kind=kind)
        try:
            params = pair.produce("a.1", [3, 4, 5, 9])
            before = pair.consumer.snapshot()
            untouched = [pair.consumer.block(block) for block in (0, 3, 14, 15)]
            pair.begin_load("b.1", [7, 8, 2, 1], params)
            pair.finish_load("b.1")
            assert pair.consumer.loaded == {"b.1"}
            for source, target in zip([3, 4, 5, 9], [7, 8, 2, 1], strict=True):
                assert pair.consumer.block(target) == pair.producer.block(source)
            assert [pair.consumer.block(block) for block in (0, 3, 14, 15)] == untouched
            assert len(before) == len(pair.consumer.snapshot())
        finally:
            pair.close()

    def test_every_chip_of_an_engine_gets_its_own_part(self) -> None:
        pair = self._pair(ranks=self.ranks)
        try:
            params = pair.produce("a.1", [2, 3])
            pair.begin_load("b.1", [11, 10], params)
            pair.finish_load("b.1")
            assert pair.consumer.block(11) == pair.producer.block(2)
            assert pair.consumer.block(10) == pair.producer.block(3)
            assert len(set(pair.producer.block(2))) == 3 * self.ranks
        finally:
            pair.close()

    def test_what_the_consumer_has_computed_is_not_loaded(self, pair: Pair) -> None:
        params = pair.produce("a.1", [1, 2, 3])
        own = pair.consumer.block(9)
        pair.begin_load("b.1", [9, 10, 11], params, num_computed=BLOCK_SIZE)
        pair.finish_load("b.1")
        assert pair.consumer.block(9) == own
        assert pair.consumer.block(10) == pair.producer.block(2)
        assert pair.consumer.block(11) == pair.producer.block(3)

    def test_requests_in_flight_together_do_not_mix(self, pair: Pair) -> None:
        params = [pair.produce(f"a.{n}", [2 * n, 2 * n + 1]) for n in range(6)]
        for n in range(6):
            pair.begin_load(f"b.{n}", [15 - 2 * n, 14 - 2 * n], params[n])
        for n in range(6):
            pair.finish_load(f"b.{n}")
        assert pair.consumer.loaded == {f"b.{n}" for n in range(6)}
        for n in range(6):
            assert pair.consumer.block(15 - 2 * n) == pair.producer.block(2 * n)
            assert pair.consumer.block(14 - 2 * n) == pair.producer.block(2 * n + 1)

    # Steps

    def test_steps_without_anything_to_do_touch_nothing(self, pair: Pair) -> None:
        before = pair.producer.snapshot() + pair.consumer.snapshot()
        for _ in range(5):
            for engine in (pair.producer, pair.consumer):
                assert engine.step() == KVStepOutput()
        assert pair.producer.snapshot() + pair.consumer.snapshot() == before

    def test_a_request_that_nobody_has_matches_nothing(self, pair: Pair) -> None:
        request = pair.request("b.nobody", 3)
        matched: int | None = None
        while matched is None:
            matched, _ = pair.consumer.runtime.get_num_new_matched_tokens(request, 0)
            pair.consumer.step()
        assert matched == 0

    def test_counters_are_numbers(self, pair: Pair) -> None:
        params = pair.produce("a.1", [1])
        pair.begin_load("b.1", [1], params)
        pair.finish_load("b.1")
        for engine in (pair.producer, pair.consumer):
            for counters in engine.runtime.stats()["chips"].values():
                assert isinstance(counters, dict)
                assert all(isinstance(value, float) for value in counters.values())

    # Failures

    def test_a_load_that_fails_ends_its_request_and_names_the_blocks(self) -> None:
        pair = self._pair("fail")
        try:
            params = pair.produce("a.1", [1, 2, 3])
            pair.begin_load("b.1", [4, 5, 6], params)
            self.spoil(pair, params)
            pair.finish_load("b.1")
            pair.consumer.drain()
            error = pair.consumer.failed["b.1"]
            assert isinstance(error, KVLoadError)
            assert error.block_ids
            assert set(error.block_ids) <= {4, 5, 6}
            assert "b.1" not in pair.consumer.loaded
            assert ("b.1", (4, 5, 6)) in pair.consumer.freed
            self._hands_over(pair, "2")
        finally:
            pair.close()

    def test_a_load_that_fails_is_computed_from_the_first_bad_block_on(self) -> None:
        pair = self._pair("recompute")
        try:
            params = pair.produce("a.1", [1, 2, 3])
            request = pair.begin_load("b.1", [4, 5, 6], params)
            self.spoil(pair, params)
            pair.finish_load("b.1")
            answer = pair.consumer.recompute["b.1"]
            first = answer.num_computed_tokens // BLOCK_SIZE
            assert answer.num_computed_tokens % BLOCK_SIZE == 0
            assert (4, 5, 6)[first] == answer.error.block_ids[0]
            for position in range(first):
                assert pair.consumer.block(4 + position) == pair.producer.block(1 + position)
            assert not pair.consumer.failed
            assert not pair.consumer.runtime.request_finished(request)[0] or pair.consumer.drain()
            self._hands_over(pair, "2")
        finally:
            pair.close()

    def test_the_death_of_the_producer_ends_every_load_of_the_consumer(self) -> None:
        pair = self._pair("fail")
        try:
            params = [pair.produce(f"a.{n}", [2 * n, 2 * n + 1]) for n in range(3)]
            for n in range(3):
                pair.begin_load(f"b.{n}", [2 * n, 2 * n + 1], params[n])
            pair.worker.kill(pair.producer.chips[0])
            for n in range(3):
                pair.finish_load(f"b.{n}")
                assert f"b.{n}" in pair.consumer.loaded | pair.consumer.failed.keys()
        finally:
            pair.close()

    def test_the_death_of_the_consumer_fails_its_requests_with_that_error(self, pair: Pair) -> None:
        params = pair.produce("a.1", [1, 2])
        pair.begin_load("b.1", [1, 2], params)
        pair.worker.kill(pair.consumer.chips[0])
        pair.consumer.step()
        assert isinstance(pair.consumer.failed["b.1"], WorkerDiedError)
        pair.consumer.drain()
        assert pair.consumer.runtime.held() == {}

    # Ends

    def test_an_aborted_load_gives_its_blocks_back_when_access_has_stopped(self, pair: Pair) -> None:
        params = pair.produce("a.1", [1, 2, 3])
        pair.begin_load("b.1", [4, 5, 6], params)
        pair.consumer.step()
        if pair.consumer.runtime.abort("b.1"):
            pair.consumer.drain()
            assert ("b.1", (4, 5, 6)) in pair.consumer.freed
        assert pair.consumer.runtime.state("b.1") is None
        pair.producer.drain()
        assert pair.producer.runtime.held() == {}
        self._hands_over(pair, "2")

    def test_a_load_that_is_aborted_before_it_begins_holds_nothing(self, pair: Pair) -> None:
        params = pair.produce("a.1", [1, 2, 3])
        pair.begin_load("b.1", [4, 5, 6], params)
        pair.consumer.runtime.abort("b.1")
        pair.consumer.drain()
        pair.producer.drain()
        assert pair.consumer.runtime.held() == {}
        assert pair.producer.runtime.held() == {}
        assert not pair.consumer.loaded

    def test_a_request_that_ends_twice_gives_its_blocks_back_once(self, pair: Pair) -> None:
        params = pair.produce("a.1", [1, 2])
        request = pair.begin_load("b.1", [4, 5], params)
        pair.finish_load("b.1")
        later = [pair.consumer.runtime.request_finished(request)[0] for _ in range(2)]
        pair.consumer.runtime.abort("b.1")
        pair.consumer.drain()
        pair.producer.drain()
        given_back = [blocks for request_id, blocks in pair.consumer.freed if request_id == "b.1"]
        assert len(given_back) == int(later[0])
        assert [request_id for request_id, _ in pair.producer.freed].count("a.1") <= 1

    def test_shutting_down_twice_does_nothing_more(self, pair: Pair) -> None:
        pair.produce("a.1", [1, 2])
        for engine in (pair.consumer, pair.producer):
            engine.runtime.close()
            engine.runtime.close()
            engine.runtime.connector.shutdown()
            with pytest.raises(ClosedError):
                engine.runtime.step()

    @staticmethod
    def _hands_over(pair: Pair, name: str) -> None:
        """Whatever went before, the next request is served."""
        params = pair.produce(f"a.{name}", [7, 8])
        pair.begin_load(f"b.{name}", [12, 13], params)
        pair.finish_load(f"b.{name}")
        assert f"b.{name}" in pair.consumer.loaded
        assert pair.consumer.block(12) == pair.producer.block(7)
