"""Decides which files' pages a store keeps for later puts, and for how long. The module uses no I/O and no clock. A
spare has no name that a reader could find.

A put spends three quarters of its time allocating fresh pages. Writing 1 GiB, including checksums, takes 0.58 s if the
pages are new, 0.22 s if they are old, and 0.13 s if they are old and the writer has already mapped them. Training puts
similar sizes at every step. Without spares, publishing 2 GiB ten times takes 1.5 times as long and twice the processor
time (medians of seven pairs on two busy cores). A spare is resized to the put that takes it, so a file takes up no more
room than its bytes need.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict

SPARE_BYTES = 256 << 10
"""Minimum size of a spare in bytes. Allocating the pages of a smaller file costs less than keeping it."""
SHARE = 2
"""The memory limit divided by this is the maximum size of all spares together, in bytes."""
MAX_SPARES = 4096
IDLE_S = 600.0
"""Seconds after which an unused spare is returned to the system. Most training steps are shorter."""
_FIT = 2
"""Maximum ratio, either way, between the sizes of a spare and a put. Beyond it, reuse saves little, or most of the
spare is cut off."""


class Spares:
    """Names and exact sizes of files that no process maps, longest idle first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._serial = 0
        self._by_name: OrderedDict[str, tuple[int, int, float]] = OrderedDict()
        self._by_size: list[tuple[int, int, str]] = []
        self._nbytes = 0

    def fits(self, nbytes: int) -> bool:
        """Return whether a file of this size is worth keeping."""
        return SPARE_BYTES <= nbytes <= self._max_bytes

    def add(self, name: str, nbytes: int, now: float) -> None:
        """Add a spare. `surplus` enforces the limits."""
        self._serial += 1
        self._by_name[name] = (nbytes, self._serial, now)
        insort(self._by_size, (nbytes, self._serial, name))
        self._nbytes += nbytes

    def take(self, name: str) -> int:
        """Remove a spare and return its size in bytes."""
        nbytes, serial, _ = self._by_name.pop(name)
        del self._by_size[bisect_left(self._by_size, (nbytes, serial, name))]
        self._nbytes -= nbytes
        return nbytes

    def size(self, name: str) -> int:
        """Return the exact size of the file in bytes."""
        return self._by_name[name][0]

    def nearest(self, nbytes: int) -> str | None:
        """Return the spare nearest in size to a put, or None if none fits. If several fit exactly, return the
        youngest."""
        at = bisect_left(self._by_size, (nbytes + 1,))
        around = self._by_size[max(at - 1, 0) : at + 1]
        near = [spare for spare in around if spare[0] <= _FIT * nbytes and nbytes <= _FIT * spare[0]]
        return min(near, key=lambda spare: abs(spare[0] - nbytes))[2] if near else None

    def all_but(self, kept: str | None) -> list[str]:
        """Return all spares except `kept`, longest idle first."""
        return [name for name in self._by_name if name != kept]

    def surplus(self, now: float) -> list[str]:
        """Return the spares that have been idle for too long or exceed the limits. The caller takes them."""
        names: list[str] = []
        nbytes, count = self._nbytes, len(self._by_name)
        for name, (size, _, since) in self._by_name.items():
            if nbytes <= self._max_bytes and count <= MAX_SPARES and now - since <= IDLE_S:
                break
            names.append(name)
            nbytes -= size
            count -= 1
        return names
