"""`_core.pyi` describes the compiled module exactly: the same names, kinds and argument names, both ways."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
from enum import Enum
from pathlib import Path

import pytest

import simpler
from simpler import _core


def is_public(name: str) -> bool:
    return not name.startswith("_")


def is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def decorators_of(function: ast.FunctionDef) -> list[str]:
    return [ast.unparse(decorator) for decorator in function.decorator_list]


def argument_names(function: ast.FunctionDef) -> list[str] | None:
    """The names by which arguments may be given; None when overloads or ``*args`` leave that open."""
    arguments = function.args
    if arguments.vararg or arguments.kwarg or "overload" in decorators_of(function):
        return None
    return [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]


def compiled_argument_names(member: object) -> list[str] | None:
    """The argument names in the signature that pybind11 writes into the docstring, if there is one."""
    first_line = (getattr(member, "__doc__", None) or "").partition("\n")[0]
    if not (found := re.fullmatch(r"\w+\((.*)\) -> .*", first_line)) or "*args" in first_line:
        return None
    # Without what stands in brackets and quotes, a comma separates two arguments.
    text, previous = re.sub(r"'[^']*'", "", found[1]), ""
    while text != previous:
        text, previous = re.sub(r"\[[^][]*\]|\([^()]*\)|<[^<>]*>", "", text), text
    names = [part.strip().partition(":")[0].partition("=")[0] for part in text.split(",") if part.strip()]
    if "/" in names:
        names = names[names.index("/") + 1 :]
    return [name for name in names if name not in {"self", "*"} and not re.fullmatch(r"arg\d+", name)]


def function_differences(where: str, stub: ast.FunctionDef, member: object) -> list[str]:
    if not callable(member):
        return [f"{where} is a function in the stub only"]
    declared, compiled = argument_names(stub), compiled_argument_names(member)
    if declared is None or compiled is None:
        return []
    declared = [name for name in declared if name not in {"self", "cls"}]
    if declared != compiled:
        return [f"{where} takes {compiled} by name, the stub says {declared}"]
    return []


def member_differences(where: str, stub: ast.FunctionDef, members: dict[str, object], cls: type) -> list[str]:
    name = stub.name
    if is_special(name):
        if name == "__buffer__" and sys.version_info < (3, 12):
            return []
        return [] if hasattr(cls, name) else [f"{where}.{name} is missing from the module"]
    if name not in members:
        return [f"{where}.{name} is missing from the module"]
    member, marks = members[name], decorators_of(stub)
    if "property" in marks:
        return [] if inspect.isdatadescriptor(member) else [f"{where}.{name} is no property in the module"]
    if f"{name}.setter" in marks:
        settable = isinstance(member, property) and member.fset is not None
        return [] if settable else [f"{where}.{name} cannot be set in the module"]
    if inspect.isdatadescriptor(member):
        return [f"{where}.{name} is a property in the module only"]
    return function_differences(f"{where}.{name}", stub, getattr(cls, name))


def assigned_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def class_differences(stub: ast.ClassDef, cls: object) -> list[str]:
    where = stub.name
    if not isinstance(cls, type):
        return [f"{where} is a class in the stub only"]
    if issubclass(cls, Enum):
        declared = {
            name: ast.literal_eval(node.value)
            for node in stub.body
            if isinstance(node, ast.Assign)
            for name in assigned_names(node)
        }
        compiled = {member.name: member.value for member in cls}
        return [] if declared == compiled else [f"{where} has {compiled}, the stub says {declared}"]
    members: dict[str, object] = dict(vars(cls))
    functions = [node for node in stub.body if isinstance(node, ast.FunctionDef)]
    declared_names = {node.name for node in functions}
    differences = [line for node in functions for line in member_differences(where, node, members, cls)]
    for node in stub.body:
        for name in assigned_names(node):
            declared_names.add(name)
            if name not in members:
                differences.append(f"{where}.{name} is missing from the module")
    undeclared = {name for name in members if is_public(name)} - declared_names
    return differences + [f"{where}.{name} is missing from the stub" for name in sorted(undeclared)]


def is_type_alias(node: ast.stmt) -> bool:
    """A name that exists for type checkers alone: ``X = ...`` or ``X: TypeAlias = ...``."""
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.annotation).endswith("TypeAlias")
    return isinstance(node, ast.Assign)


def stub_differences(stub: str, module: types.ModuleType) -> list[str]:
    """Every way in which the stub and the module disagree."""
    members = {
        name: member
        for name, member in vars(module).items()
        if is_public(name) and not isinstance(member, types.ModuleType)
    }
    declared: set[str] = set()
    differences: list[str] = []
    for node in ast.parse(stub).body:
        names = [node.name] if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else assigned_names(node)
        for name in filter(is_public, names):
            if is_type_alias(node):
                continue
            declared.add(name)
            if name not in members:
                differences.append(f"{name} is missing from the module")
            elif isinstance(node, ast.ClassDef):
                differences += class_differences(node, members[name])
            elif isinstance(node, ast.FunctionDef):
                differences += function_differences(name, node, members[name])
    return differences + [f"{name} is missing from the stub" for name in sorted(members.keys() - declared)]


def test_the_stub_describes_the_compiled_module() -> None:
    assert simpler.__file__ is not None
    stub = Path(simpler.__file__).with_name("_core.pyi").read_text()
    assert stub_differences(stub, _core) == []


STUB = """
from typing import TypeAlias
Alias: TypeAlias = int
Pair = tuple[int, int]
LIMIT: int
def connect(address: int, nbytes: int) -> None: ...
class Region:
    def __init__(self, nbytes: int) -> None: ...
    @property
    def size(self) -> int: ...
    def close(self, timeout_s: float, /) -> None: ...
    def __len__(self) -> int: ...
"""


def region_module() -> types.ModuleType:
    def connect(address: int, nbytes: int = 0) -> None:
        """connect(address: typing.SupportsInt, nbytes: dict[str, int] = {'a, b': 0}) -> None"""

    class Region:
        size = property(lambda self: 1)

        def close(self, timeout_s: float) -> None:
            """close(self: Region, arg0: float) -> None"""

        def __len__(self) -> int:
            return 1

    module = types.ModuleType("made_up")
    vars(module).update(connect=connect, Region=Region, LIMIT=3, os=types)
    return module


def test_a_stub_that_agrees_has_no_differences() -> None:
    assert stub_differences(STUB, region_module()) == []


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        ("LIMIT: int", "", "LIMIT is missing from the stub"),
        ("LIMIT: int", "LIMIT: int\nOTHER: int", "OTHER is missing from the module"),
        ("def connect(", "def attach(", "attach is missing from the module"),
        (", nbytes: int", "", "connect takes ['address', 'nbytes'] by name, the stub says ['address']"),
        ("    def close", "    def shut", "Region.shut is missing from the module"),
        ("    def close", "    def shut", "Region.close is missing from the stub"),
        ("    @property\n", "", "Region.size is a property in the module only"),
        ("    def close", "    @property\n    def close", "Region.close is no property in the module"),
        ("__len__", "__iter__", "Region.__iter__ is missing from the module"),
        ("class Region:", "class Area:", "Area is missing from the module"),
        (", /)", ")", "Region.close takes [] by name, the stub says ['timeout_s']"),
    ],
)
def test_a_stub_that_disagrees_is_found(old: str, new: str, difference: str) -> None:
    assert old in STUB
    assert difference in stub_differences(STUB.replace(old, new), region_module())


def test_an_enum_must_have_the_same_values() -> None:
    module = types.ModuleType("made_up")
    vars(module)["Kind"] = Enum("Kind", {"A": 1, "B": 2})
    assert stub_differences("class Kind(Enum):\n    A = 1\n    B = 2\n", module) == []
    assert stub_differences("class Kind(Enum):\n    A = 1\n    B = 3\n", module) == [
        "Kind has {'A': 1, 'B': 2}, the stub says {'A': 1, 'B': 3}"
    ]
