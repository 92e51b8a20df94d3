"""Importing the NIXL package: what it reads from the environment, and its logs."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

from simpler.kv.engines import EngineError

# The package that picks the build for this machine, then the builds themselves.
_PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")

_SETTINGS = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}


class _Process:
    """Where an agent was opened first."""

    opened_by: int | None = None


def load(transports: str | None, *, logs: bool) -> Any:
    """Import the package and return its compiled bindings.

    The classes in Python around them are not used: they start the progress thread without a delay.

    Raises:
        EngineError: it is missing, or this process cannot use it as asked.
    """
    if _Process.opened_by not in {None, os.getpid()}:
        raise EngineError(
            f"NIXL was opened in process {_Process.opened_by} before this one was forked from it: "
            f"open engines only in the processes that use them"
        )
    if transports is not None:
        os.environ["UCX_TLS"] = transports
    _check_transports(os.environ.get("UCX_TLS", "all"))
    if not logs:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
    bindings = _import(logs=logs)
    _Process.opened_by = os.getpid()
    return bindings


def _check_transports(value: str) -> None:
    names = {name.strip() for name in value.split(",")}
    if not value.startswith("^") and not names & {"all", "tcp"}:
        raise EngineError(f"UCX_TLS={value} leaves out tcp, without which the engine reaches no peer")


def _import(*, logs: bool) -> Any:
    raising = logging.raiseExceptions
    try:
        found = _try(_PACKAGES)
    finally:
        # The import turns errors of everybody's logging off, and logs to standard output.
        logging.raiseExceptions = raising
        if not logs:
            own = logging.getLogger("nixl")
            for handler in list(own.handlers):
                own.removeHandler(handler)
            own.propagate = True
    if isinstance(found, ImportError):
        raise EngineError(f"NIXL cannot be imported: {found} (pip install --no-deps nixl nixl-cu12)")
    return found


def _try(packages: tuple[str, ...]) -> Any:
    """The bindings of the first of these packages that is there, or why the first one is not."""
    try:
        return importlib.import_module(f"{packages[0]}._bindings")
    except ImportError as error:
        later = _try(packages[1:]) if packages[1:] else error
        return error if isinstance(later, ImportError) else later
