"""The connector of the documentation keeps the contract."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from example_programs import EXAMPLES
from simpler.kv import KVLoadError, KVTransferConfig
from simpler.testing import KVConnectorContract
from simpler.testing.kv_pair import Pair

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODULE = "example_kv_connector"
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def module() -> Iterator[None]:
    """The example under a name that the chips, which are forked, can import it by."""
    spec = importlib.util.spec_from_file_location(MODULE, EXAMPLES / "kv_connector.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[MODULE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[MODULE])
    yield
    del sys.modules[MODULE]


class TestFolderConnector(KVConnectorContract):
    @pytest.fixture(autouse=True)
    def own_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_configs(self) -> tuple[KVTransferConfig, KVTransferConfig]:
        number, extra = next(_numbers), {"folder": str(self.folder)}
        return (
            KVTransferConfig("FolderConnector", "kv_producer", f"p{number}", extra, MODULE),
            KVTransferConfig("FolderConnector", "kv_consumer", f"d{number}", extra, MODULE),
        )

    def spoil(self, pair: Pair, params: dict[str, Any] | None) -> None:
        second = pair.request("b.1", 3).block_hashes[1].hex()
        (self.folder / f"{second}.0.third").write_bytes(b"short")
        (self.folder / f"{second}.0.all").unlink()


def break_connector(how: str) -> type:
    """A connector that keeps the contract but for one thing."""
    sound: Any = vars(sys.modules[MODULE])["FolderConnector"]

    class Broken(sound):  # type: ignore[misc]  # a class made at run time
        def save_kv_layer(self, layer_name: str, kv_layer: Any) -> None:
            if how != "forgets a layer" or layer_name != "third":
                super().save_kv_layer(layer_name, kv_layer)

        def load(self, name: str, block: int, layer: str) -> bool:
            if how == "misses by a block":
                block ^= 1
            return bool(super().load(name, block, layer)) or how == "hides what is bad"

    return Broken


@pytest.mark.parametrize(
    ("how", "test"),
    [
        ("forgets a layer", "test_what_the_consumer_has_computed_is_not_loaded"),
        ("misses by a block", "test_what_the_consumer_has_computed_is_not_loaded"),
        ("hides what is bad", "test_a_load_that_fails_ends_its_request_and_names_the_blocks"),
    ],
)
def test_the_contract_refuses_a_broken_connector(how: str, test: str, tmp_path: Path) -> None:
    vars(sys.modules[MODULE])["Broken"] = break_connector(how)
    suite = TestFolderConnector()
    suite.folder = tmp_path
    configs = suite.make_configs()
    broken = tuple(replace(config, kv_connector="Broken") for config in configs)
    suite.make_configs = lambda: (broken[0], broken[1])  # type: ignore[method-assign]  # of this one
    if "fails" in test:
        with pytest.raises(KeyError, match=r"b\.1"):
            getattr(suite, test)()
        return
    pair = Pair((broken[0], broken[1]))
    try:
        with pytest.raises((AssertionError, KVLoadError)):
            getattr(suite, test)(pair)
    finally:
        pair.close()
