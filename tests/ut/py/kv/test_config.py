"""How an engine's exchange of KV blocks is configured."""

from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from simpler import ConfigError
from simpler.kv import KVTransferConfig

FULL: dict[str, Any] = {
    "kv_connector": "shm",
    "kv_role": "kv_consumer",
    "engine_id": "decode-0",
    "kv_connector_extra_config": {"lease_s": 5, "peers": ["a", {"port": 1}]},
    "kv_connector_module_path": "somewhere.else",
    "kv_load_failure_policy": "recompute",
}


def test_a_name_is_enough_and_the_rest_has_defaults() -> None:
    config = KVTransferConfig("shm")
    assert (config.kv_role, config.kv_load_failure_policy) == ("kv_both", "fail")
    assert config.is_producer
    assert config.is_consumer
    assert config.engine_id != KVTransferConfig("shm").engine_id


@pytest.mark.parametrize(
    ("role", "produces", "consumes"),
    [("kv_producer", True, False), ("kv_consumer", False, True), ("kv_both", True, True)],
)
def test_a_role_says_what_an_engine_does(role: Any, produces: bool, consumes: bool) -> None:
    config = KVTransferConfig("shm", role)
    assert (config.is_producer, config.is_consumer) == (produces, consumes)


def test_a_config_goes_to_dict_json_and_pickle_and_back() -> None:
    config = KVTransferConfig.from_dict(FULL)
    assert config.to_dict() == FULL
    assert KVTransferConfig.from_json(config.to_json()) == config
    assert KVTransferConfig.from_json(json.dumps(FULL).encode()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(KVTransferConfig.from_dict(FULL))
    assert replace(config, kv_role="kv_both").engine_id == "decode-0"


def test_a_config_cannot_be_changed_nor_can_what_it_was_made_of_change_it() -> None:
    extra = {"peers": ["a"]}
    config = KVTransferConfig("shm", kv_connector_extra_config=extra)
    extra["peers"].append("b")
    assert config.get_from_extra_config("peers", None) == ["a"]
    assert config.get_from_extra_config("other", 7) == 7
    changed: Any = config
    with pytest.raises(FrozenInstanceError):
        changed.kv_role = "kv_producer"
    with pytest.raises(TypeError):
        changed.kv_connector_extra_config["x"] = 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kv_connector": ""}, "kv_connector is 1 to 200"),
        ({"kv_connector": 3}, "kv_connector is 1 to 200"),
        ({"kv_role": "producer"}, "kv_role is one of kv_producer, kv_consumer, kv_both"),
        ({"engine_id": "a\nb"}, "engine_id is 1 to 200"),
        ({"engine_id": "x" * 201}, "engine_id is 1 to 200"),
        ({"kv_load_failure_policy": "retry"}, "one of fail, recompute"),
        ({"kv_connector_module_path": ""}, "kv_connector_module_path"),
        ({"kv_connector_extra_config": {"x": object()}}, "JSON cannot"),
        ({"kv_connector_extra_config": {"x": float("nan")}}, "JSON cannot"),
        ({"kv_connector_extra_config": {1: 2}}, "str keys"),
        ({"kv_connector_extra_config": "lease_s=5"}, "str keys"),
        ({"kv_conector": "shm"}, "did you mean 'kv_connector'"),
        ({"zzz": 1}, "there are kv_connector, kv_role"),
    ],
)
def test_what_cannot_be_is_refused_with_what_could(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        KVTransferConfig.from_dict(FULL | change)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[]", "a mapping, not list"), ("{}", "needs 'kv_connector'"), (b"\xff", "not JSON")],
)
def test_text_that_is_no_config_is_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVTransferConfig.from_json(text)
