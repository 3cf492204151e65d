"""Encodes messages into frames and decodes them: envelope, body, tensor table, raw frames. Raises WireError only.

Small numeric arrays inside a body have the msgpack-numpy format. The msgpack-numpy decoder unpickles kind `O`, and for
type `|O` it builds object arrays over the sender's bytes, so it is called only after type, shape and size have been
checked against closed lists.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import msgpack_numpy
import msgspec
import numpy as np

from proto import envelope, tensors
from proto.envelope import Envelope
from proto.errors import WireError
from proto.limits import CONTROL, MAX_INLINE_BYTES, MAX_NDIM, Limits
from proto.registry import Message, by_type
from proto.tensors import Array, Buffer

INLINE_TYPES = frozenset(["|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8"])
_FIELDS = frozenset([b"nd", b"type", b"kind", b"shape", b"data"])


class Decoded(msgspec.Struct, frozen=True):
    """A message that passed every check: envelope, typed body, and tensors in table order (read-only views)."""

    envelope: Envelope
    body: Message
    tensors: list[Array]


def to_map(array: Array) -> dict[bytes, Any]:
    """Return the msgpack-numpy map of `array`. Raises WireError if it exceeds 64 KiB or has a dtype that is not in
    `INLINE_TYPES`.
    """
    wire = np.asarray(array)
    if wire.dtype.str not in INLINE_TYPES:
        raise WireError(f"inline array of dtype {wire.dtype}: use one of {', '.join(sorted(INLINE_TYPES))}")
    if max(wire.nbytes, math.prod(dim or 1 for dim in wire.shape)) > MAX_INLINE_BYTES or wire.ndim > MAX_NDIM:
        raise WireError(
            f"inline array of shape {list(wire.shape)}, {wire.nbytes} bytes: limits are {MAX_INLINE_BYTES} bytes and "
            f"{MAX_NDIM} dimensions; put it as a shard"
        )
    # For np.generic msgpack-numpy takes another branch (nd: False), so pass an array, even if it is 0-d.
    encoded: dict[bytes, Any] = msgpack_numpy.encode(np.ascontiguousarray(wire).reshape(wire.shape))
    encoded[b"data"] = bytes(encoded[b"data"])
    return encoded


def from_map(value: Any) -> Array:
    """Check a decoded map and return its array, which owns its memory. Raises WireError only."""
    if not isinstance(value, dict) or set(value) != _FIELDS or value[b"nd"] is not True:
        raise WireError("inline array: not a msgpack-numpy array map")
    kind, shape, data = value[b"type"], value[b"shape"], value[b"data"]
    if not isinstance(kind, str) or kind not in INLINE_TYPES or value[b"kind"] not in (b"", ""):
        raise WireError(f"inline array: type {str(kind)[:40]!r} of kind {str(value[b'kind'])[:40]!r} is not admitted")
    if not isinstance(data, bytes) or len(data) > MAX_INLINE_BYTES:
        raise WireError(f"inline array: data must be at most {MAX_INLINE_BYTES} bytes")
    if not isinstance(shape, list | tuple) or len(shape) > MAX_NDIM:
        raise WireError(f"inline array: shape must have at most {MAX_NDIM} dimensions")
    for dim in shape:
        if type(dim) is not int or dim < 0:
            raise WireError(f"inline array: dimension {str(dim)[:40]} is not a size")
    if math.prod(dim or 1 for dim in shape) > MAX_INLINE_BYTES:
        raise WireError(f"inline array: shape {list(shape)}: limit is {MAX_INLINE_BYTES} bytes")
    if math.prod(shape) * np.dtype(kind).itemsize != len(data):
        raise WireError(f"inline array: shape {list(shape)} of {kind} is not {len(data)} bytes")
    array: Array = msgpack_numpy.decode({**value, b"shape": tuple(shape)})
    return np.array(array)


def _enc_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return to_map(value)
    if isinstance(value, np.floating):
        return float(value)
    if isinstance(value, np.integer):
        return int(value)
    raise WireError(f"a body cannot hold a {type(value).__name__}: use numbers, strings, bytes, lists, maps or arrays")


def _dec_hook(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        return from_map(value)
    raise WireError(f"unknown field type {kind}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_enc_hook)


@functools.cache
def _decoder(cls: type[Message]) -> msgspec.msgpack.Decoder[Message]:
    return msgspec.msgpack.Decoder(cls, dec_hook=_dec_hook)


def encode_body(body: Message) -> bytes:
    """Encode a body with msgpack. Raises WireError if a value cannot be encoded."""
    try:
        return _ENCODER.encode(body)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"{type(body).__name__}: {error}") from None


def decode_body(kind: int, data: Buffer) -> Message:
    """Decode the body of message type `kind`. Raises WireError.

    msgspec allocates memory for the bytes that are present, not for announced sizes, and the recursion limit bounds
    nesting.
    """
    cls = by_type(kind)
    try:
        return _decoder(cls).decode(data)
    except WireError:
        raise
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise WireError(f"{cls.__name__}: {str(error)[:200]}") from None


def encode(
    body: Message,
    *,
    request_id: int,
    incarnation: int,
    flags: int = 0,
    remaining_s: float = 0.0,
    arrays: Sequence[Array] = (),
    limits: Limits = CONTROL,
) -> list[Buffer]:
    """Return the frames of one message, without routing frames.

    Raises WireError if anything exceeds `limits`, so that an oversize message is not sent.
    """
    packed = encode_body(body)
    frames: list[Buffer] = []
    table = b""
    raw: list[memoryview] = []
    if arrays:
        table, raw = tensors.encode(arrays, limits)
        flags |= envelope.FLAG_TABLE
    total = len(packed) + len(table) + sum(len(frame) for frame in raw)
    if len(packed) > limits.body_bytes or total > limits.total_bytes:
        raise WireError(
            f"{type(body).__name__} of {len(packed)} + {total - len(packed)} bytes: limits are "
            f"{limits.body_bytes} for the body, {limits.total_bytes} in total; send it in parts or as shards"
        )
    head = Envelope(
        type=type(body).TYPE,
        request_id=request_id,
        incarnation=incarnation,
        flags=flags,
        remaining_ms=envelope.milliseconds(remaining_s),
        body_bytes=len(packed),
        frame_count=len(raw),
        table_bytes=len(table),
        total_bytes=total,
    )
    frames.append(head.pack())
    frames.append(packed)
    if arrays:
        frames.append(table)
        frames.extend(raw)
    return frames


def decode(frames: Sequence[Buffer], limits: Limits = CONTROL) -> Decoded:
    """Check and parse the frames of one message (routing frames removed). Raises WireError only."""
    return decode_checked(check(frames, limits), frames, limits)


def check(frames: Sequence[Buffer], limits: Limits = CONTROL) -> Envelope:
    """Check a message's frames against its envelope without parsing, and return the envelope. Raises WireError only."""
    if len(frames) < 2:
        raise WireError(f"message of {len(frames)} frames: must have an envelope and a body")
    head = envelope.unpack(frames[0], limits)
    body, table, rest = _parts(head, frames)
    raw_bytes = 0
    for frame in rest:
        if len(frame) > limits.frame_bytes:
            raise WireError(f"frame of {len(frame)} bytes: limit is {limits.frame_bytes}")
        raw_bytes += len(frame)
    if len(body) != head.body_bytes or len(table) != head.table_bytes or len(rest) != head.frame_count:
        raise WireError(
            f"body {len(body)}, table {len(table)}, frames {len(rest)}: the envelope says "
            f"{head.body_bytes}, {head.table_bytes}, {head.frame_count}"
        )
    if head.body_bytes + head.table_bytes + raw_bytes != head.total_bytes:
        raise WireError(f"{head.body_bytes + head.table_bytes + raw_bytes} bytes: the envelope says {head.total_bytes}")
    return head


def decode_checked(head: Envelope, frames: Sequence[Buffer], limits: Limits = CONTROL) -> Decoded:
    """Parse a message for which `check` returned `head`. Raises WireError only."""
    body, table, rest = _parts(head, frames)
    arrays = tensors.decode(table, rest, limits) if rest or table else []
    return Decoded(head, decode_body(head.type, body), arrays)


def _parts(head: Envelope, frames: Sequence[Buffer]) -> tuple[Buffer, Buffer, Sequence[Buffer]]:
    """Return the body, the tensor table (empty if there is none) and the raw frames."""
    if not head.flags & envelope.FLAG_TABLE:
        return frames[1], b"", frames[2:]
    if len(frames) < 3:
        raise WireError("tensor table announced, but there is no frame for it")
    return frames[1], frames[2], frames[3:]
