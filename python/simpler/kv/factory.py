"""KVConnectorFactory: connectors by name, imported when they are first used."""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING

from simpler import ConfigError
from simpler.kv.connector import KVConnector
from simpler.kv.connectors import BUILT_IN

if TYPE_CHECKING:
    from simpler.kv.config import KVTransferConfig
    from simpler.kv.connector import KVConnectorRole
    from simpler.kv.metadata import KVConnectorContext

ENTRY_POINT_GROUP = "simpler.kv_connectors"

_lock = threading.Lock()
_registered: dict[str, tuple[str, str]] = {}


class KVConnectorFactory:
    """The register of connectors: those built in, those registered here, those of installed packages.

    Thread safety: any thread.
    """

    @staticmethod
    def register_connector(name: str, module_path: str, class_name: str) -> None:
        """Make a class known under a name; its module is imported when it is first asked for.

        Raises:
            ConfigError: The name is taken by another class.
        """
        for what, value in (("name", name), ("module_path", module_path), ("class_name", class_name)):
            if not isinstance(value, str) or not value or not value.isprintable():
                raise ConfigError(f"{what} of a KV connector is printable text: {value!r}")
        with _lock:
            taken = _registered.get(name, BUILT_IN.get(name))
            if taken is not None and taken != (module_path, class_name):
                raise ConfigError(f"the KV connector {name!r} is already {taken[0]}.{taken[1]}")
            if taken is None:
                _registered[name] = (module_path, class_name)

    @staticmethod
    def unregister_connector(name: str) -> None:
        """Take a name off the register.

        Raises:
            ConfigError: It was not registered here.
        """
        with _lock:
            if _registered.pop(name, None) is None:
                raise ConfigError(f"the KV connector {name!r} is not registered")

    @staticmethod
    def names() -> tuple[str, ...]:
        """All names that can be used, sorted."""
        from importlib import metadata

        installed = {point.name for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}
        with _lock:
            return tuple(sorted(installed | _registered.keys() | BUILT_IN.keys()))

    @staticmethod
    def find(config: KVTransferConfig) -> tuple[str, str]:
        """(module path, class name) of the connector that a configuration names; nothing is imported.

        Raises:
            ConfigError: There is none, or a name stands for two.
        """
        name = config.kv_connector
        if config.kv_connector_module_path is not None:
            return config.kv_connector_module_path, name
        from importlib import metadata

        with _lock:
            known = _registered.get(name, BUILT_IN.get(name))
        points = metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)
        found = {(point.module, point.attr) for point in points} | ({known} if known is not None else set())
        if len(found) > 1:
            places = ", ".join(sorted(f"{module}.{cls}" for module, cls in found))
            raise ConfigError(f"the KV connector {name!r} stands for several classes: {places}")
        if not found:
            raise ConfigError(
                f"there is no KV connector {name!r}; there are {', '.join(KVConnectorFactory.names())}"
            )
        return found.pop()

    @staticmethod
    def get_connector_class(config: KVTransferConfig) -> type[KVConnector]:
        """The class that a configuration names, imported.

        Raises:
            ConfigError: There is none, it does not import, or it is no `KVConnector`.
        """
        return load_class(*KVConnectorFactory.find(config))

    @staticmethod
    def create_connector(
        config: KVTransferConfig, role: KVConnectorRole, context: KVConnectorContext
    ) -> KVConnector:
        """An instance for one role; errors as `get_connector_class`, and what its constructor raises."""
        return KVConnectorFactory.get_connector_class(config)(config, role, context)


def load_class(module_path: str, class_name: str) -> type[KVConnector]:
    """Import a connector's class.

    Raises:
        ConfigError: It does not import, or it is no `KVConnector`.
    """
    where = f"the KV connector {module_path}.{class_name}"
    try:
        module = importlib.import_module(module_path)
    except Exception as error:
        raise ConfigError(f"{where} does not import: {type(error).__name__}: {error}") from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type) or not issubclass(found, KVConnector):
        raise ConfigError(f"{where} is not a KVConnector: {found!r}")
    return found
