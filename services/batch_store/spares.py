"""Which files' pages a store keeps for the next puts, and for how long. No I/O, no clock; it must never hold a file
that somebody can find.

Fresh pages are three quarters of the time that a put takes (per GiB, checksums included: 0.58 s into new pages, 0.22
into old ones, 0.13 onto old ones that the writer has mapped), and training puts much the same again at every step. A
spare is cut or stretched to the size of the put that takes it, so a file never takes more room than its bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict

SPARE_BYTES = 256 << 10
"""Below this the pages cost less than the care for them."""
SHARE = 2
"""All spares together: at most the memory limit by this."""
MAX_SPARES = 4096
IDLE_S = 600.0
"""Longer than most training steps: what nobody took until then is given back to the machine."""
_FIT = 2
"""A spare serves puts of a size up to so many times smaller or larger: past that little is saved, or much cut away."""


class Spares:
    """Names and exact sizes of files that nobody maps; the longest idle first."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._serial = 0
        self._by_name: OrderedDict[str, tuple[int, int, float]] = OrderedDict()
        self._by_size: list[tuple[int, int, str]] = []
        self._nbytes = 0

    def fits(self, nbytes: int) -> bool:
        """Is a file of this size worth keeping?"""
        return SPARE_BYTES <= nbytes <= self._most_bytes

    def add(self, name: str, nbytes: int, now: float) -> None:
        """Whether that is too much is for `surplus` to say."""
        self._serial += 1
        self._by_name[name] = (nbytes, self._serial, now)
        insort(self._by_size, (nbytes, self._serial, name))
        self._nbytes += nbytes

    def take(self, name: str) -> int:
        """It is none any more; returns its size."""
        nbytes, serial, _ = self._by_name.pop(name)
        del self._by_size[bisect_left(self._by_size, (nbytes, serial, name))]
        self._nbytes -= nbytes
        return nbytes

    def size(self, name: str) -> int:
        """Exact bytes of the file."""
        return self._by_name[name][0]

    def nearest(self, nbytes: int) -> str | None:
        """For a put of this size: of the nearest size, of several of just this one the youngest."""
        at = bisect_left(self._by_size, (nbytes + 1,))
        around = self._by_size[max(at - 1, 0) : at + 1]
        near = [each for each in around if each[0] <= _FIT * nbytes and nbytes <= _FIT * each[0]]
        return min(near, key=lambda each: abs(each[0] - nbytes))[2] if near else None

    def all_but(self, kept: str | None) -> list[str]:
        """All except one, the longest idle first."""
        return [name for name in self._by_name if name != kept]

    def surplus(self, now: float) -> list[str]:
        """What is idle too long or more than may be kept, to be taken."""
        names: list[str] = []
        nbytes, count = self._nbytes, len(self._by_name)
        for name, (size, _, since) in self._by_name.items():
            if nbytes <= self._most_bytes and count <= MAX_SPARES and now - since <= IDLE_S:
                break
            names.append(name)
            nbytes -= size
            count -= 1
        return names
