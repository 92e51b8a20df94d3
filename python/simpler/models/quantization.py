"""The tensor encodings of GGUF files, and their decoding to float32.

Block formats follow the GGML reference: a row is cut into blocks of 32 weights, each block
carries its own scale, and a row never shares a block with the next one.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_WEIGHTS = 32


class TensorType(enum.IntEnum):
    """The encodings that can be read, with their numbers in the file format."""

    F32 = 0
    F16 = 1
    Q4_1 = 3
    Q8_0 = 8


class Encoding(NamedTuple):
    """How one encoding packs weights: ``block_weights`` of them in ``block_bytes``."""

    block_weights: int
    block_bytes: int


ENCODINGS: dict[TensorType, Encoding] = {
    TensorType.F32: Encoding(1, 4),
    TensorType.F16: Encoding(1, 2),
    TensorType.Q4_1: Encoding(BLOCK_WEIGHTS, 20),
    TensorType.Q8_0: Encoding(BLOCK_WEIGHTS, 34),
}

_Q4_1_BLOCK = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("pairs", "u1", (16,))])
_Q8_0_BLOCK = np.dtype([("scale", "<f2"), ("weights", "i1", (BLOCK_WEIGHTS,))])


def dequantize(raw: NDArray[np.uint8], encoding: TensorType) -> NDArray[np.float32]:
    """Decode whole blocks to float32.

    Args:
        raw: The encoded bytes, one dimension, contiguous, a whole number of blocks.
        encoding: How they are encoded.

    Returns:
        One dimension, as many weights as the blocks hold. For F32 on a little-endian machine it
        is a view of ``raw``.

    Raises:
        ValueError: ``raw`` is not a whole number of blocks.
    """
    if raw.nbytes % ENCODINGS[encoding].block_bytes:
        raise ValueError(
            f"{raw.nbytes} bytes are not a whole number of {encoding.name} blocks "
            f"of {ENCODINGS[encoding].block_bytes} bytes"
        )
    if encoding is TensorType.Q4_1:
        return _dequantize_q4_1(raw)
    if encoding is TensorType.Q8_0:
        return _dequantize_q8_0(raw)
    stored = raw.view("<f4" if encoding is TensorType.F32 else "<f2")
    return stored.astype(np.float32, copy=False)


def _dequantize_q4_1(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    # The low nibbles of the 16 bytes are weights 0 to 15 and the high ones 16 to 31.
    blocks = raw.view(_Q4_1_BLOCK)
    half = BLOCK_WEIGHTS // 2
    weights = np.empty((blocks.shape[0], BLOCK_WEIGHTS), np.float32)
    weights[:, :half] = blocks["pairs"] & 0x0F
    weights[:, half:] = blocks["pairs"] >> 4
    weights *= blocks["scale"].astype(np.float32)[:, None]
    weights += blocks["minimum"].astype(np.float32)[:, None]
    return weights.reshape(-1)


def _dequantize_q8_0(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    blocks = raw.view(_Q8_0_BLOCK)
    weights: NDArray[np.float32] = blocks["weights"].astype(np.float32)
    weights *= blocks["scale"].astype(np.float32)[:, None]
    return weights.reshape(-1)
