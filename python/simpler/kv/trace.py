"""Request traces in the format that Mooncake published: who asked when, with which blocks of tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from simpler import SimplerError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

TRACE_BLOCK_TOKENS = 512
"""Tokens for which one of `TraceRequest.hash_ids` stands."""

MOST_INPUT_TOKENS = 1 << 24
_MOST_OUTPUT_TOKENS = 1 << 24
_MOST_TIMESTAMP_MS = 1 << 53
_MOST_LINE_BYTES = 1 << 20
_HASH_ID_LIMIT = 1 << 63


class TraceError(SimplerError, ValueError):
    """A line of a trace is not what the format says; the text has its number."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Attributes:
        timestamp_ms: When it came, from the beginning of the trace on.
        input_length: Tokens of the prompt, at least 1.
        output_length: Tokens generated.
        hash_ids: One number for each `TRACE_BLOCK_TOKENS` of the prompt, the last of which may be fewer. The
            same number in two requests stands for the same tokens after the same prefix.
    """

    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: str | PathLike[str]) -> Iterator[TraceRequest]:
    """Read a trace: ``timestamp``, ``input_length``, ``output_length``, ``hash_ids`` as JSON on each line.

    Raises:
        TraceError: a line that is no such object, has a number out of range, another number of hash ids than
            its length needs, or an earlier time than the line before; or a file without a line.
        OSError: the file cannot be read.
    """
    number, before = 0, 0
    with Path(path).open("rb") as file:
        while line := file.readline(_MOST_LINE_BYTES + 1):
            number += 1
            try:
                request = _parse(line)
                if request.timestamp_ms < before:
                    raise TraceError(f"timestamp {request.timestamp_ms} is before {before}, of the last line")
            except TraceError as error:
                raise TraceError(f"{path}, line {number}: {error}") from None
            before = request.timestamp_ms
            yield request
    if number == 0:
        raise TraceError(f"{path} is empty")


def _parse(line: bytes) -> TraceRequest:
    if len(line) > _MOST_LINE_BYTES:
        raise TraceError(f"longer than {_MOST_LINE_BYTES} bytes")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise TraceError(f"a JSON object is wanted, not {type(fields).__name__}")
    input_length = _integer(fields, "input_length", 1, MOST_INPUT_TOKENS)
    hash_ids = fields.get("hash_ids")
    if not isinstance(hash_ids, list):
        raise TraceError("hash_ids must be a list")
    for number in hash_ids:
        if type(number) is not int or not 0 <= number < _HASH_ID_LIMIT:
            raise TraceError(f"hash_ids has {_shown(number)}; integers from 0 to 2**63 - 1 are wanted")
    wanted = -(-input_length // TRACE_BLOCK_TOKENS)
    if len(hash_ids) != wanted:
        raise TraceError(f"{len(hash_ids)} hash_ids for {input_length} tokens; {wanted} are wanted")
    return TraceRequest(
        _integer(fields, "timestamp", 0, _MOST_TIMESTAMP_MS),
        input_length,
        _integer(fields, "output_length", 0, _MOST_OUTPUT_TOKENS),
        tuple(hash_ids),
    )


def _integer(fields: dict[str, object], name: str, least: int, most: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not least <= value <= most:
        shown = _shown(value) if name in fields else "missing"
        raise TraceError(f"{name} is {shown}; an integer from {least} to {most} is wanted")
    return value


def _shown(value: object) -> str:
    """A value of the file for a message, cut."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
