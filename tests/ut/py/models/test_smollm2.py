"""The real model: what it says, and its logits against stored ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # it ships no types

from simpler.models.generation import generate
from simpler.models.llama import Llama
from simpler.models.tokenizer import Message

if TYPE_CHECKING:
    from simpler.models.checkpoint import Checkpoint
    from simpler.models.layout import FloatArray

pytestmark = pytest.mark.extra

STORED = Path(__file__).parent / "smollm2_logits.npz"
# OpenBLAS's kernels for SSE, AVX and AVX2 differ by at most 7e-5 here; logits range over 30.
TOLERANCE = 1e-3


def prompt_tokens(checkpoint: Checkpoint, text: str) -> list[int]:
    return checkpoint.tokenizer.encode_chat([Message("user", text)])


def test_the_capital_of_france_is_paris(checkpoint: Checkpoint, weights: FloatArray) -> None:
    tokenizer = checkpoint.tokenizer
    answer = generate(
        Llama(checkpoint.config, 128),
        weights,
        prompt_tokens(checkpoint, "What is the capital of France?"),
        max_tokens=32,
        end_of_turn=tokenizer.end_of_turn,
    )
    assert tokenizer.decode(answer) == "The capital of France is Paris."


@pytest.mark.parametrize("row", range(5))
def test_logits_equal_the_stored_ones(checkpoint: Checkpoint, weights: FloatArray, row: int) -> None:
    stored = np.load(STORED)
    model = Llama(checkpoint.config, 256)
    kv = np.zeros(model.kv.size, np.float32)
    prompt = prompt_tokens(checkpoint, str(stored["prompts"][row]))
    with threadpool_limits(1):
        logits = model.prefill(weights, kv, prompt)
        for step, token in enumerate(stored["tokens"][row].tolist()):
            values = stored["values"][row, step]
            np.testing.assert_allclose(logits[stored["ids"][row, step]], values, rtol=0, atol=TOLERANCE)
            # Another token may win only where the two best of the stored run were this close.
            assert int(np.argmax(logits)) == token or values[0] - values[1] < TOLERANCE
            logits = model.decode_step(weights, kv, token, len(prompt) + step)


def test_the_prompt_is_the_chat_template_of_the_model(checkpoint: Checkpoint) -> None:
    tokens = prompt_tokens(checkpoint, "Hi")
    start, end, newline = 1, 2, 198
    system = checkpoint.tokenizer.encode(
        "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    )
    user = [*checkpoint.tokenizer.encode("user\nHi"), end, newline]
    assistant = [start, *checkpoint.tokenizer.encode("assistant\n")]
    assert tokens == [start, *system, end, newline, start, *user, *assistant]
    assert system[:11] == [9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308]


@pytest.mark.parametrize(
    "text",
    ["", "Hello, world!", "naïve café 世界 😀", "x = [i**2 for i in range(1024)]\n\n\tend  ", "٣½Ⅷ  don't"],
)
def test_text_survives_the_real_vocabulary(checkpoint: Checkpoint, text: str) -> None:
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer.encode(text)) == text


def test_every_word_of_the_vocabulary_is_spelled_by_its_own_tokens(checkpoint: Checkpoint) -> None:
    tokenizer = checkpoint.tokenizer
    whole = 0
    for token in range(tokenizer.vocabulary_size):
        try:
            text = tokenizer.token_bytes(token).decode("utf-8")
        except UnicodeDecodeError:
            continue
        encoded = tokenizer.encode(text)
        assert tokenizer.decode(encoded) == text
        whole += encoded == [token]
    # The rest are pieces that only appear inside longer words, and tokens with digits.
    assert whole > 0.98 * tokenizer.vocabulary_size
