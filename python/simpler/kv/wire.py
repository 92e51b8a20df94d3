"""The bytes between the runtime and the chips.

To a chip: a head and, for a step, ids and the pickle of the connector's metadata: the parent is trusted. From
a chip come only structs and text, checked here: what runs there is somebody else's engine.
"""

from __future__ import annotations

import enum
import json
import math
import pickle
import struct
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from simpler.kv.errors import KVReplyError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from simpler.kv.metadata import KVConnectorMetadata

EXTENSION = "simpler.kv"
"""The name of the extension, and of the transfer provider, that carry all connectors."""

HEAD = struct.Struct("<IIQQ")
"""verb, number of the engine in its parent process; of a step its number, and the last one whose reports
have all arrived."""

_COUNT = struct.Struct("<I")
_GROUP = struct.Struct("<QI")  # number of the step, bytes of its records
_RECORD = struct.Struct("<BIH")  # kind, block, bytes of the text that follows
_MARK = b"kv1\n"
MAX_ID_BYTES = 1000
_MAX_TEXT = 2000


class Verb(enum.IntEnum):
    """What a control call wants."""

    STEP = 0
    OPEN = 1
    REGISTER = 2
    UNREGISTER = 3
    HANDSHAKE = 4
    PEER = 5
    STATS = 6
    SHUTDOWN = 7


_STEP = int(Verb.STEP)


class Kind(enum.IntEnum):
    """What a record of a report says."""

    SENT = 0
    RECEIVED = 1
    BAD_BLOCK = 2
    SAVE_FAILED = 3


class Report(NamedTuple):
    """What one chip reports in a step.

    Attributes:
        step: Number of the last step in it.
        sent: Requests whose blocks have been sent.
        received: Requests whose loads have ended.
        bad: Reason by block.
        save_errors: Why saves failed.
    """

    step: int = 0
    sent: tuple[str, ...] = ()
    received: tuple[str, ...] = ()
    bad: Mapping[int, str] = {}
    save_errors: tuple[str, ...] = ()


NOTHING = Report()


def step_key(engine: int) -> bytes:
    """How every payload of a step of an engine begins."""
    return HEAD.pack(_STEP, engine, 0, 0)[:8]


def pack_step(
    engine: int, step: int, arrived: int, finished: Collection[str], metadata: KVConnectorMetadata | None
) -> bytes:
    """The payload of a step."""
    head = HEAD.pack(_STEP, engine, step, arrived)
    if metadata is None and not finished:
        return head
    ids = [request.encode() for request in finished]
    parts = [head, _COUNT.pack(len(ids))]
    for encoded in ids:
        parts += [_COUNT.pack(len(encoded)), encoded]
    if metadata is not None:
        parts.append(pickle.dumps(metadata, pickle.HIGHEST_PROTOCOL))
    return b"".join(parts)


def unpack_step(payload: bytes) -> tuple[list[str], KVConnectorMetadata | None]:
    """(requests that ended, metadata) of a step; in the chip."""
    at = HEAD.size
    if len(payload) == at:
        return [], None
    (count,) = _COUNT.unpack_from(payload, at)
    at += _COUNT.size
    finished = []
    for _ in range(count):
        (size,) = _COUNT.unpack_from(payload, at)
        at += _COUNT.size
        finished.append(payload[at : at + size].decode())
        at += size
    metadata: KVConnectorMetadata | None = pickle.loads(payload[at:]) if at < len(payload) else None
    return finished, metadata


def pack_records(
    sent: Collection[str],
    received: Collection[str],
    bad: Collection[int] | Mapping[int, str],
    save_errors: Iterable[str] = (),
) -> bytes:
    """The records of a report, from what a connector's hooks returned; in the chip.

    Raises:
        TypeError, ValueError: They returned something else.
    """
    reasons = bad if isinstance(bad, Mapping) else dict.fromkeys(bad, "")
    records = [
        *[_record(Kind.SENT, 0, request, MAX_ID_BYTES) for request in _ids("get_finished()", sent)],
        *[_record(Kind.BAD_BLOCK, block, reason) for block, reason in reasons.items()],
        *[_record(Kind.RECEIVED, 0, request, MAX_ID_BYTES) for request in _ids("get_finished()", received)],
        *[_record(Kind.SAVE_FAILED, 0, text) for text in save_errors],
    ]
    return b"".join(records)


def pack_report(groups: Iterable[tuple[int, bytes]]) -> bytes:
    """A report of records packed before, by the step that they are from."""
    return _MARK + b"".join(_GROUP.pack(step, len(records)) + records for step, records in groups)


def unpack_report(reply: bytes, num_blocks: int, arrived: int) -> Report:
    """What a chip sent.

    Args:
        reply: The bytes.
        num_blocks: Blocks that the engine has.
        arrived: The last step of which this chip's report has arrived: what is not newer is left out.

    Raises:
        KVReplyError: They do not decode.
    """
    if not reply:
        return NOTHING
    if not reply.startswith(_MARK):
        raise KVReplyError(f"a chip's report of {len(reply)} bytes does not begin as one")
    texts: dict[Kind, list[str]] = {kind: [] for kind in Kind}
    bad: dict[int, str] = {}
    step, at = arrived, len(_MARK)
    while at < len(reply):
        if at + _GROUP.size > len(reply):
            raise KVReplyError("a chip's report ends in the middle")
        number, size = _GROUP.unpack_from(reply, at)
        at += _GROUP.size + size
        if at > len(reply):
            raise KVReplyError("a chip's report ends in the middle of its records")
        if number > arrived:
            _unpack_records(reply[at - size : at], num_blocks, texts, bad)
            step = max(step, number)
    sent, received, failed = texts[Kind.SENT], texts[Kind.RECEIVED], texts[Kind.SAVE_FAILED]
    return Report(step, tuple(sent), tuple(received), bad, tuple(failed))


def _unpack_records(
    records: bytes, num_blocks: int, texts: dict[Kind, list[str]], bad: dict[int, str]
) -> None:
    at = 0
    while at < len(records):
        if at + _RECORD.size > len(records):
            raise KVReplyError("a chip's report ends in the middle of a record")
        kind, block, size = _RECORD.unpack_from(records, at)
        at += _RECORD.size
        if kind >= len(Kind) or at + size > len(records) or (kind == Kind.BAD_BLOCK and block >= num_blocks):
            raise KVReplyError(f"a chip's report has a record of kind {kind}, block {block}, {size} bytes")
        text = records[at : at + size].decode("utf-8", "backslashreplace")
        at += size
        if kind == Kind.BAD_BLOCK:
            bad[block] = text
        else:
            texts[Kind(kind)].append(text)


def unpack_stats(reply: bytes) -> dict[str, float]:
    """A chip's counters.

    Raises:
        KVReplyError: They do not decode.
    """
    try:
        values: Any = json.loads(reply)
        stats = {str(name): float(value) for name, value in values.items()}
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise KVReplyError(f"a chip's counters do not decode: {error}") from error
    if not all(math.isfinite(value) for value in stats.values()):
        raise KVReplyError("a chip's counters are not all finite")
    return stats


def pack_move(engine: int, request_id: str, num_sources: int, payload: bytes) -> bytes:
    """The payload of a managed transfer."""
    return pickle.dumps((engine, request_id, num_sources, bytes(payload)), pickle.HIGHEST_PROTOCOL)


def unpack_move(data: bytes) -> tuple[int, str, int, bytes]:
    """The arguments of `pack_move`; in the chip."""
    engine, request_id, num_sources, payload = pickle.loads(data)
    return engine, request_id, num_sources, payload


def pack_order(verb: Verb, engine: int, content: Any) -> bytes:
    """The payload of anything but a step: JSON after the head."""
    return HEAD.pack(verb, engine, 0, 0) + json.dumps(content).encode()


def unpack_order(payload: bytes) -> Any:
    """The content of `pack_order`; in the chip."""
    return json.loads(payload[HEAD.size :])


def _record(kind: Kind, block: int, text: str, most: int = 0) -> bytes:
    data = text.encode("utf-8", "backslashreplace")
    if most and len(data) > most:
        raise ValueError(f"a request's id has at most {most} bytes: {len(data)}")
    data = data[:_MAX_TEXT]
    return _RECORD.pack(kind, block, len(data)) + data


def _ids(what: str, ids: object) -> Collection[str]:
    if isinstance(ids, str) or not isinstance(ids, Collection):
        raise TypeError(f"{what} returned {type(ids).__name__}: it must return two collections of ids")
    if not all(isinstance(request, str) for request in ids):
        raise TypeError(f"{what} returned ids that are not str: {ids!r}")
    return ids
