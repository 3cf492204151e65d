"""Decides which connections to the bulk port may stay open, because anyone can connect to it. This module uses no
sockets and no clock.

A connection proves itself with the HELLO of a line, and each line admits one connection. Without a HELLO, no connection
keeps its place for long. A newcomer is turned away only if proven connections hold all places.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

MOST, SHARE = 256, 16
"""Maximum number of connections. The descriptor limit divided by `SHARE` is a second maximum. Each connection holds at
most one range that was copied to be sent."""
IDLE_S = 20.0
"""Seconds after which a proven connection ends if it has neither requested nor received anything."""
PROVE_S = 10.0
"""Seconds within which a new connection must prove itself."""


@dataclass(slots=True, eq=False)
class ReaderPlace:
    """The place of one connection. Times are in seconds of any monotonic clock."""

    address: str
    used: float
    proven: bool = False


class Places:
    """The occupied places, longest held first, and counts of refused and ended connections."""

    def __init__(self, descriptors: int) -> None:
        """`descriptors` is the maximum number of descriptors of this process."""
        self._descriptors = descriptors
        self.turned_away = 0
        """Number of newcomers turned away because all places were held by proven connections."""
        self.evicted = 0
        """Number of unproven connections ended in favour of a newcomer."""
        self.unproven = 0
        """Number of connections that did not prove themselves in time."""
        self._held: dict[ReaderPlace, None] = {}

    def __len__(self) -> int:
        return len(self._held)

    def take(self, address: str, now: float) -> tuple[ReaderPlace | None, ReaderPlace | None]:
        """Return a place for the newcomer and the place of the connection that must end to make room. Either may be
        None.

        The newcomer is turned away if its place is None. The connection that must end is the oldest unproven one from
        the address that has the most of them. Therefore, strangers on one host displace each other and not readers that
        have just connected from other hosts.
        """
        victim = None
        if len(self._held) >= min(MOST, self._descriptors // SHARE):
            strangers = [place for place in self._held if not place.proven]
            if not strangers:
                self.turned_away += 1
                return None, None
            crowd = Counter(place.address for place in strangers).most_common(1)[0][0]
            victim = next(place for place in strangers if place.address == crowd)
            self.evicted += 1
            self.leave(victim)
        place = ReaderPlace(address, now)
        self._held[place] = None
        return place, victim

    def leave(self, place: ReaderPlace) -> None:
        """Free the place of a connection that has ended."""
        self._held.pop(place, None)

    def overdue(self, now: float) -> set[ReaderPlace]:
        """Return the places whose connections must end, and count the unproven ones among them."""
        found = {place for place in self._held if now - place.used > (IDLE_S if place.proven else PROVE_S)}
        self.unproven += sum(not place.proven for place in found)
        return found
