"""Fixtures of the registry tests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from memory.registry import Node

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool
