"""Small Workers, extensions by name, and threads whose outcome a test takes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import simpler

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL = 1 << 20
WATCHDOG_S = 60.0


def node(**options: Any) -> simpler.Worker:
    """A level 3 Worker with little memory."""
    return simpler.Worker(
        level=3, **{"hbm_bytes": SMALL, "heap_bytes": SMALL, "control_timeout_s": WATCHDOG_S} | options
    )


def error_of(call: Callable[[], object]) -> BaseException:
    """What the call raises."""
    try:
        result = call()
    except BaseException as error:
        return error
    raise AssertionError(f"nothing was raised; the result is {result!r}")


class Background:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._result: object = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error

    @property
    def running(self) -> bool:
        """Whether the call has not returned."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait until the call has ended, in whatever way."""
        self._thread.join(WATCHDOG_S)
        assert not self._thread.is_alive(), "the call did not return"

    def result(self) -> Any:
        """What it returned; raises what it raised."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._result

    def error(self) -> BaseException:
        """What it raised."""
        return error_of(self.result)


def run_task(
    worker: simpler.Worker,
    handle: simpler.CallableHandle,
    args: simpler.TaskArgs | None = None,
    *,
    chip: int = 0,
    timeout_s: float | None = None,
) -> Any:
    """One task on one chip; its result."""

    def fn(orch: simpler.Orchestrator, _args: object, _config: object) -> Any:
        return orch.submit_next_level(handle, args, worker=chip).result()

    return worker.run(fn, timeout_s=timeout_s)
