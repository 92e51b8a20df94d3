"""A client and a handler that were written for another runtime's extensions work as they are."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import simpler
from invariants.gate import Gate, gate_args, native
from kv.reference_client import FAILED, NAME, PIPE, JobResult, StoreClient, StoreError, handle
from registered import extension
from simpler import Tag, TaskArgs, Worker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BLOCK = 4096
BLOCKS = 8
DEVICES = (4, 6)
KEYS = [f"block {number}" for number in range(BLOCKS)]
DOCUMENT = Path(__file__).parents[4] / "docs" / "kv-extension-client.md"


class Rig:
    """Two chips with some memory each, and a client that broadcasts, as there was no other way to call."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.client = StoreClient(self.control(), DEVICES)
        self.buffers = [self.allocate(chip) for chip in worker.worker_ids]

    def control(self, **options: Any) -> Any:
        return functools.partial(self.worker.run_chip_control_extension, **options)

    def allocate(self, chip: int) -> simpler.Buffer:
        """Memory of a chip that its store may use, for as long as it does."""
        buffer = self.worker.malloc(BLOCKS * BLOCK, worker_id=chip)
        buffer.pin("kv store")
        self.client.register(DEVICES[chip], [(buffer.address, buffer.nbytes)])
        return buffer

    def fill(self, chip: int, seed: int) -> bytes:
        data = np.random.default_rng(seed).bytes(BLOCKS * BLOCK)
        self.worker.copy_to(self.buffers[chip], data)
        return data

    def memory(self, chip: int) -> bytes:
        data = bytearray(BLOCKS * BLOCK)
        self.worker.copy_from(data, self.buffers[chip])
        return bytes(data)

    def parts(self, chip: int, keys: Sequence[str] = KEYS) -> list[tuple[str, int, int]]:
        address = self.buffers[chip].address
        return [(key, address + at * BLOCK, BLOCK) for at, key in enumerate(keys)]

    def alone(self, chip: int) -> StoreClient:
        """A client that calls one chip, whose store may use what it did."""
        client = StoreClient(self.control(worker_id=chip), [DEVICES[chip]])
        client.register(DEVICES[chip], [(self.buffers[chip].address, self.buffers[chip].nbytes)])
        return client

    def hold(self, pipe: Pipe, chip: int = 0, job: str = "held") -> None:
        """Begin a load that goes on until the pipe ends."""
        self.client.load(job, DEVICES[chip], [(f"{PIPE}{pipe.path}", self.buffers[chip].address, BLOCK)])
        pipe.connect()


class Pipe:
    """What a load reads from; the test writes it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "pipe"
        os.mkfifo(self.path)
        self._descriptor = -1

    def connect(self) -> None:
        """Return when the load has begun."""
        self._descriptor = os.open(self.path, os.O_WRONLY)

    def write(self, data: bytes) -> None:
        assert os.write(self._descriptor, data) == len(data)

    def end(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    made = Pipe(tmp_path)
    yield made
    made.end()


@contextlib.contextmanager
def rig(*, concurrent: bool = True) -> Iterator[Rig]:
    with (
        extension(NAME, handle, concurrent=concurrent),
        Worker(
            level=3, device_ids=DEVICES, hbm_bytes=1 << 20, heap_bytes=1 << 20, control_timeout_s=20.0
        ) as worker,
    ):
        made = Rig(worker)
        try:
            yield made
        finally:
            made.client.close()


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_cache_is_saved_and_loaded_byte_for_byte(concurrent: bool) -> None:
    with rig(concurrent=concurrent) as made:
        data = [made.fill(chip, chip) for chip in (0, 1)]
        for chip in (0, 1):
            made.client.save(f"save {chip}", DEVICES[chip], made.parts(chip))
        for chip, result in enumerate(made.client.wait_all(["save 0", "save 1"])):
            assert result == JobResult(BLOCKS * BLOCK, zlib.crc32(data[chip]))
            made.worker.copy_to(made.buffers[chip], bytes(BLOCKS * BLOCK))
        for chip in (0, 1):  # the blocks come back in another order
            made.client.load(f"load {chip}", DEVICES[chip], made.parts(chip, KEYS[::-1]))
        results = made.client.wait_all(["load 0", "load 1"])
        for chip in (0, 1):
            blocks = [data[chip][at : at + BLOCK] for at in range(0, BLOCKS * BLOCK, BLOCK)]
            turned = b"".join(blocks[::-1])
            assert made.memory(chip) == turned
            assert results[chip] == JobResult(BLOCKS * BLOCK, zlib.crc32(turned))


def test_stores_of_two_chips_are_apart() -> None:
    with rig() as made:
        made.client.save("save", DEVICES[0], made.parts(0))
        made.client.wait("save")
        made.client.load("load", DEVICES[1], made.parts(1))
        with pytest.raises(StoreError, match="the store has no block 0"):
            made.client.wait("load")


@pytest.mark.parametrize("concurrent", [False, True])
def test_closing_twice_does_no_harm_and_a_store_begins_anew(concurrent: bool) -> None:
    with rig(concurrent=concurrent) as made:
        made.client.save("save", DEVICES[0], made.parts(0))
        made.client.wait("save")
        made.client.close()
        made.client.close()
        with pytest.raises(StoreError, match="the store of device 4 is not initialised"):
            made.client.is_done("save")
        made.client = StoreClient(made.control(), DEVICES)
        with pytest.raises(StoreError, match="no registered range has 4096 bytes"):
            made.client.load("load", DEVICES[0], made.parts(0))


@pytest.mark.parametrize("options", [{}, {"worker_id": 1}], ids=["broadcast", "directed"])
def test_the_client_finds_its_text_in_an_error(options: dict[str, Any]) -> None:
    with rig() as made:
        client = StoreClient(made.control(**options), DEVICES[1:])
        client.register(DEVICES[1], [(made.buffers[1].address, BLOCK)])
        client.load("load", DEVICES[1], made.parts(1, ["nothing"]))
        with pytest.raises(StoreError, match=r"^the store has no nothing") as caught:
            client.wait("load")
        assert isinstance(caught.value.__cause__, simpler.SimplerError)
        with pytest.raises(StoreError, match="job load is known already"):
            client.load("load", DEVICES[1], made.parts(1, ["nothing"]))
        client.close()


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_failure_of_ten_kilobytes_arrives_whole(concurrent: bool) -> None:
    key = "".join(map(str, range(2700)))
    key += "é" * (10_000 - len(key))
    with rig(concurrent=concurrent) as made:
        client = made.alone(0)
        client.load("load", DEVICES[0], made.parts(0, [key]))
        with pytest.raises(StoreError) as told:
            client.wait("load")
        assert str(told.value) == f"the store has no {key}"
        assert str(told.value.__cause__).endswith(f"{FAILED}the store has no {key}")
        client.close()


def test_a_cancelled_load_stops_in_the_middle_and_says_so(pipe: Pipe) -> None:
    with rig() as made:
        made.worker.copy_to(made.buffers[0], bytes([7]) * (BLOCKS * BLOCK))
        made.hold(pipe)
        pipe.write(bytes([1]) * 1000)
        made.client.cancel("held")
        with contextlib.suppress(BrokenPipeError):  # it may have seen that before it waited for more
            pipe.write(bytes([2]) * 1000)
        pipe.end()
        with pytest.raises(StoreError, match=r"^cancelled$"):
            made.client.wait("held")
        assert made.memory(0)[1000:] == bytes([7]) * (BLOCKS * BLOCK - 1000)
        made.client.save("next", DEVICES[0], made.parts(0))
        assert made.client.wait("next").nbytes == BLOCKS * BLOCK


# Beside runs

THREADS = 4
POLLS = 25


def poll_from_threads(made: Rig, polls: int) -> int:
    """How many polls of a load that goes on are answered."""
    with ThreadPoolExecutor(THREADS) as pool:
        done = list(pool.map(lambda _n: made.client.is_done("held"), range(polls)))
    assert not any(done)
    return len(done)


def test_polls_from_threads_are_answered_while_a_native_kernel_runs(tmp_path: Path, pipe: Pipe) -> None:
    gates = [Gate(tmp_path / f"gate{chip}") for chip in (0, 1)]
    with rig() as made, contextlib.ExitStack() as open_gates:
        kernel = made.worker.register(native("wait_at_gate"))

        def step(orch: simpler.Orchestrator, _args: object, _config: object) -> None:
            for chip, gate in enumerate(gates):
                orch.submit_next_level(kernel, gate_args(made.worker, gate), worker=chip)

        run = made.worker.submit(step)
        for gate in gates:
            open_gates.enter_context(gate)
        made.hold(pipe)
        answered = poll_from_threads(made, THREADS * POLLS)
        made.client.save("save", DEVICES[1], made.parts(1))
        assert made.client.wait("save").nbytes == BLOCKS * BLOCK
        assert not run.done()
        assert answered == THREADS * POLLS
        pipe.write(bytes(BLOCK))
        pipe.end()
        assert made.client.wait("held").nbytes == BLOCK
        open_gates.close()
        run.result(20)


def count_until(stop: np.ndarray[Any, Any]) -> int:
    """Holds the GIL as Python does, until it is told to stop."""
    count = 0
    while not stop[0]:
        count += 1
    return count


def test_polls_from_threads_are_answered_while_python_kernels_run(pipe: Pipe) -> None:
    with rig() as made:
        kernel = made.worker.register(count_until)
        stop = made.worker.create_buffer(8)
        stops = stop.array((1,), "int64")

        def step(orch: simpler.Orchestrator, _args: object, _config: object) -> list[int]:
            args = TaskArgs().add_tensor(stop.tensor((1,), "int64"), Tag.NO_DEP)
            tasks = [orch.submit_next_level(kernel, args, worker=chip) for chip in (0, 1)]
            made.hold(pipe)
            answered = poll_from_threads(made, THREADS * POLLS)
            assert not any(task.done() for task in tasks)
            stops[0] = 1
            assert answered == THREADS * POLLS
            return [task.result() for task in tasks]

        assert min(made.worker.run(step, timeout_s=100)) > 0
        pipe.end()


def test_an_exclusive_handler_waits_for_its_turn_or_is_withdrawn(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    with rig(concurrent=False) as made:
        hasty = StoreClient(made.control(worker_id=0, timeout_s=0.2), DEVICES[:1])
        kernel = made.worker.register(native("wait_at_gate"))
        args = gate_args(made.worker, gate)

        def step(orch: simpler.Orchestrator, given: TaskArgs, _config: object) -> None:
            orch.submit_next_level(kernel, given, worker=0)

        run = made.worker.submit(step, args)
        with gate, ThreadPoolExecutor(1) as pool:
            with pytest.raises(RuntimeError, match=NAME) as caught:
                hasty.save("hasty", DEVICES[0], made.parts(0))
            assert isinstance(caught.value, simpler.WorkerTimeoutError)
            assert not caught.value.started
            patient = pool.submit(made.client.save, "patient", DEVICES[0], made.parts(0))
            assert not patient.done()
            gate.open()
            patient.result(20)
        run.result(20)
        assert made.client.wait("patient").nbytes == BLOCKS * BLOCK
        with pytest.raises(StoreError, match="unknown job hasty"):
            hasty.is_done("hasty")  # what was withdrawn never ran
        hasty.close()


# Deaths


def test_a_chip_that_dies_between_load_and_poll_says_how_and_the_other_goes_on(pipe: Pipe) -> None:
    with rig() as made:
        here, there = made.alone(0), made.alone(1)
        data = made.fill(0, 5)
        here.save("save", DEVICES[0], made.parts(0))
        there.load("held", DEVICES[1], [(f"{PIPE}{pipe.path}", made.buffers[1].address, BLOCK)])
        pipe.connect()
        os.kill(made.worker.status()[1].pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"chip 1 \(device 6.*SIGKILL") as caught:
            there.wait("held")
        assert isinstance(caught.value, simpler.WorkerDiedError)
        assert here.wait("save") == JobResult(BLOCKS * BLOCK, zlib.crc32(data))
        made.worker.restart(1)
        with pytest.raises(StoreError, match="the store of device 6 is not initialised"):
            there.is_done("held")
        there.close()
        assert made.buffers[1].freed
        again = StoreClient(made.control(worker_id=1), DEVICES[1:])
        made.buffers[1] = made.allocate(1)
        again.register(DEVICES[1], [(made.buffers[1].address, made.buffers[1].nbytes)])
        data = made.fill(1, 6)
        again.save("save", DEVICES[1], made.parts(1))
        again.wait("save")
        made.worker.copy_to(made.buffers[1], bytes(BLOCKS * BLOCK))
        again.load("load", DEVICES[1], made.parts(1))
        again.wait("load")
        assert made.memory(1) == data
        again.close()
        here.close()


# The document


def test_the_program_of_the_document_runs_and_prints_what_the_document_says(tmp_path: Path) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    program, printed = (
        re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        for language in ("python", "text")
    )
    path = tmp_path / "program.py"
    path.write_text("\n".join(program), encoding="utf-8")
    ended = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == printed[0]
