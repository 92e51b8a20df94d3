"""The payloads of the memory control codes, as both ends pack them."""

from __future__ import annotations

import struct

WORD = struct.Struct("<Q")
"""One number: a reply's address or count."""

MALLOC = struct.Struct("<QQ")
"""nbytes, ticket. The ticket names the allocation when its caller never learns the address."""

FREE = struct.Struct("<QQQ")
"""address (0: the allocation of the ticket), ticket, generation of the process that made it."""

RANGE = struct.Struct("<QQ")
"""address, nbytes."""

PEER = struct.Struct("<QQQ")
"""destination, source, nbytes."""
