"""The real engines where they are meant to live: in chip processes, on device memory, beside the runtime."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from simpler import Worker, register_chip_control_extension, unregister_chip_control_extension
from simpler.kv.engines import Copy, OutcomeKind

from .engine_process import make_engine, pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simpler import Buffer, ChipView

MIB = 1 << 20
NAME = "engine under test"

pytestmark = [pytest.mark.extra, pytest.mark.no_asan("the engines' own libraries are not built for it")]


def serve(chip: ChipView, payload: bytes, device_id: int) -> bytes | str:
    """Open an engine and register a buffer; or read it from a peer that did."""
    order = json.loads(payload)
    (view,) = chip.buffers
    if order["do"] == "open":
        chip.state["engine"] = engine = make_engine(order["engine"], {})
        engine.open()
        engine.register(view.address, view.nbytes)
        metadata: bytes = engine.metadata()
        return json.dumps({"metadata": metadata.hex(), "address": view.address}).encode()
    engine = chip.state["engine"]
    peer = engine.connect(bytes.fromhex(order["metadata"]))
    outcome = engine.read(peer, [Copy(view.address, order["address"], view.nbytes)], timeout_s=30.0)
    return b"" if outcome.kind is OutcomeKind.DONE else outcome.message


def close(chip: ChipView) -> None:
    assert chip.state["engine"].close() is True


@pytest.fixture
def extension() -> Iterator[str]:
    register_chip_control_extension(NAME, serve, concurrent=True, on_close=close)
    yield NAME
    unregister_chip_control_extension(NAME)


@pytest.mark.parametrize(("engine", "package"), [("mooncake", "mooncake"), ("nixl", "nixl_cu12")])
def test_device_memory_moves_between_the_chips_of_a_node(extension: str, engine: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the package of simpler[{engine}]")
    with Worker(level=3, device_ids=[0, 1]) as worker:
        source, target = worker.malloc(4 * MIB, worker_id=0), worker.malloc(4 * MIB, worker_id=1)
        pins = [buffer.pin(engine) for buffer in (source, target)]
        worker.copy_to(source, pattern(3, 4 * MIB))

        def tell(chip: int, buffer: Buffer, **order: object) -> bytes:
            reply = worker.run_chip_control_extension(
                extension, json.dumps(order).encode(), worker_id=chip, buffers=[buffer]
            )
            assert isinstance(reply, bytes)
            return reply

        known = json.loads(tell(0, source, do="open", engine=engine))
        tell(1, target, do="open", engine=engine)
        tell(1, target, do="read", **known)
        arrived = np.zeros(4 * MIB, np.uint8)
        worker.copy_from(arrived, target)
        for pin in pins:
            pin.release()
    assert np.array_equal(arrived, pattern(3, 4 * MIB))
