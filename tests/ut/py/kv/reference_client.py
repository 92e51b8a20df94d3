"""A KV store that lives in the chips' processes, and its client, as users of another runtime wrote them.

The client knows nothing of this library: it is given a callable that carries a payload to the handler, and it
takes the answer from the text of the RuntimeError. It sends addresses, and has no retry loops.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import queue
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NAME = "kv-store-v1"
PENDING = "KV_STORE_PENDING:"
FAILED = "KV_STORE_FAILED:"
PIPE = "pipe:"
"""How a key begins whose value comes through a FIFO instead of from the store."""
RESULT = struct.Struct("<QII")
"""What a job leaves in its slot of the shared memory: bytes moved, their CRC-32, 1."""
_CHUNK = 4096
_STARTS = ("load", "save")

Range = tuple[int, int]
"""(address in the chip's process, bytes)"""


# In the chip's process


@dataclass
class _Job:
    error: str = ""
    cancelled: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)


class _Store:
    """The store of one chip, with a thread that moves the bytes."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.jobs: dict[str, _Job] = {}
        self.ranges: list[Range] = []
        self.results: mmap.mmap | None = None
        self._orders: queue.SimpleQueue[tuple[_Job, dict[str, Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="kv-store", daemon=True)
        self._thread.start()

    def register(self, ranges: Sequence[dict[str, int]], results: str) -> None:
        with open(f"/dev/shm/{results}", "r+b") as file:  # noqa: PTH123 - as such programs do it
            self.results = mmap.mmap(file.fileno(), 0)
        self.ranges += [(part["address"], part["size_bytes"]) for part in ranges]

    def start(self, command: dict[str, Any]) -> str | None:
        job_id = command["job_id"]
        if job_id in self.jobs:
            return f"{FAILED}job {job_id} is known already"
        for part in command["transfers"]:
            begin, end = part["address"], part["address"] + part["size_bytes"]
            if not any(start <= begin and end <= start + size for start, size in self.ranges):
                return f"{FAILED}no registered range has {part['size_bytes']} bytes at {begin:#x}"
        self.jobs[job_id] = _Job()
        self._orders.put((self.jobs[job_id], command))
        return None

    def close(self) -> None:
        for job in self.jobs.values():
            job.cancelled.set()
        self._orders.put(None)
        self._thread.join()
        if self.results is not None:
            self.results.close()

    def _serve(self) -> None:
        while (order := self._orders.get()) is not None:
            job, command = order
            try:
                self._run(job, command)
            except Exception as error:
                job.error = str(error)
            job.ended.set()

    def _run(self, job: _Job, command: dict[str, Any]) -> None:
        move = self._load if command["operation"] == "load" else self._save
        total = checksum = 0
        for part in command["transfers"]:
            if job.cancelled.is_set():
                raise InterruptedError("cancelled")
            data = move(job, part["key"], part["address"], part["size_bytes"])
            total, checksum = total + len(data), zlib.crc32(data, checksum)
        assert self.results is not None
        RESULT.pack_into(self.results, RESULT.size * command["slot"], total, checksum, 1)

    def _save(self, _job: _Job, key: str, address: int, size: int) -> bytes:
        self.values[key] = ctypes.string_at(address, size)
        return self.values[key]

    def _load(self, job: _Job, key: str, address: int, size: int) -> bytes:
        if key.startswith(PIPE):
            return self._stream(job, key.removeprefix(PIPE), address, size)
        if key not in self.values:
            raise LookupError(f"the store has no {key}")
        data = self.values[key]
        if len(data) != size:
            raise ValueError(f"{key} has {len(data)} bytes, not {size}")
        ctypes.memmove(address, data, size)
        return data

    def _stream(self, job: _Job, path: str, address: int, size: int) -> bytes:
        data = b""
        with open(path, "rb", buffering=0) as pipe:  # noqa: PTH123 - as such programs do it
            while part := pipe.read(_CHUNK):
                if job.cancelled.is_set():
                    raise InterruptedError("cancelled")
                part = part[: size - len(data)]
                ctypes.memmove(address + len(data), part, len(part))
                data += part
        if job.cancelled.is_set():
            raise InterruptedError("cancelled")
        if len(data) != size:
            raise ValueError(f"{path} ended after {len(data)} of {size} bytes")
        return data


_stores: dict[int, _Store] = {}
_lock = threading.Lock()


def handle(_chip: object, payload: bytes, device_id: int) -> str | None:
    """The handler. A text is a failure, and also how `poll` says that a job goes on."""
    command = json.loads(payload)
    operation = command["operation"]
    if operation not in ("init", "close") and command["device_id"] != device_id:
        return None  # a broadcast, for another chip
    if operation == "close":
        with _lock:
            closing = _stores.pop(device_id, None)
        if closing is not None:
            closing.close()
        return None
    with _lock:
        if operation == "init":
            if device_id not in _stores:
                _stores[device_id] = _Store()
            return None
        store = _stores.get(device_id)
        if store is None:
            return f"{FAILED}the store of device {device_id} is not initialised"
        return _answer(store, operation, command)


def _answer(store: _Store, operation: str, command: dict[str, Any]) -> str | None:
    if operation == "register":
        store.register(command["buffers"], command["results"])
        return None
    if operation in _STARTS:
        return store.start(command)
    if operation not in ("poll", "cancel"):
        return f"{FAILED}unknown operation {operation}"
    job = store.jobs.get(command["job_id"])
    if job is None:
        return f"{FAILED}unknown job {command['job_id']}"
    if operation == "cancel":
        job.cancelled.set()
        return None
    if not job.ended.is_set():
        return f"{PENDING}{command['job_id']}"
    return f"{FAILED}{job.error}" if job.error else None


# In the parent


class StoreError(Exception):
    """The store says no."""


@dataclass(frozen=True)
class JobResult:
    """What a job left in the shared memory."""

    nbytes: int
    checksum: int


class StoreClient:
    """Moves ranges of device memory in and out of the stores.

    Thread safety: any thread.
    """

    def __init__(
        self, control: Callable[[str, bytes], object], device_ids: Sequence[int], slots: int = 64
    ) -> None:
        """Start the stores.

        Args:
            control: Carries a payload to the handler of that name in every chip, or in one.
            device_ids: The chips' devices.
            slots: Jobs of a device.
        """
        self._control = control
        self._slots = slots
        self._lock = threading.Lock()
        self._used = dict.fromkeys(device_ids, 0)
        self._jobs: dict[str, tuple[int, int]] = {}  # (device, slot)
        self._results = {device: SharedMemory(create=True, size=slots * RESULT.size) for device in device_ids}
        try:
            self._invoke({"operation": "init"})
        except BaseException:
            self._drop_results()
            raise

    def register(self, device: int, ranges: Sequence[Range]) -> None:
        """Let the store of a device use some of its memory."""
        buffers = [{"address": address, "size_bytes": size} for address, size in ranges]
        self._invoke(
            {
                "operation": "register",
                "device_id": device,
                "buffers": buffers,
                "results": self._results[device].name,
            }
        )

    def save(self, job: str, device: int, parts: Sequence[tuple[str, int, int]]) -> None:
        """Begin to save; each part is (key, address, bytes)."""
        self._start("save", job, device, parts)

    def load(self, job: str, device: int, parts: Sequence[tuple[str, int, int]]) -> None:
        """Begin to load."""
        self._start("load", job, device, parts)

    def is_done(self, job: str) -> bool:
        """Ask once whether a job has ended; StoreError when it has failed."""
        try:
            self._invoke({"operation": "poll", "device_id": self._jobs[job][0], "job_id": job})
        except StoreError:
            raise
        except RuntimeError as error:
            if f"{PENDING}{job}" in str(error):
                return False
            raise
        return True

    def wait(self, job: str) -> JobResult:
        """Ask until a job has ended."""
        while not self.is_done(job):
            pass
        device, slot = self._jobs[job]
        results = self._results[device].buf
        assert results is not None
        nbytes, checksum, done = RESULT.unpack_from(results, slot * RESULT.size)
        assert done == 1
        return JobResult(nbytes, checksum)

    def wait_all(self, jobs: Sequence[str], threads: int = 4) -> list[JobResult]:
        """Ask for several at once."""
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(self.wait, jobs))

    def cancel(self, job: str) -> None:
        """Have a job stop soon; `is_done` says when it has."""
        self._invoke({"operation": "cancel", "device_id": self._jobs[job][0], "job_id": job})

    def close(self) -> None:
        """Stop the stores; again it does nothing."""
        try:
            self._invoke({"operation": "close"})
        finally:
            self._drop_results()

    def _start(self, operation: str, job: str, device: int, parts: Sequence[tuple[str, int, int]]) -> None:
        with self._lock:
            slot, self._used[device] = self._used[device], self._used[device] + 1
            if slot == self._slots:
                raise StoreError("no slot is left")
            self._jobs[job] = device, slot
        transfers = [{"key": key, "address": at, "size_bytes": size} for key, at, size in parts]
        self._invoke(
            {
                "operation": operation,
                "device_id": device,
                "job_id": job,
                "slot": slot,
                "transfers": transfers,
            }
        )

    def _drop_results(self) -> None:
        while self._results:
            _, memory = self._results.popitem()
            memory.close()
            memory.unlink()

    def _invoke(self, command: dict[str, Any]) -> None:
        try:
            self._control(NAME, json.dumps(command, separators=(",", ":")).encode())
        except RuntimeError as error:
            if FAILED in str(error):
                raise StoreError(str(error).split(FAILED, 1)[1]) from error
            raise
