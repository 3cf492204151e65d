"""Small numeric arrays inside a body, in the msgpack-numpy format but with checks that msgpack-numpy lacks.

The msgpack-numpy decoder unpickles kind `O`, and for type `|O` it builds object arrays over the sender's bytes. This
module calls that decoder only after type, shape and size have been checked against closed lists.
"""

from __future__ import annotations

import math
from typing import Any

import msgpack_numpy
import numpy as np

from proto.errors import WireError
from proto.limits import MAX_INLINE_BYTES, MAX_NDIM
from proto.tensors import Array

INLINE_TYPES = frozenset(["|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8"])
_FIELDS = frozenset([b"nd", b"type", b"kind", b"shape", b"data"])


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
