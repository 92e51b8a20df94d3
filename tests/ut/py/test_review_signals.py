"""A signal handler that raises while a reply comes: the call raises just that, and nothing is lost."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

import simpler
from registered import extension

if TYPE_CHECKING:
    from collections.abc import Callable

_ROUNDS = 300


class _AlarmError(Exception):
    pass


def _brief(_chip: simpler.ChipView, _payload: bytes, _device_id: int) -> None:
    time.sleep(0.001)  # a handler that takes a while: signals are to meet its reply


def _raise_or_return(call: Callable[[], object], kick: threading.Event) -> None:
    kick.set()
    with contextlib.suppress(_AlarmError):
        call()


@pytest.mark.parametrize("worker_id", [0, None], ids=["one chip", "broadcast"])
def test_a_signal_that_meets_the_reply_raises_what_its_handler_raised(worker_id: int | None) -> None:
    armed = False

    def on_signal(_number: int, _frame: object) -> None:
        if armed:
            raise _AlarmError

    kick, stopped = threading.Event(), threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def kicker(target: int) -> None:
        delays = [0.0009 + 0.00005 * step for step in range(12)]
        round_number = 0
        while True:
            kick.wait()
            if stopped.is_set():
                return
            kick.clear()
            threading.Event().wait(delays[round_number % len(delays)])
            round_number += 1
            signal.pthread_kill(target, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, on_signal)
    thread = threading.Thread(target=kicker, args=(main,))
    thread.start()
    try:
        with extension("review-brief", _brief), simpler.Worker(level=3, device_ids=[0, 1]) as worker:

            def call() -> object:
                return worker.run_chip_control_extension("review-brief", worker_id=worker_id)

            for _ in range(_ROUNDS):
                with contextlib.suppress(_AlarmError):  # it may come just outside the call
                    armed = True
                    _raise_or_return(call, kick)
                    armed = False
                armed = False
            stopped.set()
            kick.set()
            thread.join()
            assert worker.run_chip_control_extension("review-brief", worker_id=0) == b""
    finally:
        stopped.set()
        kick.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
