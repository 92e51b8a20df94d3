"""Random task graphs whose workers are killed, or which are cancelled, at random moments."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import simpler
from simpler import IN, INOUT, OUT, Orchestrator, TaskArgs, TaskHandle, Worker

if TYPE_CHECKING:
    from collections.abc import Callable

GRAPHS = 200
TASKS = 40
WATCHDOG_S = 60.0
SOURCE = r"""
#include <simpler/kernel.h>
#include <time.h>
int nap(const simpler_kernel_args *a) {
  struct timespec t = {0, a->scalars[0].v.i * 1000};
  nanosleep(&t, 0);
  return 0;
}
int bad(const simpler_kernel_args *a) { (void)a; return 1; }
"""


def nap(microseconds: int) -> int:
    time.sleep(microseconds * 1e-6)  # the work itself, in the child: nothing waits by it
    return microseconds


class Graphs:
    """Makes orchestration functions of random tasks over random parts of shared buffers."""

    def __init__(self, worker: Worker, seed: int) -> None:
        self.worker = worker
        self.random = random.Random(seed)
        self.nap, self.bad = (worker.register(simpler.compile_kernel(SOURCE, n)) for n in ("nap", "bad"))
        self.sub = worker.register(nap, name="sub")

    def buffers(self) -> list[simpler.Buffer | simpler.HostBuffer]:
        device = [self.worker.malloc(256, worker_id=chip % 2) for chip in range(4)]
        return [*device, *(self.worker.create_buffer(256) for _ in range(2))]

    def function(self, buffers: list[Any]) -> Callable[..., list[TaskHandle]]:
        return lambda orch, _args, _config: [self.task(orch, buffers) for _ in range(TASKS)]

    def task(self, orch: Orchestrator, buffers: list[Any]) -> TaskHandle:
        draw, chip = self.random, self.random.randrange(2)
        parts = []
        for buffer in draw.sample(buffers, 2):
            part = buffer.tensor((draw.randrange(1, 56),), "uint8", offset=draw.randrange(200))
            parts.append(draw.choice([IN, OUT, INOUT])(part))
        kind, us = draw.random(), draw.randrange(200)
        if kind < 0.7:
            return orch.submit(self.nap, us, *parts, worker=chip)
        if kind < 0.72:
            return orch.submit(self.bad, *parts, worker=chip)
        if kind < 0.9:
            return orch.submit(self.sub, us)
        return orch.submit_next_level_group(self.nap, [TaskArgs().add_scalar(us)] * 2, workers=[0, 1])


def outcome(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except (simpler.TaskError, simpler.RunCancelledError) as error:
        return error
    return None


def check_blame(error: BaseException | None, harm: str, victim: int) -> None:
    """Only the worker that was killed is said to have died, and only a cancelled run to be cancelled."""
    if isinstance(error, simpler.RunCancelledError):
        assert harm == "cancel"
    elif isinstance(error, simpler.TaskError) and isinstance(error.cause, simpler.WorkerDiedError):
        assert (harm, error.path) == ("kill", (victim,))
    elif error is not None:
        assert isinstance(error, simpler.TaskError)
        assert error.callable == "bad"


def play(graphs: Graphs, harm: str, victim: int, moment_s: float) -> None:
    """One graph that is harmed once, somewhere in its life."""
    worker, buffers = graphs.worker, graphs.buffers()
    killer = threading.Timer(moment_s, worker.kill, [victim])
    if harm == "kill":
        killer.start()
    try:
        try:
            run = worker.submit(graphs.function(buffers))
        except simpler.MemoryRangeError:  # of a chip that died while the function ran
            assert harm == "kill"
            return
        if harm == "cancel":
            threading.Event().wait(moment_s)
            run.cancel()
        assert run.wait(WATCHDOG_S), "stuck"
        error = outcome(run.result)
        check_blame(error, harm, victim)
    finally:
        if harm == "kill":
            killer.join()
            worker.restart(victim)
        for buffer in buffers:
            if not buffer.freed:
                worker.free(buffer)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tg3_cp3_graphs_whose_workers_die_or_which_are_cancelled_end_and_leave_nothing() -> None:
    with Worker(device_ids=[0, 1], num_sub_workers=2, hbm_bytes=1 << 22, heap_bytes=1 << 22) as worker:
        graphs = Graphs(worker, seed=20)
        draw = random.Random(21)
        for _ in range(GRAPHS):
            harm = draw.choice(["kill", "cancel", "none"])
            play(graphs, harm, victim=draw.randrange(4), moment_s=draw.random() * 0.004)
            assert [worker.committed_device_memory(chip) for chip in (0, 1)] == [0, 0]
        good = worker.register(nap, name="good")
        assert worker.run(lambda orch, _a, _c: orch.submit(good, 7, worker=1).result()) == 7
