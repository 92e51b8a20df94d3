"""The cpu chip keeps the contract of a backend, and what only it promises."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from simpler import _core
from simpler.chips import (
    ChipBackend,
    ChipConfig,
    TensorSpec,
    find_backend,
    installed_backends,
    pack_arguments,
)
from simpler.chips.cpu import ALIGNMENT, CpuChip
from simpler.errors import ConfigError, MemoryRangeError
from simpler.task_args import Tag
from simpler.testing import ChipBackendContract

PAGE = 4096
HBM = 1 << 20


def make_chip(hbm_bytes: int = HBM, device_id: int = 0) -> CpuChip:
    return CpuChip(ChipConfig(device_id=device_id, worker_id=0, hbm_bytes=hbm_bytes))


def arena(chip: CpuChip) -> _core.SharedRegion:
    region = chip.host_memory
    assert region is not None
    return region


class TestCpuChip(ChipBackendContract):
    def make_backend(self) -> ChipBackend:
        return make_chip(self.hbm_bytes)


class TestOddCpuChip(ChipBackendContract):
    hbm_bytes = (1 << 20) + 4096 + 256

    def make_backend(self) -> ChipBackend:
        return make_chip(self.hbm_bytes)


@pytest.fixture
def chip() -> Any:
    chip = make_chip()
    chip.open([])
    yield chip
    chip.close()


def test_what_the_platform_says_of_itself() -> None:
    chip = make_chip()
    assert (chip.platform, chip.window_registrable, chip.maps_peers) == ("cpu", True, True)


def test_running_out_names_what_to_enlarge(chip: CpuChip) -> None:
    chip.malloc(HBM // 2)
    with pytest.raises(MemoryError, match=rf"hbm_bytes={HBM}.*largest free block has {HBM // 2}"):
        chip.malloc(HBM)


def test_pages_of_freed_blocks_go_back_to_the_kernel(chip: CpuChip) -> None:
    kept, gone = chip.malloc(8 * PAGE), chip.malloc(64 * PAGE)
    for address, nbytes in ((kept, 8 * PAGE), (gone, 64 * PAGE)):
        chip.copy_in(address, memoryview(b"x" * nbytes))
    assert arena(chip).resident_bytes == 72 * PAGE
    chip.free(gone)
    assert arena(chip).resident_bytes == 8 * PAGE
    chip.free(kept)
    assert arena(chip).resident_bytes == 0


def test_small_blocks_that_shared_pages_leave_none_behind(chip: CpuChip) -> None:
    blocks = [chip.malloc(1000) for _ in range(20)]
    for address in blocks:
        chip.copy_in(address, memoryview(b"x" * 1000))
    for address in blocks:
        chip.free(address)
    assert arena(chip).resident_bytes == 0


def test_freeing_a_block_leaves_its_neighbours_bytes(chip: CpuChip) -> None:
    blocks = [chip.malloc(5000) for _ in range(9)]
    for index, address in enumerate(blocks):
        chip.copy_in(address, memoryview(bytes([index + 1]) * 5000))
    for address in blocks[::2]:
        chip.free(address)
    for index in range(1, 9, 2):
        host = bytearray(5000)
        chip.copy_out(blocks[index], memoryview(host))
        assert host == bytes([index + 1]) * 5000


def test_closing_gives_all_memory_back() -> None:
    chip = make_chip()
    chip.open([])
    chip.copy_in(chip.malloc(HBM), memoryview(b"x" * HBM))
    chip.close()
    assert arena(chip).resident_bytes == 0
    assert chip.committed_bytes() == 0


def test_a_view_that_a_kernel_kept_never_faults() -> None:
    chip = make_chip()
    chip.open([])
    kept: list[Any] = []
    chip.run(kept.append, pack_arguments([TensorSpec(chip.malloc(PAGE), (PAGE,))]))
    chip.close()
    del chip
    gc.collect()
    assert kept[0].shape == (PAGE,)
    assert int(kept[0].sum()) == 0


def test_an_in_view_cannot_be_made_writable(chip: CpuChip) -> None:
    def kernel(view: Any) -> None:
        view.flags.writeable = True

    with pytest.raises(ValueError, match="WRITEABLE"):
        chip.run(kernel, pack_arguments([TensorSpec(chip.malloc(256), (4,), "float32", Tag.IN)]))


def test_a_kernel_reaches_the_heap_and_peers_named_at_open_and_nothing_else() -> None:
    heap, peer, stranger = _core.SharedRegion(PAGE, "heap"), make_chip(device_id=1), make_chip(device_id=2)
    chip = make_chip()
    chip.open([heap, arena(peer), arena(chip)])
    for region in (heap, arena(peer), arena(chip)):
        assert (
            chip.run(lambda view: int(view.sum()), pack_arguments([TensorSpec(region.address, (64,))])) == 0
        )
    with pytest.raises(MemoryRangeError):
        chip.run(lambda _view: None, pack_arguments([TensorSpec(arena(stranger).address, (64,))]))
    with pytest.raises(MemoryRangeError):
        chip.copy(arena(chip).address, arena(stranger).address, 64)
    chip.close()


def test_copies_take_any_contiguous_host_memory(chip: CpuChip) -> None:
    address = chip.malloc(64)
    chip.copy_in(address, np.arange(16, dtype=np.float32).reshape(4, 4).data)
    out = np.zeros((2, 8), np.float32)
    chip.copy_out(address, out.data)
    assert out.ravel().tolist() == list(range(16))
    with pytest.raises(ValueError, match="contiguous"):
        chip.copy_in(address, np.zeros((4, 4), np.float32).T[::2].data)


def test_threads_of_one_process_may_allocate_at_once(chip: CpuChip) -> None:
    failures: list[BaseException] = []
    start = threading.Barrier(8)

    def work(mark: int) -> None:
        try:
            start.wait(30)
            for _ in range(40):
                address = chip.malloc(3000 + mark)
                chip.copy_in(address, memoryview(bytes([mark]) * (3000 + mark)))
                host = bytearray(3000 + mark)
                chip.copy_out(address, memoryview(host))
                assert host == bytes([mark]) * (3000 + mark)
                chip.free(address)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert chip.committed_bytes() == 0


def test_the_cpu_platform_is_always_installed() -> None:
    assert find_backend("cpu") is CpuChip
    assert "cpu" in installed_backends()


def test_an_unknown_platform_lists_those_installed() -> None:
    with pytest.raises(ConfigError, match=r"'cuda'.*installed are: .*cpu"):
        find_backend("cuda")


class ChipMachine(RuleBasedStateMachine):
    """malloc, free and copies in any order: bytes, overlaps, totals and coalescing as the model says."""

    blocks: Bundle[int] = Bundle("blocks")

    def __init__(self) -> None:
        super().__init__()
        self.chip = make_chip(64 * ALIGNMENT)
        self.chip.open([])
        self.model: dict[int, bytearray] = {}

    def teardown(self) -> None:
        self.chip.close()

    @rule(target=blocks, nbytes=st.integers(1, 24 * ALIGNMENT))
    def malloc(self, nbytes: int) -> int:
        try:
            address = self.chip.malloc(nbytes)
        except MemoryError:
            assert self._largest_gap() < nbytes
            return 0
        self.chip.copy_in(address, memoryview(bytes(nbytes)))
        self.model[address] = bytearray(nbytes)
        return address

    @rule(address=consumes(blocks))
    def free(self, address: int) -> None:
        if address in self.model:
            self.chip.free(address)
            del self.model[address]
        if address not in self.model:
            with pytest.raises(MemoryRangeError):
                self.chip.free(address)

    @rule(address=blocks, data=st.binary(min_size=1, max_size=600), at=st.integers(0, 600))
    def write(self, address: int, data: bytes, at: int) -> None:
        block = self.model.get(address)
        if block is not None and at + len(data) <= len(block):
            self.chip.copy_in(address + at, memoryview(data))
            block[at : at + len(data)] = data

    @rule(source=blocks, destination=blocks, nbytes=st.integers(1, 600), at=st.integers(0, 100))
    def copy(self, source: int, destination: int, nbytes: int, at: int) -> None:
        a, b = self.model.get(source), self.model.get(destination)
        if a is not None and b is not None and nbytes <= len(a) and at + nbytes <= len(b):
            self.chip.copy(destination + at, source, nbytes)
            b[at : at + nbytes] = bytes(a[:nbytes])

    @invariant()
    def bytes_are_as_written(self) -> None:
        for address, expected in self.model.items():
            host = bytearray(len(expected))
            self.chip.copy_out(address, memoryview(host))
            assert host == expected

    @invariant()
    def committed_is_the_truth(self) -> None:
        sizes = [-(-len(block) // ALIGNMENT) * ALIGNMENT for block in self.model.values()]
        assert self.chip.committed_bytes() == sum(sizes)

    def _largest_gap(self) -> int:
        start = arena(self.chip).address
        gaps, at = [], start
        for address in sorted(self.model):
            gaps.append(address - at)
            at = address + -(-len(self.model[address]) // ALIGNMENT) * ALIGNMENT
        return max([*gaps, start + 64 * ALIGNMENT - at])


ChipMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCpuChipAgainstAModel = ChipMachine.TestCase
