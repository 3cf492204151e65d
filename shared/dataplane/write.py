"""Writes a block file in one pass: each chunk is hashed, which brings it into the cache, and then written from there.

Files are written with plain writes: on a full shared-memory mount they return an error, while writing through a mapping
raises SIGBUS. Only a file whose pages are all allocated may be passed as a mapping.

The functions block, and must not run on an event loop's thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor, wait

import numpy as np
import xxhash

from proto.blockfile import BlockLayout
from proto.tensors import Array, Buffer

CHUNK_BYTES = 512 << 10
COPY_BYTES = 4 << 20
"""Size, in bytes, of a chunk that is copied into a mapping. A copy needs no system call, and at this size does not read
its target first (with the launcher's GLIBC_TUNABLES): 1 GiB takes 0.09 s instead of 0.15 s."""
SMALL_BYTES = 128 << 10
"""Maximum number of bytes copied without releasing the interpreter lock. Releasing it would cost as much as the
copy."""
MAX_PIECES = 1024  # IOV_MAX, including padding
HALVE_BYTES = 8 << 20
_PADDINGS = [bytes(count) for count in range(64)]
_NO_BYTES = b""
_digest = xxhash.xxh3_64_intdigest


def write_block(descriptor: int, layout: BlockLayout, helper: Executor | None = None) -> list[int]:
    """Write the whole file to `descriptor`, and return the checksum of every row.

    `helper` is a second thread, which writes half of a large file. Raises OSError (ENOSPC if the mount is full).
    """
    checksums = _in_halves(lambda begin, end: _write_rows(descriptor, layout, begin, end), layout, helper)
    _write(descriptor, [layout.head(checksums)], 0)
    return checksums


def copy_block(target: Array, layout: BlockLayout, helper: Executor | None = None) -> list[int]:
    """Write the file to `target` (uint8 [file_bytes], a mapping with all pages allocated). Return the row checksums."""
    if layout.file_bytes < SMALL_BYTES * len(layout.arrays):
        helper = None  # the helper would only wait for the interpreter lock
    checksums = _in_halves(lambda begin, end: _copy_rows(target, layout, begin, end), layout, helper)
    head = np.frombuffer(layout.head(checksums), np.uint8)
    target[: len(head)] = head
    return checksums


def _in_halves(work: Callable[[int, int], list[int]], layout: BlockLayout, helper: Executor | None) -> list[int]:
    count = len(layout.arrays)
    middle = _middle(layout) if helper is not None and layout.file_bytes >= HALVE_BYTES else count
    if middle == count or helper is None:
        return work(0, count)
    other = helper.submit(work, middle, count)
    try:
        mine = work(0, middle)
    finally:
        wait([other])  # the helper writes to a descriptor or mapping that the caller closes
    return mine + other.result()


def _copy_rows(target: Array, layout: BlockLayout, begin: int, end: int) -> list[int]:
    checksums: list[int] = []
    view = target.data
    for array, offset in zip(layout.arrays[begin:end], layout.offsets[begin:end], strict=True):
        if array.nbytes <= SMALL_BYTES:
            flat = _flat(array)
            checksums.append(_digest(flat))
            view[offset : offset + len(flat)] = flat
        else:
            checksums.append(_copy_large(target, array, offset))
    return checksums


def _copy_large(target: Array, array: Array, offset: int) -> int:
    flat = array.reshape(-1).view(np.uint8)
    digest = xxhash.xxh3_64()
    for first in range(0, flat.nbytes, COPY_BYTES):
        chunk = flat[first : first + COPY_BYTES]
        digest.update(chunk.data)
        target[offset + first : offset + first + chunk.nbytes] = chunk
    return digest.intdigest()


def _middle(layout: BlockLayout) -> int:
    """Return the index of the first row in the second half, by bytes."""
    return int(np.searchsorted(np.asarray(layout.offsets), layout.file_bytes // 2))


def _write_rows(descriptor: int, layout: BlockLayout, begin: int, end: int) -> list[int]:
    flat = [_flat(array) for array in layout.arrays[begin:end]]
    starts = np.asarray(layout.offsets[begin:end], np.int64)
    ends = starts + np.array([len(data) for data in flat], np.int64)
    gaps = np.append(starts[1:] - ends[:-1], 0).tolist()
    checksums: list[int] = []
    first = 0
    while first < len(flat):
        upto = int(np.searchsorted(ends, starts[first] + CHUNK_BYTES, side="right"))
        upto = min(upto, first + MAX_PIECES // 2)
        if upto <= first:
            checksums.append(_write_large(descriptor, flat[first], int(starts[first])))
            first += 1
            continue
        checksums.extend(map(_digest, flat[first:upto]))
        pieces: list[Buffer] = [_NO_BYTES] * (2 * (upto - first))
        pieces[::2] = flat[first:upto]
        pieces[1::2] = [_PADDINGS[gap] for gap in gaps[first:upto]]
        pieces.pop()  # the padding after the last row is written with the next rows, or is never read
        _write(descriptor, pieces, int(starts[first]))
        first = upto
    return checksums


def _flat(array: Array) -> Buffer:
    """Return the bytes of an array without a copy."""
    try:
        return array.data.cast("B")
    except (ValueError, TypeError):  # the array is empty, or of a type that buffers do not support
        return array.reshape(-1).view(np.uint8).data if array.nbytes else _NO_BYTES


def _write_large(descriptor: int, data: Buffer, offset: int) -> int:
    digest = xxhash.xxh3_64()
    for begin in range(0, len(data), CHUNK_BYTES):
        chunk = data[begin : begin + CHUNK_BYTES]
        digest.update(chunk)
        _write(descriptor, [chunk], offset + begin)
    return digest.intdigest()


def _write(descriptor: int, pieces: list[Buffer], offset: int) -> None:
    written = os.pwritev(descriptor, pieces, offset)
    total = sum(map(len, pieces))
    if written < total:  # a signal arrived or the mount is nearly full; writing the rest shows which
        rest = b"".join(bytes(piece) for piece in pieces)[written:]
        while rest:
            offset += written
            written = os.pwrite(descriptor, rest, offset)
            rest = rest[written:]
