"""LC-7: shared memory needs no /dev/shm, is refused at init when there is none, and goes back when freed."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import numpy as np
import pytest

import simpler
from invariants.gate import wait_handler
from invariants.nodes import Background, node
from invariants.processes import (
    eventually,
    memfds_mapped,
    open_files,
    status_field,
)
from invariants.program import run_program
from registered import extension
from simpler import ControlOp

if TYPE_CHECKING:
    from collections.abc import Iterator

KIB = 1 << 10
MIB = 1 << 20

EVERYTHING = """
worker = node(device_ids=[0, 1], num_sub_workers=1, hbm_bytes=256 << 20, heap_bytes=256 << 20)
with worker:
    payload = os.urandom(48 << 20)
    assert worker.control_payload(0, ControlOp.ECHO, payload) == payload
    device = worker.malloc(200 << 20)
    worker.copy_to(device, bytes(200 << 20))
    host = worker.create_buffer(200 << 20)
    memoryview(host)[:] = bytes(200 << 20)
    worker.kill(1)
    worker.restart(1)
    assert worker.control_payload(1, ControlOp.ECHO, payload) == payload
say(sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else [])
"""


WITHOUT_DEV_SHM = (
    "mount -t tmpfs -o mode=755 tmpfs /mnt && "
    "for d in null zero urandom random full; do touch /mnt/$d && mount --bind /dev/$d /mnt/$d; done && "
    "mount --rbind /mnt /dev && test ! -e /dev/shm"
)


def mount_allowed() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", "mount -t tmpfs tmpfs /dev/shm"], capture_output=True, check=False
    )
    return done.returncode == 0


@pytest.mark.parametrize(
    "mount",
    [
        "mount -t tmpfs -o size=64m tmpfs /dev/shm",
        "mount -t tmpfs -o size=4k,ro tmpfs /dev/shm",
        WITHOUT_DEV_SHM,
    ],
    ids=["64 MiB", "read-only", "none"],
)
def test_lc7_dev_shm_does_not_bind_us(mount: str) -> None:
    if not mount_allowed():
        pytest.skip("needs the rights to mount in a namespace of its own")
    said = run_program(EVERYTHING, prefix=("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"))
    assert said == "[]\n"


@pytest.mark.parametrize(
    ("limit", "what"),
    [("RLIMIT_FSIZE", "no file may be so large"), ("RLIMIT_AS", "no address space is left")],
)
def test_lc7_memory_that_cannot_be_had_is_refused_at_init(limit: str, what: str) -> None:
    said = run_program(
        f"""
        import resource
        with node() as worker:  # what the first Worker loads
            pass
        size = {"16384" if limit == "RLIMIT_FSIZE" else "status + (64 << 20)"}
        """.replace("status", "int(open('/proc/self/statm').read().split()[0]) * 4096")
        + f"""
        resource.setrlimit(resource.{limit}, (size, resource.getrlimit(resource.{limit})[1]))
        worker = node(device_ids=[0, 1], hbm_bytes=1 << 30, heap_bytes=1 << 30)
        error = error_of(worker.init)
        say(type(error).__name__, worker.state)
        say(str(error).replace(chr(10), " "))
        from invariants.processes import Census
        census = Census.take()
        say(census.children, census.memfds)
        """
    ).splitlines()
    assert said[0] == "StartupError CLOSED", what
    assert any(
        word.strip(",;:()").isdigit() and int(word.strip(",;:()")) > 10_000 for word in said[1].split()
    ), said
    assert "bytes" in said[1]
    assert said[2] == "0 0"


def shared_bytes() -> int:
    return status_field("self", "RssShmem") * KIB


def test_lc7_freed_device_and_host_memory_gives_its_pages_back() -> None:
    size = 32 * MIB
    with node(device_ids=[0, 1], hbm_bytes=2 * size, heap_bytes=2 * size) as worker:
        before = shared_bytes()
        device = worker.malloc(size, worker_id=1)
        worker.copy_to(device, np.ones(size, np.uint8))
        host = worker.create_buffer(size)
        host.array((size,), np.uint8)[:] = 1
        assert shared_bytes() >= before + 2 * size
        worker.free(device)
        worker.free(host)
        eventually(lambda: shared_bytes() < before + size // 8, "the pages go back")


def test_lc7_large_regions_cost_nothing_until_they_are_touched() -> None:
    before = shared_bytes()
    with node(device_ids=[0, 1], hbm_bytes=64 << 30, heap_bytes=64 << 30) as worker:
        assert worker.control_payload(0, ControlOp.PING) == b""
        assert shared_bytes() - before < 8 * MIB


def test_lc7_arenas_are_reused_and_give_their_pages_back() -> None:
    size = 16 * MIB
    with node() as worker:
        before = shared_bytes()
        payload = bytes(size)
        mapped = memfds_mapped()
        files = len(open_files())
        for _ in range(20):
            assert len(worker.control_payload(0, ControlOp.ECHO, payload)) == size
        assert shared_bytes() - before <= 4 * size
        assert memfds_mapped() == mapped
        assert len(open_files()) == files
        eventually(lambda: shared_bytes() - before < size // 8, "the pages go back")


def mapped_anywhere(inodes: set[str], pids: list[int]) -> set[str]:
    """Those of the inodes that a process can still reach, through a mapping or a descriptor."""
    found = memfds_mapped() & inodes
    for pid in pids:
        found |= memfds_mapped(pid) & inodes
    return found


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_lc7_after_a_close_the_kernel_has_the_memory_back_whatever_others_inherited(
    order: tuple[int, ...],
) -> None:
    workers = [node(device_ids=[number, number + 10], num_sub_workers=1) for number in range(3)]
    inodes: list[set[str]] = []
    for worker in workers:
        known = memfds_mapped()
        worker.init()
        inodes.append(memfds_mapped() - known)
        for chip in (0, 1):
            worker.copy_to(worker.malloc(64, worker_id=chip), bytes(64))
    open_workers = set(range(3))
    for number in order:
        pids = [record.pid for other in open_workers - {number} for record in workers[other].status()]
        assert len(inodes[number]) >= 3
        workers[number].close()
        open_workers.remove(number)
        assert mapped_anywhere(inodes[number], pids) == set()
        for other in open_workers:
            assert workers[other].control_payload(1, ControlOp.ECHO, b"on") == b"on"


def test_a_child_cannot_touch_the_memory_of_another_worker() -> None:
    with node(device_ids=[0]) as first:
        secret = memfds_mapped()
        with node(device_ids=[1], num_sub_workers=1) as second:
            for record in second.status():
                assert memfds_mapped(record.pid) & secret == set()
            assert first.control_payload(0, ControlOp.PING) == b""


def test_replacements_and_late_workers_see_no_memory_of_others() -> None:
    with node(device_ids=[0]) as first:
        with node(device_ids=[1]) as second:
            others = memfds_mapped(first.status()[0].pid)
            second.kill(0)
            second.restart(0)
            assert memfds_mapped(second.status()[0].pid) & others == set()
        assert first.control_payload(0, ControlOp.PING) == b""


@pytest.fixture
def many() -> Iterator[list[simpler.Worker]]:
    workers = [node(device_ids=[number]) for number in range(8)]
    yield workers
    for worker in workers:
        worker.close()


@pytest.mark.no_asan("g++ 12's libasan keeps its allocator's locks over a fork: the child may hang")
def test_workers_are_opened_and_closed_by_several_threads_at_once(many: list[simpler.Worker]) -> None:
    with extension("wait", wait_handler):

        def live(worker: simpler.Worker) -> object:
            worker.init()
            reply = worker.run_chip_control_extension("wait")
            worker.close()
            return reply

        lives = [Background(functools.partial(live, worker)) for worker in many]
        assert [each.result() for each in lives] == [[b"done"]] * len(many)
