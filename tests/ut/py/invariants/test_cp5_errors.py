"""CP-5: an error in a child arrives whole, whatever it is; past 1 MiB it is cut and says so."""

from __future__ import annotations

import pickle
import sys
from typing import TYPE_CHECKING, Any

import pytest

import simpler
from invariants.nodes import WATCHDOG_S, error_of, node, run_task
from registered import extension

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20


class UnpicklableError(Exception):
    def __init__(self) -> None:
        super().__init__("has a lock")
        self.lock = __import__("threading").Lock()

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle this")


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class StrangeStrError(Exception):
    def __str__(self) -> Any:
        text: Any = 3
        return text


class NeedsArgumentsError(Exception):
    def __init__(self, first: int, *, second: int) -> None:
        super().__init__(f"{first} and {second}")


def raise_chained() -> None:
    try:
        raise OSError("the disk is full")
    except OSError as error:
        raise LookupError("no engine") from error


def throw(error: BaseException) -> Any:
    raise error


def deep(levels: int = 500) -> None:
    if levels:
        deep(levels - 1)
    raise ValueError("from the depth")


FAILURES: dict[str, Callable[[], object]] = {
    "ten kilobytes": lambda: throw(ValueError("é" + "x" * 10_240 + "end")),
    "surrogates": lambda: throw(ValueError("before \udcff\ud800 after")),
    "nul": lambda: throw(ValueError("a\0b")),
    "bytes": lambda: throw(ValueError(b"\xff\xfe")),
    "decode": b"\xff\xfe".decode,
    "empty": lambda: throw(ValueError()),
    "unpicklable": lambda: throw(UnpicklableError()),
    "mute": lambda: throw(MuteError()),
    "strange": lambda: throw(StrangeStrError()),
    "arguments": lambda: throw(NeedsArgumentsError(1, second=2)),
    "chained": raise_chained,
    "deep": deep,
    "exit": lambda: sys.exit(5),
    "exit text": lambda: sys.exit("good bye"),
    "interrupt": lambda: throw(KeyboardInterrupt("by hand")),
    "generator": lambda: throw(GeneratorExit()),
    "stop": lambda: throw(StopIteration(3)),
    "memory": lambda: throw(MemoryError("no more")),
    "recursion": lambda: throw(RecursionError("too deep")),
}
EXPECTED = {
    "ten kilobytes": ("ValueError", "é" + "x" * 10_240 + "end"),
    "surrogates": ("ValueError", "before \\udcff\\ud800 after"),
    "nul": ("ValueError", "a\0b"),
    "bytes": ("ValueError", "b'\\xff\\xfe'"),
    "decode": (
        "UnicodeDecodeError",
        "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
    ),
    "empty": ("ValueError", ""),
    "unpicklable": ("UnpicklableError", "has a lock"),
    "mute": ("MuteError", "(its text could not be made: ValueError)"),
    "strange": ("StrangeStrError", "(its text could not be made: TypeError)"),
    "arguments": ("NeedsArgumentsError", "1 and 2"),
    "chained": ("LookupError", "no engine"),
    "deep": ("ValueError", "from the depth"),
    "exit": ("SystemExit", "5"),
    "exit text": ("SystemExit", "good bye"),
    "interrupt": ("KeyboardInterrupt", "by hand"),
    "generator": ("GeneratorExit", ""),
    "stop": ("StopIteration", "3"),
    "memory": ("MemoryError", "no more"),
    "recursion": ("RecursionError", "too deep"),
}


def fail_as(_chip: object, payload: bytes, _device: int) -> object:
    return FAILURES[payload.decode()]()


def fail_beside(chip: object, payload: bytes, device: int) -> object:
    return fail_as(chip, payload, device)


@pytest.fixture(scope="module")
def worker() -> Iterator[simpler.Worker]:
    with (
        extension("fail", fail_as),
        extension("fail beside", fail_beside, concurrent=True),
        node(device_ids=[3, 4], num_sub_workers=1) as made,
    ):
        yield made


def assert_whole(error: BaseException | None, name: str, path: tuple[int, ...], device: int | None) -> None:
    assert isinstance(error, simpler.RemoteError)
    type_name, message = EXPECTED[name]
    assert error.type_name.rsplit(".", 1)[-1] == type_name
    assert error.message == message
    assert message in str(error)
    assert (error.path, error.device_id) == (path, device)
    assert "Traceback" in error.traceback
    assert type_name in error.traceback
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == (str(error), vars(error))


@pytest.fixture(autouse=True)
def the_same_process_lives(worker: simpler.Worker) -> Iterator[None]:
    """No error of a handler ends its process."""
    before = [(record.pid, record.state) for record in worker.status()]
    yield
    assert [(record.pid, record.state) for record in worker.status()] == before


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("ext", ["fail", "fail beside"])
def test_cp5_an_exception_of_a_handler_is_that_calls_error(
    worker: simpler.Worker, name: str, ext: str
) -> None:
    call = worker.run_chip_control_extension
    assert_whole(error_of(lambda: call(ext, name.encode(), worker_id=1)), name, (1,), 4)


@pytest.mark.parametrize("name", FAILURES)
def test_cp5_an_exception_of_a_submitted_handler_is_its_futures(worker: simpler.Worker, name: str) -> None:
    future = worker.submit_chip_control_extension("fail", name.encode(), worker_id=0)
    assert_whole(future.exception(WATCHDOG_S), name, (0,), 3)


@pytest.mark.parametrize("name", FAILURES)
def test_cp5_in_a_broadcast_each_chips_error_is_whole(worker: simpler.Worker, name: str) -> None:
    error = error_of(lambda: worker.run_chip_control_extension("fail", name.encode()))
    assert isinstance(error, simpler.ChipControlError)
    for chip, device in ((0, 3), (1, 4)):
        assert_whole(error.errors[(chip,)], name, (chip,), device)
        assert EXPECTED[name][1] in str(error)


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("where", ["chip", "sub"])
def test_cp5_an_exception_of_a_kernel_is_its_tasks_cause(
    worker: simpler.Worker, name: str, where: str
) -> None:
    handle = worker.register(FAILURES[name], name=f"kernel {name}")

    def on_sub(orch: simpler.Orchestrator, _args: object, _config: object) -> object:
        return orch.submit_sub(handle).result()

    run: Callable[[], object] = (
        (lambda: run_task(worker, handle)) if where == "chip" else (lambda: worker.run(on_sub))
    )
    error = error_of(run)
    assert isinstance(error, simpler.TaskError)
    assert error.callable == f"kernel {name}"
    assert_whole(error.cause, name, *(((0,), 3) if where == "chip" else ((2,), None)))


def test_cp5_the_traceback_names_the_lines_of_the_childs_program(worker: simpler.Worker) -> None:
    error = error_of(lambda: worker.run_chip_control_extension("fail", b"chained", worker_id=0))
    assert isinstance(error, simpler.RemoteError)
    assert "in raise_chained" in error.traceback
    assert "OSError: the disk is full" in error.traceback
    assert "direct cause" in error.traceback


@pytest.mark.parametrize("size", [MIB // 2, MIB - 4096, MIB, MIB + 1, 3 * MIB, 20 * MIB])
def test_cp5_a_text_past_a_mebibyte_is_cut_and_says_so(size: int) -> None:
    def fail(_chip: object, _payload: bytes, _device: int) -> None:
        raise ValueError("start " + "é" * (size // 2) + " end")

    with extension("long", fail), node() as worker:
        error = error_of(lambda: worker.run_chip_control_extension("long", worker_id=0))
        assert isinstance(error, simpler.RemoteError)
        assert error.message.startswith("start é")
        if size < MIB - 2048:
            assert error.message.endswith("é end")
            assert len(error.message.encode()) == len("start  end") + size
        elif size > MIB:
            assert "cut" in error.message[-200:]
            assert MIB // 2 < len(error.message.encode()) <= MIB + 200
        assert error.type_name == "ValueError"


def test_a_returned_text_of_any_size_is_the_failure_whole() -> None:
    text = "engine 7 " + "ü" * 20_000

    def fail(_chip: object, _payload: bytes, _device: int) -> str:
        return text

    with extension("text", fail), node() as worker:
        error = error_of(lambda: worker.run_chip_control_extension("text", worker_id=0))
        assert isinstance(error, RuntimeError)
        assert text in str(error)


def test_a_client_that_knows_no_errors_of_ours_finds_its_text_in_a_runtime_error() -> None:
    def handler(_chip: object, payload: bytes, device_id: int) -> str | None:
        return f"mooncake: segment {payload.decode()} is gone on {device_id}" if payload else None

    with extension("client", handler), node(device_ids=[0, 1]) as worker:
        for worker_id in (0, None):
            with pytest.raises(RuntimeError) as caught:
                worker.run_chip_control_extension("client", b"kv0", worker_id=worker_id)
            assert "mooncake: segment kv0 is gone on 0" in str(caught.value)
        assert worker.run_chip_control_extension("client") == [b"", b""]
