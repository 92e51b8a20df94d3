"""The table of hooks in docs/kv.md is the code's."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from simpler.kv import KVConnector

DOCS = Path(__file__).parents[4] / "docs" / "kv.md"
ROW = re.compile(r"^\| `(\w+)\((.*?)\)` \|", re.MULTILINE)


def documented() -> dict[str, str]:
    text = DOCS.read_text().partition("## Hooks")[2].partition("\n## ")[0]
    return dict(ROW.findall(text))


def test_the_table_has_every_hook_with_its_arguments() -> None:
    hooks = {
        name: ", ".join(list(inspect.signature(hook).parameters)[1:])
        for name, hook in vars(KVConnector).items()
        if inspect.isfunction(hook) and not name.startswith("_")
    }
    assert documented() == hooks


@pytest.mark.parametrize("role", ["in each chip", "next to the scheduler"])
def test_the_table_says_where_a_hook_is_called(role: str) -> None:
    assert f"| **{role}** |" in DOCS.read_text()


def test_a_connector_without_the_hooks_that_have_no_default_cannot_be_made() -> None:
    assert KVConnector.__abstractmethods__ == {
        "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save",
        "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
    }  # fmt: skip
