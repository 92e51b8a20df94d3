"""KVTransferConfig: which connector moves KV blocks, in which role, with which options."""

from __future__ import annotations

import difflib
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

from simpler import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]
KVLoadFailurePolicy = Literal["fail", "recompute"]

_MAX_ID = 200


def _new_engine_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True)
class KVTransferConfig:
    """How one engine (a model on some chips) exchanges KV blocks.

    Attributes:
        kv_connector: A name of `KVConnectorFactory`; with `kv_connector_module_path`, a class of that module.
        kv_role: What this engine does: give blocks away, take them, or both.
        engine_id: Tells this engine from its peers; 1 to 200 printable characters. One of its own by default.
        kv_connector_extra_config: The connector's own options: what JSON can hold.
        kv_connector_module_path: A module to import the class from, instead of a registered name.
        kv_load_failure_policy: What becomes of a request whose blocks were not loaded: ``"fail"`` ends
            it, ``"recompute"`` lets it compute the tokens from the first bad block on.
    """

    kv_connector: str
    kv_role: KVRole = "kv_both"
    engine_id: str = field(default_factory=_new_engine_id)
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    kv_connector_module_path: str | None = None
    kv_load_failure_policy: KVLoadFailurePolicy = "fail"

    def __post_init__(self) -> None:
        _check_name("kv_connector", self.kv_connector)
        _check_name("engine_id", self.engine_id)
        if self.kv_connector_module_path is not None:
            _check_name("kv_connector_module_path", self.kv_connector_module_path)
        _check_choice("kv_role", self.kv_role, get_args(KVRole))
        _check_choice("kv_load_failure_policy", self.kv_load_failure_policy, get_args(KVLoadFailurePolicy))
        extra = _plain(self.kv_connector_extra_config)
        object.__setattr__(self, "kv_connector_extra_config", MappingProxyType(extra))

    @property
    def is_producer(self) -> bool:
        """Whether this engine gives blocks away."""
        return self.kv_role != "kv_consumer"

    @property
    def is_consumer(self) -> bool:
        """Whether this engine takes blocks."""
        return self.kv_role != "kv_producer"

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        """An option of the connector's own, or the default."""
        return self.kv_connector_extra_config.get(key, default)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From a mapping of the attributes.

        Raises:
            ConfigError: An unknown or missing key, or a value that cannot be.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"a KV transfer config is a mapping, not {type(values).__name__}")
        known = [part.name for part in fields(cls)]
        for key in values:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
                raise ConfigError(f"unknown key {key!r} in a KV transfer config; {hint}")
        if "kv_connector" not in values:
            raise ConfigError("a KV transfer config needs 'kv_connector'")
        return cls(**values)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """From a JSON object; errors as `from_dict`."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"a KV transfer config is not JSON: {error}") from error
        return cls.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """The reverse of `from_dict`."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        return values | {"kv_connector_extra_config": _plain(self.kv_connector_extra_config)}

    def to_json(self) -> str:
        """The reverse of `from_json`."""
        return json.dumps(self.to_dict())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_dict, (self.to_dict(),)


def _check_name(what: str, value: object) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_ID or not value.isprintable():
        raise ConfigError(f"{what} is 1 to {_MAX_ID} printable characters: {value!r}")


def _check_choice(what: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{what} is one of {', '.join(choices)}: {value!r}")


def _plain(extra: object) -> dict[str, Any]:
    """A copy that shares nothing with the argument."""
    if not isinstance(extra, Mapping) or not all(isinstance(key, str) for key in extra):
        raise ConfigError(f"kv_connector_extra_config is a mapping with str keys: {extra!r}")
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(extra), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"kv_connector_extra_config holds what JSON cannot: {error}") from error
    return copy
