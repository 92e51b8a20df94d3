"""Extensions for the length of a test."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import simpler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def extension(
    name: str,
    handler: Callable[..., object],
    *,
    concurrent: bool = False,
    on_close: Callable[..., object] | None = None,
) -> Iterator[str]:
    """Register a handler, and take it off the register again."""
    simpler.register_chip_control_extension(name, handler, concurrent=concurrent, on_close=on_close)
    try:
        yield name
    finally:
        simpler.unregister_chip_control_extension(name)
