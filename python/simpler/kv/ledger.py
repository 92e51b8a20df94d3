"""The books of an engine's requests: what is loading, what is held, what has ended.

Blocks of a request that has ended stay held while a chip or a peer may still touch them; they are given back
when every chip has certified that access has stopped, or is gone.

Thread safety: none; the runtime locks.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simpler import WorkerTimeoutError
from simpler.kv.errors import KVLoadError
from simpler.kv.metadata import KVConnectorOutput, KVRecompute, KVStepOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from simpler.kv.config import KVLoadFailurePolicy
    from simpler.kv.metadata import KVRequest
    from simpler.kv.wire import Report


COUNTERS = ("duplicate", "unknown", "late", "save_errors", "unconfirmed", "resets")
"""Completions that were ignored, saves and transfers that went wrong, engines torn down for it."""


class KVRequestState(enum.Enum):
    """Where a request stands, as far as its KV is concerned."""

    PENDING = "pending"
    """Its load begins with the next step."""
    LOADING = "loading"
    READY = "ready"
    """Its blocks are there; or it has none to load."""
    ENDED = "ended"
    """Finished, aborted or failed; its blocks may still be held."""


@dataclass(eq=False)
class Record:
    """One request, or blocks of it that a peer may still write."""

    request: KVRequest
    num_computed: int = 0
    is_async: bool = False
    blocks: tuple[int, ...] = ()
    wanted: tuple[int, ...] = ()  # blocks that are loaded
    state: KVRequestState = KVRequestState.READY
    deadline: float = 0.0
    error: Exception | None = None
    bad: dict[int, str] = field(default_factory=dict)  # reasons by block
    cause: Exception | None = None  # of the first bad block, when it was an exception
    loading: set[int] = field(default_factory=set)  # ranks that may still write
    sending: set[int] = field(default_factory=set)  # ranks that may still read
    stuck: set[int] = field(default_factory=set)  # of `loading`: no longer waited for
    moves: Counter[int] = field(default_factory=Counter)  # transfers that fill blocks and are open, by rank
    saves: int = 0  # transfers that read blocks and are open
    is_untold: bool = False  # its load has begun, and its end was not reported to the connector
    gone: bool = False

    @property
    def held(self) -> bool:
        """Whether anything may still touch the blocks."""
        return bool(self.loading or self.sending or self.saves)


class RequestLedger:
    """All requests of one engine."""

    def __init__(
        self,
        paths: Sequence[tuple[int, ...]],
        block_size: int,
        policy: KVLoadFailurePolicy,
        timeout_s: float,
        ended: Callable[[Record], bool],
    ) -> None:
        """Start empty.

        Args:
            paths: Of the chips, by rank.
            block_size: Tokens in a block.
            policy: What becomes of a request whose blocks were not loaded.
            timeout_s: How long a load may take.
            ended: Told of each request that fails; whether the connector gives its blocks back later.
        """
        self.records: dict[str, Record] = {}
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._paths = tuple(paths)
        self._live = set(range(len(paths)))
        self._block_size = block_size
        self._policy = policy
        self._timeout_s = timeout_s
        self._ended = ended
        self._held: set[Record] = set()  # that have ended
        self._loading: set[Record] = set()
        self._loaded: list[str] = []
        self._recompute: dict[str, KVRecompute] = {}
        self._failed: dict[str, Exception] = {}
        self._freed: list[tuple[str, tuple[int, ...]]] = []
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._invalid: set[int] = set()

    @property
    def quiet(self) -> bool:
        """Whether a step in which no chip reports anything changes nothing."""
        return not self._loading and not self._held and not self._failed and not self._freed

    def note(self, request: KVRequest, num_computed: int, *, is_async: bool) -> None:
        """A request was asked about."""
        record = self.records.setdefault(request.request_id, Record(request))
        if record.state is KVRequestState.READY:
            record.num_computed, record.is_async = num_computed, is_async

    def allocate(self, request: KVRequest, blocks: Sequence[int], num_external: int) -> None:
        """A request has blocks, of which some are to be loaded.

        Raises:
            ValueError: It loads already, has ended, or has too few blocks.
        """
        record = self.records.setdefault(request.request_id, Record(request))
        if record.state is not KVRequestState.READY:
            raise ValueError(f"request {request.request_id!r} is {record.state.value}: it can get no blocks")
        first = record.num_computed // self._block_size
        last = -(-(record.num_computed + num_external) // self._block_size)
        if num_external < 0 or (num_external and last > len(blocks)):
            raise ValueError(
                f"request {request.request_id!r} has {len(blocks)} blocks of {self._block_size} tokens: "
                f"too few for {record.num_computed} computed and {num_external} external tokens"
            )
        record.blocks = tuple(blocks)
        if num_external:
            record.wanted = record.blocks[first:last]
            record.state = KVRequestState.PENDING
            self._loading.add(record)

    def start(self, now: float) -> list[Record]:
        """The loads that begin with a step, now under way on every chip that lives."""
        begun = [record for record in self._loading if record.state is KVRequestState.PENDING]
        for record in begun:
            record.state = KVRequestState.LOADING
            record.loading = set(self._live)
            record.deadline = now + self._timeout_s
            record.is_untold = True
        return begun

    def report(self, rank: int, report: Report) -> None:
        """A chip has answered a step. Its synchronous loads have ended."""
        for block, reason in report.bad.items():
            self._mark_bad(rank, block, reason)
        for request_id in report.sent:
            self._take_sent(rank, request_id)
        for request_id in report.received:
            self._take_received(rank, request_id)
        for record in [*self._loading, *self._held]:
            if not record.is_async and not record.moves[rank]:
                self.load_ended(record, rank)
        self.counters["save_errors"] += len(report.save_errors)

    def step_failed(self, rank: int, begun: Iterable[Record], error: Exception) -> None:
        """A chip has not done what a step told it."""
        never_began = isinstance(error, WorkerTimeoutError) and not error.started
        certified = never_began or not isinstance(error, TimeoutError)
        for record in begun:
            if rank in record.loading and not record.moves[rank]:
                self._spoil(record, rank, record.wanted, str(error), error)
                record.stuck.add(rank)
                if never_began or (certified and not record.is_async):
                    record.loading.discard(rank)
                self._settle(record)

    def load_ended(self, record: Record, rank: int) -> None:
        """A chip no longer writes blocks of a request."""
        if rank in record.loading:
            record.loading.discard(rank)
            self._settle(record)

    def load_open(self, record: Record, rank: int, blocks: Iterable[int], error: Exception) -> None:
        """Nobody knows whether a chip still writes blocks of a request: it is not waited for."""
        self._spoil(record, rank, blocks, str(error), error)
        record.stuck.add(rank)
        self._settle(record)

    def load_bad(self, record: Record, rank: int, blocks: Iterable[int], error: Exception) -> None:
        """Blocks were not loaded; the chip's access to them goes on or has ended as before."""
        self._spoil(record, rank, blocks, str(error), error)

    def save_ended(self, record: Record) -> None:
        """A transfer that read blocks has ended."""
        record.saves -= 1
        self._settle(record)

    def rank_lost(self, rank: int, error: Exception) -> None:
        """A chip has died with its memory: every request fails, and it holds nothing any more."""
        self._live.discard(rank)
        for record in [*self.records.values(), *self._held]:
            record.loading.discard(rank)
            record.sending.discard(rank)
            if record.state is not KVRequestState.ENDED:
                self._fail(record, error)
            self._settle(record)

    def fail_pending(self, error: Exception) -> None:
        """The loads that were to begin do not."""
        for record in [r for r in self._loading if r.state is KVRequestState.PENDING]:
            self.fail(record, error)

    def fail(self, record: Record, error: Exception) -> None:
        """A request ends with an error."""
        if record.state is not KVRequestState.ENDED:
            self._fail(record, error)
            self._settle(record)

    def finish(self, record: Record, *, sends: bool) -> bool:
        """A request has ended in the scheduler; whether its blocks are given back later."""
        self._end(record, sends=sends)
        if record.held:
            return True
        self._forget(record)
        return False

    def expire(self, now: float) -> list[Record]:
        """Give up the loads whose time is over; which they are."""
        late = [r for r in self._loading if r.state is KVRequestState.LOADING and r.deadline < now]
        for record in late:
            waiting = sorted(record.loading - record.stuck)
            where = ", ".join(".".join(map(str, self._paths[rank])) for rank in waiting)
            error = WorkerTimeoutError(
                f"the KV load of request {record.request.request_id!r} has not ended on worker {where} "
                f"within {self._timeout_s:g} s",
                path=self._paths[waiting[0]],
                started=True,
                waited_for=f"the KV load of request {record.request.request_id!r}",
                timeout_s=self._timeout_s,
            )
            for rank in waiting:
                self._spoil(record, rank, record.wanted, str(error), error)
                record.stuck.add(rank)
            self._settle(record)
        return late

    def held(self) -> dict[str, tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
        """(blocks, chips that may still touch them) of requests that have ended."""
        books: dict[str, tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]] = {}
        for record in self._held:
            ranks = sorted(record.loading | record.sending)
            blocks, _ = books.get(record.request.request_id, ((), ()))
            books[record.request.request_id] = (
                blocks + record.blocks,
                tuple(self._paths[rank] for rank in ranks),
            )
        return books

    def take(
        self, errors: Mapping[tuple[int, ...], Exception]
    ) -> tuple[KVStepOutput, KVConnectorOutput | None]:
        """What has happened since the last call, for the scheduler and for its connector."""
        output = KVStepOutput(
            tuple(self._loaded), self._recompute, self._failed, tuple(self._freed), dict(errors)
        )
        told = None
        if self._sent or self._received or self._invalid:
            told = KVConnectorOutput(
                frozenset(self._sent), frozenset(self._received), frozenset(self._invalid)
            )
        self._loaded, self._freed, self._recompute, self._failed = [], [], {}, {}
        self._sent, self._received, self._invalid = set(), set(), set()
        return output, told

    def _mark_bad(self, rank: int, block: int, reason: str) -> None:
        found = False
        for record in self._loading:
            if rank in record.loading and block in record.wanted:
                found = True
                record.bad.setdefault(block, f"worker {_text(self._paths[rank])}: {reason or 'not loaded'}")
        if not found:
            self.counters["unknown"] += 1

    def _spoil(self, record: Record, rank: int, blocks: Iterable[int], reason: str, error: Exception) -> None:
        if record.state is not KVRequestState.LOADING or rank not in record.loading:
            return
        for block in blocks:
            record.bad.setdefault(block, reason)
        record.cause = record.cause or error

    def _take_sent(self, rank: int, request_id: str) -> None:
        record = self.records.get(request_id)
        if record is None or rank not in record.sending:
            self.counters["unknown" if record is None else "duplicate"] += 1
            return
        record.sending.discard(rank)
        if not record.sending:
            self._sent.add(request_id)
        self._settle(record)

    def _take_received(self, rank: int, request_id: str) -> None:
        known = self.records.get(request_id)
        ghosts = [record for record in self._held if record.request.request_id == request_id]
        for record in [*([known] if known is not None else []), *ghosts]:
            if rank in record.loading and not record.moves[rank]:
                self.counters["late"] += rank in record.stuck
                self.load_ended(record, rank)
                return
        self.counters["unknown" if known is None and not ghosts else "duplicate"] += 1

    def _settle(self, record: Record) -> None:
        """See whether a load, or the life of a request, is over."""
        if record.state is KVRequestState.LOADING and record.loading <= record.stuck:
            self._end_load(record)
        if record.state is KVRequestState.ENDED and not record.held and not record.gone:
            self._freed.append((record.request.request_id, record.blocks))
            if record.is_untold:
                self._received.add(record.request.request_id)
            self._forget(record)

    def _end_load(self, record: Record) -> None:
        request_id = record.request.request_id
        self._loading.discard(record)
        self._received.add(request_id)
        record.is_untold = False
        if not record.bad:
            record.state = KVRequestState.READY
            self._loaded.append(request_id)
            return
        bad = tuple(block for block in record.wanted if block in record.bad)
        self._invalid.update(bad)
        error = KVLoadError(request_id, bad, record.bad[bad[0]])
        error.__cause__ = record.cause
        if self._policy == "fail":
            self._fail(record, error)
            return
        computed = record.blocks.index(bad[0]) * self._block_size
        self._recompute[request_id] = KVRecompute(computed, bad if record.loading else (), error)
        if not record.loading:
            record.state, record.num_computed, record.bad = KVRequestState.READY, computed, {}
            return
        # The record stays with the blocks that may still be written; the request goes on without them.
        good = tuple(block for block in record.blocks if block not in record.bad)
        self.records[request_id] = Record(record.request, computed, record.is_async, good)
        record.blocks, record.state = bad, KVRequestState.ENDED
        self._held.add(record)

    def _fail(self, record: Record, error: Exception) -> None:
        request_id = record.request.request_id
        record.error = error
        self._failed[request_id] = error
        self._recompute.pop(request_id, None)  # it may have got so far in this very step
        if request_id in self._loaded:
            self._loaded.remove(request_id)
        self._end(record, sends=self._ended(record))

    def _end(self, record: Record, *, sends: bool) -> None:
        self._loading.discard(record)
        record.state = KVRequestState.ENDED
        self._held.add(record)
        if sends:
            record.sending = set(self._live)

    def _forget(self, record: Record) -> None:
        record.gone = True
        self._held.discard(record)
        if self.records.get(record.request.request_id) is record:
            del self.records[record.request.request_id]


def _text(path: tuple[int, ...]) -> str:
    return ".".join(map(str, path))
