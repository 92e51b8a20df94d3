"""The times promised to users, in one table. `SIMPLER_TEST_TIME_SCALE` multiplies them on a slow machine."""

from __future__ import annotations

import os

SCALE = float(os.environ.get("SIMPLER_TEST_TIME_SCALE", "1"))

# LC-3: after this long no process of a tree that has ended, in whatever way, is left.
NOTHING_LEFT_S = 1.0 * SCALE
# LC-4: a blocked call of the main thread raises KeyboardInterrupt within this after Ctrl-C.
INTERRUPT_S = 0.2 * SCALE
# LC-1, LC-2: init() and close() overrun their own limits by no more than this.
BUDGET_SLACK_S = 1.0 * SCALE
