"""Several connectors as one: the first that has blocks gives them, all of them save."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from kv.test_example_connector import MODULE, module
from simpler import ConfigError
from simpler.kv import (
    KVConnectorContext,
    KVConnectorFactory,
    KVConnectorMetadata,
    KVConnectorRole,
    KVTransferConfig,
)
from simpler.kv.connectors.multi import MultiConnector, MultiMetadata
from simpler.testing import KVConnectorContract
from simpler.testing.kv_pair import Pair

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["module"]  # a fixture

_numbers = itertools.count()


def configs(order: tuple[str, ...], folder: Path) -> tuple[KVTransferConfig, KVTransferConfig]:
    number = next(_numbers)
    known: dict[str, dict[str, Any]] = {
        "shm": {"kv_connector": "shm"},
        "folder": {
            "kv_connector": "FolderConnector",
            "kv_connector_module_path": MODULE,
            "kv_connector_extra_config": {"folder": str(folder)},
        },
    }
    extra = {"connectors": [known[name] for name in order]}
    return (
        KVTransferConfig("multi", "kv_producer", f"multi p{number}", extra),
        KVTransferConfig("multi", "kv_consumer", f"multi d{number}", extra),
    )


class TestFolderThenShm(KVConnectorContract):
    @pytest.fixture(autouse=True)
    def own_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_configs(self) -> tuple[KVTransferConfig, KVTransferConfig]:
        return configs(("folder", "shm"), self.folder)

    def spoil(self, pair: Pair, params: dict[str, Any] | None) -> None:
        second = pair.request("b.1", 3).block_hashes[1].hex()
        (self.folder / f"{second}.0.third").write_bytes(b"short")
        (self.folder / f"{second}.0.all").unlink()


class TestShmThenFolder(KVConnectorContract):
    @pytest.fixture(autouse=True)
    def own_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_configs(self) -> tuple[KVTransferConfig, KVTransferConfig]:
        return configs(("shm", "folder"), self.folder)

    def spoil(self, pair: Pair, params: dict[str, Any] | None) -> None:
        assert params is not None
        both: Any = pair.producer.runtime.connector
        both.connectors[0].take_back(params["remote_request_id"], params["remote_generation"])


@pytest.mark.parametrize(("order", "transfers"), [(("shm", "folder"), 1.0), (("folder", "shm"), 0.0)])
def test_the_first_that_has_the_blocks_gives_them_and_the_others_let_go(
    order: tuple[str, ...], transfers: float, tmp_path: Path
) -> None:
    pair = Pair(configs(order, tmp_path))
    try:
        params = pair.produce("a.1", [1, 2])
        pair.begin_load("b.1", [3, 4], params)
        pair.finish_load("b.1")
        counters = pair.consumer.runtime.stats()["chips"][1,]
        assert counters[f"shm {order.index('shm')}: transfers"] == transfers
        pair.producer.drain()
        assert pair.producer.freed == [("a.1", (1, 2))]
        assert len(list(tmp_path.glob("*.all"))) == 2
    finally:
        pair.close()


@dataclass(frozen=True)
class Told(KVConnectorMetadata):
    """Metadata of one of the connectors."""


def make(role: KVConnectorRole, *names: str) -> MultiConnector:
    config = KVTransferConfig(
        "multi", kv_connector_extra_config={"connectors": [{"kv_connector": name} for name in names]}
    )
    made = KVConnectorFactory.create_connector(
        config, role, KVConnectorContext(1, 4, logging.getLogger("test"), 0)
    )
    assert isinstance(made, MultiConnector)
    return made


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Iterator[MultiConnector]:
    """Two connectors on a chip, whose answers a test sets."""
    made = make(KVConnectorRole.WORKER, "shm", "shm")
    yield made
    made.shutdown()


def test_a_request_is_sent_when_the_last_connector_has_sent_it(
    chip: MultiConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    chip.bind_connector_metadata(MultiMetadata((None, None), {"both": 2}))
    for connector, sent in zip(chip.connectors, (["both", "one"], []), strict=True):
        monkeypatch.setattr(connector, "get_finished", lambda _ids, sent=sent: (sent, ()))
    assert chip.get_finished(()) == (["one"], [])
    monkeypatch.setattr(chip.connectors[0], "get_finished", lambda _ids: ((), ()))
    monkeypatch.setattr(chip.connectors[1], "get_finished", lambda _ids: (("both",), ("loaded",)))
    assert chip.get_finished(()) == (["both"], ["loaded"])


def test_a_connector_that_raises_keeps_no_other_from_its_part(
    chip: MultiConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise OSError("the first engine broke")

    called: list[str] = []
    chip.bind_connector_metadata(MultiMetadata((Told(), Told()), {}))
    monkeypatch.setattr(chip.connectors[0], "wait_for_save", broken)
    monkeypatch.setattr(chip.connectors[1], "wait_for_save", lambda: called.append("second"))
    with pytest.raises(OSError, match="the first engine broke"):
        chip.wait_for_save()
    assert called == ["second"]


def test_bad_blocks_come_from_all(chip: MultiConnector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chip.connectors[0], "get_block_ids_with_load_errors", lambda: {3: "torn"})
    monkeypatch.setattr(chip.connectors[1], "get_block_ids_with_load_errors", lambda: {5})
    assert chip.get_block_ids_with_load_errors() == {3: "torn", 5: ""}


def test_not_known_yet_is_passed_on_unless_an_earlier_one_has_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(configs(("shm", "folder"), tmp_path))
    try:
        both: Any = pair.consumer.runtime.connector
        request = pair.request("b.1", 1)
        monkeypatch.setattr(both.connectors[1], "get_num_new_matched_tokens", lambda _r, _n: (None, True))
        assert both.get_num_new_matched_tokens(request, 0) == (None, False)
        monkeypatch.setattr(both.connectors[0], "get_num_new_matched_tokens", lambda _r, _n: (8, True))
        assert both.get_num_new_matched_tokens(request, 0) == (8, True)
    finally:
        monkeypatch.undo()
        pair.close()


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({}, "needs connectors"),
        ({"connectors": []}, "needs connectors"),
        ({"connectors": ["shm"]}, "a mapping, not str"),
        ({"connectors": [{"kv_connector": "nobody's"}]}, "no KV connector"),
        ({"connectors": [{"kv_conector": "shm"}]}, "did you mean"),
    ],
)
def test_options_that_cannot_be_are_refused(extra: dict[str, Any], text: str) -> None:
    config = KVTransferConfig("multi", kv_connector_extra_config=extra)
    context = KVConnectorContext(1, 4, logging.getLogger("test"))
    with pytest.raises(ConfigError, match=text):
        KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, context)


def test_engines_with_other_connectors_are_not_connected(chip: MultiConnector) -> None:
    with pytest.raises(ValueError, match="has not the 2 connectors"):
        chip.set_handshake_metadata("peer", {0: b'["00"]'})
