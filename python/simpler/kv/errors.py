"""Errors of KV connectors."""

from __future__ import annotations

from simpler import SimplerError


class KVLoadError(SimplerError):
    """Blocks of a request could not be loaded; none of them counts as cached.

    Attributes:
        request_id: The request.
        block_ids: The blocks that are bad, in the order of the request's tokens.
        reason: What the chip or the engine said.
    """

    request_id: str
    block_ids: tuple[int, ...]
    reason: str

    def __init__(self, request_id: str, block_ids: tuple[int, ...], reason: str) -> None:
        super().__init__(f"request {request_id!r}: {len(block_ids)} KV blocks were not loaded: {reason}")
        self.request_id = request_id
        self.block_ids = block_ids
        self.reason = reason


class KVTransferError(SimplerError):
    """Raised by `KVConnector.run_transfer`: the bytes did not arrive, and nothing touches the ranges now.

    Any other exception leaves open whether the engine still touches them, so that they stay pinned.
    """


class KVReplyError(SimplerError, ValueError):
    """What a chip sent back does not decode."""
