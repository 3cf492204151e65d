"""Keeps mappings, for reading and for writing, of files whose pages stores lend repeatedly.

A store lends the pages of a collected file to the next put of similar size. A new mapping costs a page fault per page
written, or per 64 KiB read, and unmapping costs as much again. Per GiB, a put with checksums takes 0.13 s through a
kept mapping and 0.22 s with `pwrite`; mapping and faulting a file again takes 0.24 s, and checking a kept one 0.015 s.

The interface is `WriteMappingPool.of` and `ReadMappingPool.of`; both return None where a mapping would not pay off.
Kept mappings do not pin a file's pages: a store truncates such a file before it deletes it, and the descriptors here
hold no lock. Each kept mapping costs page tables (2 MiB per GiB) and two descriptors, hence the limits.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import OrderedDict, deque
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np

from proto.tensors import Array
from shared.dataplane.memory import array_over
from shared.os_limits import raise_descriptor_limit

MIN_BYTES = 256 << 10
"""Minimum size of a file whose mapping is kept. Smaller files are mapped each time, or written without a mapping."""
MOST_BYTES = 16 << 30
MOST_FILES = 2048
DESCRIPTOR_SHARE = 8
"""The number of files is also limited to the descriptor limit divided by this value, because a process keeps two
descriptors per file and direction."""
_SWEEP = 64
POPULATE_BYTES = 8 << 20
"""Number of bytes to populate per call. A call takes 3 to 6 ms, during which no other thread of this process runs, not
even that of its event loop."""
HELP_BYTES = 256 << 20
"""Minimum size of a mapping whose pages are checked by two threads."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, since Linux 5.14: allocates missing pages, and fails with an error on a full mount."""
_BLOCK_BYTES = 512  # unit of st_blocks
_TMPFS_MAGIC = 0x01021994
_LIBC = ctypes.CDLL(None)
_PAGEMAP = "/proc/self/pagemap"
_PRESENT, _SWAPPED, _OF_FILE = np.uint64(1 << 63), np.uint64(1 << 62), np.uint64(1 << 61)
_ENTRY_BYTES = 8
Inode = tuple[int, int]
"""Device and inode number of a file. No other file can have the same pair while a mapping of this file is kept."""


@dataclass(eq=False)
class KeptMapping:
    """A kept mapping. `descriptor` holds no lock; the first `warm_bytes` can be written without page faults."""

    data: mmap.mmap
    descriptor: int
    in_use: bool = False
    warm_bytes: int = 0

    @property
    def room(self) -> int:
        """Maximum size of the file in bytes. The last page is mapped as a whole."""
        return -(-len(self.data) // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def address(self) -> int:
        """Address at which the mapping begins."""
        return int(np.frombuffer(self.data, np.uint8).ctypes.data)


class KeptMappings:
    """Kept mappings by inode. The least recently used mapping is dropped first. This is not thread-safe."""

    def __init__(self) -> None:
        self._by_inode: OrderedDict[Inode, KeptMapping] = OrderedDict()
        self._nbytes = 0
        self._added = 0
        self._most_files = min(MOST_FILES, raise_descriptor_limit() // DESCRIPTOR_SHARE)

    def get(self, inode: Inode) -> KeptMapping | None:
        """Return the mapping of `inode`, or None if there is none."""
        kept = self._by_inode.get(inode)
        if kept is not None:
            self._by_inode.move_to_end(inode)
        return kept

    def add(self, inode: Inode, locked: int, access: int) -> KeptMapping:
        """Map the file that is open as `locked`, replacing an earlier mapping. The caller still owns the descriptor."""
        self.drop(inode)
        # The file is opened again, because a mapping keeps the lock of the descriptor from which it was made.
        unlocked = os.open(f"/proc/self/fd/{locked}", os.O_RDWR if access == mmap.ACCESS_WRITE else os.O_RDONLY)
        try:
            kept = KeptMapping(mmap.mmap(unlocked, 0, access=access), unlocked)
        except BaseException:
            os.close(unlocked)
            raise
        self._by_inode[inode] = kept
        self._nbytes += len(kept.data)
        self._added += 1
        if self._added % _SWEEP == 0:
            self._drop_deleted()
        while len(self._by_inode) > 1 and (self._nbytes > MOST_BYTES or len(self._by_inode) > self._most_files):
            self.drop(next(iter(self._by_inode)))
        return kept

    def drop(self, inode: Inode) -> None:
        """Stop keeping the mapping. It is unmapped once it is no longer used."""
        kept = self._by_inode.pop(inode, None)
        if kept is not None:
            self._nbytes -= len(kept.data)
            os.close(kept.descriptor)

    def close(self) -> None:
        """Drop all mappings."""
        for inode in list(self._by_inode):
            self.drop(inode)

    def _drop_deleted(self) -> None:
        for inode, kept in list(self._by_inode.items()):
            if os.fstat(kept.descriptor).st_nlink == 0:
                self.drop(inode)


class WriteMappingPool:
    """The mappings through which a producer writes. Any thread may use them, but only one thread at a time per file.

    A mapping is written to only under a grant to this producer. A full mount causes an error, not a signal.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept = KeptMappings()

    def of(self, descriptor: int, nbytes: int) -> Array | None:
        """Return a view, uint8 [nbytes], of a granted file, which the caller has locked through `descriptor`.

        Returns None if the file should be written without a mapping: it is small, too few of its pages exist, or its
        file system might write a page to a new place (copy on write), for which there might be no room.
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
                except OSError:  # no descriptor or mapping is left; plain writes need neither
                    return None
        if missing > 0 or kept.warm_bytes < nbytes:
            try:
                _populate(kept.data, min(nbytes, len(kept.data)))
            except OSError:  # the kernel is too old, or there is no room
                if missing > 0:
                    return None
        kept.warm_bytes = nbytes  # not the maximum: another producer may have truncated the file
        return array_over(kept.data, nbytes, lambda: kept)  # `kept` keeps the mapping alive

    def close(self) -> None:
        """Drop all mappings."""
        with self._lock:
            self._kept.close()


def _in_memory(descriptor: int) -> bool:
    """Return whether a file is on a tmpfs, where existing pages are overwritten in place."""
    status = (ctypes.c_long * 64)()  # struct statfs begins with f_type; it is at most this large
    return _LIBC.fstatfs(descriptor, status) == 0 and status[0] == _TMPFS_MAGIC


def _populate(data: mmap.mmap, nbytes: int) -> None:
    """Make the first `nbytes` of a mapping writable without page faults. Raises OSError."""
    for begin in range(0, nbytes, POPULATE_BYTES):
        data.madvise(_POPULATE_WRITE, begin, min(POPULATE_BYTES, nbytes - begin))


class ReadMappingPool:
    """The private mappings that a reader keeps. Any thread may use them.

    A mapping is not given out while it is in use or after it has been written to, and the file is locked while the
    mapping is read.
    """

    def __init__(self, helper: Executor) -> None:
        """`helper` is a second thread, which checks half of the pages of a large file."""
        self._helper = helper
        self._lock = threading.Lock()
        self._kept = KeptMappings()
        self._released: deque[tuple[Inode, KeptMapping]] = deque()

    def of(self, locked: int) -> tuple[Array, bool] | None:
        """Return a private mapping of the file, uint8 [file size], and whether it is a kept mapping, whose pages are
        already present.

        `locked` is a descriptor that holds the lock of the sealed file. The array takes ownership of the descriptor and
        closes it with the last view. Returns None, and leaves the descriptor with the caller, if the file is small or
        is already being read in this process: each reader needs private arrays, to which it may write.
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
                except OSError:  # out of descriptors or mappings; cached ones are released for current readers
                    self._kept.close()
                    return None
            kept.in_use = True
        release = partial(self._release, inode, kept, locked)
        return array_over(kept.data, status.st_size, release), again

    def _release(self, inode: Inode, kept: KeptMapping, locked: int) -> None:
        self._released.append((inode, kept))  # this runs on any thread; the next fetch does the rest
        os.close(locked)

    def close(self) -> None:
        """Drop all mappings. Arrays that have been given out stay valid."""
        with self._lock:
            self._kept.close()

    def _take_back(self) -> None:
        """Take back the mappings whose arrays are gone. Mappings that have been written to are dropped, with their
        private pages."""
        while self._released:
            inode, kept = self._released.popleft()
            kept.in_use = False
            if self._kept.get(inode) is kept and not _unwritten(kept, self._helper):
                self._kept.drop(inode)


def _unwritten(kept: KeptMapping, helper: Executor) -> bool:
    """Return whether all pages belong to the file. A page that was written to is a private copy without later data."""
    first, pages = kept.address // mmap.PAGESIZE, -(-len(kept.data) // mmap.PAGESIZE)
    if len(kept.data) < HELP_BYTES:
        return _all_of_file(first, pages)
    other = helper.submit(_all_of_file, first + pages // 2, pages - pages // 2)
    mine = _all_of_file(first, pages // 2)
    return other.result() and mine


def _all_of_file(first: int, pages: int) -> bool:
    """Return whether the `pages` pages starting at number `first` belong to the file.

    Return False if a container hides the page map.
    """
    try:
        with open(_PAGEMAP, "rb", buffering=0) as file:
            read = os.pread(file.fileno(), pages * _ENTRY_BYTES, first * _ENTRY_BYTES)
    except OSError:
        return False
    entries = np.frombuffer(read, np.uint64)
    copied = (entries & (_PRESENT | _SWAPPED) != 0) & (entries & _OF_FILE == 0)
    return len(entries) == pages and not copied.any()
