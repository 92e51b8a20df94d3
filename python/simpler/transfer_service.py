"""Transfers in a chip's process: runs providers, passes on cancellations, confirms and resets.

Thread safety: all methods may be called from any thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from simpler.chip_log import log_errors
from simpler.control.transfers import (
    CancelToken,
    RangeLife,
    TransferBuffer,
    TransferRequest,
    TransferResult,
    confirmed_ids,
)
from simpler.transfer_wire import Verb, pack_answer, pack_ids, unpack_control, unpack_request

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from simpler.control.transfers import RegisteredProvider
    from simpler.shared_map import SharedMap

_MOST_EARLY = 256


class TransferService:
    """The providers of one chip."""

    def __init__(
        self,
        providers: Sequence[RegisteredProvider],
        *,
        device_id: int,
        worker_id: tuple[int, ...],
        shared: SharedMap,
    ) -> None:
        """Start with nothing in flight.

        Args:
            providers: In the order of their numbers.
            device_id: The device.
            worker_id: The chip's path.
            shared: All memory that transfers may be given.
        """
        self._providers = tuple(providers)
        self._device_id = device_id
        self._worker_id = worker_id
        self._shared = shared
        self._lock = threading.Lock()
        self._running: dict[int, CancelToken] = {}
        self._cancelled: deque[int] = deque(maxlen=_MOST_EARLY)  # before they began, or after they ended

    def run(self, provider_id: int, meta: bytes, payload: bytes) -> bytes:
        """One transfer, from begin to end; the packed answer. Raises what the provider raises."""
        number, wanted = unpack_request(meta)
        name, provider = self._find(provider_id)
        with self._token(number) as cancel, RangeLife(self._shared) as life:
            ranges = tuple(TransferBuffer(*one, life) for one in wanted)
            request = TransferRequest(number, payload, ranges, self._device_id, self._worker_id)
            result = provider(request, cancel)
        if not isinstance(result, TransferResult):
            raise TypeError(
                f"transfer provider {name!r} returned {type(result).__name__}: it must return a "
                "TransferResult"
            )
        return pack_answer(result.outcome, result.payload)

    def control(self, provider_id: int, payload: bytes) -> bytes:
        """Cancel, confirm or reset; the packed ids that no longer touch memory."""
        verb, ids = unpack_control(payload)
        if verb is Verb.CANCEL:
            with self._lock:
                for number in ids:
                    if number in self._running:
                        self._running[number].cancel()
                    else:
                        self._cancelled.append(number)
            return b""
        name, provider = self._find(provider_id)
        ask: Any = getattr(provider, verb.name.lower(), None)
        if not callable(ask):
            raise TypeError(f"transfer provider {name!r} has no {verb.name.lower()}()")
        if verb is Verb.RESET:
            ask()
            return b""
        return pack_ids(confirmed_ids(ask(list(ids)), ids))

    def close(self) -> None:
        """An orderly stop: tell the providers, newest first. Errors are logged."""
        for registered in reversed(self._providers):
            end = getattr(registered.provider, "close", None)
            if callable(end):
                log_errors(f"close() of transfer provider {registered.name!r}", end)

    def _find(self, provider_id: int) -> tuple[str, Any]:
        if not 0 <= provider_id < len(self._providers):
            raise ValueError(f"there is no transfer provider {provider_id}")
        found = self._providers[provider_id]
        return found.name, found.provider

    @contextlib.contextmanager
    def _token(self, number: int) -> Iterator[CancelToken]:
        token = CancelToken()
        with self._lock:
            self._running[number] = token
            if number in self._cancelled:
                token.cancel()
        try:
            yield token
        finally:
            with self._lock:
                del self._running[number]
