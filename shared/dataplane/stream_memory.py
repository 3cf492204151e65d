"""Memory that streams fill, used again: taking fresh pages from the kernel can cost more than filling them does.

A region is anonymous memory in huge pages, where there are any. Of 4 KiB pages the kernel gives a GiB in 0.5 s, of a
nameless file's (which could be mapped twice) in 0.7 to 1.0 s, of huge ones in 0.1 s; receiving as much takes 0.35 s.
A region must never be used again while an array over it lives.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time

import numpy as np

from proto.tensors import Array

ROUND_BYTES = 1 << 20
HUGE_BYTES = 2 << 20
"""Whole pages of so much, for regions of at least that."""
WASTE = 2
"""A region may be used for a stream of at least 1/WASTE of its size."""


class Region:
    """`capacity` bytes of this process, at `address`; `view` is for writing."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        data = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if capacity >= HUGE_BYTES:
            with contextlib.suppress(OSError):  # a kernel without them gives small ones
                data.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(data)
        self.address: int = np.frombuffer(data, np.uint8).ctypes.data


class Regions:
    """Hands out regions and keeps what nobody uses any more until it is trimmed. Any thread.

    Kept and used memory together are never more than was in use at once: a new region takes the place of idle ones.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a lease may end inside
        self._idle: list[tuple[float, Region]] = []
        """Since when; the longest idle first."""
        self._in_use = 0
        self._closed = False
        self.idle_bytes = 0

    def take(self, nbytes: int) -> Region:
        """The smallest idle region that fits without much waste, or a new one."""
        capacity = _rounded(nbytes)
        with self._lock:
            self._in_use += 1
            fitting = [each for each in self._idle if capacity <= each[1].capacity <= WASTE * capacity]
            if fitting:
                best = min(fitting, key=lambda each: each[1].capacity)
                self._idle.remove(best)
                self.idle_bytes -= best[1].capacity
                return best[1]
            gone = 0
            while self._idle and gone < capacity:
                gone += self._drop_oldest()
        try:
            return Region(capacity)
        except BaseException:
            with self._lock:
                self._in_use -= 1
            raise

    def give_back(self, region: Region) -> None:
        """Nobody has arrays over it any more, or will."""
        with self._lock:
            self._in_use -= 1
            if not self._closed:
                self._idle.append((time.monotonic(), region))
                self.idle_bytes += region.capacity

    def trim(self, since: float) -> bool:
        """Give back to the kernel what was idle all the time since then (monotonic); False: none is left."""
        with self._lock:
            while self._idle and self._idle[0][0] <= since:
                self._drop_oldest()
            return bool(self._idle or self._in_use)

    def close(self) -> None:
        """Give the idle memory back to the kernel, now and from here on."""
        with self._lock:
            self._closed = True
            self.idle_bytes = 0
            self._idle.clear()

    def _drop_oldest(self) -> int:
        capacity = self._idle.pop(0)[1].capacity
        self.idle_bytes -= capacity
        return capacity


class Lease:
    """A region in use, until the last reference to this goes; every array over it holds one (numpy calls it base)."""

    def __init__(self, regions: Regions, nbytes: int) -> None:
        self._regions = regions
        self.region = regions.take(nbytes)
        self.__array_interface__ = {
            "version": 3,
            "shape": (self.region.capacity,),
            "typestr": "|u1",
            "data": (self.region.address, False),
        }

    def array(self) -> Array:
        """uint8 [capacity]: the memory itself."""
        return np.asarray(self)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # there was no memory for it
            self._regions.give_back(self.region)


def _rounded(nbytes: int) -> int:
    unit = ROUND_BYTES if nbytes < HUGE_BYTES else HUGE_BYTES
    return max(unit, -(-nbytes // unit) * unit)
