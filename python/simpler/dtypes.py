"""Element types: one table of names, numpy types and the codes of `simpler/kernel.h`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# The index is the code (enum simpler_dtype).
_NATIVE = (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
# name -> (code, attribute of ml_dtypes, unsigned stand-in)
_EXTENDED = {
    "bfloat16": (14, "bfloat16", "uint16"),
    "float8_e4m3": (15, "float8_e4m3fn", "uint8"),
    "float8_e5m2": (16, "float8_e5m2", "uint8"),
}


@dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        name: ``"float32"``, ``"bfloat16"``...; a DType equals its name.
        code: simpler_dtype of `simpler/kernel.h`.
        itemsize: Bytes of one element.
        numpy: The type of views. For ``bfloat16``, ``float8_e4m3`` (the OCP "fn" form: no infinities) and
            ``float8_e5m2`` it is ml_dtypes' type when that package is installed, else the unsigned integer
            of the same size that holds the bits.
    """

    name: str
    code: int
    itemsize: int
    numpy: np.dtype[Any] = field(compare=False, repr=False)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DType):
            return self.code == other.code
        if isinstance(other, str):
            return self.name == other
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        # The numpy type depends on the packages of the reading process.
        return as_dtype, (self.name,)


def _extended_numpy(attribute: str, stand_in: str) -> np.dtype[Any]:
    try:
        module = importlib.import_module("ml_dtypes")
    except ImportError:
        return np.dtype(stand_in)
    return np.dtype(getattr(module, attribute, stand_in))


def _table() -> tuple[DType, ...]:
    native = [DType(name, code, np.dtype(name).itemsize, np.dtype(name)) for code, name in enumerate(_NATIVE)]
    extended = [
        DType(name, code, np.dtype(stand_in).itemsize, _extended_numpy(attribute, stand_in))
        for name, (code, attribute, stand_in) in _EXTENDED.items()
    ]
    return (*native, *extended)


DTYPES: tuple[DType, ...] = _table()
"""Every element type, by code."""

_BY_NAME = {dtype.name: dtype for dtype in DTYPES}
_BY_NUMPY = {dtype.numpy: dtype for dtype in reversed(DTYPES)}


def as_dtype(spec: object) -> DType:
    """The DType for a name, a numpy dtype or anything that numpy takes for one.

    Raises:
        ValueError: No such element type, or bytes in an order that is not this machine's.
    """
    if isinstance(spec, DType):
        return spec
    if isinstance(spec, str) and spec in _BY_NAME:
        return _BY_NAME[spec]
    try:
        as_numpy = np.dtype(spec)  # type: ignore[call-overload]  # any object: numpy itself decides
    except (TypeError, ValueError) as error:
        raise ValueError(f"no such dtype: {spec!r}; there are {', '.join(_BY_NAME)}") from error
    found = _BY_NUMPY.get(as_numpy)
    if found is None:
        raise ValueError(f"unsupported dtype: {as_numpy!r}; there are {', '.join(_BY_NAME)}")
    return found
