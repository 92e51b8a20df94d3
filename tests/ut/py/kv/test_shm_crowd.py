"""Many requests, ended at random points, leave nothing held."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from kv.test_shm_connector import configs
from simpler.testing.kv_pair import BLOCKS, Engine, Pair

if TYPE_CHECKING:
    from simpler.kv import KVRequest


class Crowd:
    """A scheduler that hands requests over, and ends some of them before they are there."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair = pair
        self.rng = random.Random(seed)
        self.pools = {pair.producer: set(range(BLOCKS)), pair.consumer: set(range(BLOCKS))}
        self.offered: list[tuple[int, int, Any]] = []
        self.loading: dict[str, tuple[KVRequest, list[int]]] = {}

    def take(self, engine: Engine, count: int) -> list[int]:
        """Blocks that are free; none when there are too few."""
        pool = self.pools[engine]
        if len(pool) < count:
            return []
        blocks = self.rng.sample(sorted(pool), count)
        pool -= set(blocks)
        return blocks

    def produce(self, number: int) -> None:
        runtime = self.pair.producer.runtime
        if blocks := self.take(self.pair.producer, self.rng.randint(1, 3)):
            request = self.pair.request(f"a.{number}", len(blocks), {"do_remote_decode": True})
            runtime.update_state_after_alloc(request, blocks)
            self.offered.append((number, len(blocks), runtime.request_finished(request)[1]))

    def consume(self) -> None:
        engine = self.pair.consumer
        if not self.offered or len(self.pools[engine]) < self.offered[0][1]:
            return
        number, count, params = self.offered.pop(0)
        request = self.pair.request(f"b.{number}", count, params)
        matched, _ = engine.runtime.get_num_new_matched_tokens(request)
        if matched:
            blocks = self.take(engine, count)
            engine.runtime.update_state_after_alloc(request, blocks, matched)
            self.loading[request.request_id] = request, blocks

    def end(self, request_id: str) -> None:
        engine = self.pair.consumer
        request, blocks = self.loading.pop(request_id)
        if request_id not in engine.failed and not engine.runtime.request_finished(request)[0]:
            self.pools[engine].update(blocks)

    def step(self) -> None:
        for engine in self.pools:
            engine.step()
        ended = self.pair.consumer.loaded | self.pair.consumer.failed.keys()
        for request_id in [key for key in self.loading if key in ended]:
            self.end(request_id)
        self.give_back()

    def give_back(self) -> None:
        for engine, pool in self.pools.items():
            for _, blocks in engine.freed:
                assert not pool & set(blocks)
                pool.update(blocks)
            engine.freed.clear()

    def drain(self) -> None:
        for request_id in list(self.loading):
            self.end(request_id)
        for engine in (self.pair.consumer, self.pair.producer):
            engine.drain()
        self.give_back()


def test_a_thousand_requests_with_random_aborts_leave_nothing_held() -> None:
    pair = Pair(configs(lease_s=0.5))
    try:
        crowd = Crowd(pair, seed=5)
        for number in range(1000):
            crowd.produce(number)
            crowd.consume()
            if crowd.loading and crowd.rng.random() < 0.4:
                crowd.end(crowd.rng.choice(sorted(crowd.loading)))
            crowd.step()
        crowd.drain()
        assert {len(pool) for pool in crowd.pools.values()} == {BLOCKS}
        assert pair.consumer.runtime.held() == pair.producer.runtime.held() == {}
        assert pair.worker.unconfirmed_transfers() == []
        assert len(pair.consumer.loaded) > 100
    finally:
        pair.close()
