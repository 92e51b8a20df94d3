"""KV blocks on their way between chips: handing over, what a step costs, compute beside transfers."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import floor
from benchmarks.figures import OURS, Row, Target, measure
from benchmarks.sampling import Effort, sample
from simpler import (
    INOUT,
    Buffer,
    CancelToken,
    Tensor,
    TransferAccess,
    TransferHandle,
    TransferRange,
    TransferRequest,
    TransferResult,
    Worker,
    kv,
    register_transfer_provider,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.figures import Sampler

LAYERS, BLOCKS, BLOCK_BYTES = 32, 128, 16_384
TOTAL = LAYERS * BLOCKS * BLOCK_BYTES
BLOCK_TOKENS = 16
MEMCPY = "one memcpy"
ALONE = "the same task, no transfers"
_MIB = 1 << 20
_numbers = itertools.count()


def moves(effort: Effort) -> Iterator[Row]:
    """All rows that move blocks."""
    register_transfer_provider("benchmark-copy", _copy_until_told)
    kv.register()
    yield _hand_over(effort)
    yield _step(effort)
    yield _beside(effort)


def _hand_over(effort: Effort) -> Row:
    """From the moment the consumer knows of the blocks to the moment it may compute on all of them."""
    with Worker(device_ids=[0, 1]) as worker, contextlib.ExitStack() as open_:
        engines = [
            open_.enter_context(kv.KVRuntime(worker, config, block_size=BLOCK_TOKENS, chips=[chip]))
            for chip, config in enumerate(
                (
                    kv.KVTransferConfig("shm", "kv_producer", "benchmark-producer"),
                    kv.KVTransferConfig("shm", "kv_consumer", "benchmark-consumer"),
                )
            )
        ]
        for chip, engine in enumerate(engines):
            memory = worker.malloc(TOTAL, worker_id=chip)
            worker.copy_to(memory, np.full(TOTAL, chip, np.uint8))
            size = BLOCKS * BLOCK_BYTES
            engine.register_kv_caches(
                {
                    f"layer {n}": [memory.tensor((BLOCKS, BLOCK_BYTES), "uint8", offset=n * size)]
                    for n in range(LAYERS)
                }
            )
        engines[1].connect(engines[0])
        contenders: dict[str, Sampler] = {OURS: _hand_overs(effort, engines)}
        if not floor.missing():
            contenders[MEMCPY] = floor.memcpy("warm", TOTAL, effort.samples(20))
        return Row(
            f"{TOTAL // _MIB} MiB of KV blocks, {LAYERS} layers of {BLOCKS}, handed over by shm",
            "time",
            measure(contenders, effort.rounds(5)),
            Target(1.3, of=MEMCPY),
            skipped=floor.skipped(),
        )


def _hand_overs(effort: Effort, engines: list[kv.KVRuntime]) -> Sampler:
    producer, consumer = engines
    blocks = list(range(BLOCKS))
    tokens = BLOCKS * BLOCK_TOKENS

    def once() -> float:
        number = next(_numbers)
        source = kv.KVRequest(f"p{number}", tokens, kv_transfer_params={"do_remote_decode": True})
        producer.get_num_new_matched_tokens(source)
        producer.update_state_after_alloc(source, blocks)
        _, params = producer.request_finished(source)
        request = kv.KVRequest(f"d{number}", tokens, kv_transfer_params=params)
        start = time.perf_counter_ns()
        found, _ = consumer.get_num_new_matched_tokens(request)
        consumer.update_state_after_alloc(request, blocks, found or 0)
        loaded = consumer.drain().loaded
        taken = time.perf_counter_ns() - start
        if loaded != (request.request_id,):
            raise RuntimeError(f"not loaded: {request.request_id}")
        consumer.request_finished(request)
        consumer.drain()
        producer.drain()
        return float(taken)

    def take() -> list[float]:
        return [once() for _ in range(effort.samples(20))]

    return take


def _parts(memory: list[Buffer], layer: int) -> list[Tensor]:
    return [one.tensor((4, 1024), "uint8", offset=4096 * layer) for one in memory]


def _step(effort: Effort) -> Row:
    """A step in which nothing is to be done: the connector's hooks on 4 chips, and one broadcast."""
    chips = range(4)
    with Worker(device_ids=chips, hbm_bytes=16 * _MIB) as worker:
        config = kv.KVTransferConfig("shm", "kv_both", "benchmark-step")
        with kv.KVRuntime(worker, config, block_size=BLOCK_TOKENS) as engine:
            memory = [worker.malloc(8 * 4096, worker_id=chip) for chip in chips]
            engine.register_kv_caches({f"layer {n}": _parts(memory, n) for n in range(8)})
            step = sample("engine.step()", {"engine": engine}, effort.samples(5000), warm_up=200)
            return Row(
                "a step of an engine on 4 chips without anything to move, back to back",
                "time",
                measure({OURS: step}, effort.rounds(5)),
                Target(50_000),
            )


def _copy_until_told(request: TransferRequest, cancel: CancelToken) -> TransferResult:
    """Copies its first range to its second over and over, as many bytes a second as the payload says."""
    source, target = (part.array() for part in request.ranges)
    pause = source.nbytes / float(request.payload)
    due = time.monotonic()
    while not cancel.wait(max(0.0, due - time.monotonic())):
        np.copyto(target, source)
        due += pause
    return TransferResult.failed("told to stop")


def _work(values: np.ndarray[Any, Any], rounds: int) -> None:
    """Compute on a little memory that only this task touches."""
    for _ in range(rounds):
        np.multiply(values, values, out=values)


def _beside(effort: Effort) -> Row:
    """A task's time with and without transfers over other ranges of the same chip, 1 GB/s of copies."""
    with Worker(device_ids=[0]) as worker:
        kernel = worker.register(_work)
        memory = worker.malloc(_MIB)
        worker.copy_to(memory, np.zeros(_MIB, np.uint8))
        values = memory.tensor((_MIB // 4,), "float32")
        graph = worker.capture(lambda orch, _args, _config: orch.submit(kernel, INOUT(values), 60, worker=0))
        run = sample("graph.launch().result()", {"graph": graph}, effort.samples(60), warm_up=3)
        halves = worker.malloc(8 * _MIB)
        worker.copy_to(halves, np.zeros(8 * _MIB, np.uint8))

        def beside(sampler: Callable[[], Any]) -> Sampler:
            def take() -> Any:
                handle: TransferHandle = worker.submit_transfer(
                    "benchmark-copy",
                    [
                        TransferRange(halves, TransferAccess.READ, 0, 4 * _MIB),
                        TransferRange(halves, TransferAccess.WRITE, 4 * _MIB, 4 * _MIB),
                    ],
                    b"1e9",
                )
                try:
                    return sampler()
                finally:
                    handle.cancel()
                    handle.wait()

            return take

        return Row(
            "a task of 5 ms beside transfers of 1 GB/s over other ranges of the chip",
            "time",
            measure({OURS: beside(run), ALONE: run}, effort.rounds(7)),
            Target(1.05, of=ALONE),
        )
