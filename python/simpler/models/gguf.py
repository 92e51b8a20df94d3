"""Reads GGUF model files, versions 2 and 3, little-endian.

The file is untrusted: every count, length and offset in it is checked against the bytes that are
there before anything is read or allocated, and whatever is wrong is a ``GGUFError`` that says
where. Tensor data stays mapped and is decoded one tensor at a time.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from simpler.models.quantization import ENCODINGS, TensorType, dequantize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Self

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4
MAX_NAME_BYTES = 1 << 16

Value: TypeAlias = "bool | int | float | str | Sequence[Value]"

_STRING = 8
_ARRAY = 9
_BOOL = 7
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32 = _SCALARS[4]
_U64 = _SCALARS[10]

# The fewest bytes that one item can take: a string is a length, an array a type and a length, an
# entry of the metadata a key length, a type and a byte, a tensor a name length, a count of
# dimensions, one dimension, a type and an offset.
_MIN_STRING_BYTES = 8
_MIN_ARRAY_BYTES = 12
_MIN_ENTRY_BYTES = 13
_MIN_TENSOR_BYTES = 32


class GGUFError(ValueError):
    """The file is not a GGUF file that can be read; the text says what is wrong and where."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file.

    Attributes:
        name: As the file has it, such as ``"blk.0.attn_q.weight"``.
        shape: Outermost dimension first, as numpy has it; the file stores the reverse.
        encoding: How the weights are packed.
        offset: Byte offset of the data from the start of the file.
        nbytes: Size of the packed data.
    """

    name: str
    shape: tuple[int, ...]
    encoding: TensorType
    offset: int
    nbytes: int


class _Cursor:
    """Reads forward through bytes and never past their end."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.offset = 0

    @property
    def remaining(self) -> int:
        return len(self._data) - self.offset

    def take(self, nbytes: int, what: str) -> memoryview:
        if nbytes > self.remaining:
            raise GGUFError(
                f"{what} at byte {self.offset} needs {nbytes} bytes, but the file has {self.remaining} left"
            )
        taken = self._data[self.offset : self.offset + nbytes]
        self.offset += nbytes
        return taken

    def unpack(self, form: struct.Struct, what: str) -> int | float:
        number: int | float = form.unpack(self.take(form.size, what))[0]
        return number

    def u32(self, what: str) -> int:
        return int(self.unpack(_U32, what))

    def count(self, what: str, min_item_bytes: int) -> int:
        """Read a count of items, refusing one that the rest of the file cannot hold."""
        at = self.offset
        count = int(self.unpack(_U64, what))
        if count * min_item_bytes > self.remaining:
            raise GGUFError(
                f"{what} at byte {at} is {count}, more than the remaining {self.remaining} bytes can hold"
            )
        return count

    def string(self, what: str) -> str:
        at = self.offset
        raw = bytes(self.take(self.count(f"length of {what}", 1), what))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise GGUFError(f"{what} at byte {at} is not UTF-8: {error}") from None

    def name(self, what: str) -> str:
        at = self.offset
        name = self.string(what)
        if not name or len(name) > MAX_NAME_BYTES:
            raise GGUFError(f"{what} at byte {at} has {len(name)} characters")
        return name

    def value(self, value_type: int, what: str, depth: int = 0) -> Value:
        if value_type == _STRING:
            return self.string(what)
        if value_type == _ARRAY:
            return self._array(what, depth)
        form = _SCALARS.get(value_type)
        if form is None:
            raise GGUFError(f"{what} at byte {self.offset} has the unknown type {value_type}")
        number = self.unpack(form, what)
        return self._as_bool(int(number), what) if value_type == _BOOL else number

    def _as_bool(self, number: int, what: str) -> bool:
        if number > 1:
            raise GGUFError(f"{what} before byte {self.offset} is {number}, not a boolean")
        return number == 1

    def _array(self, what: str, depth: int) -> Sequence[Value]:
        if depth >= MAX_ARRAY_DEPTH:
            raise GGUFError(f"{what} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        item_type = self.u32(f"item type of {what}")
        if item_type == _STRING:
            length = self.count(f"length of {what}", _MIN_STRING_BYTES)
            return [self.string(what) for _ in range(length)]
        if item_type == _ARRAY:
            length = self.count(f"length of {what}", _MIN_ARRAY_BYTES)
            return [self._array(what, depth + 1) for _ in range(length)]
        form = _SCALARS.get(item_type)
        if form is None:
            raise GGUFError(f"items of {what} have the unknown type {item_type}")
        length = self.count(f"length of {what}", form.size)
        raw = self.take(length * form.size, what)
        numbers: list[int | float] = np.frombuffer(raw, form.format).tolist()
        if item_type == _BOOL:
            return [self._as_bool(int(number), what) for number in numbers]
        return numbers


class GGUFFile:
    """An open GGUF file: its metadata, its table of tensors, and their data.

    Close it, or use it as a context manager; arrays already decoded stay valid.

    Args:
        path: The file. It must not be truncated while it is open: it is mapped.

    Raises:
        GGUFError: the file is damaged, or uses something that cannot be read.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._map = _map_file(self.path)
        try:
            with memoryview(self._map) as view:
                self._parse(_Cursor(view))
        except GGUFError as error:
            self.close()
            raise GGUFError(f"{self.path}: {error}") from None
        except BaseException:
            self.close()
            raise

    def _parse(self, cursor: _Cursor) -> None:
        magic = bytes(cursor.take(len(MAGIC), "the magic number"))
        if magic != MAGIC:
            raise GGUFError(f"not a GGUF file: it starts with {magic!r}")
        self.version = cursor.u32("the version")
        if self.version not in SUPPORTED_VERSIONS:
            raise GGUFError(f"version {self.version} is not one of {SUPPORTED_VERSIONS}")
        tensor_count = cursor.count("the number of tensors", _MIN_TENSOR_BYTES)
        entry_count = cursor.count("the number of metadata entries", _MIN_ENTRY_BYTES)
        self.metadata: Mapping[str, Value] = MappingProxyType(_read_metadata(cursor, entry_count))
        alignment = _alignment(self.metadata)
        parsed = [_read_tensor(cursor, alignment) for _ in range(tensor_count)]
        data_start = -(-cursor.offset // alignment) * alignment
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            _place_tensors(parsed, data_start, cursor.offset + cursor.remaining)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file. May be called again."""
        self._map.close()

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Decode one tensor.

        Returns:
            A new array in the shape of its ``TensorInfo``, independent of the file.

        Raises:
            GGUFError: the file has no such tensor.
            ValueError: the file is closed.
        """
        info = self.tensors.get(name)
        if info is None:
            raise GGUFError(f"{self.path}: there is no tensor {name!r}")
        raw = np.frombuffer(self._map, np.uint8, count=info.nbytes, offset=info.offset)
        decoded = dequantize(raw, info.encoding)
        # An encoding that needs no decoding gives a view, which would keep the file mapped.
        owned = decoded.copy() if np.may_share_memory(decoded, raw) else decoded
        return owned.reshape(info.shape)


def _map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise GGUFError(f"{path}: the file is empty")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for index in range(count):
        key = cursor.name(f"key {index} of the metadata")
        if key in metadata:
            raise GGUFError(f"the metadata has {key!r} twice")
        metadata[key] = cursor.value(cursor.u32(f"type of {key!r}"), repr(key))
    return metadata


def _alignment(metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise GGUFError(f"general.alignment is {alignment!r}, not a power of two up to {MAX_ALIGNMENT}")
    return alignment


def _read_tensor(cursor: _Cursor, alignment: int) -> TensorInfo:
    """Read one entry of the tensor table; its offset still counts from the data's start."""
    name = cursor.name("the name of a tensor")
    dimension_count = cursor.u32(f"number of dimensions of {name!r}")
    if not 1 <= dimension_count <= MAX_DIMENSIONS:
        raise GGUFError(f"tensor {name!r} has {dimension_count} dimensions")
    reversed_shape = [int(cursor.unpack(_U64, f"a dimension of {name!r}")) for _ in range(dimension_count)]
    type_number = cursor.u32(f"encoding of {name!r}")
    offset = int(cursor.unpack(_U64, f"offset of {name!r}"))
    if type_number not in TensorType.__members__.values():
        known = ", ".join(f"{member.name} ({member.value})" for member in TensorType)
        raise GGUFError(f"tensor {name!r} has encoding {type_number}; readable are {known}")
    encoding = TensorType(type_number)
    block_weights, block_bytes = ENCODINGS[encoding]
    if 0 in reversed_shape or reversed_shape[0] % block_weights:
        raise GGUFError(
            f"tensor {name!r} has dimensions {reversed_shape}; with {encoding.name} the first "
            f"must be a multiple of {block_weights} and none may be 0"
        )
    if offset % alignment:
        raise GGUFError(f"tensor {name!r} starts at {offset}, which is not a multiple of {alignment}")
    weights = 1
    for dimension in reversed_shape:
        weights *= dimension
    return TensorInfo(
        name=name,
        shape=tuple(reversed(reversed_shape)),
        encoding=encoding,
        offset=offset,
        nbytes=weights // block_weights * block_bytes,
    )


def _place_tensors(parsed: Sequence[TensorInfo], data_start: int, file_bytes: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for info in parsed:
        offset = data_start + info.offset
        if offset + info.nbytes > file_bytes:
            raise GGUFError(
                f"tensor {info.name!r} takes {info.nbytes} bytes from byte {offset}, but the file "
                f"ends at {file_bytes}"
            )
        if info.name in tensors:
            raise GGUFError(f"tensor {info.name!r} is there twice")
        tensors[info.name] = TensorInfo(info.name, info.shape, info.encoding, offset, info.nbytes)
    return tensors
