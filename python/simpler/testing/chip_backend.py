"""The contract of a chip backend, as tests that a platform's own test suite inherits.

Example::

    from simpler.chips import ChipConfig
    from simpler.testing import ChipBackendContract

    class TestMyChip(ChipBackendContract):
        def make_backend(self):
            return MyChip(ChipConfig(device_id=0, worker_id=0, hbm_bytes=self.hbm_bytes))
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from simpler import ClosedError, MemoryRangeError, Tag, compile_kernel
from simpler.chips import ChipBackend, TensorSpec, pack_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator

ALIGNMENT = 256

_KERNEL = """
#include <simpler/kernel.h>
#include <stdio.h>

int scale(const simpler_kernel_args *args) {
  if (args->num_tensors != 2 || args->num_scalars != 1) {
    snprintf(args->error, args->error_bytes, "want 2 tensors and 1 scalar");
    return 7;
  }
  const float *x = args->tensors[0].data;
  float *y = args->tensors[1].data;
  for (int64_t i = 0; i < args->tensors[0].shape[0]; i++) y[i] = x[i] * (float)args->scalars[0].v.f;
  return 0;
}
"""


class ChipBackendContract(abc.ABC):
    """Every rule of `ChipBackend`. Inherit it, name the class ``Test...`` and give `make_backend`.

    Attributes:
        hbm_bytes: Device memory of the backends that `make_backend` makes: a multiple of 256, 1 MiB or more.
        python_kernels: Set to False on a platform that runs no Python kernels on numpy views.
        native_kernels: Set to False on a platform whose native kernels cannot be compiled for the host.
    """

    hbm_bytes = 1 << 20
    python_kernels = True
    native_kernels = True

    @abc.abstractmethod
    def make_backend(self) -> ChipBackend:
        """A backend that is not open, with `hbm_bytes` of device memory."""

    @pytest.fixture
    def chip(self) -> Iterator[ChipBackend]:
        """An open backend, closed after the test."""
        chip = self.make_backend()
        chip.open([])
        yield chip
        chip.close()

    # Lifecycle

    def test_it_says_what_it_is(self) -> None:
        chip = self.make_backend()
        assert chip.platform
        assert isinstance(chip.platform, str)
        assert isinstance(chip.window_registrable, bool)
        assert isinstance(chip.maps_peers, bool)

    def test_a_chip_that_is_not_open_refuses(self) -> None:
        chip = self.make_backend()
        with pytest.raises(ClosedError):
            chip.malloc(256)

    def test_a_second_open_is_refused_and_changes_nothing(self, chip: ChipBackend) -> None:
        address = chip.malloc(512)
        with pytest.raises(ClosedError):
            chip.open([])
        chip.free(address)

    def test_a_closed_chip_refuses_and_closing_again_does_nothing(self) -> None:
        chip = self.make_backend()
        chip.open([])
        chip.close()
        chip.close()
        with pytest.raises(ClosedError):
            chip.malloc(256)

    def test_reopening_starts_with_all_memory_free(self) -> None:
        chip = self.make_backend()
        chip.open([])
        chip.malloc(self.hbm_bytes)
        chip.close()
        chip.open([])
        assert chip.committed_bytes() == 0
        chip.free(chip.malloc(self.hbm_bytes))
        chip.close()

    # Allocation

    @pytest.mark.parametrize("nbytes", [1, 255, 256, 257, 4096, 65537])
    def test_addresses_are_aligned(self, chip: ChipBackend, nbytes: int) -> None:
        assert [chip.malloc(nbytes) % ALIGNMENT for _ in range(3)] == [0, 0, 0]

    @pytest.mark.parametrize("nbytes", [0, -1])
    def test_sizes_below_one_are_refused(self, chip: ChipBackend, nbytes: int) -> None:
        with pytest.raises(ValueError, match=r"."):
            chip.malloc(nbytes)
        assert chip.committed_bytes() == 0

    def test_blocks_do_not_overlap(self, chip: ChipBackend) -> None:
        sizes = [1, 256, 300, 4096, 5000, 70000]
        blocks = [(chip.malloc(size), size) for size in sizes]
        for index, (address, size) in enumerate(blocks):
            chip.copy_in(address, memoryview(bytes([index + 1]) * size))
        for index, (address, size) in enumerate(blocks):
            assert _read(chip, address, size) == bytes([index + 1]) * size

    def test_all_the_memory_can_be_had_in_one_block(self, chip: ChipBackend) -> None:
        chip.free(chip.malloc(self.hbm_bytes))

    def test_freed_neighbours_become_one_block(self, chip: ChipBackend) -> None:
        size = self.hbm_bytes // 16 // ALIGNMENT * ALIGNMENT
        blocks = [chip.malloc(size) for _ in range(16)]
        np.random.default_rng(7).shuffle(blocks)
        for address in blocks:
            chip.free(address)
        chip.malloc(self.hbm_bytes)

    def test_running_out_says_what_was_asked_and_harms_nothing(self, chip: ChipBackend) -> None:
        address = chip.malloc(1024)
        chip.copy_in(address, memoryview(b"k" * 1024))
        with pytest.raises(MemoryError, match=str(self.hbm_bytes)):
            chip.malloc(self.hbm_bytes)
        assert _read(chip, address, 1024) == b"k" * 1024
        chip.free(address)
        chip.malloc(self.hbm_bytes)

    def test_freeing_twice_is_refused(self, chip: ChipBackend) -> None:
        keep, gone = chip.malloc(256), chip.malloc(256)
        chip.free(gone)
        with pytest.raises(MemoryRangeError):
            chip.free(gone)
        assert chip.committed_bytes() == 256
        chip.free(keep)

    @pytest.mark.parametrize("shift", [1, 256, 1 << 40, -(1 << 40)])
    def test_freeing_what_is_no_block_is_refused(self, chip: ChipBackend, shift: int) -> None:
        address = chip.malloc(1024)
        with pytest.raises(MemoryRangeError):
            chip.free(address + shift)
        assert chip.committed_bytes() == 1024

    def test_committed_bytes_is_always_the_truth(self, chip: ChipBackend) -> None:
        sizes = [1, 256, 257, 10000]
        blocks = []
        for size in sizes:
            before = chip.committed_bytes()
            blocks.append((chip.malloc(size), size))
            assert size <= chip.committed_bytes() - before < size + ALIGNMENT
        for address, size in blocks:
            before = chip.committed_bytes()
            chip.free(address)
            assert size <= before - chip.committed_bytes() < size + ALIGNMENT
        assert chip.committed_bytes() == 0

    def test_host_memory_covers_every_block(self, chip: ChipBackend) -> None:
        region = chip.host_memory
        if region is None:
            pytest.skip("the host cannot touch this platform's memory")
        address = chip.malloc(self.hbm_bytes)
        assert region.address <= address
        assert address + self.hbm_bytes <= region.address + region.nbytes

    # Copies

    def test_bytes_come_back_as_they_went_in(self, chip: ChipBackend) -> None:
        data = np.random.default_rng(1).bytes(70001)
        address = chip.malloc(len(data))
        chip.copy_in(address, memoryview(data))
        assert _read(chip, address, len(data)) == data
        assert _read(chip, address + 3, 11) == data[3:14]

    def test_copies_on_the_device_may_overlap(self, chip: ChipBackend) -> None:
        data = bytes(range(256))
        address = chip.malloc(512)
        chip.copy_in(address, memoryview(data))
        chip.copy(address + 100, address, 256)
        assert _read(chip, address + 100, 256) == data

    def test_empty_copies_do_nothing(self, chip: ChipBackend) -> None:
        address = chip.malloc(256)
        chip.copy_in(address, memoryview(b"x" * 256))
        chip.copy_in(address, memoryview(b""))
        chip.copy_out(address, memoryview(bytearray()))
        chip.copy(address, address, 0)
        assert _read(chip, address, 256) == b"x" * 256

    @pytest.mark.parametrize("shift", [1, 1 << 40, -(1 << 40)])
    def test_copies_outside_the_memory_are_refused(self, chip: ChipBackend, shift: int) -> None:
        address = chip.malloc(self.hbm_bytes)
        host = bytearray(self.hbm_bytes)
        with pytest.raises(MemoryRangeError):
            chip.copy_in(address + shift, memoryview(host))
        with pytest.raises(MemoryRangeError):
            chip.copy_out(address + shift, memoryview(host))
        with pytest.raises(MemoryRangeError):
            chip.copy(address + shift, address, self.hbm_bytes)
        with pytest.raises(MemoryRangeError):
            chip.copy(address, address + shift, self.hbm_bytes)

    def test_copying_out_to_read_only_memory_is_refused(self, chip: ChipBackend) -> None:
        with pytest.raises((ValueError, TypeError)):
            chip.copy_out(chip.malloc(256), memoryview(b"x" * 256))

    def test_peers_that_are_mapped_can_be_copied(self, chip: ChipBackend) -> None:
        if not chip.maps_peers:
            pytest.skip("this platform does not map peers")
        peer = self.make_backend()
        peer.open([chip.host_memory] if chip.host_memory is not None else [])
        try:
            source, destination = chip.malloc(1000), peer.malloc(1000)
            chip.copy_in(source, memoryview(b"p" * 1000))
            peer.copy(destination, source, 1000)
            assert _read(peer, destination, 1000) == b"p" * 1000
        finally:
            peer.close()

    # Kernels

    def test_a_python_kernel_gets_views_and_scalars_in_order(self, chip: ChipBackend) -> None:
        self._needs_python_kernels()
        x, y = self._floats(chip, [1.0, 2.0, 3.0]), self._floats(chip, [0.0, 0.0, 0.0])
        args = pack_arguments(
            [True, TensorSpec(x, (3,), "float32", Tag.IN), 3, TensorSpec(y, (3,), "float32", Tag.OUT), 0.5]
        )

        def kernel(flag: bool, a: Any, factor: int, b: Any, half: float) -> tuple[object, ...]:
            b[:] = a * factor * half
            return flag, factor, half, a.flags.writeable, b.flags.writeable

        result = chip.run(kernel, args)
        assert result == (True, 3, 0.5, False, True)
        assert [type(part) for part in result[:3]] == [bool, int, float]
        assert np.frombuffer(_read(chip, y, 12), np.float32).tolist() == [1.5, 3.0, 4.5]

    def test_a_python_kernel_sees_strides(self, chip: ChipBackend) -> None:
        self._needs_python_kernels()
        x = self._floats(chip, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
        transposed = TensorSpec(x, (3, 2), "float32", Tag.IN, strides=(4, 12))
        reverse = TensorSpec(x + 20, (6,), "float32", Tag.IN, strides=(-4,))
        result = chip.run(lambda a, b: (a.tolist(), b.tolist()), pack_arguments([transposed, reverse]))
        assert result == ([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], [5.0, 4.0, 3.0, 2.0, 1.0, 0.0])

    def test_a_tensor_without_elements_is_an_empty_view(self, chip: ChipBackend) -> None:
        self._needs_python_kernels()
        args = pack_arguments([TensorSpec(chip.malloc(256), (0, 4), "float32", Tag.IN)])
        assert chip.run(lambda a: (a.shape, a.flags.writeable), args) == ((0, 4), False)

    def test_what_a_python_kernel_raises_comes_out(self, chip: ChipBackend) -> None:
        self._needs_python_kernels()

        def kernel() -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            chip.run(kernel, pack_arguments([]))
        assert chip.run(lambda: "next", pack_arguments([])) == "next"

    @pytest.mark.parametrize("shift", [-(1 << 40), 1 << 40])
    def test_a_tensor_outside_the_memory_never_reaches_the_kernel(
        self, chip: ChipBackend, shift: int
    ) -> None:
        self._needs_python_kernels()
        calls: list[object] = []
        args = pack_arguments([TensorSpec(chip.malloc(256) + shift, (256,))])
        with pytest.raises(MemoryRangeError):
            chip.run(calls.append, args)
        assert calls == []

    def test_a_native_kernel_computes(self, chip: ChipBackend) -> None:
        self._needs_native_kernels()
        x, y = self._floats(chip, [1.0, 2.0, 3.0]), self._floats(chip, [0.0, 0.0, 0.0])
        tensors = [TensorSpec(x, (3,), "float32", Tag.IN), TensorSpec(y, (3,), "float32", Tag.OUT)]
        assert chip.run(compile_kernel(_KERNEL, "scale"), pack_arguments([*tensors, 2.5])) is None
        assert np.frombuffer(_read(chip, y, 12), np.float32).tolist() == [2.5, 5.0, 7.5]

    def test_the_text_of_a_failed_native_kernel_comes_out(self, chip: ChipBackend) -> None:
        self._needs_native_kernels()
        with pytest.raises(RuntimeError, match="want 2 tensors and 1 scalar"):
            chip.run(compile_kernel(_KERNEL, "scale"), pack_arguments([1]))

    def _needs_python_kernels(self) -> None:
        if not self.python_kernels:
            pytest.skip("this platform runs no Python kernels")

    def _needs_native_kernels(self) -> None:
        if not self.native_kernels:
            pytest.skip("this platform's native kernels are not built here")

    @staticmethod
    def _floats(chip: ChipBackend, values: list[float]) -> int:
        data = np.array(values, np.float32).tobytes()
        address = chip.malloc(len(data))
        chip.copy_in(address, memoryview(data))
        return address


def _read(chip: ChipBackend, address: int, nbytes: int) -> bytes:
    host = bytearray(nbytes)
    chip.copy_out(address, memoryview(host))
    return bytes(host)
