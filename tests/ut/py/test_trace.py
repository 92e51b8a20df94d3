"""The trace of a run: slices for tasks that ran, arrows along dependencies, what did not run beside them."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest

import simpler
from simpler import INOUT, Orchestrator, RunConfig, TaskArgs, Worker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Events = list[dict[str, Any]]


def nothing(*_args: object) -> None:
    return None


def fail(*_args: object) -> None:
    raise ValueError("no")


@pytest.fixture
def node() -> Iterator[Worker]:
    with Worker(device_ids=[0, 5], num_sub_workers=1, hbm_bytes=1 << 20, heap_bytes=1 << 20) as worker:
        yield worker


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.json"


def read(path: Path) -> Events:
    events: Events = json.loads(path.read_text())["traceEvents"]
    return events


def slices(events: Events) -> Events:
    return [event for event in events if event["ph"] == "X"]


def check_shape(events: Events) -> None:
    """What holds for every trace: one task at a time on a track, arrows forward, queueing before running."""
    for _, group in itertools.groupby(
        sorted(slices(events), key=lambda e: (e["tid"], e["ts"])), key=lambda e: e["tid"]
    ):
        for before, after in itertools.pairwise(group):
            assert before["ts"] + before["dur"] <= after["ts"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    for name, start in starts.items():
        assert start["ts"] <= ends[name]["ts"]
    begun = {event["id"]: event["ts"] for event in events if event["ph"] == "b"}
    assert len(begun) == len(slices(events))
    for event in events:
        if event["ph"] == "e":
            assert 0 <= begun[event["id"]] <= event["ts"]


def two_chips_and_a_sub(orch: Orchestrator, args: Any, _config: object) -> None:
    quick, bad = args["quick"], args["bad"]
    shared = orch.alloc(8, "float64")
    for step in range(6):
        orch.submit(quick, INOUT(shared), worker=step % 2)
    orch.submit(quick)
    orch.submit_next_level_group(quick, [TaskArgs(), TaskArgs()], workers=[0, 1])
    failing = orch.submit(bad, worker=0)
    orch.submit(quick, worker=1, after=[failing])


def test_every_task_is_in_the_trace_and_its_dependencies_are_arrows(node: Worker, path: Path) -> None:
    functions = {"quick": node.register(nothing), "bad": node.register(fail)}
    with pytest.raises(simpler.TaskError, match="no"):
        node.run(two_chips_and_a_sub, functions, RunConfig(trace=str(path)))
    events = read(path)
    check_shape(events)
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {0: "chip 0 (device 0)", 1: "chip 1 (device 5)", 2: "sub worker 2", 3: "not run"}
    ran = [(event["args"]["task"], event["tid"]) for event in slices(events)]
    assert sorted(ran) == sorted([*((i, i % 2) for i in range(6)), (6, 2), (7, 0), (7, 1), (8, 0)])
    unrun = [event for event in events if event["ph"] == "i"]
    assert [(event["args"]["task"], event["args"]["outcome"]) for event in unrun] == [(9, "poisoned")]
    arrows = {event["id"].split(".")[0] for event in events if event["ph"] == "s"}
    # What had ended when its follower was submitted needs no arrow.
    assert arrows <= {f"{i}-{i + 1}" for i in range(5)} | {"8-9"}


def test_a_captured_graph_is_traced_with_all_its_dependencies(node: Worker, path: Path) -> None:
    quick = node.register(nothing)

    def chain(orch: Orchestrator, _args: object, _config: object) -> None:
        shared = orch.alloc(8, "float64")
        for step in range(20):
            orch.submit(quick, INOUT(shared), worker=step % 2)

    graph = node.capture(chain)
    graph.launch(config=RunConfig(trace=str(path))).result()
    node.close()  # the file is written by the node's own thread
    events = read(path)
    check_shape(events)
    assert [event["args"]["task"] for event in sorted(slices(events), key=lambda e: e["ts"])] == [*range(20)]


def test_a_run_that_nobody_waits_for_is_traced_when_it_is_done(node: Worker, path: Path) -> None:
    quick = node.register(nothing)

    async def main() -> None:
        await node.submit(lambda orch, _a, _c: orch.submit(quick, worker=0), None, RunConfig(trace=str(path)))

    asyncio.run(main())
    node.close()
    assert len(slices(read(path))) == 1


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(node: Worker, tmp_path: Path) -> None:
    calls: list[object] = []
    with pytest.raises(FileNotFoundError):
        node.run(lambda *_: calls.append(1), None, RunConfig(trace=str(tmp_path / "no" / "out.json")))
    assert calls == []


def test_level_2_has_nothing_to_trace(path: Path) -> None:
    with Worker(level=2, hbm_bytes=1 << 20, heap_bytes=1 << 20) as chip:
        handle = chip.register(nothing)
        with pytest.raises(simpler.ConfigError, match="level 3"):
            chip.run(handle, None, RunConfig(trace=str(path)))
