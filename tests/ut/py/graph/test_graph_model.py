"""Random programs on the task graph and on a naive model: TG-1 to TG-6 hold, and they never differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from graph.machine import Machine
from graph.model import Limits

if TYPE_CHECKING:
    from graph.model import Access, Kind

Op = tuple[str, tuple[int, int, int], list[tuple[int, bool, int, int]], list[int]]

# How often each step of a program is drawn.
STEPS = {
    "submit": 40,
    "step": 20,
    "deliver": 20,
    "fail": 4,
    "ignore recall": 2,
    "take back": 4,
    "open run": 2,
    "bring back": 2,
    "seal run": 1,
    "cancel run": 1,
    "lose": 1,
    "open scope": 1,
    "close scope": 1,
    "open buffer": 1,
    "release buffer": 1,
}

limits = st.builds(
    Limits,
    chips=st.integers(1, 4),
    sub_workers=st.integers(0, 3),
    ring_depth=st.integers(1, 4),
    sub_depth=st.integers(1, 4),
    regions=st.just(2),
    capacity=st.sampled_from([3, 1000]),
    send_ahead=st.booleans(),
)
accesses = st.lists(
    st.tuples(st.integers(0, 1), st.booleans(), st.integers(0, 11), st.integers(0, 8)), max_size=3
)
numbers = st.integers(0, 127)
steps = st.tuples(
    st.sampled_from([name for name, weight in STEPS.items() for _ in range(weight)]),
    st.tuples(numbers, numbers, numbers),
    accesses,
    st.lists(st.integers(1, 6), max_size=2),
)
programs = st.lists(steps, min_size=25, max_size=80)


def choose(among: list[int], number: int) -> int | None:
    return among[number % len(among)] if among else None


def submit(machine: Machine, op: Op) -> None:
    _, (where, what, extra), drawn, back = op
    open_runs = [run for run, state in enumerate(machine.model.runs) if not state.sealed]
    run = choose(open_runs, what)
    if run is None:
        run = machine.open_run()
    shape = where % 8
    kind: Kind = "chip"
    targets = [where % machine.limits.chips]
    members = 1
    if shape == 0:
        kind, targets = "host", []
    elif shape <= 2 and machine.limits.sub_workers:
        kind, targets = "sub", []
        members = 1 + (where // 8) % machine.limits.sub_workers if shape == 2 else 1
    elif shape >= 5:
        chips = range(machine.limits.chips)
        targets = [chip for chip in chips if (where // 8) >> chip & 1] or [0]
        members = len(targets)
    ranges: list[Access] = [(region, writes, begin, begin + size) for region, writes, begin, size in drawn]
    known = len(machine.ids)
    deps = {known - step for step in back if step <= known}
    scopes = sorted(set(range(len(machine.scopes))) - machine.model.closed_scopes)
    buffers = sorted(set(range(len(machine.buffers))) - machine.model.released_buffers)
    machine.submit(
        run,
        kind,
        targets,
        members,
        ranges,
        deps,
        [buffer for buffer in buffers if extra >> buffer % 4 & 1],
        choose(scopes, extra) if extra & 1 else None,
        extra % 5 - 2 if extra % 3 == 0 else None,
    )


def change_a_run(machine: Machine, name: str, number: int) -> None:
    open_runs = [run for run, state in enumerate(machine.model.runs) if not state.sealed]
    if name == "open run":
        machine.open_run(number % 3 - 1)
    elif name == "cancel run":
        live = sorted(set(range(len(machine.runs))) - machine.told_done)
        if (run := choose(live, number)) is not None:
            machine.cancel_run(run)
    elif (run := choose(open_runs, number)) is None:
        return
    elif name == "seal run":
        machine.seal_run(run)
    else:
        machine.open_scope(run)


def close_one(machine: Machine, name: str, number: int) -> None:
    model = machine.model
    if name == "close scope":
        scopes = sorted(set(range(len(machine.scopes))) - model.closed_scopes)
        if (scope := choose(scopes, number)) is not None:
            machine.close_scope(scope)
    else:
        buffers = sorted(set(range(len(machine.buffers))) - model.released_buffers)
        if (buffer := choose(buffers, number)) is not None:
            machine.release_buffer(buffer)


def play(machine: Machine, op: Op) -> None:
    name, (number, _, _), _, _ = op
    places = list(machine.rings)
    place = places[number % len(places)]
    worker = number % len(machine.limits.workers)
    if name == "submit":
        submit(machine, op)
    elif name in {"step", "fail", "ignore recall"}:
        machine.step(place, fails=name == "fail", obeys_recall=name == "step")
    elif name == "deliver":
        machine.deliver(place)
    elif name == "lose":
        machine.lose(worker)
    elif name == "take back":
        machine.take_back(worker)
    elif name == "bring back":
        machine.bring_back(worker)
    elif name == "open buffer":
        machine.open_buffer()
    elif name in {"close scope", "release buffer"}:
        close_one(machine, name, number)
    else:
        change_a_run(machine, name, number)


def run_program(limits: Limits, program: list[Op]) -> None:
    machine = Machine(limits)
    for op in program:
        play(machine, op)
    machine.finish()


checked = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(checked, max_examples=500)
@given(limits, programs)
def test_random_programs_agree_with_the_model(limits: Limits, program: list[Op]) -> None:
    run_program(limits, program)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(checked, max_examples=10_000)
@given(limits, programs)
def test_ten_thousand_random_programs_agree_with_the_model(limits: Limits, program: list[Op]) -> None:
    run_program(limits, program)
