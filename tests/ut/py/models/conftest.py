"""The real model for tests that need it; they are skipped where it is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from simpler.models.checkpoint import Checkpoint, ModelNotFoundError, find_demo_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simpler.models.layout import FloatArray


@pytest.fixture(scope="session")
def checkpoint() -> Iterator[Checkpoint]:
    """SmolLM2-135M-Instruct, opened."""
    try:
        path = find_demo_model()
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    with Checkpoint(path) as opened:
        yield opened


@pytest.fixture(scope="session")
def weights(checkpoint: Checkpoint) -> FloatArray:
    """Its weights in this process."""
    return checkpoint.load()
