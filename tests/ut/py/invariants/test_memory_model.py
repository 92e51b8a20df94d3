"""Memory, copies and extension calls against a model: a dict of bytes for each buffer."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

import simpler
from invariants.nodes import node
from simpler import ControlOp

if TYPE_CHECKING:
    from typing import Any

CHIPS = 2
HBM_BYTES = 64 << 10
HEAP_BYTES = 64 << 10
ALIGNMENT = 256
PAGE_BYTES = 4096

sizes = st.sampled_from([1, 2, 255, 256, 257, 4095, 4096, 4097, 20_000, HBM_BYTES])
chips = st.integers(0, CHIPS - 1)
seeds = st.integers(0, 1 << 30)


def add_to_all(chip: simpler.ChipView, payload: bytes, _device: int) -> bytes:
    """Add a number to every byte of every buffer named; reply with their sums."""
    sums = []
    for view in chip.buffers:
        array = view.array()
        array += payload[0]
        sums.append(int(array.sum(dtype="uint64")))
    return ",".join(map(str, sums)).encode()


def count_calls(chip: simpler.ChipView, payload: bytes, _device: int) -> bytes:
    chip.state["calls"] = chip.state.get("calls", 0) + 1
    return b"%d" % chip.state["calls"] + payload


def rounded(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


class Memory(RuleBasedStateMachine):
    """Every operation on a real tree of two chips and on the model; they may never differ."""

    buffers = Bundle("buffers")
    dead = Bundle("dead")

    def __init__(self) -> None:
        super().__init__()
        simpler.register_chip_control_extension("add to all", add_to_all)
        simpler.register_chip_control_extension("count calls", count_calls)
        self.worker = node(
            device_ids=range(CHIPS), hbm_bytes=HBM_BYTES, heap_bytes=HEAP_BYTES, max_control_payload=16 << 10
        )
        self.worker.init()
        self.model: dict[Any, bytearray] = {}
        self.calls = [0] * CHIPS

    def teardown(self) -> None:
        self.worker.close()
        simpler.unregister_chip_control_extension("add to all")
        simpler.unregister_chip_control_extension("count calls")

    def fill(self, buffer: Any, seed: int) -> None:
        data = random.Random(seed).randbytes(buffer.nbytes)
        if isinstance(buffer, simpler.HostBuffer):
            memoryview(buffer)[:] = data
        else:
            self.worker.copy_to(buffer, data)
        self.model[buffer] = bytearray(data)

    def content(self, buffer: Any) -> bytes:
        if isinstance(buffer, simpler.HostBuffer):
            return bytes(memoryview(buffer))
        data = bytearray(buffer.nbytes)
        self.worker.copy_from(data, buffer)
        return bytes(data)

    def committed(self, chip: int) -> int:
        return sum(
            rounded(buffer.nbytes, ALIGNMENT)
            for buffer in self.model
            if isinstance(buffer, simpler.Buffer) and buffer.worker_id == chip
        )

    @rule(target=buffers, chip=chips, nbytes=sizes, seed=seeds)
    def malloc(self, chip: int, nbytes: int, seed: int) -> Any:
        try:
            buffer = self.worker.malloc(nbytes, worker_id=chip)
        except simpler.RemoteError as error:
            if error.type_name != "MemoryError":
                raise
            assert self.committed(chip) > 0  # it is full, or in pieces
            return multiple()
        assert self.committed(chip) + rounded(nbytes, ALIGNMENT) <= HBM_BYTES
        self.fill(buffer, seed)
        return buffer

    @rule(target=buffers, nbytes=sizes, seed=seeds)
    def create(self, nbytes: int, seed: int) -> Any:
        try:
            buffer = self.worker.create_buffer(nbytes)
        except simpler.BackPressureError:
            assert any(isinstance(other, simpler.HostBuffer) for other in self.model) or nbytes > HEAP_BYTES
            return multiple()
        self.fill(buffer, seed)
        return buffer

    @rule(target=dead, buffer=consumes(buffers))
    def free(self, buffer: Any) -> Any:
        if buffer in self.model:
            self.worker.free(buffer)
            del self.model[buffer]
            assert buffer.freed
        return buffer

    @rule(buffer=dead, other=buffers)
    def dead_memory_is_refused(self, buffer: Any, other: Any) -> None:
        with pytest.raises(simpler.MemoryRangeError):
            self.worker.free(buffer)
        call = self.worker.run_chip_control_extension
        with pytest.raises(simpler.MemoryRangeError):
            call("add to all", b"\1", worker_id=0, buffers=[other, buffer])
        if isinstance(buffer, simpler.Buffer):
            with pytest.raises(simpler.MemoryRangeError):
                self.worker.copy_to(buffer, b"x")
            with pytest.raises(simpler.MemoryRangeError):
                self.worker.copy_from(bytearray(1), buffer, nbytes=1)

    @rule(dst=buffers, src=buffers, data=st.data())
    def copy(self, dst: Any, src: Any, data: st.DataObject) -> None:
        if dst not in self.model or src not in self.model:
            return
        most = min(dst.nbytes, src.nbytes)
        nbytes = data.draw(st.integers(0, most))
        to = data.draw(st.integers(0, dst.nbytes - nbytes))
        of = data.draw(st.integers(0, src.nbytes - nbytes))
        options = {"dst_offset": to, "src_offset": of, "nbytes": nbytes}
        device = [isinstance(memory, simpler.Buffer) for memory in (dst, src)]
        copies = {
            (True, True): self.worker.copy,
            (True, False): self.worker.copy_to,
            (False, True): self.worker.copy_from,
        }
        if not any(device):
            return
        copies[device[0], device[1]](dst, src, **options)
        self.model[dst][to : to + nbytes] = bytes(self.model[src][of : of + nbytes])

    @rule(buffer=buffers, over=st.integers(1, 1000), data=st.data())
    def copy_past_the_end(self, buffer: Any, over: int, data: st.DataObject) -> None:
        if not isinstance(buffer, simpler.Buffer):
            return
        offset = data.draw(st.integers(0, buffer.nbytes))
        nbytes = buffer.nbytes - offset + over
        with pytest.raises(simpler.MemoryRangeError):
            self.worker.copy_to(buffer, bytes(nbytes), dst_offset=offset)
        with pytest.raises(simpler.MemoryRangeError):
            self.worker.copy_from(bytearray(nbytes), buffer, src_offset=offset)

    @rule(chip=chips, named=st.lists(buffers, max_size=4, unique_by=id), value=st.integers(0, 255))
    def extension_on_memory(self, chip: int, named: list[Any], value: int) -> None:
        if any(buffer not in self.model for buffer in named):
            return
        reply = self.worker.run_chip_control_extension(
            "add to all", bytes([value]), worker_id=chip, buffers=named
        )
        for buffer in named:
            self.model[buffer] = bytearray((byte + value) & 255 for byte in self.model[buffer])
        assert reply == ",".join(str(sum(self.model[buffer])) for buffer in named).encode()

    @rule(payload=st.binary(max_size=16 << 10), chip=st.one_of(st.none(), chips), submit=st.booleans())
    def extension(self, payload: bytes, chip: int | None, submit: bool) -> None:
        for called in range(CHIPS) if chip is None else [chip]:
            self.calls[called] += 1
        if submit:
            reply = self.worker.submit_chip_control_extension("count calls", payload, worker_id=chip).result(
                60
            )
        else:
            reply = self.worker.run_chip_control_extension("count calls", payload, worker_id=chip)
        expected = [b"%d" % calls + payload for calls in self.calls]
        assert reply == (expected if chip is None else expected[chip])

    @rule(chip=chips, payload=st.binary(max_size=200))
    def echo(self, chip: int, payload: bytes) -> None:
        assert self.worker.control_payload(chip, ControlOp.ECHO, payload) == payload

    @rule(chip=chips)
    def chip_dies_and_comes_back(self, chip: int) -> None:
        self.worker.kill(chip)
        self.worker.restart(chip)
        self.calls[chip] = 0
        for buffer in [b for b in self.model if isinstance(b, simpler.Buffer) and b.worker_id == chip]:
            del self.model[buffer]
            with pytest.raises(simpler.MemoryRangeError):
                self.worker.copy_to(buffer, b"x")
            with pytest.raises(simpler.MemoryRangeError):
                self.worker.free(buffer)

    @invariant()
    def what_is_committed_is_what_is_allocated(self) -> None:
        for chip in range(CHIPS):
            assert self.worker.committed_device_memory(chip) == self.committed(chip)

    @invariant()
    def every_byte_is_as_in_the_model(self) -> None:
        for buffer, data in self.model.items():
            assert self.content(buffer) == data


TestMemory = pytest.mark.timeout(300)(Memory.TestCase)
TestMemory.settings = settings(
    max_examples=15,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
