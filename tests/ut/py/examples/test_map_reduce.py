"""Map and reduce: whatever the chunks, the count is that of the whole text."""

from __future__ import annotations

from collections import Counter
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

import pytest

from example_programs import load
from simpler import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

map_reduce = load("map_reduce")

TEXTS = list(topics.values())


@pytest.fixture
def counters() -> Iterator[tuple[Worker, Any]]:
    worker = Worker(level=3, device_ids=(), num_sub_workers=2)
    counting = worker.register(map_reduce.count)
    with worker:
        yield worker, counting


@pytest.mark.parametrize("chunks", [1, 2, 17, 1000])
def test_the_count_is_that_of_the_whole_text(counters: tuple[Worker, Any], chunks: int) -> None:
    worker, counting = counters
    parts = map_reduce.spread(worker, TEXTS, chunks)
    assert len(parts) <= min(chunks, len(TEXTS))
    words = map_reduce.count_words(worker, counting, parts)
    assert words == Counter(map_reduce.WORD.findall("\n".join(TEXTS).lower()))
    assert words.total() > 10_000


def test_the_chunks_are_all_of_the_text_once(counters: tuple[Worker, Any]) -> None:
    worker, _ = counters
    texts = ["short", "ein längerer Text", "", "x" * 1000, "日本語"]
    for chunks in range(1, 10):
        parts = map_reduce.spread(worker, texts, chunks)
        copied = [bytes(memoryview(part.buffer)[part.offset :][: part.nbytes]) for part in parts]
        assert b"".join(copied).decode() == "".join(f"{text}\n" for text in texts)
        assert all(part.endswith(b"\n") for part in copied)


def test_words_of_any_alphabet_are_counted(counters: tuple[Worker, Any]) -> None:
    worker, counting = counters
    parts = map_reduce.spread(worker, ["Straße und STRASSE", "straße, 42 日本語"], 2)
    words = map_reduce.count_words(worker, counting, parts)
    assert words == {"straße": 2, "strasse": 1, "und": 1, "日本語": 1}


def test_a_wrong_count_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(map_reduce, "count", lambda _chunk: Counter(a=1))
    assert map_reduce.main(["--chunks", "3"]) == 1
    assert "equal to the plain count: False" in capsys.readouterr().out


def test_no_workers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        map_reduce.main(["--workers", "0"])
    assert "at least one worker" in capsys.readouterr().err
