"""Progress of live leases, and the expiry of those without progress. The module is pure. Nothing here is journaled."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from proto.messages import LeaseProgress
from services.scheduler.events import LeaseExpired


@dataclass
class _Pace:
    deadline: float
    progress: int = -1
    not_started: bool = False


class Paces:
    """Deadlines of leases by id. Only an increased `progress` or a result moves a deadline."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._of: dict[int, _Pace] = {}
        self._expiries: list[tuple[float, int]] = []

    def begin(self, lease_id: int, now: float) -> None:
        """Set the deadline for a lease that was granted, or restored after a restart."""
        pace = self._of[lease_id] = _Pace(now + self._lease_s)
        heapq.heappush(self._expiries, (pace.deadline, lease_id))

    def heard(self, report: LeaseProgress, now: float) -> None:
        """Record the progress that the holder of a live lease reports in a heartbeat."""
        pace = self._of[report.lease_id]
        pace.not_started = report.untouched
        if report.progress > pace.progress:
            pace.progress = report.progress
            pace.deadline = now + self._lease_s

    def result(self, lease_id: int, now: float) -> None:
        """Renew the deadline of a lease because some of its tasks were completed."""
        if lease_id in self._of:
            self._of[lease_id].deadline = now + self._lease_s

    def end(self, lease_id: int) -> None:
        """Forget a lease that is no longer held."""
        self._of.pop(lease_id, None)

    def idle(self, now: float) -> Iterator[tuple[int, float]]:
        """Yield each lease with the number of seconds since its last progress."""
        for lease_id, pace in self._of.items():
            yield lease_id, max(now - (pace.deadline - self._lease_s), 0.0)

    def expired(self, now: float) -> list[LeaseExpired]:
        """Remove and return the leases whose deadline has passed.

        Some of these leases may have ended in another way.
        """
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
                found.append(LeaseExpired(lease_id, pace.not_started))
        return found
