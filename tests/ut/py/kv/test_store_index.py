"""The index of stores: late, repeated and lost events, and lookups that agree with a plain dictionary."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpler.kv import StoreEvent, StoreIndex
from simpler.kv import store_index as module

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def name(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def held(index: StoreIndex, numbers: Iterable[int], store: str = "s") -> set[int]:
    return {number for number in numbers if index.longest_prefix([name(number)], store) == {store: 1}}


def event(
    sequence: int, added: Iterable[int] = (), removed: Iterable[int] = (), epoch: int = 0
) -> StoreEvent:
    return StoreEvent(sequence, tuple(map(name, added)), tuple(map(name, removed)), epoch)


def test_each_store_has_its_own_longest_prefix() -> None:
    index = StoreIndex()
    hashes = [name(number) for number in range(4)]
    index.add("near", hashes[:2])
    index.add("far", [hashes[0], hashes[2], hashes[3]])
    assert index.longest_prefix(hashes) == {"near": 2, "far": 1}
    assert index.longest_prefix(hashes, "near") == {"near": 2}
    assert index.longest_prefix(hashes, "unknown") == {}
    assert index.longest_prefix([]) == {"near": 0, "far": 0}
    assert (index.stores, len(index)) == (("near", "far"), 5)


def test_what_is_added_twice_or_discarded_twice_is_as_if_once() -> None:
    index = StoreIndex()
    for _ in range(2):
        index.add("s", [name(1), name(2)])
    for _ in range(2):
        index.discard("s", [name(1), name(9)])
    index.discard("unknown", [name(1)])
    assert held(index, range(10)) == {2}


def test_a_dropped_store_holds_nothing_and_begins_anew() -> None:
    index = StoreIndex()
    index.apply("s", event(1, added=[1], epoch=5))
    index.drop("s")
    index.drop("unknown")
    assert index.stores == ()
    assert index.apply("s", event(1, added=[2]))
    assert held(index, range(3)) == {2}


steps = st.lists(st.tuples(st.sets(st.integers(0, 4)), st.sets(st.integers(0, 4))), max_size=8)


@given(steps, st.randoms(use_true_random=False))
def test_events_in_any_order_and_repeated_come_to_what_their_order_says(
    steps: list[tuple[set[int], set[int]]], chance: random.Random
) -> None:
    events = [event(number, added, removed) for number, (added, removed) in enumerate(steps, 1)]
    expected: set[int] = set()
    for added, removed in steps:
        expected = (expected - removed) | added
    index = StoreIndex()
    told = events + [chance.choice(events) for _ in events]
    chance.shuffle(told)
    assert sum(index.apply("s", one) for one in told) == len(events)
    assert held(index, range(5)) == expected
    assert (len(index), index.ignored, index.missed) == (len(expected), len(events), 0)


def test_a_removal_that_comes_before_its_addition_wins() -> None:
    index = StoreIndex()
    index.apply("s", event(2, removed=[1]))
    index.apply("s", event(1, added=[1]))
    assert held(index, [1]) == set()
    index.apply("s", event(3, added=[1]))
    assert held(index, [1]) == {1}


def test_a_store_that_starts_anew_is_empty_and_its_old_events_are_ignored() -> None:
    index = StoreIndex()
    index.apply("s", event(7, added=[1], epoch=1))
    assert index.apply("s", event(1, added=[2], epoch=2))
    assert not index.apply("s", event(8, added=[3], epoch=1))
    assert held(index, range(4)) == {2}


def test_a_lost_event_is_given_up_once_many_have_come_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_GAPS", 10)
    index = StoreIndex()
    for sequence in range(2, 12):
        index.apply("s", event(sequence, added=[sequence]))
    assert index.missed == 0
    index.apply("s", event(12))
    assert index.missed == 1
    assert not index.apply("s", event(1, added=[1]))
    assert held(index, range(20)) == set(range(2, 12))


def test_a_leap_in_the_numbers_is_taken_at_once() -> None:
    index = StoreIndex()
    index.apply("s", event(1, added=[1]))
    index.apply("s", event(module.MOST_SEQUENCE, added=[2]))
    assert held(index, range(3)) == {1, 2}
    assert index.missed == module.MOST_SEQUENCE - module.MOST_GAPS - 2


@pytest.mark.parametrize("sequence", [0, -1, module.MOST_SEQUENCE + 1])
def test_a_number_that_no_event_can_have_is_refused(sequence: int) -> None:
    with pytest.raises(ValueError, match=f"sequence is {sequence}"):
        StoreIndex().apply("s", event(sequence))


def test_names_of_another_length_are_refused_and_nothing_is_added() -> None:
    index = StoreIndex()
    with pytest.raises(ValueError, match="16 bytes"):
        index.add("s", [name(1), b"short"])
    with pytest.raises(ValueError, match="16 bytes"):
        index.apply("s", StoreEvent(1, (b"short",)))
    assert (len(index), index.stores) == (0, ())
    index.add("s", [name(1)])
    with pytest.raises(ValueError, match="16 bytes"):
        index.longest_prefix([name(1)] + 100 * [b"short"])


def crowded(number: int) -> bytes:
    """Names that all want three buckets of the table, three of them with what marks an empty slot there."""
    return bytes([number % 3]) + bytes(7) + (number // 3).to_bytes(8, "little")


@pytest.mark.parametrize("named", [name, crowded], ids=["spread", "crowded"])
def test_long_lookups_find_what_a_set_finds_while_names_come_and_go(named: object) -> None:
    assert callable(named)
    names: Sequence[bytes] = [named(number) for number in range(3000)]
    index, expected, chance = StoreIndex(), set[bytes](), random.Random(1)
    index.add("s", [])
    for _ in range(300):
        begin = chance.randrange(len(names))
        part = names[begin : begin + chance.randrange(200)]
        if chance.random() < 0.7:
            index.add("s", part)
            expected.update(part)
        else:
            index.discard("s", part)
            expected.difference_update(part)
        asked = names[chance.randrange(len(names)) :]
        leading = sum(1 for _ in itertools.takewhile(expected.__contains__, asked))
        assert index.longest_prefix(asked) == {"s": leading}
    assert len(index) == len(expected)
