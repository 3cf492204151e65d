"""Mappings that a process keeps of files whose pages come back with other bytes. It must never pin a file's pages: a
store truncates such a file before it deletes it, and the descriptors here hold no lock.

A mapping costs a page fault for each page written (64 KiB read), twice what the copy costs, and taking it away as much
again. Kept ones cost page tables (2 MiB per GiB) and two descriptors each, hence the limits.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from shared.descriptors import raise_descriptor_limit

MIN_BYTES = 256 << 10
"""Smaller files are mapped anew, or written without."""
MOST_BYTES = 16 << 30
MOST_FILES = 2048
DESCRIPTOR_SHARE = 8
"""At most the limit on descriptors by this many files, too: readers and writers of one process keep two of each."""
_SWEEP = 64


@dataclass(eq=False)
class Kept:
    """`descriptor`: of the file, without a lock of ours; `warm_bytes`: so many at the start are mapped for writing."""

    data: mmap.mmap
    descriptor: int
    in_use: bool = False
    warm_bytes: int = 0

    @property
    def room(self) -> int:
        """Bytes that the file may have: the last page is mapped as a whole."""
        return -(-len(self.data) // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def address(self) -> int:
        """Where the mapping begins."""
        return int(np.frombuffer(self.data, np.uint8).ctypes.data)


class Window:
    """The first bytes of a kept mapping, which lives as long as an array over them: `numpy.asarray` of this."""

    def __init__(self, kept: Kept, nbytes: int) -> None:
        """`nbytes`: at most `kept.room`, of a file that has so many now."""
        self.kept = kept
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (kept.address, False),
        }


class KeptMappings:
    """By inode, the longest unused go first. Not for several threads at once."""

    def __init__(self) -> None:
        self._by_inode: OrderedDict[tuple[int, int], Kept] = OrderedDict()
        self._nbytes = 0
        self._added = 0
        self._most_files = min(MOST_FILES, raise_descriptor_limit() // DESCRIPTOR_SHARE)

    def get(self, inode: tuple[int, int]) -> Kept | None:
        """`inode`: device and number; it cannot be another file's while a mapping is kept."""
        kept = self._by_inode.get(inode)
        if kept is not None:
            self._by_inode.move_to_end(inode)
        return kept

    def add(self, inode: tuple[int, int], locked: int, access: int) -> Kept:
        """Map the file open as `locked`, which stays the caller's; in the place of the mapping that there was."""
        self.drop(inode)
        # opened again, because a mapping holds on to the lock of the descriptor it was made from
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
            self._forget_deleted()
        while len(self._by_inode) > 1 and (self._nbytes > MOST_BYTES or len(self._by_inode) > self._most_files):
            self.drop(next(iter(self._by_inode)))
        return kept

    def drop(self, inode: tuple[int, int]) -> None:
        """The mapping itself goes with whoever uses it."""
        kept = self._by_inode.pop(inode, None)
        if kept is not None:
            self._nbytes -= len(kept.data)
            os.close(kept.descriptor)

    def close(self) -> None:
        """Keep none of them any more."""
        for inode in list(self._by_inode):
            self.drop(inode)

    def _forget_deleted(self) -> None:
        for inode, kept in list(self._by_inode.items()):
            if os.fstat(kept.descriptor).st_nlink == 0:
                self.drop(inode)
