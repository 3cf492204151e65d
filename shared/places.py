"""Decides which connections to a listening socket may stay open if anyone can connect to it. This module uses no
sockets and no clock.

A connection is proven once its peer has shown that it belongs to the run, by a sealed message or a token. A newcomer
that finds all places taken displaces the connection that matters least, so strangers displace each other. It is turned
away only if proven connections that are in use hold all places.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Place:
    """The place of one connection. Times are in seconds of any monotonic clock."""

    address: str
    used: float
    proven: bool = False
    in_use: bool = False
    """Whether the peer is being served. A connection that is proven and in use is never displaced."""

    @property
    def rank(self) -> tuple[bool, bool]:
        """How much the connection matters, for comparison."""
        return self.proven, self.in_use


class Places:
    """The occupied places, longest held first, and counts of refused and displaced connections."""

    def __init__(self, most: int) -> None:
        self.most = most
        """Maximum number of places."""
        self.turned_away = 0
        """Number of newcomers turned away because all places were held by proven connections in use."""
        self.evicted = 0
        """Number of connections ended in favour of a newcomer."""
        self._held: dict[Place, None] = {}

    def __len__(self) -> int:
        return len(self._held)

    def take(self, address: str, now: float) -> tuple[Place | None, Place | None]:
        """Return a place for the newcomer and the place of the connection that must end to make room. Either may be
        None.

        The newcomer is turned away if its place is None. The connection that must end is the oldest one of the lowest
        rank from the address that has the most of them. Therefore, strangers on one host displace each other and not
        peers that have just connected from other hosts.
        """
        victim = None
        if len(self._held) >= self.most:
            lowest = min(place.rank for place in self._held)
            if all(lowest):
                self.turned_away += 1
                return None, None
            lesser = [place for place in self._held if place.rank == lowest]
            crowd = Counter(place.address for place in lesser).most_common(1)[0][0]
            victim = next(place for place in lesser if place.address == crowd)
            self.evicted += 1
            self.leave(victim)
        place = Place(address, now)
        self._held[place] = None
        return place, victim

    def leave(self, place: Place) -> None:
        """Free the place of a connection that has ended."""
        self._held.pop(place, None)

    def unused(self, now: float, proven_s: float, unproven_s: float) -> set[Place]:
        """Return the places that have not been used for longer than the limit for their kind."""
        return {place for place in self._held if now - place.used > (proven_s if place.proven else unproven_s)}
