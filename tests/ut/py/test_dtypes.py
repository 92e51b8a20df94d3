"""Names, numpy types and the codes of kernel.h agree."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from simpler.dtypes import DTYPES, as_dtype
from simpler.kernels import ABI_VERSION, get_include
from simpler.task_args import Tag

HEADER = (Path(get_include()) / "simpler" / "kernel.h").read_text()


def enumerators(kind: str) -> dict[str, int]:
    body = re.search(rf"enum {kind} {{(.*?)}}", HEADER, re.DOTALL)
    assert body is not None
    return {name.lower(): int(value) for name, value in re.findall(r"SIMPLER_(\w+) = (\d+)", body[1])}


def test_codes_are_those_of_the_header() -> None:
    assert {dtype.name: dtype.code for dtype in DTYPES} == enumerators("simpler_dtype")
    assert [dtype.code for dtype in DTYPES] == list(range(len(DTYPES)))


def test_tags_are_those_of_the_header() -> None:
    assert {tag.name.lower(): tag.value for tag in Tag} == enumerators("simpler_tag")


def test_the_abi_version_is_that_of_the_header() -> None:
    assert f"#define SIMPLER_KERNEL_ABI_VERSION {ABI_VERSION}u" in HEADER


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dtype_is_found_by_name_and_pickles(dtype: object) -> None:
    assert as_dtype(str(dtype)) is dtype
    assert as_dtype(dtype) is dtype
    assert pickle.loads(pickle.dumps(dtype)) is dtype


@pytest.mark.parametrize("name", [dtype.name for dtype in DTYPES if dtype.code <= 13])
def test_a_native_dtype_is_found_by_anything_numpy_takes(name: str) -> None:
    numpy_type = np.dtype(name)
    for spec in (numpy_type, numpy_type.type, numpy_type.str):
        assert as_dtype(spec) == name
    assert as_dtype(name).numpy == numpy_type
    assert as_dtype(name).itemsize == numpy_type.itemsize


@pytest.mark.parametrize(
    ("spec", "name"),
    [(float, "float64"), (bool, "bool"), ("f4", "float32"), ("uint16", "uint16"), ("u1", "uint8")],
)
def test_python_types_and_short_names_work(spec: object, name: str) -> None:
    assert as_dtype(spec) == name


@pytest.mark.parametrize("spec", ["float31", "", "S8", "O", ">f4", "M8[s]", [("a", "i4")], 3, object()])
def test_what_has_no_code_is_refused(spec: object) -> None:
    with pytest.raises(ValueError, match="dtype"):
        as_dtype(spec)


@pytest.mark.parametrize(("name", "size"), [("bfloat16", 2), ("float8_e4m3", 1), ("float8_e5m2", 1)])
def test_small_floats_have_their_size(name: str, size: int) -> None:
    dtype = as_dtype(name)
    assert (dtype.itemsize, dtype.numpy.itemsize) == (size, size)


def test_small_floats_are_the_types_of_ml_dtypes_when_it_is_there() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert as_dtype("bfloat16").numpy == np.dtype(ml_dtypes.bfloat16)
    assert as_dtype(ml_dtypes.bfloat16) == "bfloat16"
    assert as_dtype(ml_dtypes.float8_e4m3fn) == "float8_e4m3"
    assert as_dtype(ml_dtypes.float8_e5m2) == "float8_e5m2"


def test_small_floats_are_unsigned_bits_without_ml_dtypes() -> None:
    script = (
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "from simpler.dtypes import as_dtype\n"
        "print(as_dtype('bfloat16').numpy, as_dtype('float8_e4m3').numpy, as_dtype('float8_e5m2').numpy)\n"
        "print(as_dtype('uint16'), as_dtype('uint8'))\n"
    )
    environment = os.environ | {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.split() == ["uint16", "uint8", "uint8", "uint16", "uint8"]


def test_a_dtype_equals_its_name_and_hashes_like_it() -> None:
    assert as_dtype("int32") == "int32"
    assert as_dtype("int32") != "int64"
    assert as_dtype("int32") != 5
    assert {"int32": 1}[as_dtype("int32")] == 1  # type: ignore[index] # equal and of equal hash
