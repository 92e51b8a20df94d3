"""A platform whose memory the host cannot touch: copies go through the chip, chips see only their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import simpler
import simpler.node
import simpler.worker_base
from registered import extension
from simpler import Tag, TaskArgs, Worker, _core
from simpler.chips.cpu import CpuChip
from simpler.shared_map import SharedMap

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HBM = 1 << 20


class OpaqueChip(CpuChip):
    """The cpu platform without what makes it special."""

    platform = "opaque"
    maps_peers = False

    @property
    def host_memory(self) -> None:
        return None

    def open(self, shared: Sequence[_core.SharedRegion]) -> None:
        self._arena = _core.SharedRegion(HBM, "opaque")  # in the chip's process: nobody else maps it
        self._memory = SharedMap([self._arena])
        super().open(shared)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    for module in (simpler.node, simpler.worker_base):
        monkeypatch.setattr(module, "find_backend", lambda _platform: OpaqueChip)
    with Worker(
        platform="opaque", device_ids=[0, 1], hbm_bytes=HBM, heap_bytes=HBM, max_control_payload=1000
    ) as worker:
        yield worker


@pytest.mark.parametrize("nbytes", [1, 999, 1000, 1001, 100_000])
def test_copies_go_through_the_chip_in_parts(node: Worker, nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    source, target = node.malloc(nbytes, worker_id=0), node.malloc(nbytes, worker_id=1)
    same = node.malloc(nbytes, worker_id=0)
    node.copy_to(source, data)
    node.copy(target, source)
    node.copy(same, source)
    for buffer in (source, target, same):
        result = bytearray(nbytes)
        node.copy_from(result, buffer)
        assert result == data.tobytes()


def test_another_chips_memory_is_refused(node: Worker) -> None:
    other = node.malloc(8, worker_id=1)
    handle = node.register(lambda _x: None)
    with pytest.raises(simpler.MemoryRangeError, match="peers"):
        node.run(handle, TaskArgs().add_tensor(other, Tag.IN))


def test_an_extension_sees_addresses_but_no_arrays_and_only_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def look(chip: simpler.ChipView, _payload: bytes, _device: int) -> bytes:
        (view,) = chip.buffers
        try:
            view.array()
        except simpler.MemoryRangeError as error:
            return f"{view.address} {error}".encode()
        return b"an array"

    for module in (simpler.node, simpler.worker_base):
        monkeypatch.setattr(module, "find_backend", lambda _platform: OpaqueChip)
    options: dict[str, Any] = {"device_ids": [0, 1], "hbm_bytes": HBM, "heap_bytes": HBM}
    with extension("look", look), Worker(platform="opaque", **options) as worker:
        buffer = worker.malloc(8, worker_id=1)
        answer = worker.run_chip_control_extension("look", worker_id=1, buffers=[buffer])
        assert answer.startswith(b"%d " % buffer.address)
        assert b"cannot touch" in answer
        with pytest.raises(simpler.MemoryRangeError, match="peers"):
            worker.run_chip_control_extension("look", worker_id=0, buffers=[buffer])


def test_native_kernels_run_through_the_backend(node: Worker) -> None:
    source = (
        "#include <simpler/kernel.h>\nint k(const simpler_kernel_args *a) {"
        " ((char *)a->tensors[0].data)[0] = 42; return 0; }\n"
    )
    buffer = node.malloc(8)
    node.copy_to(buffer, bytes(8))
    node.run(node.register(simpler.compile_kernel(source, "k")), TaskArgs().add_tensor(buffer, Tag.OUT))
    result = bytearray(1)
    node.copy_from(result, buffer)
    assert result == b"*"
