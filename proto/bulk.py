"""Messages of the bulk connections between hosts: a reader requests ranges, and the store sends their bytes.

A connection is a byte stream of messages. Each begins with a head of 24 bytes, little-endian:

    0   4s   magic "RLBC"            8   u32  stream, as `StreamOpened` numbers it
    4   u8   version, 3              12  u32  bytes of the range
    5   u8   kind                    16  u64  offset of the range in the stream
    6   u16  reserved, 0

HELLO (reader to store) is followed by the 16-byte line id, and DATA (store to reader) by the bytes of its range. READ
and CLOSE (reader to store) consist of the head alone. On a sealed line, each message ends with a 16-byte tag, and the
range in DATA is AES-128-GCM ciphertext (SPEC section 11). A receiver closes the connection at the first message that
breaks a rule, because it cannot know where the next message begins.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from proto.errors import WireError
from proto.tensors import Buffer

MAGIC = b"RLBC"
VERSION = 3
LINE_ID_BYTES = 16
TAG_BYTES = 16
MAX_RANGE_BYTES = 1 << 20

_HEAD = struct.Struct("<4sBBHIIQ")
HEAD_BYTES = _HEAD.size


class Kind(IntEnum):
    """The kinds of bulk messages."""

    HELLO = 1
    READ = 2
    CLOSE = 3
    DATA = 4


class Head(NamedTuple):
    """A checked head. `nbytes` and `offset` are 0 unless the message has a range; `stream` is 0 only in HELLO."""

    kind: Kind
    stream: int = 0
    nbytes: int = 0
    offset: int = 0


def pack_head(head: Head) -> bytes:
    """Return `head` as 24 bytes."""
    return _HEAD.pack(MAGIC, VERSION, head.kind, 0, head.stream, head.nbytes, head.offset)


def unpack_head(data: Buffer) -> Head:
    """Return the head in `data`, which must be exactly 24 bytes. Raises WireError."""
    if len(data) != HEAD_BYTES:
        raise WireError(f"bulk head of {len(data)} bytes: must be {HEAD_BYTES}")
    magic, version, number, reserved, stream, nbytes, offset = _HEAD.unpack(data)
    if magic != MAGIC or version != VERSION:
        raise WireError(f"bulk head {bytes(magic)!r} version {version}: must be {MAGIC!r} version {VERSION}")
    if number not in Kind.__members__.values() or reserved:
        raise WireError(f"bulk head of kind {number}, reserved {reserved}: not defined in version {VERSION}")
    kind = Kind(number)
    if kind in (Kind.READ, Kind.DATA):
        if not 0 < nbytes <= MAX_RANGE_BYTES:
            raise WireError(f"bulk range of {nbytes} bytes: 1..{MAX_RANGE_BYTES} are allowed")
    elif nbytes or offset:
        raise WireError(f"bulk {kind.name.lower()} with a range of {nbytes} bytes at {offset}: must have no range")
    if (stream == 0) != (kind is Kind.HELLO):
        raise WireError(f"bulk {kind.name.lower()} with stream {stream}: hello must have stream 0, all others must not")
    return Head(kind, stream, nbytes, offset)
