"""What a failed load spoils: the blocks it should have filled, and all that was computed from them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from simpler.kv.prefix_books import Books, Request


@dataclass(frozen=True, slots=True)
class Damage:
    """How far a failure reaches.

    Attributes:
        blocks: All blocks with wrong content.
        named: Those of them that can be found, each after all that continue it.
        requests: The first wrong position of each request that has one.
        cuts: Requests whose named prefix gets shorter, with its new length and tip.
    """

    blocks: frozenset[int]
    named: tuple[int, ...]
    requests: dict[str, int]
    cuts: tuple[tuple[Request, int, int], ...]


def find_damage(books: Books, bad: Iterable[int]) -> Damage:
    """Follow bad blocks through the requests that have them and the blocks that continue them."""
    holders: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for request_id, request in books.requests.items():
        for position, block in enumerate(request.blocks):
            holders[block].append((request_id, position))
    spoilt: dict[int, None] = {}
    requests: dict[str, int] = {}
    successors: Callable[[int], Sequence[int]] | None = None
    work = [block for block in bad if books.in_use(block)]
    while work:
        block = work.pop()
        if block in spoilt:
            continue
        spoilt[block] = None
        if books.hashes[block] is not None:
            successors = successors or _successors(books)
            work += successors(block)
        for request_id, position in holders[block]:
            blocks = books.requests[request_id].blocks
            known = requests.get(request_id, len(blocks))
            if position < known:
                requests[request_id] = position
                work += blocks[position + 1 : known]
    named = sorted((block for block in spoilt if books.hashes[block] is not None), key=_depths(books, spoilt))
    cuts = [cut for request in books.requests.values() if (cut := _cut(books, request, spoilt)) is not None]
    return Damage(frozenset(spoilt), tuple(reversed(named)), requests, tuple(cuts))


def _successors(books: Books) -> Callable[[int], Sequence[int]]:
    """Who continues a block. Kept only as long as it is needed, since loads rarely fail."""
    parents = np.array(books.parents, np.int64)
    order = np.argsort(parents, kind="stable")
    ordered = parents[order]

    def of(block: int) -> list[int]:
        first, last = np.searchsorted(ordered, [block, block + 1])
        return [int(successor) for successor in order[first:last]]

    return of


def _depths(books: Books, spoilt: dict[int, None]) -> Callable[[int], int]:
    """How many spoilt blocks a block continues, directly and in turn."""
    depths: dict[int, int] = {}

    def of(block: int) -> int:
        path = []
        while block in spoilt and block not in depths:
            path.append(block)
            block = books.parents[block]
        depth = depths.get(block, 0)
        for step in reversed(path):
            depth += 1
            depths[step] = depth
        return depth

    return of


def _cut(books: Books, request: Request, spoilt: dict[int, None]) -> tuple[Request, int, int] | None:
    """Where the chain of a request's names has to end; None when it stays."""
    cut = None
    block = request.tip
    for position in reversed(range(request.committed)):
        parent = books.parents[block]
        if block in spoilt:
            cut = request, position, parent
        block = parent
    return cut
