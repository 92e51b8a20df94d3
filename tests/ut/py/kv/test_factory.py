"""Connectors are found by name, module path or entry point, and imported when they are first used."""

from __future__ import annotations

import contextlib
import logging
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest

from simpler import ConfigError
from simpler.kv import (
    KVConnectorContext,
    KVConnectorFactory,
    KVConnectorRole,
    KVTransferConfig,
)
from simpler.kv.connectors.shm import ShmConnector

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODULE = "connector_of_a_test"
SOURCE = """
from simpler.kv.connectors.shm import ShmConnector

class Mine(ShmConnector):
    pass

nothing = 3
"""


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module that can be imported, and a register that is as it was."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    (tmp_path / "broken_connector_of_a_test.py").write_text("import no_such_engine_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop(MODULE, None)
    for name in ("mine", "other"):
        with contextlib.suppress(ConfigError):
            KVConnectorFactory.unregister_connector(name)


def test_what_ships_is_listed_and_found() -> None:
    assert "shm" in KVConnectorFactory.names()
    assert KVConnectorFactory.get_connector_class(KVTransferConfig("shm")) is ShmConnector


def test_a_registered_connector_is_imported_when_it_is_first_asked_for() -> None:
    KVConnectorFactory.register_connector("mine", MODULE, "Mine")
    assert "mine" in KVConnectorFactory.names()
    assert MODULE not in sys.modules
    cls = KVConnectorFactory.get_connector_class(KVTransferConfig("mine"))
    assert cls.__name__ == "Mine"
    assert MODULE in sys.modules


def test_registering_the_same_again_changes_nothing_and_another_is_refused_by_name() -> None:
    KVConnectorFactory.register_connector("mine", MODULE, "Mine")
    KVConnectorFactory.register_connector("mine", MODULE, "Mine")
    with pytest.raises(ConfigError, match=rf"'mine' is already {MODULE}\.Mine"):
        KVConnectorFactory.register_connector("mine", MODULE, "Yours")
    with pytest.raises(ConfigError, match=r"'shm' is already simpler\.kv\.connectors\.shm"):
        KVConnectorFactory.register_connector("shm", MODULE, "Mine")


def test_a_name_can_be_taken_off_again() -> None:
    KVConnectorFactory.register_connector("mine", MODULE, "Mine")
    KVConnectorFactory.unregister_connector("mine")
    with pytest.raises(ConfigError, match=r"no KV connector 'mine'; there are .*shm"):
        KVConnectorFactory.get_connector_class(KVTransferConfig("mine"))
    with pytest.raises(ConfigError, match="not registered"):
        KVConnectorFactory.unregister_connector("mine")


def test_a_module_path_names_a_class_without_registering() -> None:
    config = KVTransferConfig("Mine", kv_connector_module_path=MODULE)
    assert KVConnectorFactory.get_connector_class(config).__name__ == "Mine"


@pytest.mark.parametrize(
    ("name", "module", "text"),
    [
        ("Gone", MODULE, "not a KVConnector: None"),
        ("nothing", MODULE, "not a KVConnector: 3"),
        ("Mine", "no_such_module_anywhere", "does not import: ModuleNotFoundError"),
        ("Mine", "broken_connector_of_a_test", "no_such_engine_anywhere"),
    ],
)
def test_what_is_no_connector_is_refused_and_says_why(name: str, module: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        KVConnectorFactory.get_connector_class(KVTransferConfig(name, kv_connector_module_path=module))


@pytest.mark.parametrize("bad", [("", MODULE, "Mine"), ("mine", "", "Mine"), ("mine", MODULE, 3)])
def test_a_registration_needs_text(bad: Any) -> None:
    with pytest.raises(ConfigError, match="printable"):
        KVConnectorFactory.register_connector(*bad)


def test_an_installed_package_adds_a_connector_and_two_of_one_name_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = "simpler.kv_connectors"
    points = metadata.EntryPoints([metadata.EntryPoint("other", f"{MODULE}:Mine", group)])
    monkeypatch.setattr(metadata, "entry_points", points.select)
    assert "other" in KVConnectorFactory.names()
    assert KVConnectorFactory.get_connector_class(KVTransferConfig("other")).__name__ == "Mine"
    KVConnectorFactory.register_connector("other", "elsewhere", "Other")
    with pytest.raises(ConfigError, match=rf"several classes: {MODULE}\.Mine, elsewhere\.Other"):
        KVConnectorFactory.find(KVTransferConfig("other"))


def test_an_instance_knows_its_config_role_and_place() -> None:
    config = KVTransferConfig("shm", engine_id="factory-test")
    context = KVConnectorContext(num_ranks=2, block_size=16, log=logging.getLogger("test"), rank=1)
    made = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, context)
    assert (made.config, made.role, made.context) == (config, KVConnectorRole.WORKER, context)
