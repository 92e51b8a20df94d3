"""Many processes use one block store, and are killed at it."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from simpler.kv.file_store import BlockStoreError, FileBlockStore

from .test_file_store import PAGE, block_of, files_of, hash_number, read, true_bytes

TESTS = str(Path(__file__).parents[1])


def program(text: str, *arguments: object) -> list[str]:
    prefix = f"import sys; sys.path.insert(0, {TESTS!r})\n"
    return [sys.executable, "-c", prefix + textwrap.dedent(text), *map(str, arguments)]


# Forks a process for each line of the store's code that the scenario runs, kills it there, and looks.
KILLED_AT_EACH_LINE = """
    import os, shutil, signal, sys

    from kv.test_file_store import PAGE, block_of, hash_number, path_of, read, true_bytes
    from simpler.kv.file_store import FileBlockStore

    root, scenario = sys.argv[1:]
    CAPACITY = 4


    def prepared(directory):
        store = FileBlockStore(directory, CAPACITY * PAGE, durable=False)
        for number in range(2 if scenario == "first put" else CAPACITY):
            store.put(hash_number(number), block_of(number))
        if scenario in {"read damaged", "replace torn"}:
            os.truncate(path_of(store, hash_number(0)), 3000)
        return FileBlockStore(directory, CAPACITY * PAGE)


    def act(store):
        if scenario in {"first put", "evict"}:
            store.put(b"new block in a new folder", block_of(9))
        elif scenario == "replace torn":
            store.put(hash_number(0), block_of(0))
        elif scenario == "read damaged":
            read(store, hash_number(0))
        else:
            store.discard(hash_number(0))


    def killed_at(line, store):
        left = line

        def trace(frame, event, argument):
            nonlocal left
            if "simpler/kv/file_store" not in frame.f_code.co_filename:
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        pid = os.fork()
        if pid == 0:
            sys.settrace(trace)
            act(store)
            os._exit(0)
        return os.waitpid(pid, 0)[1] == signal.SIGKILL


    def check(directory, line):
        store = FileBlockStore(directory, CAPACITY * PAGE, durable=False)
        where = f"{scenario}, line {line}"
        torn = scenario in {"read damaged", "replace torn"}
        present = set(store.hashes())
        for number in range(CAPACITY):
            if hash_number(number) in present and not (torn and number == 0):
                assert read(store, hash_number(number)) == block_of(number), where
        if b"new block in a new folder" in present:
            assert read(store, b"new block in a new folder") == block_of(9), where
        assert store.stats().damaged == 0, where
        assert len(present) >= (2 if scenario == "first put" else CAPACITY - 1), where
        assert not any((directory / "tmp").iterdir()), where
        assert store.stats().nbytes == true_bytes(store) <= CAPACITY * PAGE, where
        act(store)
        assert store.stats().nbytes == true_bytes(store) <= CAPACITY * PAGE, where
        for number in range(20, 20 + CAPACITY):
            assert store.put(hash_number(number), block_of(number)), where
        assert store.stats().nbytes == true_bytes(store) == CAPACITY * PAGE, where


    from pathlib import Path

    line = 0
    killed = True
    while killed:
        line += 1
        directory = Path(root, str(line))
        killed = killed_at(line, prepared(directory))
        check(directory, line)
        shutil.rmtree(directory)
    print(line)
"""


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["first put", "evict", "replace torn", "read damaged", "discard"])
def test_a_process_killed_at_any_line_leaves_whole_blocks_and_true_sums(
    tmp_path: Path, scenario: str
) -> None:
    done = subprocess.run(
        program(KILLED_AT_EACH_LINE, tmp_path, scenario), check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30  # the scenario did run through the store's code


USER_OF_THE_STORE = """
    import os, random, sys

    from kv.test_file_store import PAGE, block_of, hash_number, read
    from simpler.kv.file_store import FileBlockStore

    directory, max_bytes, role, rounds, seed = sys.argv[1:]
    store = FileBlockStore(directory, int(max_bytes), durable=False)
    chance = random.Random(int(seed))
    print("ready", flush=True)
    for round in range(int(rounds)):
        number = chance.randrange(40)
        nbytes = 3000 + 700 * number  # one to eight pages
        if role == "writer":
            store.put(hash_number(number), block_of(number, nbytes))
        else:
            assert read(store, hash_number(number), nbytes) in (None, block_of(number, nbytes))
        if round % 10 == 0:
            print("round", round, flush=True)
    stats = store.stats()
    assert stats.damaged == stats.put_failures == stats.read_failures == 0, stats
    print("done", stats.hits if role == "reader" else stats.puts, flush=True)
"""


class User:
    """A process that puts or gets blocks at random, and tells how far it is."""

    def __init__(self, store: FileBlockStore, role: str, rounds: int, seed: int) -> None:
        arguments = (store.directory, store.stats().max_bytes, role, rounds, seed)
        self.process = subprocess.Popen(
            program(USER_OF_THE_STORE, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.line() == "ready\n"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def result(self) -> int:
        output, errors = self.process.communicate()
        assert self.process.returncode == 0, errors
        return int(output.split()[-1])

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def check_sums(store: FileBlockStore) -> None:
    """The sum is that of the files, and within the bound, at a moment when nobody changes them."""
    with store._ledger.locked(60) as books:
        assert books.nbytes == true_bytes(store) <= store.stats().max_bytes


def test_several_writers_and_readers_share_the_store_within_its_bound(tmp_path: Path) -> None:
    store = FileBlockStore(tmp_path, 60 * PAGE, durable=False)
    users = [
        User(store, role, 300, seed) for seed, role in enumerate(["writer", "reader", "writer", "reader"])
    ]
    while users[0].line().startswith("round"):
        check_sums(store)
    for user in users[1:]:
        assert user.result() > 0
    users[0].kill()
    check_sums(store)


def test_writers_killed_at_work_do_no_harm(tmp_path: Path) -> None:
    store = FileBlockStore(tmp_path, 60 * PAGE, durable=False)
    lasting = [User(store, "writer", 150, 100), User(store, "reader", 300, 101)]
    for seed in range(8):
        victim = User(store, "writer", 1 << 30, seed)
        for _ in range(1 + seed % 3):
            assert victim.line().startswith("round")
        victim.kill()
        check_sums(store)
    for user in lasting:
        user.result()
    reopened = FileBlockStore(tmp_path, 60 * PAGE, durable=False)
    check_sums(reopened)
    assert not any((tmp_path / "tmp").iterdir())
    assert all(file.parent.name != "tmp" for file in files_of(reopened))


HOLDER_OF_THE_LOCK = """
    import fcntl, os, sys

    descriptor = os.open(sys.argv[1], os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_holder_that_never_lets_go_is_named_and_reads_go_on(tmp_path: Path) -> None:
    store = FileBlockStore(tmp_path, 8 * PAGE, durable=False, timeout_s=0.05)
    store.put(hash_number(1), block_of(1))
    with subprocess.Popen(
        program(HOLDER_OF_THE_LOCK, tmp_path / "usage"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(BlockStoreError, match="kept the store's lock"):
            store.put(hash_number(2), block_of(2))
        with pytest.raises(BlockStoreError, match="kept the store's lock"):
            store.discard(hash_number(1))
        assert read(store, hash_number(1)) == block_of(1)
        holder.kill()
    assert store.put(hash_number(2), block_of(2))
    assert store.stats().put_failures == 1


def test_threads_share_one_store_object(tmp_path: Path) -> None:
    store = FileBlockStore(tmp_path, 12 * PAGE, durable=False)

    def use(seed: int) -> int:
        chance, hits = random.Random(seed), 0
        for _ in range(150):
            number = chance.randrange(20)
            if chance.random() < 0.5:
                store.put(hash_number(number), block_of(number))
            else:
                found = read(store, hash_number(number))
                assert found in (None, block_of(number))
                hits += found is not None
        return hits

    with ThreadPoolExecutor(4) as threads:
        hits = sum(threads.map(use, range(4)))
    check_sums(store)
    stats = store.stats()
    assert (stats.hits, stats.damaged, stats.put_failures, stats.read_failures) == (hits, 0, 0, 0)
    assert hits > 0
