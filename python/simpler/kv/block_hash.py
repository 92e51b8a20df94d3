"""Names for blocks of tokens: equal exactly when the whole prefix and everything that shapes its KV is."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

HASH_BYTES = 16
"""Size of a block's digest."""

_ROOT = b"simpler.kv.root"
_BLOCK = b"simpler.kv.block"
_MOST_TOKENS = 1 << 20
_TOKEN_LIMIT = 1 << 32


@dataclass(frozen=True, slots=True)
class BlockNamespace:
    """What blocks must have in common for one's KV to serve another: equal namespaces share, others never do.

    Attributes:
        model: The model's name, such as a repository or path.
        revision: Which weights of it.
        dtype: The element type of the cache.
        block_size: Tokens in a block, at least 1.
        extra: Anything else: an adapter, a layout, or a tenant's secret that keeps others from guessing.
        digest: Of all these.

    Raises:
        ValueError: no such block size.
    """

    model: str
    revision: str
    dtype: str
    block_size: int
    extra: str = ""
    digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= _MOST_TOKENS:
            raise ValueError(f"block_size is {self.block_size}; it must be 1 to {_MOST_TOKENS} tokens")
        parts = (self.model, self.revision, self.dtype, str(int(self.block_size)), self.extra)
        state = blake2b(digest_size=HASH_BYTES, person=_ROOT)
        for part in parts:
            encoded = part.encode()
            state.update(len(encoded).to_bytes(8, "little"))
            state.update(encoded)
        object.__setattr__(self, "digest", state.digest())


def hash_blocks(
    namespace: BlockNamespace,
    tokens: Sequence[int] | NDArray[np.integer],
    *,
    parent: bytes | None = None,
) -> list[bytes]:
    """Name each full block of `tokens`; what is left over at the end has no name yet.

    A name covers the namespace, all tokens before the block and its own: the same tokens after another prefix
    are another block. Hashing in parts gives the same names as hashing at once, as long as every part but the
    last holds whole blocks.

    Args:
        namespace: What the blocks must have in common with others to be shared.
        tokens: Token ids, each from 0 to 2**32 - 1, one-dimensional.
        parent: The name of the block just before `tokens`; None when they are the beginning.

    Returns:
        ``len(tokens) // namespace.block_size`` digests of `HASH_BYTES` each.

    Raises:
        TypeError: tokens that are not integers.
        ValueError: a token out of range, more than one dimension, or a parent that is no digest.
    """
    if parent is not None and len(parent) != HASH_BYTES:
        raise ValueError(f"parent has {len(parent)} bytes; a block's hash has {HASH_BYTES}")
    data = _encode(tokens)
    step = 4 * namespace.block_size
    # A copy of a state that was set up once is twice as fast as setting it up with keywords each time.
    start = blake2b(digest_size=HASH_BYTES, salt=namespace.digest, person=_BLOCK)
    digest = namespace.digest if parent is None else bytes(parent)
    digests = []
    for at in range(0, len(data) - step + 1, step):
        state = start.copy()
        state.update(digest + data[at : at + step])
        digest = state.digest()
        digests.append(digest)
    return digests


def _encode(tokens: Sequence[int] | NDArray[np.integer]) -> bytes:
    """Four bytes a token, little-endian."""
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"tokens have {array.ndim} dimensions; they must have one")
    if array.size == 0:
        return b""
    if array.dtype.kind not in "iu":
        raise TypeError(f"tokens are {array.dtype}; they must be integers from 0 to {_TOKEN_LIMIT - 1}")
    if array.dtype != np.uint32:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= _TOKEN_LIMIT:
            raise ValueError(f"token {low if low < 0 else high} is not from 0 to {_TOKEN_LIMIT - 1}")
    return array.astype("<u4").tobytes()
