"""The block store on disk: what is put comes back whole or not at all, within the bound, oldest out first."""

from __future__ import annotations

import functools
import os
import pickle
import tempfile
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from simpler.kv.file_store import BlockStoreError, FileBlockStore
from simpler.kv.file_store_format import HEADER_BYTES, block_path, hash_of_name

if TYPE_CHECKING:
    from pathlib import Path

PAGE = 4096


def hash_number(number: int) -> bytes:
    return number.to_bytes(4, "big") * 8


@functools.cache
def block_of(number: int, nbytes: int = PAGE - HEADER_BYTES) -> bytes:
    """A block that takes one page, with its header."""
    return bytes((number + index) % 251 for index in range(nbytes))


def path_of(store: FileBlockStore, block_hash: bytes) -> Path:
    return block_path(store.directory, block_hash)


def files_of(store: FileBlockStore) -> list[Path]:
    return [path for path in store.directory.rglob("*") if path.is_file() and path.name != "usage"]


def true_bytes(store: FileBlockStore) -> int:
    return sum(-(-path.stat().st_size // PAGE) * PAGE for path in files_of(store))


@pytest.fixture
def store(tmp_path: Path) -> FileBlockStore:
    return FileBlockStore(tmp_path / "store", 64 * PAGE, durable=False)


def read(store: FileBlockStore, block_hash: bytes, nbytes: int = PAGE - HEADER_BYTES) -> bytes | None:
    buffer = bytearray(nbytes)
    return bytes(buffer) if store.get_into(block_hash, buffer) else None


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("hash_bytes", [16, 32, 64])
def test_a_block_comes_back_byte_for_byte(tmp_path: Path, durable: bool, hash_bytes: int) -> None:
    store = FileBlockStore(tmp_path / "store", 1 << 20, durable=durable)
    block_hash, block = os.urandom(hash_bytes), os.urandom(100_001)
    assert store.put(block_hash, block)
    assert store.contains(block_hash)
    assert read(store, block_hash, 100_001) == block
    assert read(FileBlockStore(tmp_path / "store", 1 << 20), block_hash, 100_001) == block


def test_any_contiguous_memory_is_a_block(store: FileBlockStore) -> None:
    source = np.arange(600, dtype=np.float32).reshape(20, 30)
    target = np.zeros_like(source)
    assert store.put(hash_number(1), source)
    assert store.get_into(hash_number(1), target)
    assert np.array_equal(source, target)
    with pytest.raises(ValueError, match="contiguous"):
        store.put(hash_number(2), source[:, ::2])
    with pytest.raises(ValueError, match="contiguous"):
        store.get_into(hash_number(1), target.T)
    with pytest.raises(ValueError, match="read-only"):
        store.get_into(hash_number(1), bytes(2400))


def test_a_block_put_twice_is_written_once(store: FileBlockStore) -> None:
    assert store.put(hash_number(1), block_of(1))
    written = path_of(store, hash_number(1)).stat().st_ino
    assert not store.put(hash_number(1), block_of(1))
    assert path_of(store, hash_number(1)).stat().st_ino == written
    stats = store.stats()
    assert (stats.puts, stats.duplicates, stats.blocks, stats.nbytes) == (1, 1, 1, PAGE)


def test_what_was_never_put_is_a_miss(store: FileBlockStore) -> None:
    assert read(store, hash_number(1)) is None
    assert not store.contains(hash_number(1))
    assert not store.discard(hash_number(1))
    stats = store.stats()
    assert (stats.misses, stats.hits, stats.damaged, stats.read_failures) == (1, 0, 0, 0)


def test_a_buffer_of_another_size_is_an_error_and_the_block_stays(store: FileBlockStore) -> None:
    store.put(hash_number(1), block_of(1, 100))
    for nbytes in (99, 101, 1):
        with pytest.raises(ValueError, match=f"has 100 bytes, the buffer {nbytes}"):
            read(store, hash_number(1), nbytes)
    assert read(store, hash_number(1), 100) == block_of(1, 100)
    assert store.stats().damaged == 0


@pytest.mark.parametrize("block_hash", [b"", b"x" * 15, b"x" * 65])
def test_a_hash_has_16_to_64_bytes(store: FileBlockStore, block_hash: bytes) -> None:
    for call in (store.contains, store.discard):
        with pytest.raises(ValueError, match="16 to 64 bytes"):
            call(block_hash)
    with pytest.raises(ValueError, match="16 to 64 bytes"):
        store.put(block_hash, b"x")
    with pytest.raises(ValueError, match="16 to 64 bytes"):
        store.longest_prefix([block_hash])


def test_a_hash_is_bytes_and_never_a_path(store: FileBlockStore) -> None:
    with pytest.raises(TypeError, match="not str"):
        store.put("../../../../etc/passwd", b"x")  # type: ignore[arg-type]  # what is tested
    outside = b"../../../../../../tmp/out"
    assert store.put(outside, b"x")
    assert path_of(store, outside).is_relative_to(store.directory)
    assert ".." not in path_of(store, outside).parts
    assert list(store.hashes()) == [outside]


def test_a_block_that_can_never_fit_is_an_error(store: FileBlockStore) -> None:
    with pytest.raises(ValueError, match="larger than the store"):
        store.put(hash_number(1), bytes(64 * PAGE))
    with pytest.raises(ValueError, match="has 1 to"):
        store.put(hash_number(1), b"")
    assert files_of(store) == []
    assert store.put(hash_number(1), bytes(64 * PAGE - HEADER_BYTES))


@pytest.mark.parametrize(
    ("max_bytes", "timeout_s"), [(0, 1.0), (PAGE, 1.0), (1 << 20, 0.0), (1 << 20, float("inf"))]
)
def test_options_that_cannot_work_are_refused(tmp_path: Path, max_bytes: int, timeout_s: float) -> None:
    with pytest.raises(ValueError, match=r"max_bytes=|timeout_s="):
        FileBlockStore(tmp_path, max_bytes, timeout_s=timeout_s)


def test_the_longest_prefix_ends_at_the_first_gap(store: FileBlockStore) -> None:
    for number in (0, 1, 2, 4):
        store.put(hash_number(number), block_of(number))
    hashes = [hash_number(number) for number in range(6)]
    assert store.longest_prefix(hashes) == 3
    assert store.longest_prefix(hashes[3:]) == 0
    assert store.longest_prefix([]) == 0


def test_the_block_used_longest_ago_goes_first(tmp_path: Path) -> None:
    store = FileBlockStore(tmp_path, 4 * PAGE, durable=False)
    for number in range(4):
        store.put(hash_number(number), block_of(number))
    assert read(store, hash_number(0)) == block_of(0)  # 1 is now the oldest
    assert not store.put(hash_number(1), block_of(1))  # and now 2
    store.put(hash_number(4), block_of(4))
    assert [number for number in range(5) if store.contains(hash_number(number))] == [0, 1, 3, 4]
    assert store.stats().evicted == 1


def test_the_end_of_a_matched_prefix_goes_before_its_beginning(tmp_path: Path) -> None:
    store = FileBlockStore(tmp_path, 4 * PAGE, durable=False)
    chain = [hash_number(number) for number in range(3)]
    for number, block_hash in enumerate(chain):
        store.put(block_hash, block_of(number))
    store.put(hash_number(9), block_of(9))
    assert store.longest_prefix(chain) == 3
    store.put(hash_number(10), block_of(10))  # in place of 9
    store.put(hash_number(11), block_of(11))
    assert not store.contains(hash_number(9))
    assert store.longest_prefix(chain) == 2


def test_a_use_by_another_store_object_counts(tmp_path: Path) -> None:
    first = FileBlockStore(tmp_path, 3 * PAGE, durable=False)
    second = FileBlockStore(tmp_path, 3 * PAGE, durable=False)
    for number in range(3):
        first.put(hash_number(number), block_of(number))
    first.put(hash_number(3), block_of(3))  # evicts 0; 1 and 2 are remembered as the next
    assert read(second, hash_number(1)) == block_of(1)
    first.put(hash_number(4), block_of(4))
    assert first.contains(hash_number(1))
    assert not first.contains(hash_number(2))


def test_a_smaller_bound_evicts_when_the_store_is_opened(store: FileBlockStore) -> None:
    for number in range(10):
        store.put(hash_number(number), block_of(number))
    smaller = FileBlockStore(store.directory, 3 * PAGE)
    assert sorted(smaller.hashes()) == [hash_number(number) for number in (7, 8, 9)]
    assert smaller.stats().nbytes == true_bytes(smaller) == 3 * PAGE


def test_a_block_that_is_being_read_may_be_evicted(store: FileBlockStore) -> None:
    store.put(hash_number(1), block_of(1))
    with path_of(store, hash_number(1)).open("rb") as reader:
        assert store.discard(hash_number(1))
        assert reader.read()[HEADER_BYTES:] == block_of(1)
    assert files_of(store) == []


def test_files_that_are_not_the_stores_stay(store: FileBlockStore) -> None:
    notes = store.directory / "ab" / "README"
    notes.parent.mkdir()
    notes.write_text("keep")
    small = FileBlockStore(store.directory, 2 * PAGE, durable=False)
    for number in range(5):
        small.put(hash_number(number), block_of(number))
    assert notes.read_text() == "keep"
    assert hash_of_name("README") is None


def test_a_lost_or_damaged_record_is_counted_again(store: FileBlockStore) -> None:
    for number in range(5):
        store.put(hash_number(number), block_of(number))
    record = store.directory / "usage"
    for damage in (b"", b"nonsense" * 20, record.read_bytes()[:-1] + b"!"):
        record.write_bytes(damage)
        assert FileBlockStore(store.directory, 64 * PAGE).stats().nbytes == 5 * PAGE
    record.unlink()
    assert FileBlockStore(store.directory, 64 * PAGE).stats().blocks == 5


def test_blocks_removed_by_hand_are_found_out(tmp_path: Path) -> None:
    store = FileBlockStore(tmp_path, 4 * PAGE, durable=False)
    for number in range(4):
        store.put(hash_number(number), block_of(number))
    for number in range(4):
        path_of(store, hash_number(number)).unlink()
    for number in range(4, 8):
        assert store.put(hash_number(number), block_of(number))
    assert store.stats().nbytes == true_bytes(store) == 4 * PAGE


def test_folders_removed_by_hand_are_made_again(store: FileBlockStore) -> None:
    store.put(hash_number(1), block_of(1))
    for path in sorted(store.directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert read(store, hash_number(1)) is None
    assert store.put(hash_number(1), block_of(1))
    assert read(store, hash_number(1)) == block_of(1)


def test_an_error_crosses_processes_with_its_attributes() -> None:
    error = pickle.loads(pickle.dumps(BlockStoreError("full", directory="/d", errno=28)))
    assert (str(error), error.directory, error.errno) == ("full", "/d", 28)


class StoreAgainstAModel(RuleBasedStateMachine):
    """Two objects over one directory behave as one dictionary that forgets its oldest entries."""

    CAPACITY = 6

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.stores = [
            FileBlockStore(self.folder.name, self.CAPACITY * PAGE, durable=False) for _ in range(2)
        ]
        self.uses: list[int] = []  # numbers of the blocks there, the oldest use first

    def use(self, number: int) -> None:
        if number in self.uses:
            self.uses.remove(number)
        self.uses.append(number)

    @rule(which=st.integers(0, 1), number=st.integers(0, 11))
    def put(self, which: int, number: int) -> None:
        assert self.stores[which].put(hash_number(number), block_of(number)) is (number not in self.uses)
        self.use(number)
        del self.uses[: -self.CAPACITY]

    @rule(which=st.integers(0, 1), number=st.integers(0, 11))
    def get(self, which: int, number: int) -> None:
        expected = block_of(number) if number in self.uses else None
        assert read(self.stores[which], hash_number(number)) == expected
        if expected is not None:
            self.use(number)

    @rule(which=st.integers(0, 1), number=st.integers(0, 11))
    def discard(self, which: int, number: int) -> None:
        assert self.stores[which].discard(hash_number(number)) is (number in self.uses)
        if number in self.uses:
            self.uses.remove(number)

    @rule(which=st.integers(0, 1), start=st.integers(0, 11))
    def match(self, which: int, start: int) -> None:
        numbers = list(range(start, 12))
        expected = next((i for i, number in enumerate(numbers) if number not in self.uses), len(numbers))
        assert self.stores[which].longest_prefix(map(hash_number, numbers)) == expected
        for number in reversed(numbers[:expected]):
            self.use(number)

    @invariant()
    def sizes_are_exact(self) -> None:
        assert sorted(self.stores[0].hashes()) == sorted(map(hash_number, self.uses))
        stats = self.stores[1].stats()
        assert (stats.blocks, stats.nbytes) == (len(self.uses), len(self.uses) * PAGE)

    def teardown(self) -> None:
        self.folder.cleanup()


TestStoreAgainstAModel = StoreAgainstAModel.TestCase
TestStoreAgainstAModel.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
