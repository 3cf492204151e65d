"""Mappings that a reader keeps of files whose pages stores reuse for other data.

A store lends the pages of a collected file to the next put of about its size. Mapping, faulting and unmapping such a
file again costs four times as much as reading it: 0.24 s per GiB, against 0.015 s to check the pages of a kept mapping.

A mapping is not given out while it is in use or after it was written to, and its file is locked while it is read.
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
"""Minimum size of a mapping whose pages are checked by two threads."""
_PAGEMAP = "/proc/self/pagemap"
_PRESENT, _SWAPPED, _OF_FILE = np.uint64(1 << 63), np.uint64(1 << 62), np.uint64(1 << 61)
_ENTRY_BYTES = 8
Inode = tuple[int, int]


class _LockedWindow(Window):
    """Holds a file's lock while an array over a kept mapping lives. numpy keeps it alive as the base of the arrays."""

    def __init__(self, kept: Kept, inode: Inode, locked: int, nbytes: int, ended: deque[tuple[Inode, Kept]]) -> None:
        super().__init__(kept, nbytes)
        self._inode = inode
        self._locked = locked
        self._released = ended

    def __del__(self) -> None:
        self._released.append((self._inode, self.kept))  # runs on any thread; the next fetch does the rest
        os.close(self._locked)


class ReadMappingPool:
    """The read mappings of a process. Usable from any thread."""

    def __init__(self, helper: Executor) -> None:
        """`helper` is a second thread, which checks half of the pages of a large file."""
        self._helper = helper
        self._lock = threading.Lock()
        self._kept = KeptMappings()
        self._released: deque[tuple[Inode, Kept]] = deque()

    def of(self, locked: int) -> tuple[Array, bool] | None:
        """Return uint8 [bytes of the file], a private mapping, and whether it was kept from before, with its pages.

        `locked` is a descriptor that holds the lock of the sealed file. The array takes it over: it is closed with the
        last view. Returns None, and leaves the descriptor to the caller, if the file is small, or is being read in this
        process already (each reader needs private arrays, to which it may write).
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
                except OSError:  # no descriptor or mapping is left; current readers need them more
                    self._kept.close()
                    return None
            kept.in_use = True
        return np.asarray(_LockedWindow(kept, inode, locked, status.st_size, self._released)), again

    def close(self) -> None:
        """Drop all mappings. Arrays that were given out stay valid."""
        with self._lock:
            self._kept.close()

    def _take_back(self) -> None:
        """Take back mappings without arrays. Those that were written to are dropped, with their private pages."""
        while self._released:
            inode, kept = self._released.popleft()
            kept.in_use = False
            if self._kept.get(inode) is kept and not _unwritten(kept, self._helper):
                self._kept.drop(inode)


def _unwritten(kept: Kept, helper: Executor) -> bool:
    """Whether all pages are the file's. A page that was written to is a private copy and never shows later data."""
    first, pages = kept.address // mmap.PAGESIZE, -(-len(kept.data) // mmap.PAGESIZE)
    if len(kept.data) < HELP_BYTES:
        return _all_of_file(first, pages)
    other = helper.submit(_all_of_file, first + pages // 2, pages - pages // 2)
    mine = _all_of_file(first, pages // 2)
    return other.result() and mine


def _all_of_file(first: int, pages: int) -> bool:
    """Whether `pages` pages from number `first` on are the file's. False if a container hides the page map."""
    try:
        with open(_PAGEMAP, "rb", buffering=0) as file:
            read = os.pread(file.fileno(), pages * _ENTRY_BYTES, first * _ENTRY_BYTES)
    except OSError:
        return False
    entries = np.frombuffer(read, np.uint64)
    copied = (entries & (_PRESENT | _SWAPPED) != 0) & (entries & _OF_FILE == 0)
    return len(entries) == pages and not copied.any()
