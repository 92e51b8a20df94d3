"""Layers in a row over chip processes say exactly what one process says."""

from __future__ import annotations

import itertools
import os
import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest

from models.small import MODEL, NEVER, OTHER_PROMPT, PROMPT, WEIGHTS, load, reference
from simpler import SimplerError
from simpler.models.checkpoint import WeightChunk
from simpler.models.generation import generate
from simpler.models.llama import Llama
from simpler.models.pipeline import PipelineModel
from simpler.models.sampling import Sampler
from simpler.models.tokenizer import Message

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simpler.models.checkpoint import Checkpoint
    from simpler.models.layout import FloatArray


@pytest.fixture(
    scope="module", params=[(2, 5), (2, 1), (3, 5)], ids=lambda param: f"{param[0]} chips, {param[1]} layers"
)
def pipeline(request: pytest.FixtureRequest) -> Iterator[PipelineModel]:
    chips, layers_of_task = request.param
    with PipelineModel(MODEL, chips, layers_of_task=layers_of_task) as model:
        load(model)
        yield model


def said(
    model: PipelineModel, prompt: list[int], max_tokens: int, sampler: Sampler | None = None
) -> list[int]:
    return list(model.generate(prompt, max_tokens=max_tokens, end_of_turn=NEVER, sampler=sampler))


@pytest.mark.parametrize("max_tokens", [1, 2, 1000])
def test_tokens_equal_those_of_one_process(pipeline: PipelineModel, max_tokens: int) -> None:
    assert said(pipeline, PROMPT, max_tokens) == reference(PROMPT, max_tokens)


def test_the_same_graphs_serve_one_prompt_after_another(pipeline: PipelineModel) -> None:
    for prompt in (PROMPT, OTHER_PROMPT, PROMPT[:1], PROMPT):
        assert said(pipeline, prompt, 12) == reference(prompt, 12)


def test_drawn_tokens_are_the_same_with_the_same_seed(pipeline: PipelineModel) -> None:
    split, whole = (Sampler(temperature=1.5, top_p=0.9, seed=3) for _ in range(2))
    assert said(pipeline, PROMPT, 15, split) == reference(PROMPT, 15, whole)


def test_logits_equal_those_of_one_process_bit_for_bit(pipeline: PipelineModel) -> None:
    kv = np.zeros(MODEL.kv.size, np.float32)
    np.testing.assert_array_equal(pipeline.read_prompt(PROMPT), MODEL.prefill(WEIGHTS, kv, PROMPT))
    position = len(PROMPT)
    np.testing.assert_array_equal(
        pipeline.write_token(9, position), MODEL.decode_step(WEIGHTS, kv, 9, position)
    )


def test_each_chip_runs_its_layers_after_the_chips_before_it(pipeline: PipelineModel) -> None:
    chips = len(pipeline.chips)
    said(pipeline, PROMPT, 3)
    launches = pipeline.launches
    assert [launch.name for launch in launches] == ["prefill", "decode", "decode"]
    for launch in launches:
        tasks = [span for span in launch.spans() if span.chip is not None]
        assert len(tasks) == launch.num_tasks == pipeline.tasks_per_token
        on = [span.chip for span in tasks if span.name == "layers"]
        each = [0, 0, 1] if pipeline.layers_of_task == 1 else list(range(chips))
        assert on == each
        assert len(tasks) == len(on) + chips + 1
        for earlier, later in itertools.pairwise(tasks):
            assert earlier.start_s + earlier.duration_s <= later.start_s


def test_a_token_takes_its_kernels_and_an_overhead(pipeline: PipelineModel) -> None:
    said(pipeline, PROMPT, 2)
    launch = pipeline.launches[-1]
    parent, *tasks = launch.spans()
    assert parent.duration_s == launch.duration_s
    assert launch.kernel_s == pytest.approx(sum(span.duration_s for span in tasks))
    assert launch.overhead_s == pytest.approx(launch.duration_s - launch.kernel_s)
    assert 0 < launch.kernel_s < launch.duration_s
    assert pipeline.overhead_per_token_s is not None


def test_before_the_first_token_there_is_no_overhead_to_tell() -> None:
    with PipelineModel(MODEL, 2) as model:
        assert model.overhead_per_token_s is None


def test_a_task_of_no_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one layer, not 0"):
        PipelineModel(MODEL, layers_of_task=0)


@pytest.mark.parametrize("prompt", [[], [1] * 41])
def test_a_prompt_that_does_not_fit_is_refused(pipeline: PipelineModel, prompt: list[int]) -> None:
    with pytest.raises(ValueError, match="does not fit a cache of 40"):
        next(pipeline.generate(prompt, max_tokens=1, end_of_turn=NEVER))


def test_an_unknown_token_fails_its_run_and_the_next_prompt_is_answered(pipeline: PipelineModel) -> None:
    with pytest.raises(SimplerError, match="a token is not one of the 80"):
        pipeline.read_prompt([80])
    assert said(pipeline, PROMPT, 3) == reference(PROMPT, 3)


def test_a_chip_that_dies_ends_the_answer_with_an_error() -> None:
    with PipelineModel(MODEL, 2) as model:
        load(model)
        answer = model.generate(PROMPT, max_tokens=1000, end_of_turn=NEVER)
        assert next(answer) == reference(PROMPT, 1)[0]
        os.kill(next(child.pid for child in model.worker.status() if child.path == (1,)), signal.SIGKILL)
        with pytest.raises(SimplerError, match=r"(chip|worker) 1"):
            list(answer)


@pytest.mark.extra
def test_the_real_model_says_the_same_in_a_pipeline(checkpoint: Checkpoint, weights: FloatArray) -> None:
    model = Llama(checkpoint.config, 96)
    end_of_turn = checkpoint.tokenizer.end_of_turn
    with PipelineModel(model) as pipeline:
        sum(pipeline.load([WeightChunk(0, weights)]))
        for text in ("What is the capital of France?", "List three prime numbers."):
            prompt = checkpoint.tokenizer.encode_chat([Message("user", text)])
            whole = generate(model, weights, prompt, max_tokens=40, end_of_turn=end_of_turn)
            split = pipeline.generate(prompt, max_tokens=40, end_of_turn=end_of_turn)
            assert list(split) == list(whole)
