"""Messages of the bulk connections between hosts: credit in one direction, chunks in the other.

A connection is a byte stream of messages, each a head followed by its payload. Head, 48 bytes, little-endian:

    0   4s   magic "RLBC"            12  u32  index of the chunk, 0 in credit
    4   u8   version, 2              16  u64  counter, from 1, per stream, direction and epoch
    5   u8   kind                    24  16s  stream id
    6   u16  flags                   40  u32  bytes of the payload
    8   u32  epoch of the key,       44  u32  reserved, 0
             0 without encryption

The payload of CREDIT consists of up to MAX_RANGES pairs `from u32, count u32` of chunks to send, that of CHUNK of the
bytes of the chunk; that of GONE is empty. In a stream with a secret the payloads of CREDIT and CHUNK are AES-128-GCM
ciphertext followed by the tag, and the head is the associated data (SPEC section 11). A receiver of an invalid head
closes the connection, because it cannot know where the next head begins.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from proto.errors import WireError
from proto.tensors import Buffer

MAGIC = b"RLBC"
VERSION = 2
CREDIT, CHUNK, GONE = 1, 2, 3
FLAG_RESET = 1
"""In CREDIT: discard requested chunks that were not sent yet."""
FLAG_CLOSE = 2
"""In CREDIT: the reader has finished with the stream."""
TAG_BYTES = 16
MIN_CHUNK_BYTES = 1 << 16
MAX_CHUNK_BYTES = 1 << 20
MAX_RANGES = 64

_HEAD = struct.Struct("<4sBBHIIQ16sII")
_RANGE = struct.Struct("<II")
HEAD_BYTES = _HEAD.size
MAX_CREDIT_BYTES = MAX_RANGES * _RANGE.size + TAG_BYTES
_MAX_PAYLOAD = {CREDIT: MAX_CREDIT_BYTES, CHUNK: MAX_CHUNK_BYTES + TAG_BYTES, GONE: 0}


class Head(NamedTuple):
    """A checked head."""

    kind: int
    flags: int
    epoch: int
    chunk: int
    counter: int
    stream_id: bytes
    nbytes: int


def pack_head(head: Head) -> bytes:
    """Return the 48 bytes of a head."""
    return _HEAD.pack(MAGIC, VERSION, *head, 0)


def unpack_head(data: Buffer) -> Head:
    """Check and unpack a head. Raises WireError."""
    if len(data) != HEAD_BYTES:
        raise WireError(f"bulk head of {len(data)} bytes: must be {HEAD_BYTES}")
    magic, version, kind, flags, epoch, index, counter, stream_id, nbytes, reserved = _HEAD.unpack(data)
    if magic != MAGIC or version != VERSION:
        raise WireError(f"bulk head {bytes(magic)!r} version {version}: must be {MAGIC!r} version {VERSION}")
    if kind not in _MAX_PAYLOAD or flags & ~(FLAG_RESET | FLAG_CLOSE) or (flags and kind != CREDIT) or reserved:
        raise WireError(f"bulk head of kind {kind} with flags {flags:#x}: not defined in version {VERSION}")
    if nbytes > _MAX_PAYLOAD[kind]:
        raise WireError(f"bulk payload of {nbytes} bytes, kind {kind}: limit is {_MAX_PAYLOAD[kind]}")
    return Head(kind, flags, epoch, index, counter, stream_id, nbytes)


def pack_ranges(ranges: Sequence[tuple[int, int]]) -> bytes:
    """Pack at most MAX_RANGES pairs `(from, count)`. Raises WireError for more."""
    if len(ranges) > MAX_RANGES:
        raise WireError(f"credit of {len(ranges)} ranges: limit is {MAX_RANGES}; send it in parts")
    return b"".join(_RANGE.pack(*each) for each in ranges)


def unpack_ranges(data: Buffer, chunks: int) -> list[tuple[int, int]]:
    """Unpack pairs `(from, count)`. Raises WireError for a range outside a stream of `chunks` chunks."""
    if len(data) % _RANGE.size or len(data) > MAX_RANGES * _RANGE.size:
        raise WireError(f"credit of {len(data)} bytes: pairs of 4-byte numbers, {MAX_RANGES} at most")
    ranges = list(_RANGE.iter_unpack(data))
    for first, count in ranges:
        if not count or first + count > chunks:
            raise WireError(f"credit for chunks {first}+{count}: the stream has {chunks}")
    return ranges
