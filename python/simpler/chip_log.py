"""Logging where a chip works: records that say which chip they come from, and errors that end there."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("simpler.chip")


class ChipLogger(logging.Logger):
    """Logs as the logger of the same name does, with `path` and `device_id` on each record.

    A parent process adds the two itself to what its children send; at level 2 there is none.
    """

    def __init__(self, name: str, path: tuple[int, ...], device_id: int) -> None:
        super().__init__(name)
        self._named = logging.getLogger(name)
        self.parent = self._named
        self._path = path
        self._device_id = device_id

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the name is logging's
        """As the logger of the same name: its level may change at any time."""
        return self._named.isEnabledFor(level)

    def makeRecord(self, *args: Any, **options: Any) -> logging.LogRecord:  # noqa: N802 - the name is logging's
        """A record with the chip's attributes."""
        record = super().makeRecord(*args, **options)
        record.path = self._path
        record.device_id = self._device_id
        return record


def log_errors(what: str, work: Callable[..., object], *args: object) -> None:
    """Do one part of an orderly stop; what it raises is logged, since the rest still has to be done."""
    try:
        work(*args)
    except BaseException:  # noqa: BLE001 - also sys.exit()
        _log.exception("%s failed", what)
