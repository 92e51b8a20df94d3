"""CP-6: calls from several threads, to one child or many, are in flight at once and end in any order."""

from __future__ import annotations

import contextlib
import functools
import random
from typing import TYPE_CHECKING

import simpler
from invariants.gate import Gate, wait_handler
from invariants.nodes import WATCHDOG_S, Background, node, run_task
from registered import extension
from simpler import ControlOp

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

CHIPS = 4
THREADS = 16


def echo(chip: simpler.ChipView, payload: bytes, _device: int) -> bytes:
    return b"%d:" % chip.worker_id[0] + payload


def echo_beside(chip: simpler.ChipView, payload: bytes, device: int) -> bytes:
    return echo(chip, payload, device)


def call_everything(worker: simpler.Worker, number: int, rounds: int) -> int:
    """Calls of every kind with payloads of many sizes; how many went wrong."""
    dice = random.Random(number)
    wrong = 0
    pending: list[tuple[Future[bytes], bytes]] = []
    for round_number in range(rounds):
        chip = dice.randrange(CHIPS)
        size = dice.choice((0, 1, 100, 8191, 8192, 8193, 20_000))
        payload = b"%d/%d " % (number, round_number) + dice.randbytes(size)
        kind = dice.randrange(5)
        expected = b"%d:" % chip + payload
        if kind == 0:
            wrong += worker.control_payload(chip, ControlOp.ECHO, payload) != payload
        elif kind == 1:
            wrong += worker.run_chip_control_extension("echo", payload, worker_id=chip) != expected
        elif kind == 2:
            wrong += worker.run_chip_control_extension("beside", payload, worker_id=chip) != expected
        elif kind == 3:
            future = worker.submit_chip_control_extension("beside", payload, worker_id=chip)
            pending.append((future, expected))
        else:
            replies = worker.run_chip_control_extension("echo", payload)
            wrong += replies != [b"%d:" % each + payload for each in range(CHIPS)]
    return wrong + sum(bool(future.result(WATCHDOG_S) != expected) for future, expected in pending)


def test_cp6_sixteen_threads_calling_four_chips_get_their_own_replies() -> None:
    with (
        extension("echo", echo),
        extension("beside", echo_beside, concurrent=True),
        node(device_ids=range(CHIPS)) as worker,
    ):
        calls = [
            Background(functools.partial(call_everything, worker, number, 150)) for number in range(THREADS)
        ]
        assert [call.result() for call in calls] == [0] * THREADS
        assert [stats.timeouts + stats.late_replies for stats in worker.stats()] == [0] * CHIPS


def test_cp6_calls_that_give_up_among_calls_that_do_not() -> None:
    with extension("echo", echo), node(device_ids=range(CHIPS)) as worker:

        def hasty(number: int) -> None:
            for round_number in range(300):
                with contextlib.suppress(simpler.WorkerTimeoutError):
                    worker.run_chip_control_extension(
                        "echo", b"hasty", worker_id=round_number % CHIPS, timeout_s=1e-6
                    )

        def patient(number: int) -> int:
            wrong = 0
            for round_number in range(300):
                payload = b"%d/%d" % (number, round_number)
                chip = round_number % CHIPS
                reply = worker.run_chip_control_extension("echo", payload, worker_id=chip)
                wrong += reply != b"%d:" % chip + payload
            return wrong

        hasty_calls = [Background(functools.partial(hasty, number)) for number in range(THREADS // 2)]
        patient_calls = [Background(functools.partial(patient, number)) for number in range(THREADS // 2)]
        assert [call.result() for call in patient_calls] == [0] * len(patient_calls)
        for call in hasty_calls:
            call.result()
        assert sum(stats.timeouts for stats in worker.stats()) > 0
        for chip in range(CHIPS):
            assert worker.run_chip_control_extension("echo", b"end", worker_id=chip) == b"%d:end" % chip


def test_cp6_a_later_call_to_the_same_child_ends_first(make_gate: Callable[[], Gate]) -> None:
    gates = [make_gate() for _ in range(3)]
    with extension("wait", wait_handler, concurrent=True), node() as worker:
        calls = [
            Background(functools.partial(worker.run_chip_control_extension, "wait", gate.name, worker_id=0))
            for gate in gates
        ]
        for gate in gates:
            gate.wait_reached()
        for position in (2, 0, 1):
            assert calls[position].running
            gates[position].open()
            assert calls[position].result() == b"done"


def test_cp6_one_slow_child_delays_no_call_to_another(gate: Gate) -> None:
    with extension("wait", wait_handler), node(device_ids=range(CHIPS), num_sub_workers=1) as worker:
        handle = worker.register(lambda: "ran")
        slow = [Background(lambda: worker.run_chip_control_extension("wait", gate.name, worker_id=0))]
        with gate:
            slow += [
                Background(lambda: worker.run_chip_control_extension("wait", b"", worker_id=0))
                for _ in range(40)
            ]
            for chip in range(1, CHIPS):
                assert worker.run_chip_control_extension("wait", b"", worker_id=chip) == b"done"
                assert worker.control_payload(chip, ControlOp.ECHO, b"x" * 100_000) == b"x" * 100_000
                worker.copy_to(worker.malloc(64, worker_id=chip), bytes(64))
                assert run_task(worker, handle, chip=chip) == "ran"
            assert worker.control_payload(CHIPS, ControlOp.PING) == b""
            future = worker.submit_chip_control_extension("wait", b"", worker_id=1)
            assert future.result(WATCHDOG_S) == b"done"
            assert slow[0].running
        assert [call.result() for call in slow] == [b"done"] * 41
