"""How far the work on each live lease is, and which leases end because theirs gets no further. Pure, not journaled."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from proto.messages import LeaseProgress
from services.scheduler.events import LeaseExpired


@dataclass
class _Pace:
    deadline: float
    progress: int = -1
    untouched: bool = False


class Paces:
    """Leases by id. Only a greater `progress` than before, or a result, moves a deadline."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._of: dict[int, _Pace] = {}
        self._expiries: list[tuple[float, int]] = []

    def begin(self, lease_id: int, now: float) -> None:
        """A lease was given, or lives on after a restart."""
        pace = self._of[lease_id] = _Pace(now + self._lease_s)
        heapq.heappush(self._expiries, (pace.deadline, lease_id))

    def told(self, told: LeaseProgress, now: float) -> None:
        """The holder's heartbeat says how far it is."""
        pace = self._of[told.lease_id]
        pace.untouched = told.untouched
        if told.progress > pace.progress:
            pace.progress = told.progress
            pace.deadline = now + self._lease_s

    def result(self, lease_id: int, now: float) -> None:
        """Some of its tasks were completed: that is progress."""
        if lease_id in self._of:
            self._of[lease_id].deadline = now + self._lease_s

    def end(self, lease_id: int) -> None:
        """It is no longer held."""
        self._of.pop(lease_id, None)

    def expired(self, now: float) -> list[LeaseExpired]:
        """Remove and return the leases whose deadline is over; some may have ended otherwise."""
        found: list[LeaseExpired] = []
        while self._expiries and self._expiries[0][0] <= now:
            _, lease_id = heapq.heappop(self._expiries)
            pace = self._of.get(lease_id)
            if pace is None:
                continue
            if pace.deadline > now:
                heapq.heappush(self._expiries, (pace.deadline, lease_id))
            else:
                del self._of[lease_id]
                found.append(LeaseExpired(lease_id, pace.untouched))
        return found
