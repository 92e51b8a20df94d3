"""README and docs are true: the example runs, links lead somewhere, and tables agree with the sources."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import simpler

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
IPC = ROOT / "src" / "common" / "hierarchical" / "ipc"
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")


ENGINE = """
class TransferEngine:
    def __init__(self, protocol): self.protocol, self.ranges = protocol, {}
    def register_memory(self, address, nbytes): self.ranges[address] = nbytes
    def endpoint(self): return f"{self.protocol} {self.ranges}"
    def close(self): self.ranges.clear()

KV_BYTES = 1024
"""
RUN = """
import numpy as np
from simpler import Tag, TaskArgs, Worker

def kernel(x, number):
    x += number
    return float(x.sum())

worker = Worker(level=3, device_ids=[0])
worker.init()
x = worker.malloc(400).tensor((100,), np.float32)
"""
# Which Python blocks of the documents are programs, given what the text around them leaves out.
PROGRAMS = {
    ("extensions.md", 0): "",
    ("extensions.md", 1): RUN.splitlines()[2] + ENGINE,
    ("tasks.md", 0): RUN,
}


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of that language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def block(text: str, language: str) -> str:
    """The first of them."""
    return blocks(text, language)[0]


def table(text: str, first_column: str) -> list[list[str]]:
    """The cells of the table whose header row begins with that column, without backticks."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(f"| {first_column} |"):
            break
    else:
        pytest.fail(f"no table that begins with {first_column!r}")
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return rows


def protocol() -> str:
    return (ROOT / "docs" / "mailbox-protocol.md").read_text(encoding="utf-8")


def test_the_example_of_the_readme_runs_and_prints_what_the_readme_says(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    program = tmp_path / "example.py"
    program.write_text(block(readme, "python"), encoding="utf-8")
    ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert re.sub(r"pid \d+", "pid 4242", ended.stdout) == block(readme, "text")


@pytest.mark.parametrize(("document", "position"), PROGRAMS)
def test_the_programs_of_the_documents_run(document: str, position: int, tmp_path: Path) -> None:
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    program = tmp_path / "program.py"
    imports = "from simpler import register_chip_control_extension\n"
    source = imports + PROGRAMS[document, position] + blocks(text, "python")[position]
    program.write_text(source, encoding="utf-8")
    ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_blocks_of_the_task_graph_are_one_program_that_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "task-graph.md").read_text(encoding="utf-8")
    program = tmp_path / "program.py"
    program.write_text("\n".join(blocks(text, "python")), encoding="utf-8")
    ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_kernel_of_the_documents_compiles() -> None:
    text = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    assert simpler.compile_kernel(block(text, "c"), "scale").symbol == "scale"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_to_files(document: Path) -> None:
    targets = LINK.findall(document.read_text(encoding="utf-8"))
    assert [target for target in targets if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_named_in_prose_exist(document: Path) -> None:
    named = re.findall(r"`((?:src|python|tests|scripts|examples|benchmarks)/[\w./-]+)`", document.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_decision_is_in_their_index() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = LINK.findall((folder / "README.md").read_text(encoding="utf-8"))
    assert listed == sorted(path.name for path in folder.glob("0*.md"))


def test_the_api_index_has_every_public_name() -> None:
    index = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert [name for name in simpler.__all__ if not re.search(rf"\b{name}\b", index)] == []


def test_the_constants_of_the_protocol_are_those_of_the_headers() -> None:
    source = "\n".join(path.read_text() for path in sorted(IPC.glob("*.h")))
    rows = table(protocol(), "constant")
    assert len(rows) > 5
    for name, value, *_ in rows:
        found = re.search(rf"\b{name}\b\s*=\s*([^;]+);", source)
        assert found is not None, name
        assert _number(found[1], source) == int(value.replace(",", "")), name


def test_the_control_ops_of_the_protocol_are_those_of_the_enum() -> None:
    documented = {name: int(code) for name, code, *_ in table(protocol(), "op")}
    assert documented == {op.name: int(op) for op in simpler.ControlOp}


def test_the_slot_states_of_the_protocol_are_those_of_the_header() -> None:
    enum = re.search(r"enum class SlotState[^{]*\{(.*?)\};", (IPC / "layout.h").read_text(), re.DOTALL)
    assert enum is not None
    declared = re.findall(r"^\s*(k\w+),", enum[1], re.MULTILINE)
    assert [row[0] for row in table(protocol(), "state")] == declared


def _number(expression: str, source: str) -> int:
    """The value of a constant's initialiser: integers, + - << and other constants."""
    text = re.sub(r"std::\w+_t\s*\{([^}]*)\}", r"\1", expression)
    for name in re.findall(r"\bk[A-Z]\w+", text):
        found = re.search(rf"\b{name}\b\s*=\s*([^;]+);", source)
        assert found is not None, name
        text = text.replace(name, f"({_number(found[1], source)})")
    text = re.sub(r"(?<=\d)[uUlL]+\b", "", text)
    assert re.fullmatch(r"[\d\s+()<-]+", text), text
    return int(eval(text))
