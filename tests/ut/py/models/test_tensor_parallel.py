"""Heads and columns side by side on chip processes compute what one process does, within a tolerance."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest

from models.small import MODEL, NEVER, OTHER_PROMPT, PROMPT, WEIGHTS, load
from simpler.models.checkpoint import WeightChunk
from simpler.models.comparison import compare
from simpler.models.llama import Llama
from simpler.models.tensor_parallel import TensorParallelModel
from simpler.models.tokenizer import Message

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simpler.models.checkpoint import Checkpoint
    from simpler.models.launches import Span
    from simpler.models.layout import FloatArray

LAYERS = MODEL.config.layers
# Of logits that range over 10; float32 sums of this length differ by less than 1e-5.
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=[2, 3])
def parallel(request: pytest.FixtureRequest) -> Iterator[TensorParallelModel]:
    with TensorParallelModel(MODEL, request.param) as model:
        load(model)
        yield model


def said(
    model: TensorParallelModel, prompt: list[int], max_tokens: int, end_of_turn: int = NEVER
) -> tuple[list[int], list[FloatArray]]:
    """Tokens, and the logits that each was chosen from."""
    logits: list[FloatArray] = []
    tokens = model.generate(
        prompt,
        max_tokens=max_tokens,
        end_of_turn=end_of_turn,
        observe=lambda step: logits.append(step.copy()),
    )
    return list(tokens), logits


@pytest.mark.parametrize("prompt", [PROMPT, OTHER_PROMPT, PROMPT[:1]])
def test_logits_of_each_step_are_those_of_one_process(
    parallel: TensorParallelModel, prompt: list[int]
) -> None:
    tokens, logits = said(parallel, prompt, 1000)
    room = MODEL.kv.capacity - len(prompt)
    assert len(tokens) == len(logits) == room + 1
    comparison = compare(MODEL, WEIGHTS, prompt, tokens, logits, TOLERANCE)
    assert comparison.failure is None
    assert comparison.steps == len(logits)


def test_a_wrong_share_would_be_found(parallel: TensorParallelModel) -> None:
    tokens, logits = said(parallel, PROMPT, 4)
    other = WEIGHTS.copy()
    MODEL.weights.places["blk.2.down"].view(other)[-1] *= 1.5
    comparison = compare(MODEL, other, PROMPT, tokens, logits, TOLERANCE)
    assert comparison.failure is not None


def test_answers_are_the_same_bits_each_time(parallel: TensorParallelModel) -> None:
    first, again = (said(parallel, PROMPT, 1000) for _ in range(2))
    assert first[0] == again[0]
    np.testing.assert_array_equal(first[1], again[1])


def test_the_chips_of_a_stage_wait_for_all_of_the_stage_before(parallel: TensorParallelModel) -> None:
    chips = list(range(len(parallel.chips)))
    said(parallel, PROMPT, 3)
    for launch in parallel.launches:
        tasks = [span for span in launch.spans() if span.chip is not None]
        assert len(tasks) == launch.num_tasks == len(chips) * (2 * LAYERS + 2)
        stages = [tasks[at : at + len(chips)] for at in range(0, len(tasks), len(chips))]
        names = ["attend", "feed_forward"] * LAYERS
        embed = "embed_prompt" if launch.name == "prefill" else "embed_token"
        assert [stage[0].name for stage in stages] == [embed, *names, "logits"]
        for stage in stages:
            assert [span.chip for span in stage] == chips
            assert len({span.name for span in stage}) == 1
        # The first attention needs nothing of other chips.
        for earlier, later in itertools.pairwise(stages[1:]):
            assert max(ended(span) for span in earlier) <= min(span.start_s for span in later)
        longest = sum(max(span.duration_s for span in stage) for stage in stages[2:])
        first = max(sum(span.duration_s for span in pair) for pair in zip(*stages[:2], strict=True))
        assert launch.kernel_s == pytest.approx(first + longest)


def ended(span: Span) -> float:
    return span.start_s + span.duration_s


def test_each_chip_holds_only_its_part(parallel: TensorParallelModel) -> None:
    count = len(parallel.chips)
    caches = [chip.cache.nbytes for chip in parallel.chips]
    assert sum(caches) == MODEL.kv.nbytes
    assert caches == [MODEL.kv.nbytes // 3 * heads for heads in {2: [2, 1], 3: [1, 1, 1]}[count]]


@pytest.mark.extra
@pytest.mark.parametrize("chips", [2, 3])
def test_the_real_model_computes_the_same_within_the_tolerance(
    checkpoint: Checkpoint, weights: FloatArray, chips: int
) -> None:
    model = Llama(checkpoint.config, 96)
    prompt = checkpoint.tokenizer.encode_chat([Message("user", "What is the capital of France?")])
    with TensorParallelModel(model, chips) as parallel:
        sum(parallel.load([WeightChunk(0, weights)]))
        tokens, logits = said(parallel, prompt, 20, checkpoint.tokenizer.end_of_turn)
    assert checkpoint.tokenizer.decode(tokens) == "The capital of France is Paris."
    comparison = compare(model, weights, prompt, tokens, logits)
    assert comparison.failure is None
    assert comparison.steps == len(tokens) + 1
