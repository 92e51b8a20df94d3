"""Records logged in children reach the loggers of the parent, whole."""

from __future__ import annotations

import logging
import queue
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import simpler
from registered import extension
from simpler import Worker, logs

if TYPE_CHECKING:
    from collections.abc import Iterator


class Records(logging.Handler):
    """Keeps records for `take`."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: queue.Queue[logging.LogRecord] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.queue.put(record)

    def take(self, text: str) -> Any:
        while True:
            record = self.queue.get(timeout=20)
            if text in record.getMessage():
                return record


@pytest.fixture
def records() -> Iterator[Records]:
    handler = Records()
    logger = logging.getLogger("simpler")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def small_worker(**options: Any) -> Worker:
    return Worker(**{"hbm_bytes": 1 << 20, "heap_bytes": 1 << 20} | options)


def test_a_record_arrives_whole_with_path_and_device(records: Records) -> None:
    def talk(chip: simpler.ChipView, payload: bytes, _device: int) -> None:
        try:
            raise ValueError("inner")
        except ValueError:
            chip.log.exception("got %d bytes: %s", len(payload), "y" * 20_000, extra={"step": 4})

    with extension("talk", talk), small_worker(device_ids=[5, 6]) as worker:
        worker.run_chip_control_extension("talk", b"abc", worker_id=1)
        record = records.take("got")
        assert record.getMessage() == "got 3 bytes: " + "y" * 20_000
        assert (record.name, record.levelno) == ("simpler.extension.talk", logging.ERROR)
        assert (record.path, record.device_id, record.step) == ((1,), 6, 4)
        assert record.process == worker.status()[1].pid
        assert "ValueError: inner" in record.exc_text
        assert record.funcName == "talk"


def test_records_below_the_level_are_not_sent(records: Records) -> None:
    def talk(chip: simpler.ChipView, _payload: bytes, _device: int) -> None:
        chip.log.debug("quiet")
        chip.log.info("loud")

    with extension("talk", talk), small_worker() as worker:
        worker.run_chip_control_extension("talk", worker_id=0)
        assert records.take("").getMessage() == "loud"


def test_what_is_logged_while_closing_arrives_before_close_returns(records: Records) -> None:
    def say_goodbye(chip: simpler.ChipView) -> None:
        chip.log.info("goodbye")

    with extension("talk", lambda _c, _p, _d: None, on_close=say_goodbye):
        small = small_worker()
        small.init()
        small.close()
    assert records.queue.get_nowait().getMessage() == "goodbye"


def test_a_death_is_logged_once_with_how(records: Records) -> None:
    with small_worker(device_ids=[9]) as worker:
        pid = worker.status()[0].pid
        worker.kill(0)
        record = records.take("died")
        assert record.levelno == logging.WARNING
        assert str(pid) in record.getMessage()
        assert "SIGKILL" in record.getMessage()
    assert records.queue.empty()


def test_a_handler_that_raises_harms_neither_later_records_nor_replies(records: Records) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("handler")

    def talk(chip: simpler.ChipView, payload: bytes, _device: int) -> bytes:
        chip.log.info("%s", payload.decode())
        return payload

    broken = Broken()
    logger = logging.getLogger("simpler.extension.talk")
    logger.addHandler(broken)
    try:
        with extension("talk", talk), small_worker() as worker:
            worker.run_chip_control_extension("talk", b"one", worker_id=0)
            logger.removeHandler(broken)
            assert worker.submit_chip_control_extension("talk", b"two", worker_id=0).result(20) == b"two"
            records.take("two")
    finally:
        logger.removeHandler(broken)


def test_a_record_that_cannot_be_formatted_is_packed_all_the_same() -> None:
    record = logging.LogRecord("simpler.x", logging.INFO, "f", 1, "%d", ("text",), None)
    assert b"could not be formatted" in logs.pack_record(record)


@pytest.mark.parametrize(("value", "shown"), [("INFO", True), ("30", False), ("error", False)])
def test_simpler_log_sets_the_level(value: str, shown: bool) -> None:
    script = (
        "import simpler\n"
        "simpler.register_chip_control_extension('say', lambda c, p, d: c.log.info('hello'))\n"
        "with simpler.Worker(hbm_bytes=1 << 20, heap_bytes=1 << 20) as worker:\n"
        "    worker.run_chip_control_extension('say')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**__import__("os").environ, "SIMPLER_LOG": value},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ("hello" in done.stderr) == shown


def test_a_level_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMPLER_LOG", "chatty")
    with pytest.raises(simpler.ConfigError, match="chatty"):
        Worker()
