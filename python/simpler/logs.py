"""Log records of the children, brought whole to the parent's loggers.

Records of the loggers below "simpler" made in a child are formatted there, sent as one frame and handled in
the parent by the logger of the same name, with the attributes `path` and `device_id` added.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
from typing import TYPE_CHECKING, Any

from simpler.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = "simpler"
_PLAIN = (str, int, float, bool, type(None))
_REBUILT = frozenset({"msg", "args", "exc_info", "message"})
_LEVELS = {
    "CRITICAL": logging.CRITICAL,
    "ERROR": logging.ERROR,
    "WARNING": logging.WARNING,
    "WARN": logging.WARNING,
    "INFO": logging.INFO,
    "DEBUG": logging.DEBUG,
}


class _UnlessConfigured(logging.Handler):
    """Writes to stderr as long as the program has configured no logging of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        try:
            sys.stderr.write(f"{self.format(record)}\n")
        except Exception:  # noqa: BLE001 - a stream can be anything; logging's rule is that this harms nobody
            self.handleError(record)


def configure_from_environment() -> None:
    """Set the level of the "simpler" loggers from SIMPLER_LOG (a level's name or number), when it is set.

    Raises:
        ConfigError: the variable holds something else.
    """
    text = os.environ.get("SIMPLER_LOG", "").strip()
    if not text:
        return
    level = int(text) if text.isdecimal() else _LEVELS.get(text.upper())
    if level is None:
        raise ConfigError(f"SIMPLER_LOG={text!r}: expected one of {', '.join(_LEVELS)} or a number")
    logger = logging.getLogger(ROOT)
    logger.setLevel(level)
    if not any(isinstance(handler, _UnlessConfigured) for handler in logger.handlers):
        handler = _UnlessConfigured()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)


def pack_record(record: logging.LogRecord) -> bytes:
    """A record as plain data: message and exception formatted here, extra attributes that are plain kept."""
    fields: dict[str, Any] = {
        name: value
        for name, value in record.__dict__.items()
        if name not in _REBUILT and isinstance(value, _PLAIN)
    }
    try:
        fields["msg"] = record.getMessage()
    except Exception as exc:  # noqa: BLE001 - the arguments' own code can raise anything; the record still goes
        fields["msg"] = f"{record.msg!r} (its arguments could not be formatted: {type(exc).__name__})"
    if record.exc_info and not record.exc_text:
        fields["exc_text"] = logging.Formatter().formatException(record.exc_info)
    return pickle.dumps(fields, protocol=5)


class ForwardingHandler(logging.Handler):
    """In a child: sends each record to the parent."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record; a parent that is gone is not an error of the code that logs."""
        try:
            self._send(pack_record(record))
        except (OSError, RuntimeError):
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        """Nothing can be reported from here: the channel itself failed."""


def configured_loggers() -> list[logging.Logger]:
    """In the parent: the loggers below "simpler" whose records would not simply go up to it."""
    loggers = (
        logger
        for name, logger in list(logging.root.manager.loggerDict.items())
        if name.startswith(f"{ROOT}.") and isinstance(logger, logging.Logger)
    )
    return [logger for logger in loggers if logger.handlers or not logger.propagate]


def forward_to_parent(send: Callable[[bytes], None], configured: Sequence[logging.Logger]) -> None:
    """In a child: let the "simpler" loggers send to the parent and nowhere else.

    What the program has configured handles the records there.
    """
    logger = logging.getLogger(ROOT)
    logger.handlers = [ForwardingHandler(send)]
    logger.propagate = False
    for below in configured:
        below.handlers = []
        below.propagate = True


def handle_frame(frame: bytes, path: tuple[int, ...], device_id: int | None) -> None:
    """In the parent: handle one child's record with the logger of its name; raises what that raises."""
    fields = pickle.loads(frame)
    fields["path"] = path
    fields["device_id"] = device_id
    record = logging.makeLogRecord(fields)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)
