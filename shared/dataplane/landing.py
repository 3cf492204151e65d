"""Mappings through which a producer writes files whose pages it is lent repeatedly.

A store lends the pages of a collected file to the next put of about its size. Writing them through an existing mapping
costs a copy and no page faults: 0.13 s per GiB with checksums, against 0.22 s with `pwrite`.

The mappings hold no lock and are written only for a grant of this producer. A full mount is an error, not a signal.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

import numpy as np

from proto.tensors import Array
from shared.dataplane.kept import MIN_BYTES, KeptMappings, Window

_BLOCK_BYTES = 512  # unit of st_blocks
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, since Linux 5.14: allocates missing pages, and fails with an error on a full mount."""
_TMPFS_MAGIC = 0x01021994
_LIBC = ctypes.CDLL(None)
POPULATE_BYTES = 8 << 20
"""Bytes to populate per call: 3 to 6 ms, in which no other thread of this process runs, nor its event loop."""


class WriteMappingPool:
    """The write mappings of a process. Usable from any thread; each file is used by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept = KeptMappings()

    def of(self, descriptor: int, nbytes: int) -> Array | None:
        """Return uint8 [nbytes] over a granted file, which the caller has locked through `descriptor`.

        Returns None if the file should be written without a mapping: it is small, too few of its pages are there, or
        its file system may write a page to a new place (copy on write), for which there may be no room.
        """
        if nbytes < MIN_BYTES:
            return None
        status = os.fstat(descriptor)
        missing = nbytes - status.st_blocks * _BLOCK_BYTES
        if status.st_size != nbytes or missing > nbytes // 4 or not _in_memory(descriptor):
            return None
        inode = (status.st_dev, status.st_ino)
        with self._lock:
            kept = self._kept.get(inode)
            if kept is None or kept.room < nbytes:
                try:
                    kept = self._kept.add(inode, descriptor, mmap.ACCESS_WRITE)
                except OSError:  # no descriptor or mapping is left; plain writes need none
                    return None
        if missing > 0 or kept.warm_bytes < nbytes:
            try:
                _populate(kept.data, min(nbytes, len(kept.data)))
            except OSError:  # an old kernel, or no room
                if missing > 0:
                    return None
        kept.warm_bytes = nbytes  # not the maximum: another producer may have cut the file
        return np.asarray(Window(kept, nbytes))

    def close(self) -> None:
        """Drop all mappings."""
        with self._lock:
            self._kept.close()


def _in_memory(descriptor: int) -> bool:
    """Whether a file is on a tmpfs, where existing pages are overwritten in place."""
    status = (ctypes.c_long * 64)()  # struct statfs begins with f_type; it is at most this large
    return _LIBC.fstatfs(descriptor, status) == 0 and status[0] == _TMPFS_MAGIC


def _populate(data: mmap.mmap, nbytes: int) -> None:
    """Make the first `nbytes` of a mapping writable without page faults. Raises OSError."""
    for begin in range(0, nbytes, POPULATE_BYTES):
        data.madvise(_POPULATE_WRITE, begin, min(POPULATE_BYTES, nbytes - begin))
