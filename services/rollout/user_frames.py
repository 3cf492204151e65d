"""Framing between the service and a process that runs users' code: msgpack structs behind their lengths, over sockets.

Messages contain only data, so that reading them executes nothing.
"""

from __future__ import annotations

import struct

import msgspec

LENGTH = struct.Struct("<I")
TO_PROCESS_BYTES = 1 << 30
TO_SERVICE_BYTES = 16 << 20
"""Maximum size of a message. Decoded, it may take sixty times as much memory of the service, which hosts the engine."""


def frame(message: msgspec.Struct, limit_bytes: int) -> bytes:
    """Return `message` behind its length. `limit_bytes` is the limit of its direction.

    Raises TypeError, ValueError, OverflowError or RecursionError for what msgpack cannot encode, and ValueError above
    the limit.
    """
    body = msgspec.msgpack.encode(message)
    if len(body) > limit_bytes:
        raise ValueError(f"{len(body)} bytes in one message, at most {limit_bytes}")
    return LENGTH.pack(len(body)) + body


UNFIT = (TypeError, ValueError, OverflowError, RecursionError)
"""The exceptions that `frame` raises."""
