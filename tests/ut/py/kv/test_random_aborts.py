"""Requests are aborted at every point of their lives: each block comes back once, none stays pinned."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import simpler
from simpler import kv
from simpler.kv import wire
from simpler.kv.connectors.shm import ShmConnector

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

MOST_REQUESTS = 1000
REQUESTS = 100 if os.environ.get("SIMPLER_ASAN") else MOST_REQUESTS
BLOCK_SIZE = 4
BLOCKS = 24
BLOCK_BYTES = 64
LAYERS = ("k", "v")
PRODUCER, CONSUMER = 0, 1
MOODS = ("half", "deaf", "open", "lost")
STAGES = ("never", "asked", "allocated", "stepped", "later")
FREE = bytes([0xF5]) * BLOCK_BYTES
"""What is in blocks that nobody has."""
WATCHDOG_S = 60.0


class MoodyConnector(ShmConnector):
    """The connector ``shm``, some of whose transfers stay in the middle until their request is aborted.

    The first word of the request's id says what comes then: ``half`` stops, ``deaf`` copies the rest all the
    same, ``open`` says nothing and certifies later, ``lost`` certifies nothing before the engine is reset.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._asked: set[str] = set()

    def run_transfer(self, job: kv.KVTransferJob, cancel: simpler.CancelToken) -> None:
        mood = job.request_id.partition(".")[0]
        if mood not in MOODS:
            super().run_transfer(job, cancel)
            return
        for at, (source, target) in enumerate(zip(job.sources, job.targets, strict=True)):
            if at == 1 or mood == "deaf":
                cancel.wait()
            if at == 1 and mood == "half":
                raise kv.KVTransferError("stopped in the middle")
            np.copyto(target.array(), source.array())
        if mood != "deaf":
            raise TimeoutError("the peer says nothing")

    def confirm_transfers(self, request_ids: Sequence[str]) -> Collection[str]:
        known = [key for key in request_ids if key in self._asked and key.startswith("open")]
        self._asked.update(request_ids)
        return known

    def reset_transfers(self) -> None:
        self._asked.clear()


class Allocator:
    """A scheduler's blocks: each is free, or has one owner."""

    def __init__(self) -> None:
        self.free = list(range(BLOCKS))
        self.owners: dict[int, str] = {}

    def take(self, rng: random.Random, count: int, owner: str) -> list[int]:
        rng.shuffle(self.free)
        blocks, self.free = self.free[:count], self.free[count:]
        assert len(blocks) == count
        self.owners.update(dict.fromkeys(blocks, owner))
        return blocks

    def give_back(self, owner: str, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self.owners.pop(block, "nobody") == owner
            self.free.append(block)


class Side:
    """One engine on one chip, and its scheduler's view of the blocks."""

    def __init__(self, worker: simpler.Worker, chip: int, runtime: kv.KVRuntime) -> None:
        self.worker = worker
        self.runtime = runtime
        self.blocks = Allocator()
        self.buffers = [worker.malloc(BLOCKS * BLOCK_BYTES, worker_id=chip) for _ in LAYERS]
        self.caches = [buffer.tensor((BLOCKS, BLOCK_BYTES), "uint8") for buffer in self.buffers]
        for buffer in self.buffers:
            worker.copy_to(buffer, FREE * BLOCKS)
        runtime.register_kv_caches(dict(zip(LAYERS, self.caches, strict=True)))

    def write(self, block: int, data: Sequence[bytes]) -> None:
        for cache, part in zip(self.caches, data, strict=True):
            self.worker.copy_to(cache[block], part)

    def read(self, block: int) -> list[bytes]:
        parts = [bytearray(BLOCK_BYTES) for _ in LAYERS]
        for cache, part in zip(self.caches, parts, strict=True):
            self.worker.copy_from(part, cache[block])
        return [bytes(part) for part in parts]

    def take(self, rng: random.Random, count: int, owner: str) -> list[int]:
        """Blocks that nobody has written since they came back."""
        blocks = self.blocks.take(rng, count, owner)
        for block in blocks:
            assert self.read(block) == [FREE, FREE]
        return blocks

    def give_back(self, owner: str, blocks: Sequence[int], *, is_alive: bool = True) -> None:
        """REQUIRES: nothing touches them any more, or the writing fails."""
        self.blocks.give_back(owner, blocks)
        for block in blocks if is_alive else ():
            self.write(block, [FREE, FREE])

    def close(self) -> None:
        self.runtime.close()
        for buffer in self.buffers:
            if not buffer.freed:
                self.worker.free(buffer)  # refused while anything is pinned


@dataclass
class Offer:
    """Blocks that the producer holds for a reader."""

    request_id: str
    params: dict[str, Any]
    data: list[list[bytes]]


@dataclass
class Load:
    """A request of the consumer that has blocks."""

    request: kv.KVRequest
    blocks: list[int]
    data: list[list[bytes]]
    stage: str
    age: int = 0


class Storm:
    """Random requests through two engines."""

    def __init__(self, worker: simpler.Worker, seed: int, name: str, policy: Any = "fail") -> None:
        self.worker = worker
        self.rng = random.Random(seed)
        self.producer = Side(worker, PRODUCER, make_runtime(worker, PRODUCER, "producer", name))
        self.consumer = Side(worker, CONSUMER, make_runtime(worker, CONSUMER, "consumer", name, policy))
        self.consumer.runtime.connect(self.producer.runtime)
        self.ahead_s = 0.0
        leases: Any = self.producer.runtime.connector
        leases.leases._clock = lambda: time.monotonic() + self.ahead_s
        self.offers: list[Offer] = []
        self.held: dict[str, list[int]] = {}  # of the producer
        self.loads: dict[str, Load] = {}
        self.ended: dict[str, list[int]] = {}  # of the consumer: aborted or failed, blocks not back yet
        self.count = 0
        self.seen: Counter[str] = Counter()
        self.dead: set[int] = set()

    # The producer

    def produce(self) -> None:
        """A few requests, some of which are aborted before they have been computed."""
        made: list[tuple[kv.KVRequest, list[int]]] = []
        for _ in range(self.rng.randint(1, 3)):
            size = self.rng.randint(1, 4)
            if size > len(self.producer.blocks.free):
                break
            self.count += 1
            request = kv.KVRequest(
                f"p.{self.count}", size * BLOCK_SIZE, kv_transfer_params={"do_remote_decode": True}
            )
            assert self.producer.runtime.get_num_new_matched_tokens(request) == (0, False)
            if self.maybe_abort(self.producer, request, [], "producer asked"):
                continue
            blocks = self.producer.take(self.rng, size, request.request_id)
            self.producer.runtime.update_state_after_alloc(request, blocks, 0)
            if not self.maybe_abort(self.producer, request, blocks, "producer allocated"):
                made.append((request, blocks))
        self.step_producer({request.request_id: request.num_tokens for request, _ in made})
        computed = [made.pop() for _ in range(len(made))]
        for request, blocks in computed:
            if not self.maybe_abort(self.producer, request, blocks, "producer stepped"):
                made.append((request, blocks))
        self.offer(made)

    def offer(self, made: Sequence[tuple[kv.KVRequest, list[int]]]) -> None:
        for request, blocks in made:
            data = [[self.rng.randbytes(BLOCK_BYTES) for _ in LAYERS] for _ in blocks]
            for block, parts in zip(blocks, data, strict=True):
                self.producer.write(block, parts)
            is_held, params = self.producer.runtime.request_finished(request)
            assert is_held
            assert params is not None
            self.held[request.request_id] = blocks
            self.offers.append(Offer(request.request_id, params, data))
            if self.rng.random() < 0.05:
                assert self.producer.runtime.abort(
                    request.request_id
                )  # it has ended, and comes back by a step
                self.seen["producer ended"] += 1

    def maybe_abort(self, side: Side, request: kv.KVRequest, blocks: list[int], stage: str) -> bool:
        if self.rng.random() > 0.06:
            return False
        self.seen[stage] += 1
        assert not side.runtime.abort(request.request_id)
        side.give_back(request.request_id, blocks)
        return True

    def step_producer(self, scheduled: dict[str, int] | None = None) -> None:
        output = self.producer.runtime.step(scheduled)
        assert not output.loaded
        assert not output.recompute
        assert not output.failed or PRODUCER in self.dead
        for request_id, blocks in output.freed:
            assert list(blocks) == self.held.pop(request_id)
            self.producer.give_back(request_id, blocks, is_alive=PRODUCER not in self.dead)

    # The consumer

    def begin(self) -> None:
        """The consumer asks for an offer, or nobody ever does."""
        if not self.offers:
            return
        offer = self.offers[self.rng.randrange(len(self.offers))]
        size = len(offer.data)
        if size > len(self.consumer.blocks.free):
            return
        self.offers.remove(offer)
        if self.rng.random() < 0.02:
            self.seen["never read"] += 1
            return
        stage = self.rng.choice(STAGES)
        is_moody = stage in ("stepped", "later") and self.rng.random() < 0.5
        mood = self.rng.choice(MOODS) if is_moody else "plain"
        request = kv.KVRequest(
            f"{mood}.{offer.request_id}", size * BLOCK_SIZE, kv_transfer_params=offer.params
        )
        matched, _ = self.consumer.runtime.get_num_new_matched_tokens(request)
        assert matched in (0, size * BLOCK_SIZE)
        if not matched or stage == "asked":
            self.seen["asked" if matched else "taken back before"] += 1
            assert not self.consumer.runtime.abort(request.request_id)
            return
        blocks = self.consumer.take(self.rng, size, request.request_id)
        self.consumer.runtime.update_state_after_alloc(request, blocks, matched)
        self.loads[request.request_id] = Load(request, blocks, offer.data, stage)
        if stage == "allocated":
            self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        load = self.loads.pop(request_id)
        mood = request_id.partition(".")[0]
        self.seen[f"aborted {self.consumer.runtime.state(request_id)}"] += 1
        self.seen[mood] += 1
        if self.consumer.runtime.abort(request_id):
            self.ended[request_id] = load.blocks
        else:
            assert mood == "plain" or load.stage == "allocated" or CONSUMER in self.dead
            self.consumer.give_back(request_id, load.blocks, is_alive=CONSUMER not in self.dead)
        if self.rng.random() < 0.5:
            self.seen["aborted twice"] += 1
            assert self.consumer.runtime.abort(request_id)  # the scheduler gets nothing to give back again

    def step_consumer(self) -> None:
        output = self.consumer.runtime.step()
        for request_id in output.loaded:
            self.check(self.loads[request_id])
        for request_id, answer in output.recompute.items():
            self.recompute(self.loads[request_id], answer)
        for request_id in output.failed:
            self.seen["failed"] += 1
            self.ended[request_id] = self.loads.pop(request_id).blocks
        for request_id, blocks in output.freed:
            assert list(blocks) == self.ended.pop(request_id)
            self.consumer.give_back(request_id, blocks, is_alive=CONSUMER not in self.dead)
        for request_id, load in list(self.loads.items()):
            load.age += 1
            if load.stage == "stepped" or (load.stage == "later" and self.rng.random() < 0.3):
                self.abort(request_id)

    def check(self, load: Load) -> None:
        """What was loaded is what was computed."""
        self.seen["loaded"] += 1
        for block, parts in zip(load.blocks, load.data, strict=True):
            assert self.consumer.read(block) == parts
        if load.stage == "never":
            self.finish(load)

    def recompute(self, load: Load, answer: kv.KVRecompute) -> None:
        """Compute what was not loaded; nothing may still write it, since the load has ended."""
        self.seen["recomputed"] += 1
        assert answer.replace == ()
        for block in load.blocks[answer.num_computed_tokens // BLOCK_SIZE :]:
            self.consumer.write(block, [bytes(BLOCK_BYTES)] * 2)
        self.finish(load)

    def finish(self, load: Load) -> None:
        del self.loads[load.request.request_id]
        assert self.consumer.runtime.request_finished(load.request) == (False, None)
        self.consumer.give_back(load.request.request_id, load.blocks)

    # Both

    def tick(self) -> None:
        if len(self.offers) < 6:
            self.produce()
        for _ in range(self.rng.randint(0, 3)):
            self.begin()
        if self.rng.random() < 0.03 and not self.worker.unconfirmed_transfers():
            self.lapse()
        self.step_consumer()
        self.step_producer()

    def lapse(self) -> None:
        """All leases end, also of blocks that are being read, once nothing stays in the middle."""
        moody = [key for key in (*self.loads, *self.ended) if key.partition(".")[0] in MOODS]
        if not moody:
            self.seen["lapsed"] += 1
            self.ahead_s += 60
            self.step_producer()

    def settle(self) -> None:
        """Give up all that is left, and wait for all blocks."""
        for request_id in list(self.loads):
            self.abort(request_id)
        deadline = time.monotonic() + WATCHDOG_S
        while self.ended or self.held:
            assert time.monotonic() < deadline, (self.consumer.runtime.held(), self.producer.runtime.held())
            if CONSUMER not in self.dead and self.worker.unconfirmed_transfers():
                self.worker.reset_provider(wire.EXTENSION, worker_id=CONSUMER)
            self.step_consumer()
            if not self.ended:
                self.ahead_s += 60  # what nobody reads
            self.step_producer()

    def assert_clean(self) -> None:
        """All blocks are back, and no request is known."""
        for side in (self.producer, self.consumer):
            assert side.runtime.held() == {}
            assert side.blocks.owners == {}
            assert sorted(side.blocks.free) == list(range(BLOCKS))
            assert side.runtime._ledger.records == {}
            assert side.runtime._moves.count == 0
        assert self.worker.unconfirmed_transfers() == []

    def close(self) -> None:
        self.consumer.close()
        self.producer.close()


def make_runtime(
    worker: simpler.Worker, chip: int, role: str, name: str, policy: Any = "fail"
) -> kv.KVRuntime:
    kind: Any = f"kv_{role}"
    config = kv.KVTransferConfig("MoodyConnector", kind, f"{role} {name}", {}, __name__, policy)
    return kv.KVRuntime(
        worker, config, block_size=BLOCK_SIZE, chips=[chip], max_unconfirmed_bytes=20 * BLOCK_BYTES
    )


@contextlib.contextmanager
def two_chips() -> Iterator[simpler.Worker]:
    """A Worker of which nothing is left but its memory accounts, which are empty at the end."""
    kv.register()
    with simpler.Worker(
        device_ids=[0, 1], hbm_bytes=1 << 20, heap_bytes=1 << 20, control_timeout_s=20.0
    ) as worker:
        yield worker
        assert [worker.committed_device_memory(chip) for chip in worker.worker_ids] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "policy"), [(1, "fail"), (2, "fail"), (3, "recompute")])
def test_a_thousand_requests_with_random_aborts_leave_nothing(seed: int, policy: str) -> None:
    with two_chips() as worker:
        storm = Storm(worker, seed, f"aborts {seed}", policy)
        while storm.count < REQUESTS:
            storm.tick()
        storm.settle()
        storm.assert_clean()
        for runtime in (storm.producer.runtime, storm.consumer.runtime):
            stats = runtime.stats()
            assert (stats["unknown"], stats["duplicate"], stats["save_errors"]) == (0, 0, 0)
        storm.close()
        assert storm.seen["loaded"] > REQUESTS / 10, storm.seen
        expected = {*MOODS, "asked", "aborted twice", "producer allocated", "producer ended"}
        expected |= {f"aborted {kv.KVRequestState[state]}" for state in ("PENDING", "LOADING", "READY")}
        if REQUESTS == MOST_REQUESTS:  # fewer do not come to everything
            assert expected <= storm.seen.keys()


@pytest.mark.parametrize("victim", [PRODUCER, CONSUMER], ids=["producer", "consumer"])
@pytest.mark.parametrize("seed", range(4))
def test_after_kill_9_in_the_middle_every_request_ends_and_nothing_stays_pinned(
    victim: int, seed: int
) -> None:
    with two_chips() as worker:
        storm = Storm(worker, seed, f"kill {victim} {seed}")
        while storm.count < 40 + 5 * seed or not storm.loads:
            storm.tick()
        os.kill(worker.status()[victim].pid, signal.SIGKILL)
        storm.dead.add(victim)
        for _ in range(3):
            storm.step_consumer()
            storm.step_producer()
        storm.settle()
        storm.assert_clean()
        if victim == CONSUMER:
            assert storm.seen["failed"]
        storm.close()
        worker.restart(victim)
        again = Storm(worker, seed, f"again {victim} {seed}")
        while again.count < 20:
            again.tick()
        again.settle()
        again.assert_clean()
        again.close()
