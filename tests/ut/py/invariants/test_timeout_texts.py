"""A time-out says what was waited for and how long; its attributes say the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import simpler
from invariants.gate import wait_handler
from invariants.nodes import WATCHDOG_S, Background, error_of, node
from registered import extension

if TYPE_CHECKING:
    from invariants.gate import Gate

LIMIT_S = 0.25


@pytest.mark.parametrize("how", ["run", "submit", "broadcast"])
def test_a_time_out_says_what_was_waited_for_and_how_long(gate: Gate, how: str) -> None:
    with extension("wait", wait_handler), node() as worker:
        stuck = Background(lambda: worker.run_chip_control_extension("wait", gate.name, worker_id=0))
        with gate:
            error: BaseException | None
            if how == "run":
                error = error_of(
                    lambda: worker.run_chip_control_extension("wait", worker_id=0, timeout_s=LIMIT_S)
                )
            elif how == "submit":
                error = worker.submit_chip_control_extension(
                    "wait", worker_id=0, timeout_s=LIMIT_S
                ).exception(WATCHDOG_S)
            else:
                whole = error_of(lambda: worker.run_chip_control_extension("wait", timeout_s=LIMIT_S))
                assert isinstance(whole, simpler.ChipControlError)
                error = whole.errors[(0,)]
            assert isinstance(error, simpler.WorkerTimeoutError)
            assert "extension 'wait'" in str(error)
            assert "0.25 s" in str(error)
            assert error.timeout_s == LIMIT_S
            assert "extension 'wait'" in error.waited_for
        assert stuck.result() == b"done"
