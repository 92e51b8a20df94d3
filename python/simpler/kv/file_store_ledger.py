"""How many bytes the blocks of one directory take, agreed on by all processes that use it.

One small file holds the sum and is the lock of the store. The sum is marked before anything changes and
unmarked with the new value after, so a process killed in between leaves the mark, and whoever takes the lock
next counts the files again. A record of an earlier boot is counted again too: a power failure may have kept
the record and lost the files, or the reverse.

Each use opens the lock file anew: descriptors inherited by a fork would share one lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import heapq
import os
import stat
import struct
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from simpler.kv.file_store_format import charge_of, hash_of_name, is_folder_name

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORD_NAME = "usage"
TEMPORARY_NAME = "tmp"

_RECORD = struct.Struct("<8sI4x16sQQ")
_CRC = struct.Struct("<I")
_RECORD_BYTES = _RECORD.size + _CRC.size
_MAGIC = b"SMPLKVU\x01"

_FIRST_WAIT_S = 0.0002
_LONGEST_WAIT_S = 0.01


class LockTimeoutError(OSError):
    """Another process kept the lock of the store for too long."""


class BlockFile(NamedTuple):
    """One block as a scan found it; the oldest use sorts first."""

    used_ns: int
    charge: int
    path: Path


def boot_id() -> bytes:
    """16 bytes that differ from boot to boot; zeros where the kernel has none."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return bytes.fromhex(text.strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


def waits(deadline: float) -> Iterator[float]:
    """The pauses between attempts, ever longer; ends at the deadline."""
    pause = _FIRST_WAIT_S
    while (left := deadline - time.monotonic()) > 0:
        yield min(pause, left)
        pause = min(pause * 2, _LONGEST_WAIT_S)


def scan_blocks(directory: Path) -> Iterator[BlockFile]:
    """Every block in the directory. What vanishes meanwhile, and what is none of ours, is left out."""
    for outer in _folders(directory, 0):
        for inner in _folders(outer, 1):
            yield from _blocks_in(inner)


def _folders(directory: Path, level: int) -> Iterator[Path]:
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if is_folder_name(entry.name, level) and entry.is_dir(follow_symlinks=False):
                    yield Path(entry.path)
    except OSError:
        return


def _blocks_in(folder: Path) -> Iterator[BlockFile]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if hash_of_name(entry.name) is None:
                    continue
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield BlockFile(status.st_mtime_ns, charge_of(status.st_size), Path(entry.path))
    except OSError:
        return


class Books:
    """The record of one store while this thread holds its lock.

    Attributes:
        nbytes: What the blocks take, those being written included.
        blocks: How many they are.
    """

    def __init__(self, descriptor: int, directory: Path, boot: bytes) -> None:
        self._descriptor = descriptor
        self._directory = directory
        self._boot = boot
        self._marked = False
        self.nbytes = 0
        self.blocks = 0
        known = _read_record(descriptor, boot)
        if known is None:
            self.recount()
        else:
            self.nbytes, self.blocks = known

    def mark(self) -> None:
        """Say that the files are about to change. Call it before changing them."""
        if not self._marked:
            self._marked = True
            self._write(dirty=True)

    def add(self, nbytes: int, blocks: int) -> None:
        """Book what has changed; either number may be negative."""
        self.nbytes = max(0, self.nbytes + nbytes)
        self.blocks = max(0, self.blocks + blocks)

    def recount(self, keep: int = 1) -> list[BlockFile]:
        """Count the files, finished and unfinished, and return those used longest ago, at most ``keep``."""
        self.mark()
        self.nbytes = self.blocks = 0
        for charge in self._temporaries():
            self.add(charge, 1)
        return heapq.nsmallest(keep, self._counted())

    def _counted(self) -> Iterator[BlockFile]:
        for file in scan_blocks(self._directory):
            self.add(file.charge, 1)
            yield file

    def _temporaries(self) -> Iterator[int]:
        with contextlib.suppress(OSError), os.scandir(self._directory / TEMPORARY_NAME) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    yield charge_of(entry.stat(follow_symlinks=False).st_size)

    def finish(self) -> None:
        """Write the new sum, if anything has changed."""
        if self._marked:
            self._write(dirty=False)
            self._marked = False

    def _write(self, *, dirty: bool) -> None:
        fields = _RECORD.pack(_MAGIC, int(dirty), self._boot, self.nbytes, self.blocks)
        os.pwrite(self._descriptor, fields + _CRC.pack(zlib.crc32(fields)), 0)


def _read_record(descriptor: int, boot: bytes) -> tuple[int, int] | None:
    """Bytes and blocks; None when the files have to be counted."""
    raw = os.pread(descriptor, _RECORD_BYTES, 0)
    if len(raw) != _RECORD_BYTES:
        return None
    magic, dirty, written_in, nbytes, blocks = _RECORD.unpack(raw[: _RECORD.size])
    (crc,) = _CRC.unpack(raw[_RECORD.size :])
    if magic != _MAGIC or crc != zlib.crc32(raw[: _RECORD.size]) or dirty or written_in != boot:
        return None
    return nbytes, blocks


class Ledger:
    """The lock and the record of one directory.

    Thread safety: any thread and any process.
    Fork: holds no descriptor between calls.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / RECORD_NAME
        self._boot = boot_id()

    @contextlib.contextmanager
    def locked(self, timeout_s: float) -> Iterator[Books]:
        """Hold the lock. An exception inside leaves the mark, and the next holder counts.

        Raises:
            LockTimeoutError: another holder kept it for the whole time.
            OSError: the directory is gone, read-only or full.
        """
        descriptor = self._take(time.monotonic() + timeout_s)
        try:
            books = Books(descriptor, self._directory, self._boot)
            yield books
            books.finish()
        finally:
            # By name and not by closing: a process forked meanwhile has a copy of the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def peek(self) -> tuple[int, int]:
        """Bytes and blocks as last recorded, without the lock; zeros when nothing is recorded."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return 0, 0
        try:
            return _read_record(descriptor, self._boot) or (0, 0)
        except OSError:
            return 0, 0
        finally:
            os.close(descriptor)

    def _take(self, deadline: float) -> int:
        attempts = waits(deadline)
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if self._try_lock(descriptor):
                    taken, descriptor = descriptor, -1
                    return taken
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
            pause = next(attempts, None)
            if pause is None:
                raise LockTimeoutError(
                    errno.ETIMEDOUT, "another process kept the store's lock", str(self._path)
                )
            time.sleep(pause)

    def _try_lock(self, descriptor: int) -> bool:
        """Lock the file, if it still is the one that the path names."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        try:
            found, own = self._path.stat(), os.fstat(descriptor)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)
