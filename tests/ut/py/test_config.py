"""Options are checked when given, and the error names the option."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest

from simpler.config import RunConfig, WorkerConfig, call_timeout, wait_timeout
from simpler.errors import ConfigError
from simpler.ids import ControlOp, as_path


def test_the_defaults_are_one_cpu_chip_in_one_node() -> None:
    config = WorkerConfig()
    assert (config.level, config.platform, config.device_ids, config.num_sub_workers) == (3, "cpu", (0,), 0)


def test_values_come_out_as_tuples_and_numbers() -> None:
    config = WorkerConfig(device_ids=[np.int64(4), 2], keep_fds=[7], control_timeout_s=1, spin_us=0)
    assert config.device_ids == (4, 2)
    assert config.keep_fds == (7,)
    assert isinstance(config.control_timeout_s, float)
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(("device_id", "devices"), [(None, (0,)), (0, (0,)), (5, (5,))])
def test_level_2_is_one_device(device_id: int | None, devices: tuple[int, ...]) -> None:
    assert WorkerConfig(2, device_id=device_id).device_ids == devices


def test_a_node_may_have_sub_workers_only() -> None:
    assert WorkerConfig(device_ids=(), num_sub_workers=2).device_ids == ()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"level": 1}, "level"),
    ({"level": 4}, "level"),
    ({"level": "3"}, "level"),
    ({"level": True}, "level"),
    ({"platform": ""}, "platform"),
    ({"platform": None}, "platform"),
    ({"device_ids": (0, 1, 0)}, "duplicates"),
    ({"device_ids": (-1,)}, "device_ids"),
    ({"device_ids": (0.5,)}, "device_ids"),
    ({"device_ids": "01"}, "device_ids"),
    ({"device_ids": 3}, "device_ids"),
    ({"device_ids": ()}, "sub workers"),
    ({"device_id": 1}, "device_id"),
    ({"device_id": 1, "device_ids": (0,)}, "exclude"),
    ({"level": 2, "device_id": 1, "device_ids": (1,)}, "exclude"),
    ({"level": 2, "device_ids": (1,)}, "device_id="),
    ({"level": 2, "device_id": -1}, "device_id"),
    ({"level": 2, "num_sub_workers": 1}, "num_sub_workers"),
    ({"num_sub_workers": -1}, "num_sub_workers"),
    ({"num_sub_workers": 1024}, "1024"),
    ({"name": ""}, "name"),
    ({"name": "x" * 65}, "name"),
    ({"name": "a\nb"}, "name"),
    ({"name": 3}, "name"),
    *[
        ({option: value}, option)
        for option in ("control_timeout_s", "startup_timeout_s", "shutdown_timeout_s")
        for value in (0, -1, math.nan, "1", None, True)
    ],
    ({"max_control_payload": 0}, "max_control_payload"),
    ({"max_control_payload": 1 << 32}, "max_control_payload"),
    ({"hbm_bytes": 0}, "hbm_bytes"),
    ({"hbm_bytes": 1e9}, "hbm_bytes"),
    ({"heap_bytes": -5}, "heap_bytes"),
    ({"spin_us": -1}, "spin_us"),
    ({"spin_us": math.nan}, "spin_us"),
    ({"spin_us": math.inf}, "spin_us"),
    ({"keep_fds": (-1,)}, "keep_fds"),
    ({"keep_fds": (3, 3)}, "keep_fds"),
    ({"restart": "always"}, "restart"),
]


@pytest.mark.parametrize(("options", "text"), BAD, ids=str)
def test_what_cannot_work_is_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        WorkerConfig(**options)


def test_timeouts_may_be_infinite() -> None:
    assert WorkerConfig(control_timeout_s=math.inf).control_timeout_s == math.inf


def test_configs_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        WorkerConfig().level = 2  # type: ignore[misc] # what the test is about


def test_a_run_config_has_no_limits_of_its_own() -> None:
    assert RunConfig() == RunConfig(deadline_s=None, priority=0, trace=None)


@pytest.mark.parametrize(
    "options",
    [
        {"deadline_s": 0},
        {"deadline_s": math.nan},
        {"priority": 1.5},
        {"priority": True},
        {"priority": 1 << 15},
        {"trace": 3},
    ],
)
def test_a_run_config_that_cannot_work_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        RunConfig(**options)


def test_a_task_may_set_only_its_priority() -> None:
    assert RunConfig(priority=3).task_priority() == 3
    for config in (RunConfig(deadline_s=1.0), RunConfig(trace="x")):
        with pytest.raises(ConfigError, match="priority"):
            config.task_priority()


@pytest.mark.parametrize(("given", "used"), [(None, 30.0), (1, 1.0), (math.inf, math.inf), (1e-9, 1e-9)])
def test_calls_without_a_timeout_use_the_workers(given: float | None, used: float) -> None:
    assert call_timeout(given, 30.0) == used


@pytest.mark.parametrize("given", [0, -1.0, math.nan, -math.inf])
def test_calls_need_a_positive_timeout(given: float) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        call_timeout(given, 30.0)


@pytest.mark.parametrize(("given", "used"), [(None, math.inf), (0, 0.0), (2, 2.0)])
def test_waits_without_a_timeout_have_no_limit_and_0_polls(given: float | None, used: float) -> None:
    assert wait_timeout(given) == used


@pytest.mark.parametrize("given", [-1.0, math.nan])
def test_waits_refuse_negative_times(given: float) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        wait_timeout(given)


@pytest.mark.parametrize(
    ("given", "path"), [(3, (3,)), ((1, 2), (1, 2)), ([0], (0,)), (np.int32(4), (4,)), ((), ())]
)
def test_an_id_is_a_path_of_one(given: Any, path: tuple[int, ...]) -> None:
    assert as_path(given) == path


@pytest.mark.parametrize(
    ("given", "error"),
    [(-1, ValueError), ((0, -2), ValueError), (True, TypeError), ("1", TypeError), (0.5, TypeError)],
)
def test_what_is_no_path_is_refused(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        as_path(given)


def test_control_codes_are_distinct() -> None:
    assert len({int(op) for op in ControlOp}) == len(ControlOp.__members__)
