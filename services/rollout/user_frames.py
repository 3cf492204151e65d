"""How the service and a process that runs users' code speak: msgpack structs, each behind its length, over a socket
pair. Must never carry anything that has to be executed to be read."""

from __future__ import annotations

import struct

import msgspec

LENGTH = struct.Struct("<I")
TO_PROCESS_BYTES = 1 << 30
TO_SERVICE_BYTES = 16 << 20
"""As objects, a message may take sixty times as much of the memory of the service, where the engine lives."""


def frame(message: msgspec.Struct, limit_bytes: int) -> bytes:
    """Raises TypeError, ValueError, OverflowError or RecursionError for what msgpack cannot carry, ValueError past
    `limit_bytes`, the one of its direction."""
    body = msgspec.msgpack.encode(message)
    if len(body) > limit_bytes:
        raise ValueError(f"{len(body)} bytes in one message, at most {limit_bytes}")
    return LENGTH.pack(len(body)) + body


UNFIT = (TypeError, ValueError, OverflowError, RecursionError)
"""What `frame` raises."""
