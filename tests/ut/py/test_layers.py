"""Includes and imports point one way: each layer uses itself and the layers above it in its table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPO = Path(__file__).parents[3]

# Folders of src/common/hierarchical, and files of its top level by the first word of their name.
CPP_LAYERS = ("base", "graph", "os", "ipc", "workers", "sched", "runtime")

# Headers of the operating system; only os/ makes system calls.
SYSTEM_HEADERS = re.compile(r"(unistd|fcntl|poll|dirent)\.h|(sys/(?!types\.h)|linux/).*")

# Modules and subpackages of simpler.
PYTHON_LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"_core"}),
    frozenset({"config", "dtypes", "errors", "failures", "ids", "lifecycle", "logs", "payloads"}),
    frozenset(
        {
            "access",
            "buffers",
            "callables",
            "columns",
            "holds",
            "host_blocks",
            "host_heap",
            "kernels",
            "memory",
            "memory_checks",
            "memory_wire",
            "pins",
            "ranges",
            "states",
            "shared_map",
            "task_args",
            "task_checks",
            "tensor",
            "transfer_ranges",
            "uses",
        }
    ),
    frozenset({"chips"}),
    frozenset({"control"}),
    frozenset(
        {
            "call_threads",
            "caller",
            "capture",
            "child_main",
            "chip_log",
            "chip_service",
            "deliveries",
            "device_memory",
            "domain",
            "extensions",
            "function_runs",
            "gather",
            "local_caller",
            "local_chip",
            "node",
            "orchestrator",
            "recording",
            "run",
            "scratch",
            "status",
            "thread_limits",
            "trace",
            "transfer_flow",
            "transfer_handle",
            "transfer_records",
            "transfer_service",
            "transfer_wire",
            "transfers",
            "worker",
            "worker_base",
        }
    ),
)

# Users of the runtime like any other: they may import what everybody may, the roots of the public packages.
USERS = frozenset({"cli", "cluster", "executor", "kv", "models", "serve", "testing"})
PUBLIC_PACKAGES = frozenset({"chips", "control", "kv", "models", "testing"})


def cpp_layer(file: str) -> str:
    first, _, rest = file.partition("/")
    return first if rest else Path(first).stem.partition("_")[0]


def cpp_violations(root: Path, layers: tuple[str, ...]) -> list[str]:
    """Includes under `root` (the folder `hierarchical`) that the order of `layers` does not allow."""
    violations = []
    for source in sorted([*root.rglob("*.h"), *root.rglob("*.cpp")]):
        where = source.relative_to(root).as_posix()
        layer = cpp_layer(where)
        if layer == "include":
            continue
        if layer not in layers:
            violations.append(f"{where}: no layer is called {layer}")
            continue
        allowed = layers[: layers.index(layer) + 1]
        for bracket, header in re.findall(
            r'^\s*#\s*include\s*(["<])([^">]+)', source.read_text(), re.MULTILINE
        ):
            if bracket == "<":
                if layer != "os" and SYSTEM_HEADERS.fullmatch(header):
                    violations.append(f"{where}: <{header}> belongs in os/")
            elif header.startswith("hierarchical/"):
                used = cpp_layer(header.removeprefix("hierarchical/"))
                if used not in allowed:
                    violations.append(f"{where}: {layer} must not use {header}")
            elif not header.startswith("simpler/"):
                violations.append(f'{where}: "{header}" is not named from the root of the includes')
    return violations


def runtime_nodes(node: ast.AST) -> list[ast.AST]:
    """All nodes below, but for the imports that only a type checker follows."""
    nodes = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        nodes += [child, *runtime_nodes(child)]
    return nodes


def imported_modules(source: Path, package: Path) -> list[str]:
    """What a file imports of its own package, as dotted names below it; "" is the package itself."""
    parents = source.relative_to(package).parts[:-1]
    modules = []
    for node in runtime_nodes(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = [package.name, *parents][: len(parents) + 2 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inside = package.parent.joinpath(*base.split("."), alias.name)
                is_module = inside.is_dir() or any(
                    inside.with_suffix(suffix).exists() for suffix in (".py", ".pyi")
                )
                modules.append(f"{base}.{alias.name}" if is_module else base)
    prefix = package.name + "."
    return [name.removeprefix(prefix) for name in modules if name.startswith(prefix)] + [
        "" for name in modules if name == package.name
    ]


def is_public(module: str, package: Path) -> bool:
    """The package itself, or the root of one of its public packages."""
    return module == "" or (module in PUBLIC_PACKAGES and package.joinpath(module).is_dir())


def python_violations(package: Path, layers: tuple[frozenset[str], ...]) -> list[str]:
    """Imports in `package` that the order of `layers` does not allow."""
    rank = {name: index for index, names in enumerate(layers) for name in names}
    violations = []
    for source in sorted(package.rglob("*.py")):
        relative = source.relative_to(package)
        where, own = relative.as_posix(), relative.with_suffix("").parts[0]
        if own in {"__init__", "__main__"}:
            continue
        if own not in rank and own not in USERS:
            violations.append(f"{where}: {own} has no layer")
            continue
        for module in imported_modules(source, package):
            used = module.partition(".")[0]
            if used == own:
                continue
            upwards = used in rank and own in rank and rank[used] <= rank[own]
            if not (is_public(module, package) if own in USERS else upwards):
                violations.append(f"{where}: {own} must not import {module or package.name}")
    return violations


def test_cpp_includes_point_one_way() -> None:
    assert cpp_violations(REPO / "src/common/hierarchical", CPP_LAYERS) == []


def test_python_imports_point_one_way() -> None:
    assert python_violations(REPO / "python/simpler", PYTHON_LAYERS) == []


def test_the_tables_name_each_layer_once() -> None:
    names = [name for layer in (*PYTHON_LAYERS, USERS) for name in layer]
    assert len(names) == len(set(names))
    assert len(CPP_LAYERS) == len(set(CPP_LAYERS))


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


GOOD_CPP = {
    "base/error.h": "#include <string>\n",
    "os/futex.cpp": '#include <unistd.h>\n#include "hierarchical/base/error.h"\n',
    "workers/child.h": '#include "hierarchical/os/futex.h"\n#include "simpler/kernel.h"\n',
    "runtime_calls.cpp": '#include "hierarchical/runtime.h"\n',
    "runtime.cpp": '#include "hierarchical/runtime.h"\n#include "hierarchical/workers/child.h"\n',
    "include/simpler/kernel.h": "#include <stdint.h>\n",
}


def test_includes_of_layers_above_are_allowed(tmp_path: Path) -> None:
    assert cpp_violations(write_tree(tmp_path, GOOD_CPP), CPP_LAYERS) == []


@pytest.mark.parametrize(
    ("file", "text", "violation"),
    [
        (
            "base/clock.h",
            '#include "hierarchical/os/futex.h"',
            "base/clock.h: base must not use hierarchical/os/futex.h",
        ),
        (
            "ipc/ring.cpp",
            '  #  include "hierarchical/runtime.h"',
            "ipc/ring.cpp: ipc must not use hierarchical/runtime.h",
        ),
        ("ipc/slot.h", "#include <sys/mman.h>", "ipc/slot.h: <sys/mman.h> belongs in os/"),
        (
            "ipc/bell.h",
            '#include "slot.h"',
            'ipc/bell.h: "slot.h" is not named from the root of the includes',
        ),
        ("misc/helper.h", "", "misc/helper.h: no layer is called misc"),
    ],
)
def test_a_bad_include_is_found(tmp_path: Path, file: str, text: str, violation: str) -> None:
    assert cpp_violations(write_tree(tmp_path, GOOD_CPP | {file: text}), CPP_LAYERS) == [violation]


GOOD_PYTHON = {
    "__init__.py": "from simpler.worker import Worker",
    "_core.pyi": "",
    "errors.py": "from simpler import _core",
    "buffers.py": "import simpler.errors\nif TYPE_CHECKING:\n    from simpler.worker import Worker",
    "chips/__init__.py": "from simpler.chips.cpu import CpuChip",
    "chips/cpu.py": "from simpler.buffers import Buffer\nfrom .protocol import ChipBackend",
    "chips/protocol.py": "import numpy",
    "worker.py": "from simpler import _core, errors\nimport simpler.chips.cpu",
    "models/__init__.py": "import simpler\nfrom simpler.models.llama import Llama",
    "models/llama.py": "from simpler import Worker\nfrom simpler.chips import ChipBackend",
}


def test_imports_of_layers_above_are_allowed(tmp_path: Path) -> None:
    assert python_violations(write_tree(tmp_path / "simpler", GOOD_PYTHON), PYTHON_LAYERS) == []


@pytest.mark.parametrize(
    ("file", "text", "violation"),
    [
        ("errors.py", "from simpler import worker", "errors.py: errors must not import worker"),
        (
            "errors.py",
            "def late():\n    import simpler.chips.cpu",
            "errors.py: errors must not import chips.cpu",
        ),
        ("errors.py", "from simpler import Worker", "errors.py: errors must not import simpler"),
        ("errors.py", "from . import worker", "errors.py: errors must not import worker"),
        ("chips/cpu.py", "from ..worker import Worker", "chips/cpu.py: chips must not import worker"),
        ("worker.py", "import simpler.models", "worker.py: worker must not import models"),
        (
            "models/llama.py",
            "from simpler.worker import Worker",
            "models/llama.py: models must not import worker",
        ),
        (
            "models/llama.py",
            "from simpler.chips.cpu import CpuChip",
            "models/llama.py: models must not import chips.cpu",
        ),
        ("helpers.py", "", "helpers.py: helpers has no layer"),
    ],
)
def test_a_bad_import_is_found(tmp_path: Path, file: str, text: str, violation: str) -> None:
    package = write_tree(tmp_path / "simpler", GOOD_PYTHON | {file: text})
    assert python_violations(package, PYTHON_LAYERS) == [violation]
