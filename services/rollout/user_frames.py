"""How the service and a process that runs users' code speak: msgpack structs, each behind its length, over a socket
pair. Must never carry anything that has to be executed to be read."""

from __future__ import annotations

import struct

import msgspec

LENGTH = struct.Struct("<I")
LIMIT_BYTES = 1 << 30


def frame(message: msgspec.Struct) -> bytes:
    """Raises TypeError, ValueError, OverflowError or RecursionError for what msgpack cannot carry, ValueError past
    LIMIT_BYTES."""
    body = msgspec.msgpack.encode(message)
    if len(body) > LIMIT_BYTES:
        raise ValueError(f"{len(body)} bytes in one message of users' code, at most {LIMIT_BYTES}")
    return LENGTH.pack(len(body)) + body


UNFIT = (TypeError, ValueError, OverflowError, RecursionError)
"""What `frame` raises."""
