"""A model on two chips says the same whatever connector moves its cache, and computes what is not found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from simpler import ConfigError
from simpler.kv import BlockNamespace
from simpler.models.connected import ConnectedModel
from simpler.models.layout import BLOCK_TOKENS
from simpler.models.split import DECODE_CHIP, PREFILL_CHIP

from .small import MODEL, NEVER, OTHER_PROMPT, PROMPT, load, reference

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from simpler.models.layout import FloatArray

SPACE = BlockNamespace("small", "1", "float32", BLOCK_TOKENS)
WHOLE_BLOCKS = [*PROMPT, *range(11)]


@pytest.fixture(scope="module")
def shared() -> Iterator[ConnectedModel]:
    with ConnectedModel(MODEL, "shm", SPACE) as model:
        load(model)
        yield model


def answer(model: ConnectedModel, prompt: list[int], max_tokens: int = 8) -> list[int]:
    return list(model.generate(prompt, max_tokens=max_tokens, end_of_turn=NEVER))


def cache(model: ConnectedModel, chip: int, tokens: int) -> FloatArray:
    """The blocks of the first tokens."""
    data = np.empty(MODEL.kv.size, np.float32)
    model.worker.copy_from(data, model.chips[chip].cache)
    return MODEL.kv.view(data)[:, : MODEL.kv.used_blocks(tokens)]


def check_caches(model: ConnectedModel, prompt: list[int]) -> None:
    """The second chip has the blocks of the first, bit for bit."""
    first, second = (cache(model, chip, len(prompt)) for chip in (PREFILL_CHIP, DECODE_CHIP))
    assert first.any(axis=(2, 3, 4, 5)).all()
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("prompt", [PROMPT, OTHER_PROMPT, WHOLE_BLOCKS, [7]])
def test_tokens_are_those_of_one_process(shared: ConnectedModel, prompt: list[int]) -> None:
    assert answer(shared, prompt) == reference(prompt, 8)
    assert shared.is_exact


@pytest.mark.parametrize("prompt", [PROMPT, WHOLE_BLOCKS])
def test_the_second_chip_has_the_blocks_of_the_first_bit_for_bit(
    shared: ConnectedModel, prompt: list[int]
) -> None:
    shared.worker.copy_to(shared.chips[DECODE_CHIP].cache, np.full(MODEL.kv.size, np.nan, np.float32))
    answer(shared, prompt, 1)
    check_caches(shared, prompt)


def test_a_move_reports_its_blocks(shared: ConnectedModel) -> None:
    answer(shared, PROMPT, 1)
    assert shared.found.tokens == 0
    assert shared.moved.tokens == 2 * BLOCK_TOKENS
    assert shared.moved.copies == 2 * MODEL.kv.layers
    assert shared.moved.nbytes == shared.moved.copies * MODEL.kv.block_bytes
    assert shared.moved.wall_s > 0
    assert shared.prompt_s > 0


def test_the_move_is_among_the_spans(shared: ConnectedModel) -> None:
    answer(shared, PROMPT, 3)
    spans = [(span.name, span.chip) for span in shared.spans]
    prompt = [("prefill", None), ("embed_prompt", 0), ("layers", 0), ("logits", 0)]
    token = [("decode", None), ("embed_token", 1), ("layers", 1), ("logits", 1)]
    assert spans == [*prompt, ("move cache", 1), *token, *token]


def test_no_block_is_held_once_the_next_sequence_begins(shared: ConnectedModel) -> None:
    for prompt in (PROMPT, OTHER_PROMPT, PROMPT):
        answer(shared, prompt, 2)
    shared.measure_prompt_s(PROMPT)
    for engine in (shared._producer, shared._consumer):
        assert engine.held() == {}
        assert engine.state("prompt 1") is None


@pytest.mark.parametrize("prompt", [[], [1] * 41])
def test_a_prompt_that_does_not_fit_is_refused(shared: ConnectedModel, prompt: list[int]) -> None:
    with pytest.raises(ValueError, match="does not fit a cache of 40"):
        answer(shared, prompt)


def test_an_unknown_connector_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"no KV connector 'telepathy'; there are .*shm"):
        ConnectedModel(MODEL, "telepathy", SPACE)
    with pytest.raises(ValueError, match="blocks have 16 tokens, not 8"):
        ConnectedModel(MODEL, "shm", BlockNamespace("small", "1", "float32", 8))


def with_store(folder: Path) -> ConnectedModel:
    return ConnectedModel(MODEL, "file", SPACE, {"directory": str(folder), "max_bytes": 1 << 24})


def test_a_second_run_finds_the_blocks_of_the_first_and_computes_the_rest(tmp_path: Path) -> None:
    for found in (0, BLOCK_TOKENS):
        with with_store(tmp_path) as model:
            load(model)
            assert answer(model, PROMPT, 1) == reference(PROMPT, 1)
            assert model.found.tokens == found
            assert model.is_exact == (found == 0)
            check_caches(model, PROMPT)
            assert answer(model, PROMPT) == reference(PROMPT, 8)


def test_a_prompt_that_begins_like_an_earlier_one_is_read_from_where_they_part(tmp_path: Path) -> None:
    with with_store(tmp_path) as model:
        load(model)
        for prompt, found in (
            (PROMPT, 0),
            ([*PROMPT[:BLOCK_TOKENS], 3, 1, 4], BLOCK_TOKENS),
            (OTHER_PROMPT, 0),
        ):
            assert answer(model, prompt) == reference(prompt, 8)
            assert model.found.tokens == found


def test_damaged_files_of_a_store_are_misses(tmp_path: Path) -> None:
    with with_store(tmp_path) as model:
        load(model)
        answer(model, PROMPT)
    for file in tmp_path.rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
    with with_store(tmp_path) as model:
        load(model)
        assert answer(model, PROMPT, 1) == reference(PROMPT, 1)
        assert model.found.tokens == 0
        check_caches(model, PROMPT)
