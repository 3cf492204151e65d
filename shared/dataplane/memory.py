"""Arrays over memory that is released with the last array, and reusable memory for streams.

Taking fresh pages from the kernel can cost more than filling them.

A region is anonymous memory, in huge pages where they are available. The kernel provides a GiB in 0.5 s as 4 KiB pages,
in 0.7 to 1.0 s as pages of an unnamed file (which could be mapped twice), and in 0.1 s as huge pages. Receiving a GiB
takes 0.35 s. A region is not reused while an array over it exists.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from proto.tensors import Array

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
