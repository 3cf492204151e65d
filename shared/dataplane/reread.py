"""Mappings that a reader keeps of files whose pages come back with other bytes (the weights of each version). Must
never give out one that is in use or that was written to, nor read through one whose file it has not locked.

A store lends the pages of a collected file of the same size to the next put. A new mapping of them costs a page fault
for each 64 KiB, and taking the old one away as much again; one that is kept costs a look at its pages. What is kept
pins nothing and holds no lock: a store truncates such a file before it deletes it.
"""

from __future__ import annotations

import mmap
import os
import threading
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from proto.tensors import Array

MIN_BYTES = 32 << 20
MAX_KEPT = 4
_PAGEMAP = "/proc/self/pagemap"
_PRESENT, _SWAPPED, _OF_FILE = np.uint64(1 << 63), np.uint64(1 << 62), np.uint64(1 << 61)
_ENTRY_BYTES = 8


@dataclass
class _Kept:
    """`descriptor`: of the file, without a lock; `address`: where `data`, a private mapping of it, begins."""

    data: mmap.mmap
    descriptor: int
    address: int
    in_use: bool = False


class _Lease:
    """Holds a file's lock while any array over a kept mapping lives. numpy keeps it alive as the arrays' base."""

    def __init__(self, kept: _Kept, locked: int) -> None:
        self._kept = kept
        self._locked = locked
        self.__array_interface__ = {
            "version": 3,
            "shape": (len(kept.data),),
            "typestr": "|u1",
            "data": (kept.address, False),
        }

    def __del__(self) -> None:
        self._kept.in_use = False
        os.close(self._locked)


class Rereads:
    """One a process. Any thread."""

    def __init__(self, helper: Executor) -> None:
        """`helper`: a second thread, which looks at half of the pages."""
        self._helper = helper
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, int], _Kept] = {}

    def of(self, locked: int) -> tuple[Array, bool] | None:
        """uint8 [bytes of the file], a private mapping, and whether it was kept from before, with its pages.

        `locked`: a descriptor under the lock of the sealed file, which now belongs to the array: it is closed with
        the last view of it. None: the file is small, or somebody here reads it already (who writes to private arrays
        changes nobody else's); the descriptor stays the caller's.
        """
        status = os.fstat(locked)
        if status.st_size < MIN_BYTES:
            return None
        key = (status.st_dev, status.st_ino)
        with self._lock:
            self._forget()
            kept = self._kept.get(key)
            if kept is not None and kept.in_use:
                return None
            again = kept is not None and len(kept.data) == status.st_size and _unwritten(kept, self._helper)
            if kept is None or not again:
                self._drop(key)
                kept = self._kept[key] = _map(locked)
                while len(self._kept) > MAX_KEPT:
                    self._drop(next(iter(self._kept)))
            kept.in_use = True
        return np.asarray(_Lease(kept, locked)), again

    def close(self) -> None:
        """Keep none of them any more; what was given out stays valid."""
        with self._lock:
            for key in list(self._kept):
                self._drop(key)

    def _forget(self) -> None:
        for key, kept in list(self._kept.items()):
            if os.fstat(kept.descriptor).st_nlink == 0:
                self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        """The mapping itself goes with whoever uses it."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            os.close(kept.descriptor)


def _map(locked: int) -> _Kept:
    # opened again, because a mapping holds on to the lock of the descriptor it was made from
    unlocked = os.open(f"/proc/self/fd/{locked}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = mmap.mmap(unlocked, 0, access=mmap.ACCESS_COPY)
    except BaseException:
        os.close(unlocked)
        raise
    return _Kept(data, unlocked, np.frombuffer(data, np.uint8).ctypes.data)


def _unwritten(kept: _Kept, helper: Executor) -> bool:
    """Whether all pages are still the file's: one that was written to is a copy, which later versions never reach."""
    first, pages = kept.address // mmap.PAGESIZE, -(-len(kept.data) // mmap.PAGESIZE)
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
