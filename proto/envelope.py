"""The fixed 64-byte little-endian header of every message. It can be checked without the rest of the message."""

from __future__ import annotations

import struct

import msgspec
import xxhash

from proto.errors import WireError
from proto.limits import Limits

MAGIC = b"RLBS"
MAJOR = 1
MINOR = 7
SIZE = 64

FLAG_REPLY = 1
FLAG_ONE_WAY = 2
FLAG_TABLE = 4
KNOWN_FLAGS = FLAG_REPLY | FLAG_ONE_WAY | FLAG_TABLE

_LAYOUT = struct.Struct("<4sBBHHHIQQIIIIQ")
_CHECK = struct.Struct("<Q")
_REMAINING = struct.Struct("<I")
_REMAINING_OFFSET = 12


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the header (SPEC section 2). `remaining_ms` is the time left until the caller's deadline."""

    type: int
    request_id: int
    incarnation: int
    flags: int = 0
    remaining_ms: int = 0
    body_bytes: int = 0
    frame_count: int = 0
    table_bytes: int = 0
    total_bytes: int = 0
    minor: int = MINOR

    def pack(self) -> bytes:
        """Return the header as 64 bytes. Raises WireError if a field does not fit its width."""
        call = (self.type, self.flags, 0, self.remaining_ms, self.request_id, self.incarnation)
        sizes = (self.body_bytes, self.frame_count, self.table_bytes, 0, self.total_bytes)
        try:
            head = _LAYOUT.pack(MAGIC, MAJOR, self.minor, *call, *sizes)
        except struct.error as error:
            raise WireError(f"envelope {self}: a field does not fit ({error})") from None
        return head + _CHECK.pack(xxhash.xxh3_64_intdigest(head))


def milliseconds(remaining_s: float) -> int:
    """Return a remaining time as the header holds it."""
    return min(max(int(remaining_s * 1000), 0), 0xFFFFFFFF)


def with_remaining(header: bytes | memoryview, remaining_s: float) -> bytes:
    """Return a packed header with a new remaining time, for sending a request again, and a new checksum."""
    head = bytearray(header[: _LAYOUT.size])
    _REMAINING.pack_into(head, _REMAINING_OFFSET, max(milliseconds(remaining_s), 1))
    return bytes(head) + _CHECK.pack(xxhash.xxh3_64_intdigest(head))


def unpack(data: bytes | memoryview, limits: Limits) -> Envelope:
    """Parse and check one header. Raises WireError only.

    The major version is checked before the checksum, so that the error for a newer peer names its version.
    """
    if len(data) != SIZE:
        raise WireError(f"envelope of {len(data)} bytes: must be {SIZE}")
    magic, major, minor, kind, flags, reserved, remaining_ms, *rest = _LAYOUT.unpack_from(data)
    request_id, incarnation, body_bytes, frame_count, table_bytes, reserved_b, total_bytes = rest
    if magic != MAGIC:
        raise WireError(f"envelope magic {bytes(magic)!r}: must be {MAGIC!r}")
    if major != MAJOR:
        raise WireError(
            f"protocol version {major}.{minor}: this side speaks {MAJOR}.{MINOR}; use the same release on both sides"
        )
    (checksum,) = _CHECK.unpack_from(data, _LAYOUT.size)
    if checksum != xxhash.xxh3_64_intdigest(data[: _LAYOUT.size]):
        raise WireError("envelope checksum does not match its bytes")
    if minor == MINOR and (flags & ~KNOWN_FLAGS or reserved or reserved_b):
        raise WireError(f"envelope flags {flags:#x}: only {KNOWN_FLAGS:#x} are defined in {MAJOR}.{MINOR}")
    if body_bytes > limits.body_bytes:
        raise WireError(f"body of {body_bytes} bytes: limit is {limits.body_bytes}")
    if frame_count > limits.frames:
        raise WireError(f"{frame_count} frames: limit is {limits.frames}")
    if total_bytes > limits.total_bytes or body_bytes + table_bytes > total_bytes:
        raise WireError(f"total of {total_bytes} bytes: limit is {limits.total_bytes}, and body+table must fit in it")
    return Envelope(
        type=kind,
        request_id=request_id,
        incarnation=incarnation,
        flags=flags,
        remaining_ms=remaining_ms,
        body_bytes=body_bytes,
        frame_count=frame_count,
        table_bytes=table_bytes,
        total_bytes=total_bytes,
        minor=minor,
    )
