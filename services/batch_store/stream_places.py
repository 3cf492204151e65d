"""Who may stay connected to the bulk port, which asks nobody for a key. Pure: no socket, no clock.

A connection proves itself by credit that is in order, for as long as the stream is open that it is for. It must never
be possible to hold a place for long without that, nor to turn away one that may still prove itself while others only
hold theirs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

MOST, SHARE = 256, 16
"""Connections at a time, and at most the limit on descriptors by this. Each may hold one chunk that was copied to be
sent, no more."""
IDLE_S = 20.0
"""A connection that proved itself, and neither asked nor took anything for so long, ends."""
PROVE_S = 10.0
"""So long a new one may take to prove itself; and one whose streams have all ended, to do it again."""
OFFENCES = 32
"""So many in a row end a connection. A reader has a few when the store has just restarted."""


@dataclass(slots=True, eq=False)
class Place:
    """Of one connection. Times are of any steady clock, in seconds."""

    address: str
    used: float
    proven: bool = False
    offences: int = 0
    """Since it last proved itself."""

    def prove(self, now: float) -> None:
        """Credit in order came."""
        self.proven, self.used, self.offences = True, now, 0


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
        """Connections that had proved nothing in time, or nothing any more."""
        self.hung_up = 0
        """Connections with too many offences in a row."""
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

    def offend(self, place: Place) -> bool:
        """One more offence. True: that is enough."""
        place.offences += 1
        self.hung_up += place.offences == OFFENCES
        return place.offences >= OFFENCES

    def overdue(self, now: float) -> set[Place]:
        """Whose connections are to end."""
        found = {place for place in self._held if now - place.used > (IDLE_S if place.proven else PROVE_S)}
        self.unproven += sum(not place.proven for place in found)
        return found
