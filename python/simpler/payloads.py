"""Payloads of control calls: anything contiguous with the buffer protocol."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, TypeAlias

    import numpy as np
    from typing_extensions import Buffer

    Plain: TypeAlias = bytes | memoryview
    BytesLike: TypeAlias = Buffer | np.ndarray[Any, Any]
    """Numpy's arrays have the buffer protocol, but say so to type checkers from Python 3.12 on only."""


def as_payload(payload: BytesLike) -> Plain:
    """`payload` as plain bytes or a one-dimensional view of its memory.

    Raises:
        TypeError: no buffer protocol (a str has to be encoded first).
        ValueError: the memory is not contiguous.
    """
    if isinstance(payload, bytes):
        return payload
    if isinstance(payload, str):
        raise TypeError("a payload is bytes-like, not str: encode it first")
    try:
        exported: Any = payload
        view = memoryview(exported)
    except BufferError as error:
        raise ValueError(f"a payload's memory cannot be had: {error}") from error
    if not view.c_contiguous:
        raise ValueError("a payload must be contiguous in C order")
    return pickle.PickleBuffer(view).raw()


def payload_bytes(payload: BytesLike, limit: int) -> bytes:
    """A copy of `payload`, for a call that has no process boundary to copy it.

    Raises:
        ValueError: more than `limit` bytes, or not contiguous.
    """
    view = as_payload(payload)
    size = memoryview(view).nbytes
    if size > limit:
        raise ValueError(f"a payload of {size} bytes is above max_control_payload={limit}")
    return view if isinstance(view, bytes) else bytes(view)
