"""The connector that keeps blocks in a folder."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import simpler
from simpler.kv import FileBlockStore, KVConnectorContext, KVConnectorRole, KVTransferConfig
from simpler.kv.connectors.file import FileConnector
from simpler.kv.connectors.file_events import StoreEvents
from simpler.testing import KVConnectorContract
from simpler.testing.kv_pair import BLOCK_SIZE, Pair

_numbers = itertools.count()

if TYPE_CHECKING:
    from collections.abc import Iterator


def configs(folder: Path, policy: Any = "fail", **extra: Any) -> tuple[KVTransferConfig, KVTransferConfig]:
    number = next(_numbers)
    options = {"directory": str(folder), "max_bytes": 1 << 22, "fsync": False, **extra}
    return (
        KVTransferConfig("file", "kv_producer", f"p{number}", options),
        KVTransferConfig("file", "kv_consumer", f"d{number}", options, None, policy),
    )


def file_of(pair: Pair, block: int, of: int = 3, name: str = "b.1") -> Path:
    connector = pair.consumer.runtime.connector
    assert isinstance(connector, FileConnector)
    key = connector.key(0, pair.request(name, of).block_hashes[block]).hex()
    return connector.store.directory / key[:2] / key[2] / key


def matched(pair: Pair, name: str, blocks: int) -> int | None:
    tokens, _ = pair.consumer.runtime.get_num_new_matched_tokens(pair.request(name, blocks), 0)
    return tokens


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(configs(tmp_path / "store"))
    yield made
    made.close()


class TestFileConnector(KVConnectorContract):
    @pytest.fixture(autouse=True)
    def own_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "store"

    def make_configs(self) -> tuple[KVTransferConfig, KVTransferConfig]:
        return configs(self.folder)

    def spoil(self, pair: Pair, params: dict[str, Any] | None) -> None:
        path = file_of(pair, 1)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


def test_blocks_outlive_the_worker(tmp_path: Path) -> None:
    first = Pair(configs(tmp_path), "packed")
    first.produce("a.1", [1, 2, 3])
    saved = [first.producer.block(block) for block in (1, 2, 3)]
    first.close()
    second = Pair(configs(tmp_path), "padded")  # where the blocks lie does not matter
    second.begin_load("b.1", [6, 5, 9], None)
    second.finish_load("b.1")
    assert [second.consumer.block(block) for block in (6, 5, 9)] == saved
    second.close()


def test_nothing_of_another_layout_or_number_of_ranks_is_found(tmp_path: Path) -> None:
    made = Pair(configs(tmp_path), "packed")
    made.produce("a.1", [1])
    made.close()
    for kind, ranks in (("split", 1), ("packed", 2)):
        other = Pair(configs(tmp_path), kind, ranks)
        assert matched(other, "b.1", 1) == 0
        other.close()


@pytest.mark.parametrize("harm", ["missing", "torn"])
def test_a_file_that_is_missing_or_torn_shortens_the_match(pair: Pair, harm: str) -> None:
    pair.produce("a.1", [1, 2, 3])
    path = file_of(pair, 1)
    if harm == "missing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 1)
    assert matched(pair, "b.1", 3) == BLOCK_SIZE
    pair.produce("a.1", [1, 2, 3])
    assert matched(pair, "c.1", 3) == 3 * BLOCK_SIZE


def test_a_block_that_is_lost_before_its_load_is_computed_and_those_before_it_are_kept(
    tmp_path: Path,
) -> None:
    made = Pair(configs(tmp_path, "recompute"))
    made.produce("a.1", [1, 2, 3])
    made.begin_load("b.1", [4, 5, 6], None)
    file_of(made, 1).unlink()
    made.finish_load("b.1")
    answer = made.consumer.recompute["b.1"]
    assert answer.num_computed_tokens == BLOCK_SIZE
    assert answer.error.block_ids == (5,)
    assert made.consumer.block(4) == made.producer.block(1)
    made.close()


def test_the_folder_stays_within_its_bound(tmp_path: Path) -> None:
    most = 16 * 4096
    made = Pair(configs(tmp_path, max_bytes=most))
    for number in range(20):
        made.produce(f"a.{number}", [1, 2, 3])
        made.producer.runtime.take_events()
    stats = FileBlockStore(tmp_path, most).stats()
    assert stats.nbytes <= most
    assert sum(path.stat().st_size for path in tmp_path.rglob("?" * 64)) <= most
    assert matched(made, "b.19", 3) == 3 * BLOCK_SIZE
    assert matched(made, "b.0", 3) == 0
    made.close()


def test_a_folder_that_has_vanished_is_a_miss_and_saves_are_counted_and_dropped(
    pair: Pair, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "store")
    pair.produce("a.1", [1, 2])
    assert matched(pair, "b.1", 2) == 0
    stats = pair.producer.runtime.stats()
    assert stats["save_errors"] == 1
    assert stats["chips"][pair.producer.chips[0],]["blocks_dropped"] == 2
    assert pair.producer.runtime.held() == {}


@pytest.mark.root
def test_a_full_disk_drops_saves_and_harms_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a tmpfs here")
    try:
        made = Pair(configs(disk))
        made.produce("a.1", [1])
        fill(disk / "others")
        FileBlockStore(disk, 1 << 22).discard(bytes.fromhex(file_of(made, 0, 1).name))
        fill(disk / "more")
        made.produce("a.2", [1, 2])
        assert matched(made, "b.2", 2) == 0
        assert made.producer.runtime.stats()["save_errors"] == 1
        made.close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_what_was_stored_and_removed_is_told(pair: Pair) -> None:
    pair.produce("a.1", [1, 2])
    hashes = tuple(pair.request("a.1", 2).block_hashes)
    (stored,) = pair.producer.runtime.take_events()
    assert (stored.kind, stored.block_hashes, stored.medium) == ("stored", hashes, "disk")
    assert pair.producer.runtime.take_events() == []
    file_of(pair, 1, 2).unlink()
    (removed,) = pair.producer.runtime.take_events()
    assert (removed.kind, removed.block_hashes) == ("removed", hashes[1:])


def test_what_came_and_went_untold_is_no_event() -> None:
    there = {b"a", b"b"}
    events = StoreEvents(there.__contains__)
    events.seen([b"a", b"b"])
    there.remove(b"a")
    assert [event.block_hashes for event in events.take()] == [(b"b",)]
    assert events.knows(b"b")
    there.clear()
    assert not events.knows(b"b")


@pytest.mark.parametrize("call", ["put", "get_into"])
def test_the_death_of_a_chip_in_a_save_or_a_load_ends_its_request_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    fifo, go = tmp_path / "begun", tmp_path / "go"
    os.mkfifo(fifo)
    os.mkfifo(go)
    store = FileBlockStore(tmp_path / "store", 1 << 22)
    real = getattr(FileBlockStore, call)

    def wait(self: FileBlockStore, key: bytes, data: Any) -> bool:
        if not (tmp_path / "armed").exists():
            done: bool = real(self, key, data)
            return done
        fifo.open("wb").close()
        go.read_bytes()
        return False

    monkeypatch.setattr(FileBlockStore, call, wait)
    made = Pair(configs(tmp_path / "store", fsync=True))
    monkeypatch.undo()
    made.produce("a.1", [1, 2])
    (tmp_path / "armed").touch()
    engine = made.producer if call == "put" else made.consumer
    name = "a.2" if call == "put" else "b.1"
    if call == "put":
        request = made.request(name, 2)
        engine.runtime.update_state_after_alloc(request, [3, 4], 0)
        engine.step({name: request.num_tokens})
    else:
        made.begin_load(name, [3, 4], None)
    engine.step()
    fifo.read_bytes()  # it has begun
    made.worker.kill(engine.chips[0])
    engine.step()
    assert isinstance(engine.failed[name], simpler.WorkerDiedError)
    engine.drain()
    assert engine.runtime.held() == {}
    (tmp_path / "armed").unlink()
    assert store.stats().blocks == 2
    assert not any((tmp_path / "store" / "tmp").iterdir())
    if call == "put":
        made.begin_load("c.1", [5, 6], None)
        made.finish_load("c.1")
        assert "c.1" in made.consumer.loaded
    made.close()


_OTHER = """
import sys
from pathlib import Path
from kv.test_file_connector import configs
from simpler.testing.kv_pair import Pair
made = Pair(configs(Path(sys.argv[1])))
print(flush=True)
sys.stdin.readline()
for number in range(12):
    made.produce(f"other.{number}", [1, 2, 3])
made.close()
"""


def test_two_processes_share_a_folder_at_once(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _OTHER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])},
    ) as other:
        made = Pair(configs(tmp_path))
        assert other.stdout is not None
        assert other.stdin is not None
        other.stdout.readline()
        other.stdin.write(b"go\n")
        other.stdin.flush()
        for number in range(6, 18):  # half of them at the same time as the other process
            made.produce(f"a.{number}", [1, 2, 3])
        assert other.wait(60) == 0
        for number in range(18):
            name = f"b.{number}"
            made.begin_load(name, [4, 5, 6], None)
            made.finish_load(name)
            assert name in made.consumer.loaded
        made.close()
    stats = FileBlockStore(tmp_path, 1 << 22).stats()
    assert (stats.blocks, stats.damaged) == (3 * 18, 0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"directory": None}, "directory of the file connector"),
        ({"max_bytes": "1G"}, "max_bytes of the file connector"),
        ({"max_bytes": True}, "max_bytes of the file connector"),
        ({"fsync": 1}, "fsync of the file connector"),
        ({"timeout_s": 0}, "timeout_s of the file connector"),
        ({"dir": "/tmp"}, "no option 'dir'"),
    ],
)
def test_options_that_cannot_be_are_named(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    config, _ = configs(tmp_path, **options)
    context = KVConnectorContext(num_ranks=1, block_size=BLOCK_SIZE, log=logging.getLogger("test"))
    with pytest.raises(simpler.ConfigError, match=text):
        FileConnector(config, KVConnectorRole.SCHEDULER, context)


def test_what_an_aborted_step_left_behind_is_not_saved(pair: Pair) -> None:
    engine, request = pair.producer, pair.request("a.1", 2)
    engine.runtime.update_state_after_alloc(request, [1, 2], 0)
    engine.step({"a.1": request.num_tokens})
    engine.runtime.abort("a.1")  # its compute may have failed
    engine.drain()
    assert matched(pair, "b.1", 2) == 0


def test_of_two_folders_the_second_serves_what_the_first_has_lost(tmp_path: Path) -> None:
    subs = []
    for name in ("near", "far"):
        options = {"directory": str(tmp_path / name), "max_bytes": 1 << 22, "fsync": False}
        subs.append({"kv_connector": "file", "kv_connector_extra_config": options})
    made = Pair(
        (
            KVTransferConfig("multi", "kv_producer", "two-p", {"connectors": subs}),
            KVTransferConfig("multi", "kv_consumer", "two-d", {"connectors": subs}),
        )
    )
    made.produce("a.1", [1, 2, 3])
    for path in (tmp_path / "near").rglob("?" * 64):
        path.unlink()
    made.begin_load("b.1", [7, 6, 5], None)
    made.finish_load("b.1")
    assert "b.1" in made.consumer.loaded
    assert [made.consumer.block(n) for n in (7, 6, 5)] == [made.producer.block(n) for n in (1, 2, 3)]
    made.close()
