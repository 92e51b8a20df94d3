"""A content-addressed store of KV blocks on disk, shared by any number of processes without a server.

A block is one file, named after its hash. It is written to a temporary file, synced, and renamed, so that a
process killed at any moment leaves the whole block or none; a checksum tells blocks that a power failure or
a bad disk has damaged. `docs/kv-file-store.md` has the format and what each failure does.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from simpler import SimplerError
from simpler.kv.file_store_format import (
    HEADER_BYTES,
    DamagedBlockError,
    block_name,
    block_path,
    charge_of,
    check_hash,
    hash_of_name,
    pack_header,
)
from simpler.kv.file_store_io import (
    READ_FLAGS,
    bytes_of,
    charge_at,
    holds,
    is_same,
    read_header,
    read_payload,
    sync_folder,
    write_all,
)
from simpler.kv.file_store_ledger import Ledger, scan_blocks, waits
from simpler.kv.file_store_space import Space, Temporary, touch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from _typeshed import ReadableBuffer, WriteableBuffer
    from numpy.typing import NDArray

    Readable = ReadableBuffer | NDArray[Any]
    Writable = WriteableBuffer | NDArray[Any]

_REMEDIES = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
    errno.ENOENT: "the directory is gone",
    errno.ETIMEDOUT: "another process kept the store's lock; is one stopped?",
}


class BlockStoreError(SimplerError):
    """A block could not be stored. Nothing of it is left, and the store goes on.

    Attributes:
        directory: The store's.
        errno: What the operating system said; 0 when it was not asked.
    """

    directory: str
    errno: int

    def __init__(self, message: str, *, directory: str = "", errno: int = 0) -> None:
        super().__init__(message)
        self.directory = directory
        self.errno = errno


class FileBlockStoreStats(NamedTuple):
    """The directory's size, which all its users share, and what this object has seen since it was made.

    Attributes:
        blocks: Blocks in the directory, those being written included.
        nbytes: What they take on disk, in whole pages.
        max_bytes: What they may take.
        hits: Blocks read.
        misses: Blocks asked for and not read, for whatever reason.
        bytes_read: Their bytes.
        puts: Blocks written.
        bytes_written: Their bytes.
        duplicates: Blocks that were there already.
        put_failures: Blocks that could not be written.
        read_failures: Files that the operating system would not read.
        damaged: Files that were not the block they were named after.
        evicted: Blocks removed to make room.
        temporaries_removed: Unfinished files of dead writers removed.
    """

    blocks: int
    nbytes: int
    max_bytes: int
    hits: int
    misses: int
    bytes_read: int
    puts: int
    bytes_written: int
    duplicates: int
    put_failures: int
    read_failures: int
    damaged: int
    evicted: int
    temporaries_removed: int


_COUNTERS = FileBlockStoreStats._fields[3:]


class FileBlockStore:
    """Blocks on disk, by hash.

    Thread safety: any thread and any process, on one machine.
    Fork: holds no descriptor between calls; fork while no thread is inside one.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        max_bytes: int,
        *,
        durable: bool = True,
        timeout_s: float = 30.0,
    ) -> None:
        """Open the store, and make the directory if it is not there.

        Args:
            directory: For this store alone. Files in it that are none of the store's are left alone.
            max_bytes: What all blocks together may take, in whole pages of 4,096 bytes, those being written
                included. Each user of a directory keeps to its own bound: give all the same.
            durable: Sync blocks and folders, so that a block that was put survives a power failure. Without
                it one that did not is a miss.
            timeout_s: How long a call waits for the store's lock and for room that others are writing to.

        Raises:
            BlockStoreError: the directory can be neither used nor made.
        """
        if max_bytes < 2 * charge_of(HEADER_BYTES):
            raise ValueError(f"max_bytes={max_bytes} has no room for a block")
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise ValueError(f"timeout_s={timeout_s} must be positive and finite")
        self._directory = Path(directory).absolute()
        self._root = str(self._directory)
        self._max_bytes = max_bytes
        self._durable = durable
        self._timeout_s = timeout_s
        self._counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()
        self._ledger = Ledger(self._directory)
        self._space = Space(self._directory, max_bytes, self._count)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise self._failure("cannot open the block store", error) from error
        # A store that can only be read is of use too.
        with contextlib.suppress(OSError), self._ledger.locked(timeout_s) as books:
            self._space.remove_abandoned(books)
            self._space.make_room(books, 0)

    @property
    def directory(self) -> Path:
        """Where the blocks are."""
        return self._directory

    def put(self, block_hash: bytes, data: Readable) -> bool:
        """Store a block, evicting those used longest ago if there is no room.

        Args:
            block_hash: 16 to 64 bytes that stand for these bytes and no others.
            data: Contiguous; 1 byte up to 4 GiB.

        Returns:
            False when the block was there already.

        Raises:
            BlockStoreError: it could not be written; counted in ``put_failures``.
            ValueError: the block is empty, or larger than the whole store.
        """
        name = block_name(self._root, check_hash(block_hash))
        block = bytes_of(data)
        size = HEADER_BYTES + block.nbytes
        if charge_of(size) > self._max_bytes:
            raise ValueError(f"a block of {block.nbytes} bytes is larger than the store ({self._max_bytes})")
        if holds(name, size):
            touch(name)
            self._count("duplicates")
            return False
        try:
            stored = self._write(Path(name), block_hash, block)
        except OSError as error:
            self._count("put_failures")
            raise self._failure(f"cannot store a block of {block.nbytes} bytes", error) from error
        self._count("puts" if stored else "duplicates")
        self._count("bytes_written", block.nbytes if stored else 0)
        return stored

    def get_into(self, block_hash: bytes, buffer: Writable) -> bool:
        """Read a block straight into the caller's memory, and count it as used.

        Args:
            block_hash: The block's.
            buffer: Writable, contiguous, of the block's size.

        Returns:
            False for a miss: the block is not there or cannot be read, or its file is torn, corrupted or
            another's, in which case it is removed. What the buffer holds then is undefined.

        Raises:
            ValueError: the block is good and has another size than the buffer.
        """
        name = block_name(self._root, check_hash(block_hash))
        target = bytes_of(buffer)
        if target.readonly:
            raise ValueError("the buffer is read-only")
        try:
            hit = self._read(name, block_hash, target)
        except OSError as error:
            hit = False
            if error.errno not in {errno.ENOENT, errno.ENOTDIR}:
                self._count("read_failures")
        self._count("hits" if hit else "misses")
        self._count("bytes_read", target.nbytes if hit else 0)
        return hit

    def contains(self, block_hash: bytes) -> bool:
        """Whether the block seems to be there. Only reading it tells whether it is good."""
        return holds(block_name(self._root, check_hash(block_hash)), None)

    def longest_prefix(self, hashes: Iterable[bytes]) -> int:
        """How many of these blocks, from the first on, are there; they count as used.

        The first is recorded as used last, so that of a chain the end is evicted before the beginning.
        """
        names = []
        for block_hash in hashes:
            name = block_name(self._root, check_hash(block_hash))
            if not holds(name, None):
                break
            names.append(name)
        for name in reversed(names):
            touch(name)
        return len(names)

    def discard(self, block_hash: bytes) -> bool:
        """Remove a block; whether it was there. Those who are reading it read on.

        Raises:
            BlockStoreError: it cannot be removed.
        """
        path = block_path(self._directory, check_hash(block_hash))
        try:
            return self._remove(path, None)
        except OSError as error:
            raise self._failure("cannot remove a block", error) from error

    def hashes(self) -> Iterator[bytes]:
        """The hashes of all blocks, in no order. What comes or goes meanwhile may be missed."""
        for file in scan_blocks(self._directory):
            if (block_hash := hash_of_name(file.path.name)) is not None:
                yield block_hash

    def stats(self) -> FileBlockStoreStats:
        """Sizes and counters; takes no lock."""
        nbytes, blocks = self._ledger.peek()
        with self._counts_lock:
            return FileBlockStoreStats(
                blocks, nbytes, self._max_bytes, *(self._counts[name] for name in _COUNTERS)
            )

    def _count(self, name: str, increase: int = 1) -> None:
        with self._counts_lock:
            self._counts[name] += increase

    def _failure(self, what: str, error: OSError) -> BlockStoreError:
        code = error.errno or 0
        reason = _REMEDIES.get(code, "")
        text = f"{self._directory}: {what}: {error.strerror or error}{f' ({reason})' if reason else ''}"
        return BlockStoreError(text, directory=str(self._directory), errno=code)

    def _write(self, path: Path, block_hash: bytes, block: memoryview) -> bool:
        """Write, sync and rename; whether this call stored the block."""
        temporary = self._reserve(HEADER_BYTES + block.nbytes)
        published = False
        try:
            write_all(temporary.descriptor, pack_header(block_hash, block), block)
            touch(temporary.descriptor)
            if self._durable:
                os.fsync(temporary.descriptor)
            stored = self._publish(temporary, path)
            published = True
        finally:
            if not published:
                with contextlib.suppress(OSError), self._ledger.locked(self._timeout_s) as books:
                    self._space.release(books, temporary)
            os.close(temporary.descriptor)
        if stored and self._durable:
            sync_folder(path.parent)
        return stored

    def _reserve(self, file_bytes: int) -> Temporary:
        deadline = time.monotonic() + self._timeout_s
        for pause in waits(deadline):
            with self._ledger.locked(max(deadline - time.monotonic(), 0.001)) as books:
                temporary = self._space.reserve(books, file_bytes)
            if temporary is not None:
                return temporary
            time.sleep(pause)
        raise OSError(errno.EBUSY, "blocks that are being written fill the store; max_bytes is too small")

    def _publish(self, temporary: Temporary, path: Path) -> bool:
        """Give the finished file its name; whether nobody else had."""
        size = os.fstat(temporary.descriptor).st_size
        with self._ledger.locked(self._timeout_s) as books:
            if holds(path, size):
                self._space.release(books, temporary)
                return False
            self._make_folders(path)
            replaced = charge_at(path)
            if replaced is not None:
                books.mark()
            temporary.path.replace(path)
            if replaced is not None:
                books.add(-replaced, -1)
        return True

    def _make_folders(self, path: Path) -> None:
        """Make the two folders above a block, and sync the names of those that are new."""
        for folder in (path.parent.parent, path.parent):
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:
                continue
            if self._durable:
                sync_folder(folder.parent)

    def _read(self, name: str, block_hash: bytes, target: memoryview) -> bool:
        try:
            descriptor = os.open(name, READ_FLAGS)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            self._remove_damaged(Path(name), None)  # a link, which the store never makes
            return False
        try:
            header = read_header(descriptor, block_hash)
            if header.nbytes != target.nbytes:
                raise ValueError(
                    f"block {block_hash.hex()} has {header.nbytes} bytes, the buffer {target.nbytes}"
                )
            read_payload(descriptor, header, target)
        except DamagedBlockError:
            self._remove_damaged(Path(name), descriptor)
            return False
        else:
            touch(descriptor)
            return True
        finally:
            os.close(descriptor)

    def _remove_damaged(self, path: Path, descriptor: int | None) -> None:
        self._count("damaged")
        try:
            self._remove(path, descriptor)
        except OSError:
            self._count("read_failures")

    def _remove(self, path: Path, descriptor: int | None) -> bool:
        """Remove a file; when a descriptor is given, only the file that it has open."""
        with self._ledger.locked(self._timeout_s) as books:
            charge = charge_at(path)
            if descriptor is not None and not is_same(path, os.fstat(descriptor)):
                return False
            books.mark()
            try:
                path.unlink()
            except FileNotFoundError:
                return False
            if charge is not None:
                books.add(-charge, -1)
            return True
