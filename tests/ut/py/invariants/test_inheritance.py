"""What children have of their parent, and what they must not have."""

from __future__ import annotations

import os
import select
import signal
import socket
from typing import TYPE_CHECKING

import pytest

from invariants.gate import wait_handler
from invariants.nodes import WATCHDOG_S, node, run_task
from invariants.processes import open_files, status_field
from invariants.program import run_program
from registered import extension
from simpler import ControlOp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def sees_the_end(fd: int) -> bool:
    """Whether reading `fd` comes to an end within the watchdog's time."""
    poll = select.poll()
    poll.register(fd, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(WATCHDOG_S * 1000)) and os.read(fd, 1) == b""


def pipe_ends() -> tuple[int, Callable[[], None]]:
    read_end, write_end = os.pipe()
    return read_end, lambda: os.close(write_end)


def socket_ends() -> tuple[int, Callable[[], None]]:
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.close


def connection_ends() -> tuple[int, Callable[[], None]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    return client.detach(), accepted.close


@pytest.mark.parametrize("make", [pipe_ends, socket_ends, connection_ends])
def test_a_peer_sees_the_end_when_the_parent_closes_though_the_children_live(
    make: Callable[[], tuple[int, Callable[[], None]]],
) -> None:
    fd, close_other = make()
    try:
        with node(device_ids=[0, 1], num_sub_workers=1) as worker:
            worker.kill(1)
            worker.restart(1)
            close_other()
            assert sees_the_end(fd)
            assert worker.control_payload(1, ControlOp.PING) == b""
    finally:
        os.close(fd)


def test_a_port_can_be_bound_again_though_the_children_live() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with node(device_ids=[0]) as worker:
            server.close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address)
            assert worker.control_payload(0, ControlOp.PING) == b""


def test_an_inherited_number_stays_taken_so_that_no_stranger_is_closed_by_it() -> None:
    read_end, write_end = os.pipe()
    event = select.epoll()
    try:
        with node(device_ids=[0]) as worker:
            files = open_files(worker.status()[0].pid)
            for fd in (read_end, write_end, event.fileno()):
                assert files[fd] == "/dev/null"
    finally:
        event.close()
        os.close(read_end)
        os.close(write_end)


def test_files_and_directories_and_the_standard_three_stay(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"content")
    fd, directory = os.open(path, os.O_RDONLY), os.open(tmp_path, os.O_RDONLY)

    def look(_chip: object, _payload: bytes, _device: int) -> bytes:
        return os.pread(fd, 100, 0) + b"," + ",".join(os.listdir(directory)).encode()  # noqa: PTH208 - of a descriptor

    try:
        with extension("look", look), node() as worker:
            assert worker.run_chip_control_extension("look", worker_id=0) == b"content,data"
            files = open_files(worker.status()[0].pid)
            assert [files[number] for number in range(3)] == [open_files()[number] for number in range(3)]
    finally:
        os.close(fd)
        os.close(directory)


def test_keep_fds_exempts_a_descriptor_also_in_a_replacement() -> None:
    read_end, write_end = os.pipe()

    def write(_chip: object, payload: bytes, _device: int) -> bytes:
        return b"%d" % os.write(write_end, payload)

    try:
        with extension("write", write), node(keep_fds=[write_end]) as worker:
            assert worker.run_chip_control_extension("write", b"first", worker_id=0) == b"5"
            worker.kill(0)
            worker.restart(0)
            assert worker.run_chip_control_extension("write", b"second", worker_id=0) == b"6"
            assert os.read(read_end, 100) == b"firstsecond"
    finally:
        os.close(read_end)
        os.close(write_end)


def test_no_child_holds_what_another_workers_children_hold() -> None:
    with node(device_ids=[0, 1]) as first, node(device_ids=[2], num_sub_workers=1) as second:
        for worker in (first, second):
            for record in worker.status():
                held = [target for target in open_files(record.pid).values() if target.startswith("socket:")]
                own = [target for target in open_files().values() if target.startswith("socket:")]
                assert set(held) & set(own) == set()
                assert len(held) <= 2


def test_signal_handlers_mask_and_timers_of_the_parent_are_not_the_childs() -> None:
    said = run_program(
        """
        import signal
        signal.signal(signal.SIGUSR1, lambda *_: say("in", os.getpid()))
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        signal.setitimer(signal.ITIMER_REAL, 3600)
        def look(chip, payload, device):
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
            return repr((signal.getitimer(signal.ITIMER_REAL), mask)).encode()
        simpler.register_chip_control_extension("look", look)
        with node() as worker:
            say(worker.run_chip_control_extension("look", worker_id=0).decode())
            os.kill(worker.status()[0].pid, signal.SIGTERM)
            error = error_of(lambda: worker.control_payload(0, ControlOp.PING, timeout_s=60))
            say("SIGTERM" in str(error))
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        say(signal.getitimer(signal.ITIMER_REAL)[0] > 0, signal.SIGUSR2 in mask)
        """
    ).splitlines()
    assert said == ["((0.0, 0.0), set())", "True", "True True"]


def test_what_children_print_is_written_once_and_nothing_is_lost() -> None:
    said = run_program(
        """
        libc = ctypes.CDLL(None)
        def talk(chip, payload, device):
            print("python", device, payload.decode())  # not flushed: the output is a pipe
            libc.printf(b"native %d %s\\n", device, payload)
        simpler.register_chip_control_extension("talk", talk)
        print("before the fork")
        libc.printf(b"native before the fork\\n")
        with node(device_ids=[0, 1], num_sub_workers=1) as worker:
            for number in range(3):
                worker.run_chip_control_extension("talk", b"%d" % number)
            sub = worker.register(lambda: print("from the sub worker"))
            worker.run(lambda orch, args, config: orch.submit_sub(sub).result())
        print("after the close")
        """
    ).splitlines()
    expected = [
        f"{kind} {device} {number}"
        for kind in ("python", "native")
        for device in (0, 1)
        for number in range(3)
    ]
    expected += ["before the fork", "native before the fork", "from the sub worker", "after the close"]
    assert sorted(said) == sorted(expected)


BLAS = """
import numpy, threadpoolctl
def threads(chip, payload, device):
    import threadpoolctl
    numpy.ones((64, 64)) @ numpy.ones((64, 64))
    counts = [info["num_threads"] for info in threadpoolctl.threadpool_info()]
    return repr((counts, os.environ.get("OMP_NUM_THREADS"), len(os.listdir("/proc/self/task")))).encode()
simpler.register_chip_control_extension("threads", threads)
before = [info["num_threads"] for info in threadpoolctl.threadpool_info()]
with node(num_sub_workers=1) as worker:
    said = eval(worker.run_chip_control_extension("threads", worker_id=0))
    worker.kill(0)
    worker.restart(0)
    again = eval(worker.run_chip_control_extension("threads", worker_id=0))
say(said[0], said[1], again[0] == said[0])
assert [info["num_threads"] for info in threadpoolctl.threadpool_info()] == before
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one core BLAS has one thread anyway")
def test_blas_has_one_thread_in_children_unless_the_user_said_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    counts, for_later, same = run_program(BLAS).strip().rsplit(" ", 2)
    assert set(eval(counts)) <= {1}
    assert for_later == "1"
    assert same == "True"
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    counts, for_later, same = run_program(BLAS).strip().rsplit(" ", 2)
    assert set(eval(counts)) <= {2}
    assert for_later == "2"
    assert same == "True"


def test_multiprocessing_works_in_a_handler() -> None:
    said = run_program(
        """
        from multiprocessing import shared_memory
        own = shared_memory.SharedMemory(create=True, size=1)  # starts the parent's resource tracker
        def share(chip, payload, device):
            memory = shared_memory.SharedMemory(create=True, size=100)
            memory.buf[:3] = b"abc"
            other = shared_memory.SharedMemory(name=memory.name)
            reply = bytes(other.buf[:3])
            other.close()
            memory.close()
            memory.unlink()
            return reply
        simpler.register_chip_control_extension("share", share)
        with node(device_ids=[0, 1]) as worker:
            say(worker.run_chip_control_extension("share"))
        own.close()
        own.unlink()
        """
    )
    assert said == "[b'abc', b'abc']\n"


def test_a_forked_copy_of_the_program_is_refused_and_harms_nothing() -> None:
    said = run_program(
        """
        simpler.register_chip_control_extension("wait", wait_handler)
        worker = node(device_ids=[0, 1])
        worker.init()
        buffer = worker.malloc(64)
        future = worker.submit_chip_control_extension("wait", worker_id=0)
        future.result()
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            uses = [
                lambda: worker.control_payload(0, ControlOp.PING),
                lambda: worker.run_chip_control_extension("wait"),
                lambda: worker.submit_chip_control_extension("wait"),
                lambda: worker.malloc(8),
                lambda: worker.free(buffer),
                lambda: worker.copy_to(buffer, bytes(64)),
                lambda: worker.create_buffer(8),
                lambda: worker.status(),
                lambda: worker.kill(0),
                lambda: worker.restart(0),
                lambda: worker.init(),
                lambda: worker.run(print),
            ]
            for use in uses:
                error = error_of(use)
                say(isinstance(error, simpler.ClosedError) and "forked copy" in str(error) or repr(error))
            worker.close()
            del worker
            with node() as own:
                say(own.control_payload(0, ControlOp.ECHO, b"own"))
            sys.exit(0)
        os.waitpid(pid, 0)
        say(worker.run_chip_control_extension("wait"))
        worker.copy_to(buffer, bytes(64))
        worker.close()
        """
    ).splitlines()
    assert said == ["True"] * 12 + ["b'own'", "[b'done', b'done']"]


def test_a_childs_private_memory_is_its_own_and_small() -> None:
    with extension("wait", wait_handler), node(device_ids=[0, 1]) as worker:
        handle = worker.register(os.getppid)
        assert run_task(worker, handle) == os.getpid()
        assert status_field(worker.status()[0].pid, "Threads") >= 1
        os.kill(worker.status()[0].pid, signal.SIGINT)  # as a terminal would
        assert worker.run_chip_control_extension("wait") == [b"done"] * 2
