"""How the outcomes of one broadcast become its result."""

from __future__ import annotations

import pytest

from simpler.errors import BackPressureError, ChipControlError, ClosedError, WorkerError
from simpler.gather import Gather, broadcast_result


def test_a_chip_without_room_for_its_reply_does_not_hide_the_other_replies() -> None:
    with pytest.raises(ChipControlError) as caught:
        broadcast_result("save", [b"good", BackPressureError("the reply arena stayed full")])
    assert caught.value.results == {(0,): b"good"}
    error = caught.value.errors[(1,)]
    assert isinstance(error, WorkerError)
    assert "stayed full" in str(error)


def test_a_submitted_broadcast_ends_whatever_one_chip_ends_with() -> None:
    gather = Gather("save", [0, 1], directed=False)
    gather.arrive(0, b"good")
    gather.arrive(1, BackPressureError("the reply arena stayed full"))
    with pytest.raises(ChipControlError, match="stayed full"):
        gather.future.result(timeout=0)


def test_closing_the_worker_is_the_error_of_the_whole_broadcast() -> None:
    with pytest.raises(ClosedError):
        broadcast_result("save", [b"good", ClosedError("closed")])
