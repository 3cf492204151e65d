"""Mappings that a producer keeps of files whose pages it is lent again and again (the weights of each version). Must
never keep a lock, or write to a file that is not this producer's own grant.

A store lends the pages of a collected file of the same size to the next put. Written through a mapping that is there
already they cost a copy and no page fault; a new mapping costs a fault a page. What is kept pins nothing: a store
truncates such a file before it deletes it.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np

from proto.tensors import Array

MIN_BYTES = 32 << 20
MAX_KEPT = 4
_BLOCK_BYTES = 512  # of st_blocks


@dataclass(frozen=True)
class _Kept:
    data: mmap.mmap
    descriptor: int


class Landings:
    """One a process; calls never overlap."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], _Kept] = {}

    def of(self, path: str, descriptor: int, nbytes: int) -> Array | None:
        """uint8 [nbytes] over the granted file at `path`, which the caller has locked through `descriptor`.

        None: not all of its pages are there (a store through a mapping could meet a full mount), or it is small.
        """
        self._forget()
        status = os.fstat(descriptor)
        if nbytes < MIN_BYTES or status.st_size != nbytes or status.st_blocks * _BLOCK_BYTES < nbytes:
            return None
        key = (status.st_dev, status.st_ino)
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= MAX_KEPT:
                _close(self._kept.pop(next(iter(self._kept))))
            # of its own, because a mapping holds on to the lock of the descriptor it was made from
            unlocked = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            kept = self._kept[key] = _Kept(mmap.mmap(unlocked, nbytes), unlocked)
        return np.frombuffer(kept.data, np.uint8)

    def close(self) -> None:
        """Let go of all of them."""
        while self._kept:
            _close(self._kept.popitem()[1])

    def _forget(self) -> None:
        for key, kept in list(self._kept.items()):
            if os.fstat(kept.descriptor).st_nlink == 0:
                _close(self._kept.pop(key))


def _close(kept: _Kept) -> None:
    kept.data.close()
    os.close(kept.descriptor)
