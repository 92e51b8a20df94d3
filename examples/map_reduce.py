"""Map and reduce: count the words of the Python documentation in sub workers.

The text lies in memory that all processes share; a task gets its chunk as a view, and what it returns comes
back pickled. While later chunks are counted this process adds up the earlier ones.

    python map_reduce.py --workers 4 --chunks 32
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from itertools import accumulate, pairwise
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

import numpy as np

from simpler import IN, Worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from simpler import CallableHandle, Orchestrator, Tensor

WORD = re.compile(r"[^\W\d_]+")


def count(chunk: NDArray[np.uint8]) -> Counter[str]:
    """How often each word is in a chunk of UTF-8 text."""
    return Counter(WORD.findall(chunk.tobytes().decode().lower()))


def spread(worker: Worker, texts: Sequence[str], chunks: int) -> list[Tensor]:
    """Put the texts into shared memory, one after another; views of so many runs of whole texts."""
    encoded = [text.encode() + b"\n" for text in texts]
    ends = [0, *accumulate(map(len, encoded))]
    buffer = worker.create_buffer(ends[-1])
    memoryview(buffer)[:] = b"".join(encoded)
    cuts = np.searchsorted(ends, np.linspace(0, ends[-1], chunks + 1))
    return [
        buffer.tensor(ends[last] - ends[first], np.uint8, offset=ends[first])
        for first, last in pairwise(cuts)
        if first < last
    ]


def count_words(worker: Worker, counting: CallableHandle, chunks: Sequence[Tensor]) -> Counter[str]:
    """Count all chunks, as many at once as there are sub workers."""

    def map_and_reduce(orch: Orchestrator, _args: None, _config: Any) -> Counter[str]:
        counted = [orch.submit(counting, IN(chunk)) for chunk in chunks]
        total = Counter[str]()
        for task in counted:
            total.update(task.result())
        return total

    result: Counter[str] = worker.run(map_and_reduce)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Count, compare with one Counter over the whole text, and show the commonest words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="processes that count")
    parser.add_argument("--chunks", type=int, default=16, help="tasks")
    options = parser.parse_args(argv)
    if options.workers < 1 or options.chunks < 1:
        parser.error("at least one worker and one chunk")

    texts = list(topics.values())
    worker = Worker(level=3, device_ids=(), num_sub_workers=options.workers)
    counting = worker.register(count)
    with worker:
        chunks = spread(worker, texts, options.chunks)
        started = time.perf_counter()
        words = count_words(worker, counting, chunks)
        took = time.perf_counter() - started
    started = time.perf_counter()
    plain = Counter(WORD.findall("\n".join(texts).lower()))
    alone = time.perf_counter() - started
    right = words == plain
    print(f"{words.total()} words in {len(chunks)} chunks: {took * 1e3:.1f} ms, alone {alone * 1e3:.1f} ms")
    print(", ".join(f"{word} {times}" for word, times in words.most_common(5)))
    print(f"equal to the plain count: {right}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
