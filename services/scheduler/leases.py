"""Holds the live leases, by id, holder, request and version. Decisions about tasks are made elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from services.scheduler.tasks import Task

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
