"""Extensions register once, by name, for Workers to come."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from simpler.control import registry
from simpler.control.registry import (
    register_chip_control_extension,
    snapshot,
    unknown_extension,
    unregister_chip_control_extension,
)
from simpler.errors import UnknownExtensionError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    before = {extension.name for extension in snapshot()}
    yield
    for extension in snapshot():
        if extension.name not in before:
            unregister_chip_control_extension(extension.name)


def handler(chip: Any, payload: bytes, device_id: int) -> bytes:
    return payload


def other(chip: Any, payload: bytes, device_id: int) -> bytes:
    return b""


class Engine:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Engine)

    __hash__ = None  # type: ignore[assignment] # equal engines are still different objects

    def handle(self, chip: Any, payload: bytes, device_id: int) -> None:
        return None


def names() -> list[str]:
    return [extension.name for extension in snapshot()]


def test_a_snapshot_has_every_extension_in_order_with_its_position() -> None:
    start = len(snapshot())
    register_chip_control_extension("a", handler)
    register_chip_control_extension("b", other, concurrent=True, on_close=print)
    a, b = snapshot()[start:]
    assert (a.name, a.handler, a.concurrent, a.on_close, a.id) == ("a", handler, False, None, start)
    assert (b.name, b.handler, b.concurrent, b.on_close, b.id) == ("b", other, True, print, start + 1)


def test_a_snapshot_is_not_changed_by_what_comes_later() -> None:
    register_chip_control_extension("a", handler)
    taken = snapshot()
    unregister_chip_control_extension("a")
    register_chip_control_extension("b", handler)
    assert "a" in [extension.name for extension in taken]
    assert names() != [extension.name for extension in taken]


ANY: Any = handler  # partials of it are never called: any arguments will do
ENGINE = Engine()
ARRAY = np.arange(3)
SAME: list[tuple[Any, Any]] = [
    (handler, handler),
    (ENGINE.handle, ENGINE.handle),
    ([].append, None),
    (functools.partial(ANY, 1), functools.partial(ANY, 1)),
    (functools.partial(ANY, key=[1, 2]), functools.partial(ANY, key=[1, 2])),
    (functools.partial(ENGINE.handle, 1), functools.partial(ENGINE.handle, 1)),
    (functools.partial(ANY, ARRAY), functools.partial(ANY, ARRAY)),
    (functools.partial(ANY, ENGINE.handle), functools.partial(ANY, ENGINE.handle)),
]


@pytest.mark.parametrize(("first", "second"), SAME, ids=str)
def test_the_same_function_may_be_registered_again(first: Any, second: Any) -> None:
    register_chip_control_extension("same", first)
    register_chip_control_extension("same", first if second is None else second)
    assert names().count("same") == 1


DIFFERENT: list[tuple[Any, Any]] = [
    (handler, other),
    (Engine().handle, Engine().handle),
    (handler, functools.partial(handler)),
    (functools.partial(ANY, 1), functools.partial(ANY, 2)),
    (functools.partial(ANY, 1), functools.partial(ANY, 1, 1)),
    (functools.partial(ANY, a=1), functools.partial(ANY, b=1)),
    (functools.partial(ANY, np.arange(3)), functools.partial(ANY, np.arange(3))),
    (lambda *_: None, lambda *_: None),
]


@pytest.mark.parametrize(("first", "second"), DIFFERENT, ids=str)
def test_another_function_under_a_taken_name_is_refused(first: Any, second: Any) -> None:
    register_chip_control_extension("taken", first)
    with pytest.raises(ValueError, match="'taken' is already registered"):
        register_chip_control_extension("taken", second)
    kept = next(extension for extension in snapshot() if extension.name == "taken")
    assert kept.handler is first


@pytest.mark.parametrize("options", [{"concurrent": True}, {"on_close": print}])
def test_the_same_function_with_other_options_is_refused(options: dict[str, Any]) -> None:
    register_chip_control_extension("taken", handler)
    with pytest.raises(ValueError, match="options"):
        register_chip_control_extension("taken", handler, **options)


@pytest.mark.parametrize("name", ["a", "x" * 255, "mooncake.register", "with space", "名"])
def test_names_are_1_to_255_printable_characters(name: str) -> None:
    register_chip_control_extension(name, handler)
    assert name in names()


@pytest.mark.parametrize("name", ["", "x" * 256, "a\nb", "a\0", "\udcff", b"bytes", None])
def test_other_names_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="printable"):
        register_chip_control_extension(name, handler)


@pytest.mark.parametrize("options", [{"handler": 3}, {"handler": handler, "on_close": 3}])
def test_handlers_must_be_callable(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="not callable"):
        register_chip_control_extension("bad", **options)
    assert "bad" not in names()


def test_unregistering_what_is_not_there_says_so() -> None:
    with pytest.raises(UnknownExtensionError, match="'nothing' is not registered"):
        unregister_chip_control_extension("nothing")


def test_a_name_may_be_used_again_after_unregistering() -> None:
    register_chip_control_extension("again", handler)
    unregister_chip_control_extension("again")
    register_chip_control_extension("again", other)
    assert "again" in names()


def test_an_unknown_name_is_told_from_one_registered_too_late() -> None:
    assert "never registered" in str(unknown_extension("late"))
    register_chip_control_extension("late", handler)
    assert "registered after init()" in str(unknown_extension("late"))


def test_registering_from_many_threads_loses_nothing() -> None:
    wanted = [f"thread-{index}" for index in range(64)]
    start = threading.Barrier(8)

    def work(part: list[str]) -> None:
        start.wait(30)
        for name in part:
            registry.register_chip_control_extension(name, handler)

    threads = [threading.Thread(target=work, args=(wanted[index::8],)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(wanted) <= set(names())
    assert [extension.id for extension in snapshot()] == list(range(len(snapshot())))
