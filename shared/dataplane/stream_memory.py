"""Memory that streams fill, used again: taking fresh pages from the kernel costs ten times what filling them does.

A region is a nameless file, mapped once to write to it and once more, copy-on-write, by each fetch. It must never be
used again while a fetch's mapping of it lives.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref

ROUND_BYTES = 1 << 20
WASTE = 2
"""A region may be used for a stream of at least 1/WASTE of its size."""


class Region:
    """`capacity` bytes; `view` is the mapping to write to."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._descriptor = os.memfd_create("rlbus-stream", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._descriptor, capacity)
            self.view = memoryview(mmap.mmap(self._descriptor, capacity))
        except BaseException:
            os.close(self._descriptor)
            raise

    def __del__(self) -> None:
        os.close(self._descriptor)

    def copy(self) -> mmap.mmap:
        """A private mapping, which costs memory only where it is written to."""
        return mmap.mmap(self._descriptor, self.capacity, access=mmap.ACCESS_COPY)


class Regions:
    """Hands out regions; keeps what nobody uses any more, up to `idle_limit_bytes` and until trimmed. Any thread."""

    def __init__(self, idle_limit_bytes: int) -> None:
        self._limit_bytes = idle_limit_bytes
        self._lock = threading.RLock()  # a finalizer may run inside
        self._idle: list[tuple[float, Region]] = []
        """Since when; the longest idle first."""
        self._in_use = 0
        self.idle_bytes = 0

    def take(self, nbytes: int) -> Region:
        """The smallest idle region that fits without much waste, or a new one."""
        capacity = -(-nbytes // ROUND_BYTES) * ROUND_BYTES
        with self._lock:
            self._in_use += 1
            fitting = [each for each in self._idle if capacity <= each[1].capacity <= WASTE * capacity]
            if fitting:
                best = min(fitting, key=lambda each: each[1].capacity)
                self._idle.remove(best)
                self.idle_bytes -= best[1].capacity
                return best[1]
        try:
            return Region(capacity)
        except BaseException:
            with self._lock:
                self._in_use -= 1
            raise

    def give_back(self, region: Region) -> None:
        """Nobody maps it any more, or will. The oldest idle ones make room for it."""
        with self._lock:
            self._in_use -= 1
            self._idle.append((time.monotonic(), region))
            self.idle_bytes += region.capacity
            while self.idle_bytes > self._limit_bytes:
                self.idle_bytes -= self._idle.pop(0)[1].capacity

    def trim(self, since: float) -> bool:
        """Give back to the kernel what was idle all the time since then (monotonic); False: none is left."""
        with self._lock:
            while self._idle and self._idle[0][0] <= since:
                self.idle_bytes -= self._idle.pop(0)[1].capacity
            return bool(self._idle or self._in_use)

    def clear(self) -> None:
        """Give the idle memory back to the kernel, now and from here on."""
        with self._lock:
            self._limit_bytes = self.idle_bytes = 0
            self._idle.clear()


class Lease:
    """A region in use: by whoever holds this object, and by every mapping that `copy` made."""

    def __init__(self, regions: Regions, nbytes: int) -> None:
        self.region = regions.take(nbytes)
        self._uses = _Uses(regions, self.region)
        self._uses.enter(self)

    def copy(self) -> mmap.mmap:
        """A private mapping; the region is in use as long as it lives."""
        data = self.region.copy()
        self._uses.enter(data)
        return data


class _Uses:
    """Counts what uses a region and gives it back after the last."""

    def __init__(self, regions: Regions, region: Region) -> None:
        self._regions, self._region = regions, region
        self._lock = threading.RLock()
        self._count = 0

    def enter(self, user: object) -> None:
        with self._lock:
            self._count += 1
        weakref.finalize(user, self._leave).atexit = False

    def _leave(self) -> None:
        with self._lock:
            self._count -= 1
            last = not self._count
        if last:
            self._regions.give_back(self._region)
