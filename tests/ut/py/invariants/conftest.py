"""Gates, by the name of the directory that pytest gives each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from invariants.gate import Gate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def make_gate(tmp_path: Path) -> Callable[[], Gate]:
    """Make as many gates as a test needs."""
    made: list[Gate] = []

    def make() -> Gate:
        made.append(Gate(tmp_path / f"gate{len(made)}"))
        return made[-1]

    return make


@pytest.fixture
def gate(make_gate: Callable[[], Gate]) -> Gate:
    """One gate."""
    return make_gate()
