"""The block store under damage, kills, crowds and full disks: whole blocks or misses, and it goes on."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import subprocess
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simpler.kv import file_store_io
from simpler.kv.file_store import BlockStoreError, FileBlockStore
from simpler.kv.file_store_format import HEADER_BYTES, DamagedBlockError, pack_header, parse_header

from .test_file_store import PAGE, block_of, files_of, hash_number, path_of, read, true_bytes
from .test_file_store_sharing import check_sums

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def store(tmp_path: Path) -> FileBlockStore:
    return FileBlockStore(tmp_path / "store", 64 * PAGE, durable=False)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(0, HEADER_BYTES + 300))
def test_a_file_torn_anywhere_is_counted_removed_and_a_miss(store: FileBlockStore, length: int) -> None:
    before = store.stats().damaged
    store.put(hash_number(1), block_of(1, 300))
    os.truncate(path_of(store, hash_number(1)), length)
    whole = length == HEADER_BYTES + 300
    assert (read(store, hash_number(1), 300) == block_of(1, 300)) is whole
    assert path_of(store, hash_number(1)).exists() is whole
    assert store.stats().damaged - before == (not whole)
    assert store.stats().blocks == whole


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, HEADER_BYTES + 299), flip=st.integers(1, 255))
def test_a_changed_byte_anywhere_is_a_miss(store: FileBlockStore, position: int, flip: int) -> None:
    before = store.stats().damaged
    store.put(hash_number(1), block_of(1, 300))
    path = path_of(store, hash_number(1))
    raw = bytearray(path.read_bytes())
    raw[position] ^= flip
    path.write_bytes(raw)
    assert read(store, hash_number(1), 300) is None
    assert not path.exists()
    assert store.stats().damaged == before + 1
    assert store.put(hash_number(1), block_of(1, 300))
    assert read(store, hash_number(1), 300) == block_of(1, 300)


@settings(max_examples=200, deadline=None)
@given(raw=st.binary(max_size=200), size=st.integers(0, 1 << 40))
def test_no_bytes_but_ours_are_a_header(raw: bytes, size: int) -> None:
    with pytest.raises(DamagedBlockError):
        parse_header(raw, hash_number(1), size)


@settings(max_examples=100, deadline=None)
@given(
    header_bytes=st.integers(0, 2**32 - 1),
    hash_bytes=st.integers(0, 2**32 - 1),
    nbytes=st.integers(0, 2**64 - 1),
    flags=st.integers(1, 2**32 - 1),
)
def test_sizes_out_of_range_are_refused_though_the_checksum_fits(
    header_bytes: int, hash_bytes: int, nbytes: int, flags: int
) -> None:
    good = pack_header(hash_number(1), memoryview(b"block"))
    fields = bytearray(good[:-4])
    struct.pack_into("<IIQII", fields, 8, header_bytes, hash_bytes, nbytes, 0, flags)
    raw = bytes(fields) + struct.pack("<I", zlib.crc32(fields))
    with pytest.raises(DamagedBlockError):
        parse_header(raw, hash_number(1), HEADER_BYTES + nbytes)


@pytest.mark.parametrize("change", [("hash_bytes", 12, 33), ("nbytes", 16, 6), ("flags", 28, 1)])
def test_each_field_of_the_header_is_checked(change: tuple[str, int, int]) -> None:
    _, offset, value = change
    fields = bytearray(pack_header(hash_number(1), memoryview(b"block"))[:-4])
    struct.pack_into("<I", fields, offset, value)
    raw = bytes(fields) + struct.pack("<I", zlib.crc32(fields))
    with pytest.raises(DamagedBlockError):
        parse_header(raw, hash_number(1), HEADER_BYTES + 5)


def test_a_block_in_another_blocks_place_is_a_miss(store: FileBlockStore) -> None:
    store.put(hash_number(1), block_of(1))
    foreign = path_of(store, hash_number(2))
    foreign.parent.mkdir(parents=True, exist_ok=True)
    path_of(store, hash_number(1)).rename(foreign)
    assert read(store, hash_number(2)) is None
    assert not foreign.exists()
    assert store.stats().damaged == 1


def test_a_link_or_a_pipe_in_a_blocks_place_is_a_miss_and_is_removed(store: FileBlockStore) -> None:
    store.put(hash_number(1), block_of(1))
    for number, plant in ((2, "link"), (3, "pipe")):
        path = path_of(store, hash_number(number))
        path.parent.mkdir(parents=True, exist_ok=True)
        if plant == "link":
            path.symlink_to(path_of(store, hash_number(1)))
        else:
            os.mkfifo(path)
        assert not store.contains(hash_number(number))
        assert read(store, hash_number(number)) is None
        assert not path.is_symlink()
        assert not path.exists()
    assert read(store, hash_number(1)) == block_of(1)
    assert store.stats().damaged == 2


def test_a_torn_file_is_replaced_by_the_next_put(store: FileBlockStore) -> None:
    store.put(hash_number(1), block_of(1))
    os.truncate(path_of(store, hash_number(1)), 1000)
    assert store.put(hash_number(1), block_of(1))
    assert read(store, hash_number(1)) == block_of(1)
    assert store.stats().nbytes == true_bytes(store)


def test_blocks_that_are_being_written_are_waited_for_and_then_named(tmp_path: Path) -> None:
    store = FileBlockStore(tmp_path, 2 * PAGE, durable=False, timeout_s=0.05)
    with store._ledger.locked(1) as books:
        temporary = store._space.reserve(books, 2 * PAGE)
    assert temporary is not None
    with pytest.raises(BlockStoreError, match="being written fill the store"):
        store.put(hash_number(1), block_of(1))
    os.close(temporary.descriptor)  # as the death of its writer does
    assert store.put(hash_number(1), block_of(1))
    assert store.stats().temporaries_removed == 1


def test_a_forked_child_that_holds_a_copy_of_the_lock_locks_nobody_out(store: FileBlockStore) -> None:
    with store._ledger.locked(1):
        descriptors = [
            int(entry.name) for entry in Path("/proc/self/fd").iterdir() if entry.resolve().name == "usage"
        ]
        copies = [os.dup(descriptor) for descriptor in descriptors]
    try:
        assert copies
        assert store.put(hash_number(1), block_of(1))
    finally:
        for copy in copies:
            os.close(copy)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 pages in memory."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={64 * PAGE}", "tmpfs", str(mounted)]
    if (done := subprocess.run(command, check=False, capture_output=True, text=True)).returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    yield mounted
    subprocess.run(["umount", "-l", str(mounted)], check=True)


@pytest.mark.root
def test_on_a_disk_that_others_fill_old_blocks_make_room(small_disk: Path) -> None:
    store = FileBlockStore(small_disk / "store", 1 << 30)
    for number in range(10):
        store.put(hash_number(number), block_of(number))
    fill(small_disk / "others")
    for number in range(10, 14):
        assert store.put(hash_number(number), block_of(number))
        assert read(store, hash_number(number)) == block_of(number)
    assert store.stats().evicted >= 4
    assert store.stats().put_failures == 0
    check_sums(store)


@pytest.mark.root
def test_a_full_disk_is_a_clear_error_and_the_store_goes_on(small_disk: Path) -> None:
    store = FileBlockStore(small_disk / "store", 1 << 30)
    store.put(hash_number(0), block_of(0))
    fill(small_disk / "others")
    with pytest.raises(BlockStoreError, match="the disk is full") as caught:
        store.put(hash_number(1), bytes(20 * PAGE))
    assert caught.value.errno == errno.ENOSPC
    assert not any((store.directory / "tmp").iterdir())
    check_sums(store)
    (small_disk / "others").unlink()
    assert store.put(hash_number(1), bytes(20 * PAGE))
    assert store.stats().put_failures == 1


@pytest.mark.root
def test_a_full_disk_cannot_hold_a_new_store(small_disk: Path) -> None:
    fill(small_disk / "others")
    store = FileBlockStore(small_disk, 1 << 30)
    with pytest.raises(BlockStoreError, match="the disk is full"):
        store.put(hash_number(1), block_of(1))
    assert read(store, hash_number(1)) is None


@pytest.mark.root
def test_a_read_only_file_system_still_gives_its_blocks(small_disk: Path) -> None:
    writer = FileBlockStore(small_disk, 1 << 30)
    writer.put(hash_number(1), block_of(1))
    writer.put(hash_number(2), block_of(2))
    os.truncate(path_of(writer, hash_number(2)), 500)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for store in (writer, FileBlockStore(small_disk, 1 << 30)):
        assert read(store, hash_number(1)) == block_of(1)
        assert read(store, hash_number(2)) is None
        with pytest.raises(BlockStoreError, match="read-only"):
            store.put(hash_number(3), block_of(3))
        stats = store.stats()
        assert (stats.damaged, stats.read_failures, stats.put_failures) == (1, 1, 1)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert writer.put(hash_number(3), block_of(3))


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(PAGE))
    free = os.statvfs(path)
    assert free.f_bavail == 0


def test_a_quota_is_an_error_of_its_own_and_leaves_nothing(
    store: FileBlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(BlockStoreError, match="quota is used up"):
            store.put(hash_number(1), block_of(1))
    assert files_of(store) == []
    check_sums(store)
    assert store.put(hash_number(1), block_of(1))


@pytest.mark.parametrize("call", ["pwritev", "fsync"])
def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = FileBlockStore(tmp_path, 64 * PAGE)

    def fail(*arguments: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(BlockStoreError, match="Input/output error"):
            store.put(hash_number(1), block_of(1))
    assert files_of(store) == []
    check_sums(store)
    assert store.put(hash_number(1), block_of(1))


def test_short_writes_are_continued(store: FileBlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: real(fd, bytes(parts[0])[:50], at))
    monkeypatch.setattr(file_store_io, "_CALL_BYTES", 100)
    assert store.put(hash_number(1), block_of(1, 1234))
    assert read(store, hash_number(1), 1234) == block_of(1, 1234)


def test_a_disk_that_cannot_read_a_block_is_a_counted_miss(
    store: FileBlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(hash_number(1), block_of(1))

    def fail(*arguments: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        assert read(store, hash_number(1)) is None
    assert (store.stats().read_failures, store.stats().misses) == (1, 1)
    assert read(store, hash_number(1)) == block_of(1)


def test_a_directory_that_has_vanished_is_misses_and_a_clear_error_until_it_is_back(tmp_path: Path) -> None:
    store = FileBlockStore(tmp_path / "store", 64 * PAGE)
    store.put(hash_number(1), block_of(1))
    (tmp_path / "store").rename(tmp_path / "away")
    assert read(store, hash_number(1)) is None
    assert store.longest_prefix([hash_number(1)]) == 0
    with pytest.raises(BlockStoreError, match="the directory is gone"):
        store.put(hash_number(2), block_of(2))
    assert not (tmp_path / "store").exists()  # a disk that is unmounted is not written beside
    (tmp_path / "away").rename(tmp_path / "store")
    assert read(store, hash_number(1)) == block_of(1)
    assert store.put(hash_number(2), block_of(2))


def test_a_file_where_the_directory_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    with pytest.raises(BlockStoreError, match="cannot open the block store"):
        FileBlockStore(tmp_path / "store", 64 * PAGE)


def test_a_lock_file_that_was_replaced_while_it_was_waited_for_is_not_trusted(store: FileBlockStore) -> None:
    store.put(hash_number(1), block_of(1))
    with (store.directory / "usage").open("rb") as old:
        (store.directory / "usage").unlink()
        fcntl.flock(old, fcntl.LOCK_EX)
        assert store.put(hash_number(2), block_of(2))
    check_sums(store)
