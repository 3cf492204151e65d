"""Keeps a file of lines within a size limit while any number of processes append to it.

The oldest bytes are removed in place: the file keeps its name and its inode, because the processes that write to it
cannot be told to open another file. Its first line then says how many bytes were removed. With this number, a reader
that remembers a position in the file finds that position again. The second line may have lost its beginning.

The launcher's guard imports this module, which therefore imports only the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

LIMIT_BYTES = 32 << 20
"""Maximum size of each log, and of the file to which a process prints. A larger file is cut to its last 16 MiB."""
HEAD_BYTES = 4096
"""Length of the first line of a file that was cut, which ends with blanks. Most file systems have blocks of this size,
and only whole blocks can be removed from a file."""
_CHUNK_BYTES = 1 << 20
_EVENT = "earlier lines were dropped"
_MARK = json.dumps(_EVENT).encode()
_FALLOC_FL_COLLAPSE_RANGE = 0x08
_LIBC = ctypes.CDLL(None)
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_NO_FIELDS: Mapping[str, str | int] = MappingProxyType({})


class FileHead(NamedTuple):
    """The first line of a file that was cut, or zeros for a file that was not cut."""

    dropped_bytes: int = 0
    """Number of bytes removed from the file so far."""
    nbytes: int = 0
    """Length of the line."""

    @property
    def offset(self) -> int:
        """The difference between positions among all bytes that were ever written to the file, which stay valid when
        the file is cut, and positions in the file."""
        return self.dropped_bytes - self.nbytes


def head_of(descriptor: int) -> FileHead:
    """Return the head of an open file. Raises OSError."""
    line = os.pread(descriptor, HEAD_BYTES, 0)
    if _MARK not in line or line.find(b"\n") != HEAD_BYTES - 1:
        return FileHead()
    try:
        entry = json.loads(line)
        dropped = int(entry["dropped_bytes"]) if entry["event"] == _EVENT else 0
    except (ValueError, KeyError, TypeError):
        return FileHead()
    return FileHead(dropped, HEAD_BYTES) if dropped >= HEAD_BYTES else FileHead()


def cut(path: Path, limit_bytes: int, fields: Mapping[str, str | int] = _NO_FIELDS) -> bool:
    """If the file is larger than `limit_bytes`, which must be at least 16 KiB, remove its oldest bytes, so that about
    half of `limit_bytes` remain. Return whether bytes were removed.

    Every writer must have opened the file for appending (O_APPEND). What they write meanwhile is kept. On a file system
    that cannot remove a range of a file (btrfs, NFS, tmpfs), the file is copied over itself and truncated; the bytes
    that arrive between the last look at its size and the truncation are then lost and not counted. If this process is
    killed, the file still ends with its last bytes. Two processes must not cut a file at the same time.

    `fields` are added to the line that says how many bytes were removed. Raises OSError.
    """
    # Writing at a position requires a descriptor of its own, without O_APPEND.
    with path.open("r+b", buffering=0) as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        if size <= limit_bytes:
            return False
        begin = (size - limit_bytes // 2) // HEAD_BYTES * HEAD_BYTES
        dropped = head_of(descriptor).offset + begin
        line = _line(dropped, limit_bytes, fields)
        if _LIBC.fallocate(descriptor, _FALLOC_FL_COLLAPSE_RANGE, HEAD_BYTES, begin - HEAD_BYTES) == 0:
            os.pwrite(descriptor, line, 0)
        else:
            end = _move(descriptor, begin, limit_bytes)
            os.pwrite(descriptor, line, 0)
            os.ftruncate(descriptor, end)
    return True


def _move(descriptor: int, source: int, limit_bytes: int) -> int:
    """Copy the bytes from `source` to the end of the file to the position after the head, and return the position after
    the copy. Stop at `limit_bytes` in case others write faster than this process copies."""
    target = HEAD_BYTES
    while target < limit_bytes and (data := os.pread(descriptor, _CHUNK_BYTES, source)):
        written = os.pwrite(descriptor, data, target)
        source, target = source + written, target + written
    return target


def _line(dropped: int, limit_bytes: int, fields: Mapping[str, str | int]) -> bytes:
    entry = {
        "timestamp": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
        "level": "warning",
        **fields,
        "event": _EVENT,
        "dropped_bytes": dropped,
        "limit_bytes": limit_bytes,
    }
    return json.dumps(entry).encode().ljust(HEAD_BYTES - 1) + b"\n"
