"""What a block looks like on disk: the name of its file and the header before its bytes.

A file is a header of 128 bytes, little endian, and the block. Header: magic (8 bytes), size of the header,
size of the hash, size of the block (u64), CRC-32 of the block, flags (0), the hash padded with zeros to 64
bytes, 28 zeros, CRC-32 of the 124 bytes before it. A reader believes nothing before the last CRC fits.
"""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

HEADER_BYTES = 128
MIN_HASH_BYTES = 16
MAX_HASH_BYTES = 64
MAX_BLOCK_BYTES = 1 << 32

# What a file is counted as: disks hand out whole pages.
PAGE_BYTES = 4096

_MAGIC = b"SMPLKV\x00\x01"
_HEADER = struct.Struct("<8sIIQII64s28x")
_CRC = struct.Struct("<I")
_NAME = re.compile(r"(?:[0-9a-f]{2}){16,64}")
_OUTER = re.compile(r"[0-9a-f]{2}")
_INNER = re.compile(r"[0-9a-f]")


class DamagedBlockError(ValueError):
    """The bytes are not the block that the file's name promises; the text says what is wrong."""


class BlockHeader(NamedTuple):
    """What a good header says."""

    block_hash: bytes
    nbytes: int
    crc: int


def charge_of(file_bytes: int) -> int:
    """The bytes that a file of this size counts for."""
    return -(-file_bytes // PAGE_BYTES) * PAGE_BYTES


def check_hash(block_hash: bytes) -> bytes:
    """Return the hash; anything but 16 to 64 bytes is an error, since it becomes a file's name."""
    if not isinstance(block_hash, bytes):
        raise TypeError(f"a block's hash is bytes, not {type(block_hash).__name__}")
    if not MIN_HASH_BYTES <= len(block_hash) <= MAX_HASH_BYTES:
        raise ValueError(
            f"a block's hash has {MIN_HASH_BYTES} to {MAX_HASH_BYTES} bytes, not {len(block_hash)}"
        )
    return block_hash


def block_name(directory: Path | str, block_hash: bytes) -> str:
    """Where the block lives: two levels of folders, 256 and 16 wide, and the hash in hexadecimal digits."""
    name = block_hash.hex()
    return f"{directory}/{name[:2]}/{name[2]}/{name}"


def block_path(directory: Path | str, block_hash: bytes) -> Path:
    """The same as a `Path`, which takes longer to make than the system takes to look for the file."""
    return Path(block_name(directory, block_hash))


def is_folder_name(name: str, level: int) -> bool:
    """Whether a folder of the fan-out is called this; level 0 is the outer one."""
    return (_INNER if level else _OUTER).fullmatch(name) is not None


def hash_of_name(name: str) -> bytes | None:
    """The hash that a file's name stands for; None for a name that is none of ours."""
    return bytes.fromhex(name) if _NAME.fullmatch(name) else None


def pack_header(block_hash: bytes, block: memoryview) -> bytes:
    """The header of a block, with the checksum of its bytes."""
    fields = _HEADER.pack(
        _MAGIC, HEADER_BYTES, len(block_hash), block.nbytes, zlib.crc32(block), 0, block_hash
    )
    return fields + _CRC.pack(zlib.crc32(fields))


def parse_header(raw: bytes, expected_hash: bytes, file_bytes: int) -> BlockHeader:
    """Read the header of the block that is wanted.

    Args:
        raw: The first bytes of the file, as many as there were up to ``HEADER_BYTES``.
        expected_hash: The hash that the file's name stands for.
        file_bytes: The size of the file.

    Raises:
        DamagedBlockError: torn, corrupted, another format, another block, or a size that is not the file's.
    """
    if len(raw) != HEADER_BYTES:
        raise DamagedBlockError(f"{len(raw)} bytes are no header")
    fields = raw[: _HEADER.size]
    magic, header_bytes, hash_bytes, nbytes, crc, flags, padded = _HEADER.unpack(fields)
    if magic != _MAGIC:
        raise DamagedBlockError("not a block of this format")
    if _CRC.unpack(raw[_HEADER.size :])[0] != zlib.crc32(fields):
        raise DamagedBlockError("the header's checksum does not fit")
    if header_bytes != HEADER_BYTES or flags != 0:
        raise DamagedBlockError("a header of another version")
    if not MIN_HASH_BYTES <= hash_bytes <= MAX_HASH_BYTES or not 1 <= nbytes <= MAX_BLOCK_BYTES:
        raise DamagedBlockError("the header's sizes are out of range")
    if padded[:hash_bytes] != expected_hash or any(padded[hash_bytes:]):
        raise DamagedBlockError("the header names another block")
    if file_bytes != HEADER_BYTES + nbytes:
        raise DamagedBlockError(f"{file_bytes} bytes, where {HEADER_BYTES + nbytes} were written")
    return BlockHeader(expected_hash, nbytes, crc)
