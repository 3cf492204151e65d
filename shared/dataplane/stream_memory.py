"""Reusable memory for streams. Taking fresh pages from the kernel can cost more than filling them.

A region is anonymous memory, in huge pages where they are available. The kernel provides a GiB of 4 KiB pages in 0.5 s,
of pages of an unnamed file (which could be mapped twice) in 0.7 to 1.0 s, and of huge pages in 0.1 s. Receiving a GiB
takes 0.35 s. A region is not reused while an array over it exists.
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
"""Size of a huge page. Regions of at least this size are rounded up to a multiple of it."""
WASTE = 2
"""Maximum ratio between the size of a reused region and the size that is needed."""


class Region:
    """Memory of `capacity` bytes at `address`. Data is written through `view`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        data = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if capacity >= HUGE_BYTES:
            with contextlib.suppress(OSError):  # a kernel without huge pages provides small ones
                data.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(data)
        self.address: int = np.frombuffer(data, np.uint8).ctypes.data


class Regions:
    """Hands out regions and keeps unused ones until they are trimmed. Thread-safe.

    Idle and used memory together do not exceed the peak of the used memory, because a new region replaces idle ones.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may end a lease while the lock is held
        self._idle: list[tuple[float, Region]] = []
        """(time since which it is idle, region), the longest idle first."""
        self._in_use = 0
        self._closed = False
        self.idle_bytes = 0

    def take(self, nbytes: int) -> Region:
        """Return the smallest idle region that fits within `WASTE`, or a new one."""
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
        """Take back a region over which no array exists."""
        with self._lock:
            self._in_use -= 1
            if not self._closed:
                self._idle.append((time.monotonic(), region))
                self.idle_bytes += region.capacity

    def trim(self, since: float) -> bool:
        """Free the regions that have been idle since `since` (monotonic). Return False if no region is left."""
        with self._lock:
            while self._idle and self._idle[0][0] <= since:
                self._drop_oldest()
            return bool(self._idle or self._in_use)

    def close(self) -> None:
        """Free the idle regions, and from now on each region when it is given back."""
        with self._lock:
            self._closed = True
            self.idle_bytes = 0
            self._idle.clear()

    def _drop_oldest(self) -> int:
        capacity = self._idle.pop(0)[1].capacity
        self.idle_bytes -= capacity
        return capacity


class RegionHold:
    """Keeps a region in use until the last reference to this object goes. Arrays over it hold one as their `base`."""

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
        """Return the memory as a uint8 array [capacity], without a copy."""
        return np.asarray(self)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the region could not be allocated
            self._regions.give_back(self.region)


def _rounded(nbytes: int) -> int:
    unit = ROUND_BYTES if nbytes < HUGE_BYTES else HUGE_BYTES
    return max(unit, -(-nbytes // unit) * unit)
