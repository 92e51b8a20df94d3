"""TR-2 and TR-4 over random programs: tasks, copies and transfers over the same bytes."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from run_parts import small_worker
from simpler import (
    IN,
    INOUT,
    CancelToken,
    MemoryRangeError,
    SimplerError,
    TransferRange,
    TransferRequest,
    TransferResult,
    Worker,
)
from transfers.transfer_parts import READ, WRITE, provider

if TYPE_CHECKING:
    import simpler

CELLS, CELL = 12, 64
NBYTES = CELLS * CELL
OPERATIONS = 120


def fold(request: TransferRequest, cancel: CancelToken) -> TransferResult:
    """Each range to be written becomes 5 times itself plus the sum of those read."""
    total = sum(int(r.array().astype(np.uint32).sum()) for r in request.ranges if r.access is READ)
    for written in request.ranges:
        if cancel.cancelled:
            return TransferResult.failed("cancelled before the next range")
        if written.access is WRITE:
            array = written.array()
            array[:] = (array.astype(np.uint32) * 5 + total).astype(np.uint8)
    return TransferResult.ok()


def mix(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
    target[:] = (target.astype(np.uint32) * 3 + int(source.astype(np.uint32).sum())).astype(np.uint8)


class Program:
    """A random program, and what it does when its parts run one after another."""

    def __init__(self, seed: int, worker: Worker) -> None:
        self.random = random.Random(seed)
        self.worker = worker
        self.kernel = worker.register(mix)
        self.memory = [worker.malloc(NBYTES, worker_id=chip) for chip in worker.worker_ids]
        self.model = [np.arange(NBYTES, dtype=np.uint32).astype(np.uint8) for _ in self.memory]
        for buffer, expected in zip(self.memory, self.model, strict=True):
            worker.copy_to(buffer, expected)
        self.runs: list[simpler.RunHandle] = []
        self.handles: list[simpler.TransferHandle] = []

    def part(self) -> tuple[int, int, int]:
        """(chip, begin, end): some bytes, often not whole cells."""
        begin = self.random.randrange(NBYTES - 1)
        return self.random.randrange(2), begin, min(NBYTES, begin + self.random.randint(1, 2 * CELL))

    def parts(self, count: int) -> list[tuple[int, int, int]]:
        """Some that do not overlap."""
        found: list[tuple[int, int, int]] = []
        while len(found) < count:
            chip, begin, end = self.part()
            if all(chip != c or end <= b or e <= begin for c, b, e in found):
                found.append((chip, begin, end))
        return found

    def task(self) -> None:
        source, target = self.parts(2)
        tags = [
            tag(self.memory[chip].tensor((end - begin,), "uint8", offset=begin))
            for tag, (chip, begin, end) in ((IN, source), (INOUT, target))
        ]
        chip = self.random.randrange(2)
        self.runs.append(
            self.worker.submit(lambda orch, args, config: orch.submit(self.kernel, *tags, worker=chip))
        )
        mix(self.view(source), self.view(target))

    def transfer(self) -> simpler.TransferHandle:
        parts = self.parts(self.random.randint(1, 4))
        reads = self.random.randint(0, len(parts) - 1)
        ranges = [
            TransferRange(self.memory[chip], READ if i < reads else WRITE, begin, end - begin)
            for i, (chip, begin, end) in enumerate(parts)
        ]
        handle = self.worker.submit_transfer("fold", ranges, worker_id=self.random.randrange(2))
        self.handles.append(handle)
        total = sum(int(self.view(one).astype(np.uint32).sum()) for one in parts[:reads])
        for one in parts[reads:]:
            view = self.view(one)
            view[:] = (view.astype(np.uint32) * 5 + total).astype(np.uint8)
        return handle

    def copy(self) -> None:
        chip, begin, end = self.part()
        data = self.random.randbytes(end - begin)
        self.worker.copy_to(self.memory[chip], data, dst_offset=begin)
        self.model[chip][begin:end] = np.frombuffer(data, np.uint8)

    def view(self, part: tuple[int, int, int]) -> np.ndarray[Any, Any]:
        chip, begin, end = part
        return self.model[chip][begin:end]


@pytest.mark.parametrize("seed", range(8))
def test_bytes_are_as_if_everything_had_run_in_the_order_submitted(seed: int) -> None:
    with provider("fold", fold), small_worker(device_ids=[0, 1]) as worker:
        program = Program(seed, worker)
        for _ in range(OPERATIONS):
            program.random.choice(
                [program.task, program.task, program.transfer, program.transfer, program.copy]
            )()
        assert all(run.wait(30) for run in program.runs)
        assert all(handle.result(30) == b"" for handle in program.handles)
        for buffer, expected in zip(program.memory, program.model, strict=True):
            seen = np.zeros(NBYTES, np.uint8)
            worker.copy_from(seen, buffer)
            np.testing.assert_array_equal(seen, expected)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_cancelled_or_killed_everything_ends_and_nothing_stays_pinned(seed: int) -> None:
    with provider("fold", fold), small_worker(device_ids=[0, 1]) as worker:
        for round_ in range(3):
            program = Program(seed * 10 + round_, worker)
            victim = program.random.randrange(2)
            fatal = program.random.randrange(OPERATIONS)
            for at in range(OPERATIONS):
                if at == fatal:
                    worker.kill(victim)
                try:
                    if program.random.random() < 0.4:
                        program.task()
                    elif program.random.random() < 0.3:
                        program.transfer().cancel()
                    else:
                        program.transfer()
                except SimplerError:  # lost memory, or bytes that a dead provider may still touch
                    continue
            worker.restart(victim)  # what waits for bytes that a dead provider may touch goes on now
            assert all(run.wait(30) for run in program.runs)
            assert all(handle.wait(30) for handle in program.handles)
            assert worker.unconfirmed_transfers() == []
            for buffer in program.memory:
                with contextlib.suppress(MemoryRangeError):  # lost
                    worker.free(buffer)
            assert [worker.committed_device_memory(chip) for chip in worker.worker_ids] == [0, 0]
