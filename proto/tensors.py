"""Encodes and decodes tensors on the wire: a table of fixed 96-byte rows, then raw frames. Every size is checked before
use."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from proto import dtypes
from proto.errors import WireError
from proto.limits import MAX_NDIM, Limits

Array = np.ndarray[Any, np.dtype[Any]]
Buffer = bytes | memoryview

_ROW = struct.Struct("<BBHIIIQQ8Q")
ROW_BYTES = _ROW.size


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One checked row of the table: `prod(shape) * itemsize == nbytes`, frames `[first, first + count)`."""

    dtype: dtypes.DType
    shape: tuple[int, ...]
    nbytes: int
    first_frame: int
    frame_count: int
    checksum: int


def checksum(data: Buffer | Array) -> int:
    """Return the xxh3-64 of the bytes. It is also defined for an empty tensor."""
    return xxhash.xxh3_64_intdigest(raw_bytes(data) if isinstance(data, np.ndarray) else data)


def as_wire(array: Array) -> Array:
    """Return a C-contiguous little-endian view or copy of `array` with the same shape, including 0-d.

    Raises WireError for a dtype outside the table or more than 8 dimensions.
    """
    row = dtypes.by_numpy(array.dtype)
    if array.ndim > MAX_NDIM:
        raise WireError(f"tensor of {array.ndim} dimensions: limit is {MAX_NDIM}")
    if array.dtype != row.numpy:
        array = array.astype(row.numpy)
    return array if array.flags.c_contiguous else np.ascontiguousarray(array).reshape(array.shape)


def raw_bytes(array: Array) -> memoryview:
    """Return the bytes of a C-contiguous array as a flat memoryview, without a copy."""
    if array.nbytes == 0:
        return memoryview(b"")
    return memoryview(array.reshape(-1).view(np.uint8).data)


def encode(arrays: Sequence[Array], limits: Limits) -> tuple[bytes, list[memoryview]]:
    """Return (table, raw frames). Frames share the memory of the arrays, which must not change before they are sent.

    Raises WireError for a dtype outside the table, more than 8 dimensions, or sizes that exceed `limits`.
    """
    total = sum(array.nbytes for array in arrays)
    if len(arrays) > limits.frames or total > limits.total_bytes:
        raise WireError(
            f"{len(arrays)} tensors totalling {total} bytes: limits are {limits.frames} tensors and "
            f"{limits.total_bytes} bytes; send them in parts or as shards"
        )
    rows: list[bytes] = []
    frames: list[memoryview] = []
    for array in arrays:
        wire = as_wire(array)
        data = raw_bytes(wire)
        _check_size(len(rows), wire.shape, wire.dtype.itemsize, limits)
        first = len(frames)
        for offset in range(0, len(data), limits.frame_bytes):
            frames.append(data[offset : offset + limits.frame_bytes])
        dims = wire.shape + (0,) * (MAX_NDIM - wire.ndim)
        code, count = dtypes.by_numpy(wire.dtype).code, len(frames) - first
        rows.append(_ROW.pack(code, wire.ndim, 0, first, count, 0, len(data), checksum(data), *dims))
    if len(frames) > limits.frames:
        raise WireError(f"{len(frames)} frames for {len(arrays)} tensors: limit is {limits.frames}")
    return b"".join(rows), frames


def _check_size(index: int, shape: Sequence[int], itemsize: int, limits: Limits) -> None:
    """Check a tensor's size by its non-zero dimensions, because numpy refuses a shape such as (0, 2**63)."""
    room = itemsize
    for dim in shape:
        room *= dim or 1  # Python integers do not overflow
    if room > min(limits.tensor_bytes, limits.total_bytes):
        raise WireError(
            f"tensor {index}: shape {list(shape)} of {itemsize}-byte elements: limit is "
            f"{min(limits.tensor_bytes, limits.total_bytes)} bytes; send larger tensors as shards"
        )


def parse_table(table: Buffer, frame_count: int, limits: Limits) -> list[TensorRow]:
    """Parse a table, check it and return its rows. The rows use the frames in order, each frame exactly once.

    Raises WireError only.
    """
    count, rest = divmod(len(table), ROW_BYTES)
    if rest:
        raise WireError(f"tensor table of {len(table)} bytes: must be a multiple of {ROW_BYTES}")
    if count > limits.frames:
        raise WireError(f"tensor table of {count} rows: limit is {limits.frames}")
    rows: list[TensorRow] = []
    next_frame = 0
    for code, ndim, flags, first, used, reserved, nbytes, digest, *dims in _ROW.iter_unpack(table):
        dtype = dtypes.by_code(code)
        if ndim > MAX_NDIM or flags or reserved:
            raise WireError(f"tensor row {len(rows)}: ndim {ndim} (limit {MAX_NDIM}), flags {flags}")
        if any(dims[ndim:]):
            raise WireError(f"tensor row {len(rows)}: dimensions past ndim {ndim} must be zero")
        _check_size(len(rows), dims[:ndim], dtype.itemsize, limits)
        if math.prod(dims[:ndim]) * dtype.itemsize != nbytes:
            raise WireError(f"tensor row {len(rows)}: shape {dims[:ndim]} of {dtype.name} is not {nbytes} bytes")
        if first != next_frame or used > frame_count - next_frame or (used == 0) != (nbytes == 0):
            raise WireError(f"tensor row {len(rows)}: frames {first}+{used} of {frame_count}, expected {next_frame}+")
        next_frame += used
        rows.append(TensorRow(dtype, tuple(dims[:ndim]), nbytes, first, used, digest))
    if next_frame != frame_count:
        raise WireError(f"{frame_count} frames, but the table uses {next_frame}: every frame must be used once")
    return rows


def decode(table: Buffer, frames: Sequence[Buffer], limits: Limits) -> list[Array]:
    """Return the arrays, read-only. A tensor in a single frame is a view of that frame; other tensors are copied once.

    Raises WireError if sizes or checksums do not match.
    """
    arrays: list[Array] = []
    for index, row in enumerate(parse_table(table, len(frames), limits)):
        parts = frames[row.first_frame : row.first_frame + row.frame_count]
        if sum(len(part) for part in parts) != row.nbytes or (len(parts) > 1 and not all(parts)):
            raise WireError(f"tensor {index}: frames hold {sum(map(len, parts))} bytes, but the row says {row.nbytes}")
        data: Buffer = parts[0] if len(parts) == 1 else b"".join(parts)
        if checksum(data) != row.checksum:
            raise WireError(f"tensor {index}: checksum does not match its {row.nbytes} bytes")
        arrays.append(np.frombuffer(data, dtype=row.dtype.numpy).reshape(row.shape))
    return arrays
