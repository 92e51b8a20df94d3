"""What is accepted of a split that takes sums in another order, and what is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from models.small import MODEL, PROMPT, WEIGHTS
from simpler.models.comparison import Comparison, compare

if TYPE_CHECKING:
    from simpler.models.layout import FloatArray

TOKENS = [5, 6, 7]


def logits() -> list[FloatArray]:
    """Those of the prompt and of each token."""
    kv = np.zeros(MODEL.kv.size, np.float32)
    first = MODEL.prefill(WEIGHTS, kv, PROMPT)
    rest = [MODEL.decode_step(WEIGHTS, kv, token, len(PROMPT) + at) for at, token in enumerate(TOKENS)]
    return [first, *rest]


def compared(given: list[FloatArray], tolerance: float) -> Comparison:
    return compare(MODEL, WEIGHTS, PROMPT, TOKENS, given, tolerance)


def swap_best(given: FloatArray) -> float:
    """Make the second best the best; how far below it was."""
    second, best = np.argsort(given)[-2:]
    behind = float(given[best] - given[second])
    given[[second, best]] = given[[best, second]]
    return behind


def test_equal_logits_pass_whatever_tokens_were_chosen() -> None:
    comparison = compared(logits(), 1e-5)
    assert comparison.failure is None
    assert (comparison.steps, comparison.other_tokens) == (4, 0)


def test_the_largest_difference_is_told() -> None:
    given = logits()
    given[2][3] += 0.01
    comparison = compared(given, 0.1)
    assert comparison.failure is None
    assert comparison.largest == pytest.approx(0.01, rel=0.05)


def test_a_difference_beyond_the_tolerance_fails_at_its_step() -> None:
    given = logits()
    given[2][3] += 0.01
    comparison = compared(given, 0.005)
    assert comparison.failure == "a logit of step 2 differs by 0.01, more than 0.005"
    assert comparison.steps == 3


def test_logits_that_are_no_numbers_fail() -> None:
    given = logits()
    given[1][0] = np.nan
    assert "step 1 differs by nan" in str(compared(given, 1e9).failure)


def test_another_best_token_passes_only_where_the_two_best_are_closer_than_the_tolerance() -> None:
    given = logits()
    behind = swap_best(given[1])
    close = compared(given, behind * 1.01)
    assert close.failure is None
    assert close.other_tokens == 1
    assert compared(given, behind * 0.99).failure is not None
    # Exactly the tolerance apart: the logits pass, the token does not.
    assert "of step 1 is" in str(compared(given, behind).failure)


def test_more_logits_than_tokens_to_choose_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="more logits than those of 3 tokens"):
        compared([*logits(), np.zeros(80, np.float32)], 1.0)
