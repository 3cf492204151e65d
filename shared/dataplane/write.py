"""Writes a block file in one pass: each chunk is hashed while it comes into the cache, then written from there.

Plain writes, not a mapping: a full shared-memory mount is an error here, where a store through a mapping would be a
SIGBUS. Only a file whose pages are all there may be given mapped. It must never run on an event loop's thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np
import xxhash

from proto.blockfile import Layout
from proto.tensors import Array

CHUNK_BYTES = 512 << 10
COPY_BYTES = 1 << 20
"""Chunks into a mapping: no system call each, so what counts is the second level cache. 1.2 times as fast as halves."""
MAX_PIECES = 512  # below IOV_MAX of 1024, padding included
HALVE_BYTES = 8 << 20
_PADDING = bytes(64)
_EMPTY_DIGEST = xxhash.xxh3_64_intdigest(b"")


def write_block(descriptor: int, layout: Layout, helper: Executor | None = None) -> list[int]:
    """Write the whole file to `descriptor`; returns the checksum of every row.

    `helper`: a second thread that takes half of a large file. Raises OSError (ENOSPC: the mount is full).
    """
    checksums = _in_halves(lambda begin, end: _write_rows(descriptor, layout, begin, end), layout, helper)
    _write(descriptor, [layout.head(checksums)], 0)
    return checksums


def copy_block(target: Array, layout: Layout, helper: Executor | None = None) -> list[int]:
    """The same into `target` uint8 [file_bytes], a mapping of a file whose pages are all there."""
    checksums = _in_halves(lambda begin, end: _copy_rows(target, layout, begin, end), layout, helper)
    head = np.frombuffer(layout.head(checksums), np.uint8)
    target[: len(head)] = head
    return checksums


def _in_halves(work: Callable[[int, int], list[int]], layout: Layout, helper: Executor | None) -> list[int]:
    count = len(layout.arrays)
    middle = _middle(layout) if helper is not None and layout.file_bytes >= HALVE_BYTES else count
    if middle == count or helper is None:
        return work(0, count)
    other = helper.submit(work, middle, count)
    return work(0, middle) + other.result()


def _copy_rows(target: Array, layout: Layout, begin: int, end: int) -> list[int]:
    checksums: list[int] = []
    for array, offset in zip(layout.arrays[begin:end], layout.offsets[begin:end], strict=True):
        flat = array.reshape(-1).view(np.uint8)
        digest = xxhash.xxh3_64()
        for first in range(0, flat.nbytes, COPY_BYTES):
            chunk = flat[first : first + COPY_BYTES]
            digest.update(chunk.data)
            target[offset + first : offset + first + chunk.nbytes] = chunk
        checksums.append(digest.intdigest())
    return checksums


def _middle(layout: Layout) -> int:
    """The first row of the second half, by bytes."""
    return int(np.searchsorted(np.asarray(layout.offsets), layout.file_bytes // 2))


def _write_rows(descriptor: int, layout: Layout, begin: int, end: int) -> list[int]:
    checksums: list[int] = []
    pieces: list[bytes | memoryview] = []
    at = filled = 0  # the pieces go to [at, filled) of the file
    for array, offset in zip(layout.arrays[begin:end], layout.offsets[begin:end], strict=True):
        if array.nbytes == 0:
            checksums.append(_EMPTY_DIGEST)
            continue
        flat = array.reshape(-1).view(np.uint8).data
        if pieces and (filled - at + flat.nbytes > CHUNK_BYTES or len(pieces) >= MAX_PIECES):
            _write(descriptor, pieces, at)
            pieces = []
        if not pieces:
            at = offset
        elif offset != filled:
            pieces.append(_PADDING[: offset - filled])
        if flat.nbytes <= CHUNK_BYTES:
            checksums.append(xxhash.xxh3_64_intdigest(flat))
            pieces.append(flat)
            filled = offset + flat.nbytes
        else:
            checksums.append(_write_large(descriptor, flat, offset))
    if pieces:
        _write(descriptor, pieces, at)
    return checksums


def _write_large(descriptor: int, data: memoryview, offset: int) -> int:
    digest = xxhash.xxh3_64()
    for begin in range(0, len(data), CHUNK_BYTES):
        chunk = data[begin : begin + CHUNK_BYTES]
        digest.update(chunk)
        _write(descriptor, [chunk], offset + begin)
    return digest.intdigest()


def _write(descriptor: int, pieces: list[bytes | memoryview], offset: int) -> None:
    written = os.pwritev(descriptor, pieces, offset)
    total = sum(map(len, pieces))
    if written < total:  # a signal, or the mount is nearly full: the rest shows which
        rest = b"".join(bytes(piece) for piece in pieces)[written:]
        while rest:
            offset += written
            written = os.pwrite(descriptor, rest, offset)
            rest = rest[written:]
