"""The books of requests against a model: blocks come back once, and never while something touches them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from simpler import RemoteError, WorkerDiedError, WorkerTimeoutError
from simpler.kv import KVRequest, KVRequestState
from simpler.kv.ledger import Record, RequestLedger
from simpler.kv.wire import Report

RANKS = 3
SIZE = 4
TIMEOUT_S = 10.0


class World:
    """What chips really do, beside what the ledger has been told."""

    def __init__(self, seed: int, policy: Any) -> None:
        self.rng = random.Random(seed)
        self.ledger = RequestLedger(
            [(rank,) for rank in range(RANKS)], SIZE, policy, TIMEOUT_S, self.on_failed
        )
        self.now = 0.0
        self.live = set(range(RANKS))
        # (request, rank, asynchronous, blocks): a load writes them
        self.touching: set[tuple[str, int, bool, tuple[int, ...]]] = set()
        self.reading: set[tuple[str, int]] = set()
        self.blocks: dict[str, set[int]] = {}  # not given back
        self.replaced: dict[str, set[int]] = {}  # those that their request does not use any more
        self.running: set[str] = set()
        self.ended: dict[str, str] = {}
        self.next = 0
        self.fresh = 0

    def on_failed(self, record: Record) -> bool:
        return self.sends(record.request.request_id)

    def sends(self, request_id: str) -> bool:
        if self.rng.random() < 0.3:
            self.reading |= {(request_id, rank) for rank in self.live}
            return True
        return False

    def take_blocks(self, count: int) -> list[int]:
        self.fresh += count
        return list(range(self.fresh - count, self.fresh))

    def begin(self) -> None:
        request_id = f"r{self.next}"
        self.next += 1
        count = self.rng.randint(1, 4)
        request, blocks = KVRequest(request_id, count * SIZE), self.take_blocks(count)
        self.ledger.note(request, 0, is_async=self.rng.random() < 0.5)
        self.ledger.allocate(request, blocks, self.rng.choice([0, count * SIZE]))
        self.blocks[request_id] = set(blocks)
        self.replaced[request_id] = set()
        self.running.add(request_id)

    def step(self) -> None:
        self.now += self.rng.choice([0.1, 1.0, TIMEOUT_S / 2])
        begun = self.ledger.start(self.now)
        for rank in sorted(self.live):
            self.rng.choice([self.answer] * 6 + [self.refuse, self.fall_silent, self.die])(rank, begun)
        self.ledger.expire(self.now)
        self.collect()

    def touch(self, rank: int, begun: list[Record]) -> None:
        self.touching |= {
            (record.request.request_id, rank, record.is_async, record.wanted)
            for record in begun
            if rank in record.loading
        }

    def answer(self, rank: int, begun: list[Record]) -> None:
        self.touch(rank, begun)
        self.touching = {access for access in self.touching if access[1] != rank or access[2]}
        done = [key for key, at, _, _ in sorted(self.touching) if at == rank and self.rng.random() < 0.5]
        sent = [key for key, at in sorted(self.reading) if at == rank and self.rng.random() < 0.5]
        bad = {}
        for key in done:
            if self.rng.random() < 0.3 and self.blocks.get(key):
                bad[self.rng.choice(sorted(self.blocks[key]))] = "torn"
        self.touching = {access for access in self.touching if access[1] != rank or access[0] not in done}
        self.reading -= {(key, rank) for key in sent}
        noise = [self.rng.choice(["nobody", *sorted(self.ended)])] if self.rng.random() < 0.2 else []
        noise = [
            key for key in noise if not any(key == access[0] for access in (*self.touching, *self.reading))
        ]
        self.ledger.report(rank, Report(1, (*sent, *noise), (*done, *noise), bad))

    def refuse(self, rank: int, begun: list[Record]) -> None:
        self.touch(rank, [record for record in begun if record.is_async])
        error = RemoteError(type_name="OSError", message="no", path=(rank,))
        self.ledger.step_failed(rank, begun, error)

    def fall_silent(self, rank: int, begun: list[Record]) -> None:
        started = self.rng.random() < 0.5
        if started:
            self.touch(rank, begun)
        self.ledger.step_failed(rank, begun, WorkerTimeoutError("slow", path=(rank,), started=started))

    def die(self, rank: int, begun: list[Record]) -> None:
        if len(self.live) == RANKS and self.rng.random() < 0.05:
            self.lose(rank)
        else:
            self.answer(rank, begun)

    def lose(self, rank: int) -> None:
        self.live.discard(rank)
        self.touching = {access for access in self.touching if access[1] != rank}
        self.reading = {access for access in self.reading if access[1] != rank}
        self.ledger.rank_lost(rank, WorkerDiedError("gone", path=(rank,)))

    def is_touched(self, request_id: str, blocks: set[int]) -> bool:
        """Whether a load writes some of the blocks, or a request that has ended is still read."""
        written = any(blocks & set(access[3]) for access in self.touching)
        read = any(key == request_id for key, _ in self.reading)
        return written or (read and not blocks <= self.replaced[request_id])

    def end(self) -> None:
        if not self.running:
            return
        request_id = self.rng.choice(sorted(self.running))
        self.running.discard(request_id)
        self.ended[request_id] = "finished"
        sends = self.sends(request_id)
        if not self.ledger.finish(self.ledger.records[request_id], sends=sends):
            blocks = self.blocks[request_id] - self.replaced[request_id]
            assert not self.is_touched(request_id, blocks)
            self.give_back(request_id, blocks)

    def give_back(self, request_id: str, blocks: set[int]) -> None:
        assert blocks <= self.blocks[request_id], f"{request_id}: {blocks} came back twice"
        self.blocks[request_id] -= blocks
        self.replaced[request_id] -= blocks

    def collect(self) -> None:
        output, told = self.ledger.take({})
        for request_id in output.failed:
            assert request_id in self.running
            self.running.discard(request_id)
            self.ended[request_id] = "failed"
        for request_id, answer in output.recompute.items():
            assert request_id in self.running
            assert set(answer.error.block_ids) <= self.blocks[request_id]
            if answer.replace:
                record = self.ledger.records[request_id]
                new = [*record.blocks, *self.take_blocks(len(answer.replace))]
                self.ledger.allocate(record.request, new, 0)
                self.blocks[request_id] |= set(new)
                self.replaced[request_id] |= set(answer.replace)
            else:
                assert not self.is_touched(request_id, self.blocks[request_id])
        for request_id in output.loaded:
            assert not self.is_touched(request_id, self.blocks[request_id])
            assert told is not None
            assert request_id in told.finished_recving
        for request_id, blocks in output.freed:
            assert not self.is_touched(request_id, set(blocks))
            self.give_back(request_id, set(blocks))

    def settle(self) -> None:
        """Everything answers from now on."""
        while self.running:
            self.end()
        for _ in range(3):
            self.ledger.start(self.now)
            for rank in sorted(self.live):
                done = tuple(access[0] for access in sorted(self.touching) if access[1] == rank)
                sent = tuple(key for key, at in sorted(self.reading) if at == rank)
                self.touching = {access for access in self.touching if access[1] != rank}
                self.reading = {access for access in self.reading if access[1] != rank}
                self.ledger.report(rank, Report(1, sent, done))
            self.collect()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_blocks_come_back_once_and_never_while_something_touches_them(policy: str) -> None:
    seen: set[str] = set()
    for seed in range(150):
        world = World(seed, policy)
        for _ in range(60):
            world.rng.choice([world.begin, world.step, world.step, world.end])()
        world.settle()
        assert {key: left for key, left in world.blocks.items() if left} == {}, f"seed {seed}"
        assert world.ledger.records == {}
        assert world.ledger.held() == {}
        assert world.ledger.quiet
        seen |= set(world.ended.values()) | {key for key, count in world.ledger.counters.items() if count}
    assert seen >= {"finished", "failed", "late", "unknown"}


def test_a_request_that_is_asked_about_while_it_loads_is_not_changed() -> None:
    ledger = RequestLedger([(0,)], SIZE, "fail", TIMEOUT_S, lambda _record: False)
    request = KVRequest("a", 8)
    ledger.note(request, 0, is_async=True)
    ledger.allocate(request, [1, 2], 8)
    ledger.start(0.0)
    ledger.note(request, 4, is_async=False)
    record = ledger.records["a"]
    assert (record.num_computed, record.is_async) == (0, True)
    ledger.report(0, Report(1, (), ("a",)))
    assert record.state is KVRequestState.READY
    assert not ledger.finish(record, sends=False)
    assert ledger.records == {}
