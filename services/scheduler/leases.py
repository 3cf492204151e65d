"""The live leases, and their progress. The module is pure; decisions about tasks are made elsewhere."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from proto.messages import LeaseProgress
from services.scheduler.events import LeaseExpired
from services.scheduler.tasks import EVALUATION, Task

Holder = tuple[str, int]
CallId = tuple[int, int]
"""Incarnation of a caller and the id of its request."""
NO_CALL: CallId = (0, 0)
Version = tuple[int, int]
"""Lineage and step of a policy version, ordered by lineage first."""


@dataclass(slots=True, eq=False)
class TaskLease:
    """One live lease. `version` names the weights to use, and `call` names the request that the lease answered."""

    lease_id: int
    stage: int
    holder: Holder
    incarnation: int
    version: Version | None
    call: CallId
    tasks: dict[str, Task]
    """The tasks that the lease still holds, in the order in which they were granted."""

    @property
    def measured(self) -> int | None:
        """The step of the version that is evaluated with the lease, or None if it does not belong to an evaluation."""
        first = next(iter(self.tasks.values()), None)
        return first.epoch if first is not None and first.admission == EVALUATION else None


class Leases:
    """All live leases. Ids count from 1 and are not reused."""

    def __init__(self) -> None:
        self.next_id = 1
        self._live: dict[int, TaskLease] = {}
        self._of: dict[Holder, dict[int, TaskLease]] = {}
        self._answered: dict[CallId, TaskLease] = {}
        self._versions: Counter[Version] = Counter()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[TaskLease]:
        return iter(self._live.values())

    def get(self, lease_id: int) -> TaskLease | None:
        return self._live.get(lease_id)

    def add(self, lease: TaskLease) -> TaskLease:
        self.next_id = max(self.next_id, lease.lease_id + 1)
        self._live[lease.lease_id] = lease
        self._of.setdefault(lease.holder, {})[lease.lease_id] = lease
        if lease.call != NO_CALL:
            self._answered[lease.call] = lease
        if lease.version is not None:
            self._versions[lease.version] += 1
        return lease

    def remove(self, lease: TaskLease) -> None:
        del self._live[lease.lease_id]
        self._answered.pop(lease.call, None)
        del self._of[lease.holder][lease.lease_id]
        if not self._of[lease.holder]:
            del self._of[lease.holder]
        if lease.version is not None:
            self._versions[lease.version] -= 1
            if not self._versions[lease.version]:
                del self._versions[lease.version]

    def versions(self) -> set[Version]:
        """Return the policy versions named by live leases."""
        return set(self._versions)

    def held_by(self, holder: Holder) -> list[TaskLease]:
        return list(self._of.get(holder, {}).values())

    def last_of(self, holder: Holder) -> TaskLease | None:
        """Return the holder's most recently granted live lease, or None."""
        return next(reversed(self._of.get(holder, {}).values()), None)

    def answering(self, holder: Holder, call: CallId) -> TaskLease | None:
        """Return the live lease that this same request has already been granted, or None."""
        lease = self._answered.get(call)
        return lease if lease is not None and lease.holder == holder else None


@dataclass
class _Pace:
    deadline: float
    progress: int = -1
    not_started: bool = False


class LeasePaces:
    """Deadlines of leases by id, which are not journaled. Only an increased `progress` or a result moves a deadline."""

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
        over: list[LeaseExpired] = []
        while self._expiries and self._expiries[0][0] <= now:
            _, lease_id = heapq.heappop(self._expiries)
            pace = self._of.get(lease_id)
            if pace is None:
                continue
            if pace.deadline > now:
                heapq.heappush(self._expiries, (pace.deadline, lease_id))
            else:
                del self._of[lease_id]
                over.append(LeaseExpired(lease_id, pace.not_started))
        return over
