"""Every error says its cause, keeps its attributes through pickle, and is of the promised types."""

from __future__ import annotations

import copy
import pickle

import pytest

from simpler import errors
from simpler.errors import (
    BackPressureError,
    ChipControlError,
    ClosedError,
    ConfigError,
    MemoryRangeError,
    RemoteError,
    RunCancelledError,
    SimplerError,
    StartupError,
    TaskError,
    TransferError,
    TransferUnconfirmedError,
    UnknownExtensionError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)

REMOTE = RemoteError(
    type_name="ValueError", message="bad block 7", traceback="Traceback: here\n", path=(1,), device_id=3
)
LATE = WorkerTimeoutError(
    "no reply in 2 s", path=(0,), device_id=2, pid=11, started=True, waited_for="the reply", timeout_s=2.0
)
DIED = WorkerDiedError("chip 0 (pid 12) died: SIGKILL, running task 17", path=(2,), device_id=5, pid=12)

EVERY = [
    ClosedError("closed"),
    ConfigError("bad option"),
    BackPressureError("enlarge heap_bytes"),
    MemoryRangeError("freed"),
    UnknownExtensionError("never registered"),
    WorkerError("broken", path=(4, 1)),
    LATE,
    DIED,
    REMOTE,
    StartupError("init failed", cause=REMOTE),
    StartupError("init failed: no memory"),
    ChipControlError.make("kv", {(0,): b"ok"}, {(1,): REMOTE, (2,): DIED}, ((3,),)),
    ChipControlError.make("kv", {}, {(0,): LATE}),
    RunCancelledError("2 of 3 tasks did not begin"),
    TransferError("failed: no route", transfer_id=3, provider="copy", path=(1,)),
    TransferUnconfirmedError("is unconfirmed: late", transfer_id=4, provider="copy", path=(0,)),
    TaskError(callable="matmul", path=(1,), cause=REMOTE, poisoned=2),
]


def plain(error: BaseException) -> object:
    """What two equal errors have in common."""
    state = {key: plain(v) if isinstance(v, BaseException) else v for key, v in vars(error).items()}
    if isinstance(error, ChipControlError):
        state["errors"] = {path: plain(cause) for path, cause in error.errors.items()}
    return type(error), str(error), error.args, state


@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_errors_pickle_with_their_attributes(error: SimplerError, protocol: int) -> None:
    assert plain(pickle.loads(pickle.dumps(error, protocol))) == plain(error)


@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
def test_errors_copy_with_their_attributes(error: SimplerError) -> None:
    assert plain(copy.deepcopy(error)) == plain(error)


@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
def test_every_error_is_a_simpler_error_and_a_runtime_error(error: SimplerError) -> None:
    assert isinstance(error, SimplerError)
    assert isinstance(error, RuntimeError)


def test_every_class_of_the_module_is_tried_here() -> None:
    classes = {c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, SimplerError)}
    assert classes - {SimplerError} == {type(error) for error in EVERY}


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (ConfigError("x"), ValueError),
        (UnknownExtensionError("x"), LookupError),
        (LATE, TimeoutError),
        (LATE, WorkerError),
        (DIED, WorkerError),
    ],
)
def test_errors_are_also_what_python_calls_them(error: SimplerError, base: type[BaseException]) -> None:
    assert isinstance(error, base)


def test_str_of_a_lookup_error_is_its_text_without_quotes() -> None:
    assert str(UnknownExtensionError("never registered")) == "never registered"


@pytest.mark.parametrize("text", ["mine", "", "two\nlines", "x" * 10_000, "\udcff is not UTF-8"])
def test_a_remote_error_shows_the_handlers_own_text_whole(text: str) -> None:
    error = RemoteError(type_name="OSError", message=text, path=(0, 2), device_id=9)
    assert text in str(error)
    assert "OSError" in str(error)
    assert "0.2" in str(error)
    assert "device 9" in str(error)


def test_a_message_that_a_handler_returned_has_no_type() -> None:
    assert str(RemoteError(type_name="", message="engine gone", path=(1,))) == "worker 1: engine gone"


def test_the_childs_traceback_is_a_note() -> None:
    assert "Traceback: here" in REMOTE.__notes__[0]
    assert "Traceback: here" not in str(REMOTE)


def test_a_startup_error_shows_and_carries_the_childs_own() -> None:
    error = StartupError("init failed", cause=REMOTE)
    assert "bad block 7" in str(error)
    assert error.cause is REMOTE
    assert error.__cause__ is REMOTE


def test_a_broadcast_error_holds_each_chips_text_in_worker_order() -> None:
    error = ChipControlError.make("kv", {(0,): b"ok"}, {(2,): DIED, (1,): REMOTE}, ((3,),))
    text = str(error)
    assert 0 < text.index("bad block 7") < text.index("SIGKILL")
    assert "'kv'" in text
    assert error.results == {(0,): b"ok"}
    assert error.errors == {(1,): REMOTE, (2,): DIED}
    assert error.pending == ((3,),)
    assert "still running: worker 3" in text


@pytest.mark.parametrize(
    ("failures", "is_timeout"),
    [({(0,): LATE}, True), ({(0,): LATE, (1,): LATE}, True), ({(0,): LATE, (1,): DIED}, False), ({}, False)],
)
def test_a_broadcast_is_a_timeout_when_every_error_is(
    failures: dict[tuple[int, ...], RemoteError | WorkerError], is_timeout: bool
) -> None:
    error = ChipControlError.make("kv", {(5,): b""}, failures)
    assert isinstance(error, TimeoutError) is is_timeout
    assert isinstance(error, ChipControlError)


def test_a_task_error_names_function_worker_cause_and_the_poisoned() -> None:
    error = TaskError(callable="matmul", path=(1,), cause=REMOTE, poisoned=2)
    assert all(part in str(error) for part in ("'matmul'", "worker 1", "bad block 7", "2 more tasks"))
    assert error.__cause__ is REMOTE
    assert "more task" not in str(TaskError(callable="matmul", path=(1,), cause=REMOTE))
