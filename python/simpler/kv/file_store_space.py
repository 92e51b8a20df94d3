"""Room in a block store: reserved before a block is written, made by evicting what was used longest ago.

A block under way is a file in the folder ``tmp``, allocated in full and locked by its writer. The lock ends
with the writer, so whoever can take it may remove the file. Everything here runs under the store's lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from simpler.kv.file_store_format import charge_of
from simpler.kv.file_store_ledger import TEMPORARY_NAME, BlockFile, Books

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT})

# A scan remembers this share of the blocks, the oldest, so that it is made once for many evictions.
_REMEMBERED_SHARE = 8
_REMEMBERED_LEAST = 256


class Temporary(NamedTuple):
    """A file being written: its descriptor holds the lock that shows its writer lives."""

    descriptor: int
    path: Path
    charge: int


class Space:
    """Makes and takes room in one directory.

    Thread safety: the callers hold the store's lock.
    """

    def __init__(self, directory: Path, max_bytes: int, count: Callable[[str], None]) -> None:
        """Look after one directory.

        Args:
            directory: The store's.
            max_bytes: What all blocks together may take.
            count: Called with ``"evicted"`` or ``"temporaries_removed"`` for each file removed.
        """
        self._directory = directory
        self._temporaries = directory / TEMPORARY_NAME
        self._max_bytes = max_bytes
        self._count = count
        self._oldest: deque[BlockFile] = deque()

    def reserve(self, books: Books, file_bytes: int) -> Temporary | None:
        """Open a file of this size; None when only blocks that are being written take the room.

        Raises:
            OSError: the disk is full though blocks were evicted, or the directory cannot be written.
        """
        charge = charge_of(file_bytes)
        if not self.make_room(books, charge):
            return None
        books.mark()
        try:
            temporary = self._open_temporary(file_bytes)
        except OSError as error:
            # Others fill the disk too: give it back at least what the block needs, and try once more.
            if error.errno not in FULL_DISK or not self._evict(books, charge):
                raise
            temporary = self._open_temporary(file_bytes)
        books.add(charge, 1)
        return temporary

    def make_room(self, books: Books, needed: int) -> bool:
        """Evict until this many bytes fit; whether they do."""
        missing = books.nbytes + needed - self._max_bytes
        if missing <= 0:
            return True
        self.remove_abandoned(books)
        missing = books.nbytes + needed - self._max_bytes
        return missing <= 0 or self._evict(books, missing)

    def release(self, books: Books, temporary: Temporary) -> None:
        """Give up a block that was being written."""
        books.mark()
        with contextlib.suppress(FileNotFoundError):
            temporary.path.unlink()
            books.add(-temporary.charge, -1)

    def remove_abandoned(self, books: Books) -> None:
        """Remove the unfinished files of writers that have died."""
        for path in self._unfinished():
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                charge = charge_of(os.fstat(descriptor).st_size)
                books.mark()
                path.unlink()
                books.add(-charge, -1)
                self._count("temporaries_removed")
            except OSError:
                continue  # its writer lives, or has just finished
            finally:
                os.close(descriptor)

    def _unfinished(self) -> list[Path]:
        try:
            with os.scandir(self._temporaries) as entries:
                return [Path(entry.path) for entry in entries]
        except OSError:
            return []

    def _open_temporary(self, file_bytes: int) -> Temporary:
        self._temporaries.mkdir(mode=0o700, exist_ok=True)
        path = self._temporaries / f"{os.getpid()}-{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(descriptor, 0, file_bytes)
        except BaseException:
            path.unlink()
            os.close(descriptor)
            raise
        return Temporary(descriptor, path, charge_of(file_bytes))

    def _evict(self, books: Books, nbytes: int) -> bool:
        """Remove the blocks used longest ago until this many bytes are gone; whether they are."""
        for file, spared in self._candidates(books):
            used_ns = _used_ns(file.path)
            if used_ns is None or (spared and used_ns != file.used_ns):
                continue
            books.mark()
            file.path.unlink()
            books.add(-file.charge, -1)
            self._count("evicted")
            nbytes -= file.charge
            if nbytes <= 0:
                return True
        return False

    def _candidates(self, books: Books) -> Iterator[tuple[BlockFile, bool]]:
        """The oldest blocks: those still remembered, then those of scans.

        Beside each: whether it is spared if it was used since it was seen. In the last scan none is, so that
        readers who use everything all the time cannot keep a writer out.
        """
        for spared in (True, True, True, False):
            while self._oldest:
                yield self._oldest.popleft(), spared
            remembered = max(_REMEMBERED_LEAST, books.blocks // _REMEMBERED_SHARE)
            self._oldest.extend(books.recount(remembered))
            if not self._oldest:
                return
        while self._oldest:
            yield self._oldest.popleft(), False


def _used_ns(path: Path) -> int | None:
    """When the block was last used; None when it is no file (any more)."""
    try:
        status = path.stat(follow_symlinks=False)
    except OSError:
        return None
    return status.st_mtime_ns if stat.S_ISREG(status.st_mode) else None


def touch(target: int | str) -> None:
    """Record a use. A directory that cannot be written keeps the old time."""
    now = time.time_ns()
    with contextlib.suppress(OSError):
        os.utime(target, ns=(now, now))
