"""The ranges that an engine may touch: counted, never overlapping, and looked up for each copy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpler import MemoryRangeError
from simpler.kv.engines import Copy
from simpler.kv.engines.registrations import Registrations

RANGES = st.tuples(st.integers(1, 60), st.integers(1, 12))


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "check"]), RANGES), max_size=60))
def test_it_agrees_with_a_set_of_addresses(steps: list[tuple[str, tuple[int, int]]]) -> None:
    ranges, model = Registrations(), dict[tuple[int, int], int]()
    for step, (address, nbytes) in steps:
        wanted = set(range(address, address + nbytes))
        taken = {key: set(range(key[0], key[0] + key[1])) for key in model}
        key = (address, nbytes)
        try:
            if step == "add":
                if not ranges.add_again(*key):
                    ranges.add(*key)
                assert key in model or not any(wanted & other for other in taken.values())
                model[key] = model.get(key, 0) + 1
            elif step == "remove":
                ranges.remove(*key)
                model[key] -= 1
                model = {key: times for key, times in model.items() if times}
            else:
                ranges.check([Copy(address, 1, nbytes)])
                assert any(wanted <= other for other in taken.values())
        except MemoryRangeError:
            refused = {
                "add": key not in model and any(wanted & other for other in taken.values()),
                "remove": key not in model,
                "check": not any(wanted <= other for other in taken.values()),
            }
            assert refused[step]
        assert ranges.ranges() == sorted(model)
        assert len(ranges) == len(model)


@pytest.mark.parametrize(("address", "nbytes"), [(0, 10), (10, 0), (10, -1), (-5, 10)])
def test_what_is_no_range_is_refused(address: int, nbytes: int) -> None:
    ranges = Registrations()
    with pytest.raises(MemoryRangeError, match="is no range of memory"):
        ranges.add_again(address, nbytes)
    with pytest.raises(MemoryRangeError, match="not within one registered range"):
        ranges.check([Copy(address, 1, nbytes)])


def test_after_clear_nothing_is_registered() -> None:
    ranges = Registrations()
    ranges.add(10, 5)
    ranges.clear()
    assert ranges.ranges() == []
    with pytest.raises(MemoryRangeError, match="is not registered"):
        ranges.times(10, 5)
