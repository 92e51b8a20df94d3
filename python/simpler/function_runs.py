"""Runs of orchestration functions: what `Worker.run` and `Worker.submit` do at a node."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

from simpler.callables import CallableHandle
from simpler.config import RunConfig, run_limit
from simpler.errors import SimplerError
from simpler.orchestrator import Orchestrator
from simpler.run import RunContext, RunHandle
from simpler.trace import tracer_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from simpler import _core
    from simpler.orchestrator import Host


def run_function(
    host: Host,
    fn: Callable[..., Any] | CallableHandle,
    args: Any,
    config: RunConfig | None,
    timeout_s: float | None,
) -> Any:
    """`Worker.run` of a node: `submit_function(...).result()`, made short."""
    if timeout_s is None and config is None:
        limit, priority = math.inf, 0
    else:
        limit, priority = run_limit(timeout_s, config), 0 if config is None else config.priority
    run, value = _call(host, fn, args, config, limit, priority)
    context: RunContext = run.context
    try:
        summary = run.finish(limit if limit == math.inf else context.left())
    except KeyboardInterrupt:
        run.cancel()  # nobody has a handle to it
        context.trace_when_done(run)
        raise
    if context.tracer is not None:
        context.trace_when_done(run) if summary is None else context.tracer.write()
    if summary is not True:
        raise context.timed_out("the run", None) if summary is None else context.run_error(summary)
    return value.result() if fn.__class__ is CallableHandle else value


def submit_function(
    host: Host, fn: Callable[..., Any] | CallableHandle, args: Any, config: RunConfig | None
) -> RunHandle:
    """`Worker.submit` of a node."""
    run, value = _call(
        host, fn, args, config, run_limit(None, config), 0 if config is None else config.priority
    )
    run.seal()
    run.context.trace_when_done(run)
    return RunHandle(run, run.context, value, is_task=isinstance(fn, CallableHandle))


def _call(
    host: Host,
    fn: Callable[..., Any] | CallableHandle,
    args: Any,
    config: RunConfig | None,
    limit: float,
    priority: int,
) -> tuple[_core.Run, Any]:
    """Open a run and call its function; the run is not sealed. What a CallableHandle gives is its task."""
    is_task = fn.__class__ is CallableHandle
    if not is_task and not callable(fn):
        raise TypeError(f"a run is of a function or a CallableHandle, not {fn!r}")
    context = RunContext(host, limit, None if config is None else tracer_of(host, config))
    run = host.engine.open_run(context, priority, limit)
    if context.tracer is not None:
        context.tracer.attach(run)
    orch = Orchestrator(host, run, context)
    try:
        if isinstance(fn, CallableHandle):
            value: Any = orch.submit_next_level(fn, args, worker=0)
        else:
            value = fn(orch, args, config)
        orch.end()
    except BaseException as error:  # whatever it is, nothing more may begin
        run.cancel()
        run.seal()
        orch.end()
        context.trace_when_done(run)
        if isinstance(error, Exception):
            # Closed or interrupted meanwhile: the function's own error is the one to see.
            with contextlib.suppress(SimplerError):
                run.wait(context.left())
        raise
    return run, value
