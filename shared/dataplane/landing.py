"""Mappings through which a producer writes files whose pages it is lent again and again. Must never keep a lock, write
to a file that is not this producer's own grant, nor meet a full mount as a signal.

A store lends the pages of a collected file to the next put of about its size. Written through a mapping that is there
already they cost a copy and no page fault (per GiB, checksums included: 0.13 s, with `pwrite` 0.22).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

import numpy as np

from proto.tensors import Array
from shared.dataplane.kept import MIN_BYTES, KeptMappings, Window

_BLOCK_BYTES = 512  # of st_blocks
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, since Linux 5.14: what is not there is allocated, and a full mount is an error."""
_TMPFS_MAGIC = 0x01021994
_LIBC = ctypes.CDLL(None)
POPULATE_BYTES = 8 << 20
"""At once: 3 to 6 ms, in which no other thread of this process runs, its event loop neither."""


class WriteMappingPool:
    """One a process. Any thread, but one file is in one thread's hands at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept = KeptMappings()

    def of(self, descriptor: int, nbytes: int) -> Array | None:
        """uint8 [nbytes] over a granted file, which the caller has locked through `descriptor`.

        None: write it without, because it is small, because too few of its pages are there, or because it lies on a
        file system that may write a page to a new place (copy on write), for which there may be no room.
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
                except OSError:  # no descriptor or mapping is left: plain writes need none
                    return None
        if missing > 0 or kept.warm_bytes < nbytes:
            try:
                _populate(kept.data, min(nbytes, len(kept.data)))
            except OSError:  # an old kernel, or no room
                if missing > 0:
                    return None
        kept.warm_bytes = nbytes  # another producer may have had it longer, but whoever cut it took pages away
        return np.asarray(Window(kept, nbytes))

    def close(self) -> None:
        """Let go of all of them."""
        with self._lock:
            self._kept.close()


def _in_memory(descriptor: int) -> bool:
    """Does a file lie on a tmpfs, where what is there is written in its place?"""
    status = (ctypes.c_long * 64)()  # struct statfs begins with f_type, and is no larger anywhere
    return _LIBC.fstatfs(descriptor, status) == 0 and status[0] == _TMPFS_MAGIC


def _populate(data: mmap.mmap, nbytes: int) -> None:
    """Make the first `nbytes` of a mapping writable without a fault. Raises OSError."""
    for begin in range(0, nbytes, POPULATE_BYTES):
        data.madvise(_POPULATE_WRITE, begin, min(POPULATE_BYTES, nbytes - begin))
