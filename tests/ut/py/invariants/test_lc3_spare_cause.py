"""LC-3: restart() says how the spare died."""

from __future__ import annotations

import os
import signal

import simpler
from invariants.nodes import error_of, node
from invariants.processes import wait_ended


def test_lc3_restart_without_a_spare_says_how_the_spare_died() -> None:
    with node() as worker:
        spare = worker.status()[-1].pid
        os.kill(spare, signal.SIGKILL)
        wait_ended(spare)
        worker.kill(0)
        error = error_of(lambda: worker.restart(0))
        assert isinstance(error, simpler.StartupError)
        assert "SIGKILL" in str(error)
