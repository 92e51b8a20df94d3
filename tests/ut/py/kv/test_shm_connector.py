"""The connector that hands blocks over between chips of one Worker."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

import pytest

from simpler import ConfigError
from simpler.kv import (
    BlockLeases,
    KVConnectorContext,
    KVConnectorFactory,
    KVConnectorRole,
    KVRuntime,
    KVTransferConfig,
)
from simpler.testing import KVConnectorContract
from simpler.testing.kv_pair import Engine, Pair

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simpler.kv import KVTransfer

_numbers = itertools.count()


def configs(**extra: Any) -> tuple[KVTransferConfig, KVTransferConfig]:
    number = next(_numbers)
    return (
        KVTransferConfig("shm", "kv_producer", f"p{number}", extra),
        KVTransferConfig("shm", "kv_consumer", f"d{number}", extra),
    )


class TestShmConnector(KVConnectorContract):
    def make_configs(self) -> tuple[KVTransferConfig, KVTransferConfig]:
        return configs()

    def spoil(self, pair: Pair, params: dict[str, Any] | None) -> None:
        assert params is not None
        producer: Any = pair.producer.runtime.connector
        producer.take_back(params["remote_request_id"], params["remote_generation"])


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(configs())
    yield made
    made.close()


def test_a_lease_lasts_while_it_is_renewed_and_its_generation_never_comes_again() -> None:
    now = 0.0
    leases = BlockLeases(10.0, lambda: now)
    first = leases.offer("a")
    now = 9.0
    assert leases.renew("a", first)
    now = 18.0
    assert leases.take_lapsed() == []
    now = 20.0
    assert leases.take_lapsed() == ["a"]
    assert not leases.renew("a", first)
    second = leases.offer("a")
    assert second != first
    assert not leases.is_valid("a", first)
    assert not leases.give_back("a", first)
    assert leases.give_back("a", second)
    assert len(leases) == 0


def test_blocks_that_nobody_reads_come_back_when_the_lease_lapses() -> None:
    pair = Pair(configs(lease_s=0.01))
    try:
        params = pair.produce("a.1", [1, 2])
        pair.producer.drain()
        assert pair.producer.freed == [("a.1", (1, 2))]
        request = pair.request("b.1", 2, params)
        assert pair.consumer.runtime.get_num_new_matched_tokens(request) == (0, False)
    finally:
        pair.close()


def test_what_was_read_after_its_lease_had_ended_does_not_count(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = pair.produce("a.1", [1, 2])
    assert params is not None
    pair.begin_load("b.1", [3, 4], params)
    producer: Any = pair.producer.runtime.connector
    accept = pair.consumer.runtime.connector.accept_transfer

    def accept_later(transfer: KVTransfer) -> str | None:
        producer.take_back("a.1", params["remote_generation"])  # the bytes are there; then the lease ends
        return accept(transfer)

    monkeypatch.setattr(pair.consumer.runtime._moves, "_accept", accept_later)
    pair.finish_load("b.1")
    assert "has taken the blocks back" in str(pair.consumer.failed["b.1"])


def test_the_producer_keeps_blocks_until_an_aborted_read_of_them_has_stopped(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = pair.produce("a.1", [1, 2])
    pair.begin_load("b.1", [3, 4], params)
    with monkeypatch.context() as patch:
        patch.setattr(pair.consumer.runtime._moves, "look", lambda: None)  # it has not ended yet
        pair.consumer.step()
    assert pair.consumer.runtime.abort("b.1")
    pair.producer.step()
    pair.producer.step()
    assert set(pair.producer.runtime.held()) == {"a.1"}
    pair.consumer.drain()
    pair.producer.drain()
    assert pair.producer.freed == [("a.1", (1, 2))]


def test_what_the_consumer_has_computed_itself_is_given_back_at_once(pair: Pair) -> None:
    params = pair.produce("a.1", [1, 2])
    request = pair.request("b.1", 2, params)
    assert pair.consumer.runtime.get_num_new_matched_tokens(request, 8) == (8, True)
    pair.consumer.runtime.update_state_after_alloc(request, [3, 4], 0)
    pair.producer.drain()
    assert pair.producer.freed == [("a.1", (1, 2))]


def test_engines_whose_blocks_differ_are_not_connected() -> None:
    pair = Pair(configs())
    other = Engine(pair.worker, configs()[1], [1], "split")
    try:
        with pytest.raises(ValueError, match="are not like those"):
            other.runtime.connect(pair.producer.runtime)
    finally:
        other.close()
        pair.close()


def test_an_engine_id_is_taken_once_in_a_process(pair: Pair) -> None:
    config = pair.producer.runtime.config
    with pytest.raises(ConfigError, match="has a shm engine"):
        KVRuntime(pair.worker, config, block_size=8, chips=[0])
    pair.producer.runtime.close()
    KVRuntime(pair.worker, config, block_size=8, chips=[0]).close()


@pytest.mark.parametrize("lease_s", [0, -1, "soon", True])
def test_a_lease_is_a_time(lease_s: Any) -> None:
    with pytest.raises(ConfigError, match="lease_s"):
        KVConnectorFactory.create_connector(
            configs(lease_s=lease_s)[0],
            KVConnectorRole.SCHEDULER,
            KVConnectorContext(1, 8, logging.getLogger("test")),
        )


@pytest.mark.parametrize("victim", ["producer", "consumer"])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_kill_at_any_point_of_a_hand_over_ends_both_sides(victim: str, steps: int) -> None:
    pair = Pair(configs(lease_s=0.05))
    try:
        params = [pair.produce(f"a.{n}", [2 * n, 2 * n + 1]) for n in range(4)]
        for n in range(4):
            pair.begin_load(f"b.{n}", [2 * n, 2 * n + 1], params[n])
        for _ in range(steps):
            pair.consumer.step()
        pair.worker.kill(getattr(pair, victim).chips[0])
        for n in range(4):
            pair.finish_load(f"b.{n}")
        pair.producer.drain()
        pair.consumer.drain()
        ended = pair.consumer.loaded | pair.consumer.failed.keys()
        assert ended == {f"b.{n}" for n in range(4)}
        assert pair.producer.runtime.held() == {}
        assert pair.consumer.runtime.held() == {}
    finally:
        pair.close()
