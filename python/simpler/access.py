"""What a transfer does with memory."""

from __future__ import annotations

import enum


class TransferAccess(enum.IntEnum):
    """What a transfer does with a range."""

    READ = 0
    WRITE = 1
