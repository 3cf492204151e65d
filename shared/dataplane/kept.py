"""Mappings that a process keeps of files whose pages stores reuse for other data.

They do not pin a file's pages: a store truncates such a file before it deletes it, and the descriptors here hold no
lock. A new mapping costs a page fault per page written, or per 64 KiB read: twice the cost of the copy, and unmapping
costs as much again. Kept mappings cost page tables (2 MiB per GiB) and two descriptors each, hence the limits.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from shared.os_limits import raise_descriptor_limit

MIN_BYTES = 256 << 10
"""Minimum size of a file whose mapping is kept. Smaller files are mapped each time, or written without a mapping."""
MOST_BYTES = 16 << 30
MOST_FILES = 2048
DESCRIPTOR_SHARE = 8
"""The descriptor limit divided by this limits the files, too: readers and writers of a process keep two per file."""
_SWEEP = 64


@dataclass(eq=False)
class Kept:
    """A kept mapping. `descriptor` has no lock of ours; the first `warm_bytes` can be written without page faults."""

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


class Window:
    """The first bytes of a kept mapping. `numpy.asarray` of it gives an array, which keeps the mapping alive."""

    def __init__(self, kept: Kept, nbytes: int) -> None:
        """`nbytes` is the current size of the file, and at most `kept.room`."""
        self.kept = kept
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (kept.address, False),
        }


class KeptMappings:
    """Kept mappings by inode. The least recently used go first. Not thread-safe."""

    def __init__(self) -> None:
        self._by_inode: OrderedDict[tuple[int, int], Kept] = OrderedDict()
        self._nbytes = 0
        self._added = 0
        self._most_files = min(MOST_FILES, raise_descriptor_limit() // DESCRIPTOR_SHARE)

    def get(self, inode: tuple[int, int]) -> Kept | None:
        """Return the mapping of `inode` (device, number), which no other file can have while its mapping is kept."""
        kept = self._by_inode.get(inode)
        if kept is not None:
            self._by_inode.move_to_end(inode)
        return kept

    def add(self, inode: tuple[int, int], locked: int, access: int) -> Kept:
        """Map the file open as `locked`, in place of an earlier mapping. The descriptor stays with the caller."""
        self.drop(inode)
        # Opened again, because a mapping keeps the lock of the descriptor from which it was made.
        unlocked = os.open(f"/proc/self/fd/{locked}", os.O_RDWR if access == mmap.ACCESS_WRITE else os.O_RDONLY)
        try:
            kept = Kept(mmap.mmap(unlocked, 0, access=access), unlocked)
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

    def drop(self, inode: tuple[int, int]) -> None:
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
