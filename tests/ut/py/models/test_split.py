"""A model split over two chip processes says what the same model says in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from simpler.models.checkpoint import WeightChunk
from simpler.models.config import LlamaConfig
from simpler.models.generation import generate
from simpler.models.layout import BLOCK_TOKENS
from simpler.models.llama import Llama
from simpler.models.sampling import Sampler
from simpler.models.split import DECODE_CHIP, PREFILL_CHIP, SplitModel
from simpler.models.tokenizer import Message

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simpler.models.checkpoint import Checkpoint
    from simpler.models.layout import FloatArray

PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three prime numbers.",
    "Explain in one sentence why the sky is blue.",
    "Translate 'good morning' to Spanish.",
)
TINY = Llama(
    LlamaConfig(
        layers=3,
        embedding=32,
        hidden=48,
        heads=4,
        kv_heads=2,
        head=8,
        vocabulary=100,
        context=128,
        rope_base=1e4,
        norm_epsilon=1e-5,
    ),
    60,
)
TINY_WEIGHTS = (np.random.default_rng(5).standard_normal(TINY.weights.size) / 5).astype(np.float32)
TINY_PROMPT = [int(token) for token in np.random.default_rng(6).integers(0, 100, 21)]
NEVER = -1


@pytest.fixture(scope="module")
def tiny() -> Iterator[SplitModel]:
    with SplitModel(TINY) as split:
        loaded = sum(split.load([WeightChunk(0, TINY_WEIGHTS)]))
        assert loaded == TINY.weights.nbytes
        yield split


@pytest.fixture(scope="module")
def real(checkpoint: Checkpoint) -> Iterator[SplitModel]:
    with SplitModel(Llama(checkpoint.config, 128)) as split:
        assert sum(split.load(checkpoint.chunks())) <= checkpoint.layout.nbytes
        yield split


def tiny_reference(max_tokens: int, sampler: Sampler | None = None, end_of_turn: int = NEVER) -> list[int]:
    return list(
        generate(
            TINY, TINY_WEIGHTS, TINY_PROMPT, max_tokens=max_tokens, end_of_turn=end_of_turn, sampler=sampler
        )
    )


def tiny_split(
    split: SplitModel, max_tokens: int, sampler: Sampler | None = None, end_of_turn: int = NEVER
) -> list[int]:
    return list(split.generate(TINY_PROMPT, max_tokens=max_tokens, end_of_turn=end_of_turn, sampler=sampler))


@pytest.mark.parametrize("max_tokens", [1, 2, 30, 1000])
def test_split_tokens_equal_those_of_one_process(tiny: SplitModel, max_tokens: int) -> None:
    assert tiny_split(tiny, max_tokens) == tiny_reference(max_tokens)


def test_the_end_of_the_turn_ends_both(tiny: SplitModel) -> None:
    end = tiny_reference(8)[5]
    assert tiny_split(tiny, 30, end_of_turn=end) == tiny_reference(30, end_of_turn=end)


def test_drawn_tokens_are_the_same_with_the_same_seed(tiny: SplitModel) -> None:
    split, reference = (Sampler(temperature=1.5, top_p=0.9, seed=3) for _ in range(2))
    assert tiny_split(tiny, 30, split) == tiny_reference(30, reference)


def test_the_second_chip_has_the_first_ones_blocks_bit_for_bit(tiny: SplitModel) -> None:
    assert len(tiny_split(tiny, 1)) == 1
    caches = []
    for chip in (PREFILL_CHIP, DECODE_CHIP):
        cache = np.empty(TINY.kv.size, np.float32)
        tiny.worker.copy_from(cache, tiny.chips[chip].cache)
        caches.append(TINY.kv.view(cache)[:, :, :, :, : len(TINY_PROMPT) % BLOCK_TOKENS])
    used = TINY.kv.used_blocks(len(TINY_PROMPT))
    assert caches[0][:, :used].any()
    np.testing.assert_array_equal(caches[0][:, :used], caches[1][:, :used])


def test_a_move_reports_each_block_it_copied(tiny: SplitModel) -> None:
    tiny_split(tiny, 1)
    assert tiny.transfer is not None
    assert tiny.transfer.copies == TINY.kv.layers * 2
    assert tiny.transfer.nbytes == tiny.transfer.copies * TINY.kv.block_bytes
    assert tiny.transfer.copy_s > 0


def test_prefill_runs_on_the_first_chip_and_decoding_on_the_second(tiny: SplitModel) -> None:
    tiny_split(tiny, 3)
    spans = tiny.spans
    launches = [span.name for span in spans if span.chip is None]
    assert launches == ["prefill", "decode", "decode"]
    read, moved = ["embed_prompt", "layers", "logits"], ["move cache"]
    written = ["embed_token", "layers", "logits"] * 2
    assert [span.name for span in spans if span.chip == PREFILL_CHIP] == read
    assert [span.name for span in spans if span.chip == DECODE_CHIP] == moved + written
    assert tiny.tasks_per_token == 3


@pytest.mark.parametrize("prompt", [[], [1] * 61])
def test_a_prompt_that_does_not_fit_is_refused(tiny: SplitModel, prompt: list[int]) -> None:
    with pytest.raises(ValueError, match="does not fit a cache of 60"):
        next(tiny.generate(prompt, max_tokens=1, end_of_turn=NEVER))


@pytest.mark.extra
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_real_model_says_the_same_split_and_whole(
    checkpoint: Checkpoint, weights: FloatArray, real: SplitModel, prompt: str
) -> None:
    tokens = checkpoint.tokenizer.encode_chat([Message("user", prompt)])
    end_of_turn = checkpoint.tokenizer.end_of_turn
    whole = generate(Llama(checkpoint.config, 128), weights, tokens, max_tokens=40, end_of_turn=end_of_turn)
    split = real.generate(tokens, max_tokens=40, end_of_turn=end_of_turn)
    assert list(split) == list(whole)
