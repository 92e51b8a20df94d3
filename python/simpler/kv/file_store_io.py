"""The system calls of the block store on one file."""

from __future__ import annotations

import os
import stat
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from simpler.kv.file_store_format import (
    HEADER_BYTES,
    MAX_BLOCK_BYTES,
    BlockHeader,
    DamagedBlockError,
    charge_of,
    parse_header,
)

if TYPE_CHECKING:
    from pathlib import Path

    from _typeshed import ReadableBuffer
    from numpy.typing import NDArray

# Whatever is planted in a block's place, opening it follows no link and waits for no writer of a pipe.
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

# Linux writes and reads at most 2 GiB less a page in one call.
_CALL_BYTES = 1 << 30


def bytes_of(data: ReadableBuffer | NDArray[Any]) -> memoryview:
    """The bytes of a buffer, without copying them."""
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    if not view.c_contiguous:
        raise ValueError("a block is contiguous memory")
    if not 1 <= view.nbytes <= MAX_BLOCK_BYTES:
        raise ValueError(f"a block has 1 to {MAX_BLOCK_BYTES} bytes, not {view.nbytes}")
    return view.cast("B")


def holds(path: Path | str, size: int | None) -> bool:
    """Whether a file that may be a block is there, of this size if one is given."""
    try:
        status = os.stat(path, follow_symlinks=False)  # noqa: PTH116  # it is asked for each block of a prompt
    except OSError:
        return False
    fits = status.st_size > HEADER_BYTES if size is None else status.st_size == size
    return fits and stat.S_ISREG(status.st_mode)


def charge_at(path: Path) -> int | None:
    """What the file counts for; None when there is none."""
    try:
        status = path.stat(follow_symlinks=False)
    except OSError:
        return None
    return charge_of(status.st_size) if stat.S_ISREG(status.st_mode) else None


def is_same(path: Path, opened: os.stat_result) -> bool:
    """Whether the path still names the file that was opened."""
    try:
        found = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino)


def read_header(descriptor: int, block_hash: bytes) -> BlockHeader:
    """Read and check the header; DamagedBlockError unless it is this block's."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise DamagedBlockError("not a regular file")
    return parse_header(os.pread(descriptor, HEADER_BYTES, 0), block_hash, status.st_size)


def read_payload(descriptor: int, header: BlockHeader, target: memoryview) -> None:
    """Read the block into the target and check it there; DamagedBlockError unless it is whole."""
    done = 0
    while done < header.nbytes:
        count = os.preadv(descriptor, [target[done : done + _CALL_BYTES]], HEADER_BYTES + done)
        if count == 0:
            raise DamagedBlockError("the file became shorter while it was read")
        done += count
    if zlib.crc32(target) != header.crc:
        raise DamagedBlockError("the block's checksum does not fit")


def write_all(descriptor: int, header: bytes, block: memoryview) -> None:
    """Write header and block from the start of the file, in as many calls as it takes."""
    done = os.pwritev(descriptor, [header, block[:_CALL_BYTES]], 0)
    while done < HEADER_BYTES:
        done += os.pwrite(descriptor, header[done:], done)
    while done < HEADER_BYTES + block.nbytes:
        start = done - HEADER_BYTES
        done += os.pwrite(descriptor, block[start : start + _CALL_BYTES], done)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
