"""A chip-control extension: code of yours inside the process that owns the device memory.

It counts how often each chip was asked, and sums a buffer that the caller allocated and named.
"""

from __future__ import annotations

import numpy as np

from simpler import ChipView, Worker, register_chip_control_extension


def checksum(chip: ChipView, payload: bytes, device_id: int) -> bytes:
    """Sum the named buffer; ``chip.state`` lives as long as the chip's process."""
    chip.state["calls"] = chip.state.get("calls", 0) + 1
    total = int(chip.buffers["data"].array(None, np.uint8).sum(dtype=np.int64))
    return f"device {device_id}, call {chip.state['calls']}: {payload.decode()} {total}".encode()


def refuse(_chip: ChipView, _payload: bytes, device_id: int) -> str | None:
    """A handler may also return None for success and a text for a failure."""
    return None if device_id == 0 else f"device {device_id} says no"


def main() -> None:
    """Call one chip, then both at once, and look at a partial failure."""
    register_chip_control_extension("checksum", checksum)
    register_chip_control_extension("refuse", refuse)
    with Worker(level=3, device_ids=[0, 1], hbm_bytes=1 << 20) as worker:
        data = worker.malloc(1000, worker_id=1)
        worker.copy_to(data, bytes([1, 2, 3, 4] * 250))
        for word in (b"sum", b"again"):
            reply = worker.run_chip_control_extension("checksum", word, worker_id=1, buffers={"data": data})
            print(reply.decode())
        try:
            worker.run_chip_control_extension("refuse")
        except RuntimeError as error:
            print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
