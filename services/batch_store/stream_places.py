"""Decides which connections to the bulk port may stay; anyone can connect to it. Pure: no socket, no clock.

A connection proves itself with the HELLO of a line, which is good for one connection. No connection holds a place for
long without that, and none that may still prove itself is turned away while others only hold their places.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

MOST, SHARE = 256, 16
"""Maximum number of connections, which is also at most the limit on descriptors divided by the share. Each may hold one
range that was copied to be sent, no more."""
IDLE_S = 20.0
"""A connection that proved itself, and neither asked for nor took anything for so many seconds, ends."""
PROVE_S = 10.0
"""Seconds that a new connection may take to prove itself."""


@dataclass(slots=True, eq=False)
class Place:
    """The place of one connection. Times are of any steady clock, in seconds."""

    address: str
    used: float
    proven: bool = False


class Places:
    """The places that are taken, the longest held first, and what came of those who held them."""

    def __init__(self, descriptors: int) -> None:
        """`descriptors`: most that this process may have."""
        self._descriptors = descriptors
        self.turned_away = 0
        """Newcomers, because every place was held by one that had proved itself."""
        self.evicted = 0
        """Connections that had proved nothing, for a newcomer."""
        self.unproven = 0
        """Connections that had proved nothing in time."""
        self._held: dict[Place, None] = {}

    def __len__(self) -> int:
        return len(self._held)

    def take(self, address: str, now: float) -> tuple[Place | None, Place | None]:
        """`(the newcomer's place, whose connection ends for it)`; no place: the newcomer's own ends.

        The one that goes has proved nothing and is, of those from the address with most such ones, the oldest: so
        strangers of one host push out one another, not readers of other hosts that have just connected.
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
        place = Place(address, now)
        self._held[place] = None
        return place, victim

    def leave(self, place: Place) -> None:
        """Its connection has ended."""
        self._held.pop(place, None)

    def overdue(self, now: float) -> set[Place]:
        """Return the places whose connections are to end."""
        found = {place for place in self._held if now - place.used > (IDLE_S if place.proven else PROVE_S)}
        self.unproven += sum(not place.proven for place in found)
        return found
