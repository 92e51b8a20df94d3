"""Windows of domains: what members see of each other's, and what engines may have of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import simpler
import simpler.node
import simpler.worker_base
from run_parts import SMALL, small_worker
from simpler import IN, INOUT, OUT, MemoryRangeError, TransferRange, Worker
from simpler.chips.cpu import CpuChip
from transfers.transfer_parts import READ, WRITE, copy, part, provider

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np


class Unregistrable(CpuChip):
    """The cpu platform, if no engine could register a window."""

    window_registrable = False


def zero(sums: np.ndarray[Any, Any]) -> None:
    sums[:] = 0


def add_to_both(mine: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> None:
    mine += 1
    other += 10


def keep(sums: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
    out[:] = sums


def in_domain(
    worker: Worker, use: Callable[[simpler.Orchestrator, simpler.Domain], None], **options: Any
) -> None:
    given: dict[str, Any] = {"workers": [0, 1], "window_size": 4096, "buffers": {"sums": ((8,), "int32")}}
    worker.run(lambda orch, args, config: use(orch, orch.allocate_domain("ring", **(given | options))))


def test_members_write_each_others_windows_which_go_with_the_run() -> None:
    with small_worker(device_ids=[0, 1]) as worker:
        clear, both, save = (worker.register(kernel) for kernel in (zero, add_to_both, keep))
        before = [worker.committed_device_memory(chip) for chip in worker.worker_ids]
        seen = worker.create_buffer(64)

        def ring(orch: simpler.Orchestrator, domain: simpler.Domain) -> None:
            sums = [domain.tensor("sums", chip) for chip in (0, 1)]
            for chip in (0, 1):
                orch.submit(clear, OUT(sums[chip]), worker=chip)
            for chip in (0, 1):
                orch.submit(both, INOUT(sums[chip]), INOUT(sums[1 - chip]), worker=chip)
            for chip in (0, 1):
                target = seen.tensor((8,), "int32", offset=32 * chip)
                orch.submit(save, IN(sums[chip]), OUT(target), worker=1 - chip)

        in_domain(worker, ring)
        assert set(seen.array((16,), "int32")) == {11}
        assert [worker.committed_device_memory(chip) for chip in worker.worker_ids] == before


def never(orch: simpler.Orchestrator, domain: simpler.Domain) -> None:
    raise AssertionError("there is no such domain")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"workers": []}, ValueError, "each once"),
        ({"workers": [0, 0]}, ValueError, "each once"),
        ({"buffers": {"sums": ((8192,), "uint8")}}, ValueError, "8192 bytes of a window of 4096"),
        ({"buffers": {"sums": ((-1,), "uint8")}}, ValueError, "negative"),
        ({"window_size": 8 * SMALL}, simpler.RemoteError, "memory"),
    ],
)
def test_a_domain_that_cannot_be_leaves_no_memory(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with small_worker(device_ids=[0, 1]) as worker:
        before = [worker.committed_device_memory(chip) for chip in worker.worker_ids]
        with pytest.raises(error, match=text):
            in_domain(worker, never, **options)
        assert [worker.committed_device_memory(chip) for chip in worker.worker_ids] == before


def test_a_window_that_no_engine_can_register_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (simpler.node, simpler.worker_base):
        monkeypatch.setattr(module, "find_backend", lambda _platform: Unregistrable)
    with provider("copy", copy), small_worker(device_ids=[0, 1]) as worker:

        def use(orch: simpler.Orchestrator, domain: simpler.Domain) -> None:
            with pytest.raises(
                MemoryRangeError, match="window of domain 'ring' on worker 0 cannot be pinned"
            ):
                domain.window(0).pin("engine")
            with pytest.raises(MemoryRangeError, match="window of domain 'ring' on worker 0"):
                worker.submit_transfer("copy", [TransferRange(domain.window(0), READ)])

        in_domain(worker, use)
        plain = worker.malloc(64)
        with plain.pin("engine"):
            worker.submit_transfer("copy", [part(plain, READ, 0, 32), part(plain, WRITE, 32, 64)]).result(20)


def test_a_window_of_this_platform_is_moved_like_any_memory() -> None:
    with provider("copy", copy), small_worker(device_ids=[0, 1]) as worker:

        def use(orch: simpler.Orchestrator, domain: simpler.Domain) -> None:
            halves = [part(domain.window(0), READ, 0, 8), part(domain.window(1), WRITE, 0, 8)]
            with domain.window(0).pin("engine"):
                assert worker.submit_transfer("copy", halves, worker_id=0).result(20) == b"2 ranges"

        in_domain(worker, use)
