"""LC-2: close() stays within its budget when every process of the tree is stopped."""

from __future__ import annotations

import os
import signal

from invariants.nodes import node
from invariants.test_lc2_close import BUDGET_S, close_within_budget


def test_lc2_stopped_children_and_a_stopped_spare_are_ended_within_the_budget() -> None:
    worker = node(device_ids=[0, 1], num_sub_workers=1, shutdown_timeout_s=BUDGET_S)
    worker.init()
    for record in worker.status():
        os.kill(record.pid, signal.SIGSTOP)
    close_within_budget(worker)
