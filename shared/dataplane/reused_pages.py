"""Memory whose pages are used again: mappings of files whose pages stores lend, and regions for streams.

Taking fresh pages from the kernel can cost more than filling them. Arrays over such memory release it with the last
array.

A store lends the pages of a collected file to the next put of similar size. A new mapping costs a page fault per page
written, or per 64 KiB read, and unmapping costs as much again. Per GiB, a put with checksums takes 0.13 s through a
kept mapping and 0.22 s with `pwrite`; mapping and faulting a file again takes 0.24 s, and checking a kept one 0.015 s.

The interface to mappings is `WriteMappingPool.of` and `ReadMappingPool.of`; both return None where a mapping would not
pay off. Kept mappings do not pin a file's pages: a store truncates such a file before it deletes it, and the
descriptors here hold no lock. Each kept mapping costs page tables (2 MiB per GiB) and two descriptors, so their number
is limited.

A region is anonymous memory, in huge pages where they are available. The kernel provides a GiB in 0.5 s as 4 KiB pages,
in 0.7 to 1.0 s as pages of an unnamed file (which could be mapped twice), and in 0.1 s as huge pages. Receiving a GiB
takes 0.35 s. A region is not reused while an array over it exists.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np

from proto.tensors import Array
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
ROUND_BYTES = 1 << 20
HUGE_BYTES = 2 << 20
"""Size of a huge page. Regions of at least this size are rounded up to a multiple of it."""
WASTE = 2
"""Maximum ratio between the size of a reused region and the size that is needed."""


class _Base:
    """The object that arrays over some memory keep alive as their `base`."""

    def __init__(self, data: mmap.mmap, nbytes: int, release: Callable[[], object]) -> None:
        self._release = release
        address = np.frombuffer(data, np.uint8).ctypes.data
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}

    def __del__(self) -> None:
        self._release()


def array_over(data: mmap.mmap, nbytes: int, release: Callable[[], object]) -> Array:
    """Return the first `nbytes` bytes of `data` as an array, uint8 [nbytes], without a copy.

    When the last array over the memory is gone, `release` is called, on any thread. `release` must keep `data` alive
    until then. `nbytes` may exceed the length of `data`, up to the end of its last page.
    """
    return np.asarray(_Base(data, nbytes, release))


class Regions:
    """Hands out regions and keeps unused ones until they are trimmed. It is thread-safe.

    Idle and used memory together never exceed the peak of used memory, because a new region replaces idle ones.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may delete an array while the lock is held
        self._idle: list[tuple[float, mmap.mmap]] = []
        """Pairs of (time at which the region became idle, region), longest idle first."""
        self._in_use = 0
        self._closed = False
        self.idle_bytes = 0

    def take(self, nbytes: int) -> Array:
        """Return an array of at least `nbytes` bytes, uint8: the smallest idle region within `WASTE`, or a new one.

        The region becomes idle again when the last array over it is gone. Raises OSError if there is no memory.
        """
        region = self._region(_rounded(nbytes))
        return array_over(region, len(region), partial(self._give_back, region))

    def _region(self, capacity: int) -> mmap.mmap:
        with self._lock:
            fitting = [region for region in self._idle if capacity <= len(region[1]) <= WASTE * capacity]
            if fitting:
                best = min(fitting, key=lambda region: len(region[1]))
                self._idle.remove(best)
                self.idle_bytes -= len(best[1])
                self._in_use += 1
                return best[1]
            gone = 0
            while self._idle and gone < capacity:
                gone += self._drop_oldest()
        region = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if capacity >= HUGE_BYTES:
            with contextlib.suppress(OSError):  # a kernel without huge pages provides small ones
                region.madvise(mmap.MADV_HUGEPAGE)
        with self._lock:
            self._in_use += 1
        return region

    def _give_back(self, region: mmap.mmap) -> None:
        with self._lock:
            self._in_use -= 1
            if not self._closed:
                self._idle.append((time.monotonic(), region))
                self.idle_bytes += len(region)

    def trim(self, since: float) -> bool:
        """Free the regions that have been idle since `since` (monotonic). Return False if no region is left."""
        with self._lock:
            while self._idle and self._idle[0][0] <= since:
                self._drop_oldest()
            return bool(self._idle or self._in_use)

    def close(self) -> None:
        """Free the idle regions. From now on, free each region as soon as it is given back."""
        with self._lock:
            self._closed = True
            self.idle_bytes = 0
            self._idle.clear()

    def _drop_oldest(self) -> int:
        capacity = len(self._idle.pop(0)[1])
        self.idle_bytes -= capacity
        return capacity


def _rounded(nbytes: int) -> int:
    unit = ROUND_BYTES if nbytes < HUGE_BYTES else HUGE_BYTES
    return max(unit, -(-nbytes // unit) * unit)


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
    first = np.frombuffer(kept.data, np.uint8).ctypes.data // mmap.PAGESIZE
    pages = -(-len(kept.data) // mmap.PAGESIZE)
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
