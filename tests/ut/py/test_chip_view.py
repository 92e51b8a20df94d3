"""A handler sees its buffers while it runs, and nothing that allocates, runs or resets."""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpler import _core
from simpler.control.chip_view import (
    BufferEntry,
    BufferViews,
    ChipView,
    make_buffers,
    pack_buffers,
    unpack_buffers,
    with_buffers,
)
from simpler.errors import MemoryRangeError
from simpler.shared_map import SharedMap

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def region() -> _core.SharedRegion:
    return _core.SharedRegion(1 << 16, "test-view")


def make_view(**options: Any) -> ChipView:
    return ChipView(
        device_id=3,
        worker_id=(1,),
        platform="cpu",
        log=logging.getLogger("simpler.test"),
        state={},
        **options,
    )


def views_of(region: _core.SharedRegion, *entries: BufferEntry) -> BufferViews:
    return make_buffers(pack_buffers(entries), SharedMap([region]))


ENTRIES = st.builds(
    BufferEntry,
    name=st.text(min_size=1, max_size=20),
    address=st.integers(0, (1 << 64) - 1),
    nbytes=st.integers(0, (1 << 64) - 1),
    host_visible=st.booleans(),
    readonly=st.booleans(),
)


@given(entries=st.lists(ENTRIES, max_size=8, unique_by=lambda entry: entry.name))
def test_what_is_packed_comes_back(entries: list[BufferEntry]) -> None:
    assert unpack_buffers(pack_buffers(entries)) == entries


@given(entries=st.lists(ENTRIES, min_size=1, max_size=3, unique_by=lambda e: e.name), cut=st.integers(1, 10))
def test_cut_bytes_are_refused(entries: list[BufferEntry], cut: int) -> None:
    with pytest.raises(ValueError, match="end in the middle"):
        unpack_buffers(pack_buffers(entries)[: -min(cut, len(entries[-1].name.encode()))])


def test_names_cannot_repeat_but_buffers_may_have_none() -> None:
    with pytest.raises(ValueError, match="same name"):
        pack_buffers([BufferEntry("kv", 0, 1), BufferEntry("kv", 1, 1)])
    assert len(unpack_buffers(pack_buffers([BufferEntry("", 0, 1), BufferEntry("", 1, 1)]))) == 2


def test_buffers_are_found_by_position_and_by_name(region: _core.SharedRegion) -> None:
    views = views_of(region, BufferEntry("k", region.address, 64), BufferEntry("v", region.address + 64, 32))
    assert (views[0].name, views["v"].nbytes, views[-1].address) == ("k", 32, region.address + 64)
    assert (len(views), views.names) == (2, ("k", "v"))
    assert [views.__contains__(key) for key in ("k", "q", views[1])] == [True, False, True]
    assert [view.name for view in views] == ["k", "v"]
    with pytest.raises(KeyError, match="q"):
        views["q"]
    with pytest.raises(IndexError):
        views[2]


def test_an_array_is_the_memory_itself(region: _core.SharedRegion) -> None:
    buffer = views_of(region, BufferEntry("", region.address + 256, 64))[0]
    buffer.array((4, 4), "float32")[:] = 2.5
    assert buffer.array().shape == (64,)
    assert buffer.array((2,), np.float32).tolist() == [2.5, 2.5]
    raw = _core.memory_at(region.address + 256, 4, readonly=True)
    assert np.frombuffer(raw, np.float32).tolist() == [2.5]


def test_a_read_only_buffer_gives_arrays_that_stay_so(region: _core.SharedRegion) -> None:
    array = views_of(region, BufferEntry("", region.address, 64, readonly=True))[0].array((64,), "uint8")
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True


@pytest.mark.parametrize(
    ("shape", "dtype"), [((17,), "float32"), (65, "uint8"), ((1 << 62, 8), "uint8"), ((-1,), "uint8")]
)
def test_an_array_larger_than_the_buffer_is_refused(
    region: _core.SharedRegion, shape: Any, dtype: str
) -> None:
    with pytest.raises(MemoryRangeError):
        views_of(region, BufferEntry("", region.address, 64))[0].array(shape, dtype)


def test_memory_that_the_host_cannot_touch_has_an_address_only(region: _core.SharedRegion) -> None:
    buffer = views_of(region, BufferEntry("hbm", 1 << 50, 64, host_visible=False))[0]
    assert buffer.address == 1 << 50
    with pytest.raises(MemoryRangeError, match="cannot touch"):
        buffer.array((64,), "uint8")


def test_memory_that_this_process_does_not_map_is_refused(region: _core.SharedRegion) -> None:
    with pytest.raises(MemoryRangeError):
        views_of(region, BufferEntry("", region.address + region.nbytes - 8, 16))


def test_buffers_are_dead_once_the_handler_has_returned(region: _core.SharedRegion) -> None:
    with views_of(region, BufferEntry("kv", region.address, 64)) as views:
        kept = views["kv"]
        array = kept.array((8,), "uint8")
    uses: list[Callable[[], object]] = [lambda: kept.address, lambda: kept.array((8,), "uint8")]
    for use in uses:
        with pytest.raises(MemoryRangeError, match=r"'kv'.*handler.*returned"):
            use()
    assert array.tolist() == [0] * 8  # stale at worst, never a fault


def test_a_view_cannot_be_changed_but_for_its_state() -> None:
    view = make_view()
    view.state["engine"] = 1
    for name in ("device_id", "state", "buffers", "backend"):
        with pytest.raises(AttributeError):
            setattr(view, name, None)
    with pytest.raises(AttributeError):
        del view.log
    assert not hasattr(view, "__dict__")


def test_the_view_of_a_call_shares_the_state(region: _core.SharedRegion) -> None:
    view = make_view()
    call = with_buffers(view, views_of(region, BufferEntry("kv", region.address, 64)))
    call.state["n"] = 1
    assert view.state == {"n": 1}
    assert (len(view.buffers), len(call.buffers)) == (0, 1)
    assert (call.device_id, call.worker_id, call.platform, call.log) == (3, (1,), "cpu", view.log)


def test_nothing_that_allocates_runs_or_resets_can_be_reached(region: _core.SharedRegion) -> None:
    view = with_buffers(make_view(), views_of(region, BufferEntry("kv", region.address, 64)))
    seen: set[int] = set()
    pending: list[object] = [view.buffers, view.buffers[0], view.buffers[0].array((8,), "uint8")]
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, type):
            continue
        seen.add(id(item))
        assert not isinstance(item, _core.SharedRegion | _core.ArenaAllocator | SharedMap)
        pending.extend(gc.get_referents(item))
    public = {name for name in dir(view) if not name.startswith("_")}
    assert public == {"buffers", "device_id", "log", "platform", "state", "worker_id"}
