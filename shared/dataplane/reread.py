"""Mappings that a reader keeps of files whose pages come back with other bytes. Must never give out one that is in use
or that was written to, nor read through one whose file it has not locked.

A store lends the pages of a collected file to the next put of about its size. To map, fault and unmap such a file anew
costs four times as much as reading it (0.24 s per GiB; a look at the pages of a mapping that is there 0.015).
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from concurrent.futures import Executor

import numpy as np

from proto.tensors import Array
from shared.dataplane.kept import MIN_BYTES, Kept, KeptMappings, Window

HELP_BYTES = 256 << 20
"""A look at so many bytes' pages is worth a second thread."""
_PAGEMAP = "/proc/self/pagemap"
_PRESENT, _SWAPPED, _OF_FILE = np.uint64(1 << 63), np.uint64(1 << 62), np.uint64(1 << 61)
_ENTRY_BYTES = 8
Inode = tuple[int, int]


class _Lease(Window):
    """Holds a file's lock while any array over a kept mapping lives. numpy keeps it alive as the arrays' base."""

    def __init__(self, kept: Kept, inode: Inode, locked: int, nbytes: int, ended: deque[tuple[Inode, Kept]]) -> None:
        super().__init__(kept, nbytes)
        self._inode = inode
        self._locked = locked
        self._ended = ended

    def __del__(self) -> None:
        self._ended.append((self._inode, self.kept))  # on any thread: all else is for the next fetch
        os.close(self._locked)


class ReadMappingPool:
    """One a process. Any thread."""

    def __init__(self, helper: Executor) -> None:
        """`helper`: a second thread, which looks at half of the pages of a large file."""
        self._helper = helper
        self._lock = threading.Lock()
        self._kept = KeptMappings()
        self._ended: deque[tuple[Inode, Kept]] = deque()

    def of(self, locked: int) -> tuple[Array, bool] | None:
        """uint8 [bytes of the file], a private mapping, and whether it was kept from before, with its pages.

        `locked`: a descriptor under the lock of the sealed file, which now belongs to the array: it is closed with
        the last view of it. None: the file is small, or somebody here reads it already (who writes to private arrays
        changes nobody else's); the descriptor stays the caller's.
        """
        status = os.fstat(locked)
        if status.st_size < MIN_BYTES:
            return None
        inode = (status.st_dev, status.st_ino)
        with self._lock:
            self._take_back()
            kept = self._kept.get(inode)
            if kept is not None and kept.in_use:
                return None
            again = kept is not None and kept.room >= status.st_size
            if kept is None or not again:
                try:
                    kept = self._kept.add(inode, locked, mmap.ACCESS_COPY)
                except OSError:  # no descriptor or mapping is left: whoever reads now needs them more
                    self._kept.close()
                    return None
            kept.in_use = True
        return np.asarray(_Lease(kept, inode, locked, status.st_size, self._ended)), again

    def close(self) -> None:
        """Keep none of them any more; what was given out stays valid."""
        with self._lock:
            self._kept.close()

    def _take_back(self) -> None:
        """Mappings whose last array went; those that were written to go too, and their private pages with them."""
        while self._ended:
            inode, kept = self._ended.popleft()
            kept.in_use = False
            if self._kept.get(inode) is kept and not _unwritten(kept, self._helper):
                self._kept.drop(inode)


def _unwritten(kept: Kept, helper: Executor) -> bool:
    """Whether all pages are still the file's: one that was written to is a copy, which later versions never reach."""
    first, pages = kept.address // mmap.PAGESIZE, -(-len(kept.data) // mmap.PAGESIZE)
    if len(kept.data) < HELP_BYTES:
        return _of_file(first, pages)
    other = helper.submit(_of_file, first + pages // 2, pages - pages // 2)
    mine = _of_file(first, pages // 2)
    return other.result() and mine


def _of_file(first: int, pages: int) -> bool:
    """Of so many pages from number `first` on. False where a container does not show it."""
    try:
        with open(_PAGEMAP, "rb", buffering=0) as file:
            read = os.pread(file.fileno(), pages * _ENTRY_BYTES, first * _ENTRY_BYTES)
    except OSError:
        return False
    entries = np.frombuffer(read, np.uint64)
    copied = (entries & (_PRESENT | _SWAPPED) != 0) & (entries & _OF_FILE == 0)
    return len(entries) == pages and not copied.any()
