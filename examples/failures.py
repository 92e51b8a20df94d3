"""Failures: each says what happened, and the rest of the tree goes on."""

from __future__ import annotations

import threading

from simpler import ChipView, Worker, WorkerDiedError, WorkerTimeoutError, register_chip_control_extension


def fail(_chip: ChipView, _payload: bytes, _device_id: int) -> None:
    """Raise; the caller gets type, message and traceback."""
    raise LookupError("no block 7")


def hang(_chip: ChipView, _payload: bytes, _device_id: int) -> None:
    """Never return; only the caller's deadline, kill() or close() ends this."""
    threading.Event().wait()


def main() -> None:
    """An error, a deadline, a death and a restart."""
    register_chip_control_extension("fail", fail)
    register_chip_control_extension("hang", hang)
    with Worker(level=3, device_ids=[0, 1], hbm_bytes=1 << 20) as worker:
        try:
            worker.run_chip_control_extension("fail", worker_id=0)
        except RuntimeError as error:
            print(f"error: {'LookupError: no block 7' in str(error)}")
        try:
            worker.run_chip_control_extension("hang", worker_id=0, timeout_s=0.1)
        except WorkerTimeoutError as error:
            print(f"deadline: the handler had begun: {error.started}")
        worker.kill(0)
        try:
            worker.malloc(64, worker_id=0)
        except WorkerDiedError as error:
            print(f"death: {'SIGKILL' in str(error)}")
        print(f"the other chip: {worker.committed_device_memory(1)} bytes in use")
        worker.restart(0)
        print(f"restarted: {worker.malloc(64, worker_id=0).nbytes} bytes allocated")


if __name__ == "__main__":
    main()
