"""Live leases by id and by holder. Decisions about tasks are made elsewhere."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Any

Holder = tuple[str, int]


class Lease:
    """One live lease. `open` is the number of its tasks without an accepted outcome."""

    __slots__ = ("call", "holder", "incarnation", "lease_id", "open", "slots", "stage", "version")

    def __init__(
        self,
        lease_id: int,
        stage: int,
        holder: Holder,
        incarnation: int,
        slots: list[int],
        version: tuple[int, int] | None,
        call: tuple[int, int],
    ) -> None:
        """`version` is (lineage, step) of the weights to use, and `call` the request that the lease answered."""
        self.lease_id = lease_id
        self.stage = stage
        self.holder = holder
        self.incarnation = incarnation
        self.slots = array("q", slots)
        self.open = len(slots)
        self.version = version
        self.call = call


class Leases:
    """All live leases. Ids count from 1 and are not reused."""

    def __init__(self) -> None:
        self.next_id = 1
        self._live: dict[int, Lease] = {}
        self._of: dict[Holder, dict[int, None]] = {}
        self._answered: dict[tuple[int, int], int] = {}
        """Request -> id of the live lease that it was granted."""
        self._versions: Counter[tuple[int, int]] = Counter()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._live.values())

    def get(self, lease_id: int) -> Lease | None:
        return self._live.get(lease_id)

    def add(
        self,
        stage: int,
        holder: Holder,
        incarnation: int,
        slots: list[int],
        version: tuple[int, int] | None,
        call: tuple[int, int],
    ) -> Lease:
        lease = Lease(self.next_id, stage, holder, incarnation, slots, version, call)
        self.next_id += 1
        self._insert(lease)
        return lease

    def remove(self, lease: Lease) -> None:
        del self._live[lease.lease_id]
        self._answered.pop(lease.call, None)
        if lease.version is not None:
            self._versions[lease.version] -= 1
            if not self._versions[lease.version]:
                del self._versions[lease.version]
        of = self._of[lease.holder]
        del of[lease.lease_id]
        if not of:
            del self._of[lease.holder]

    def versions(self) -> set[tuple[int, int]]:
        """Return the policy versions that live leases name."""
        return set(self._versions)

    def held_by(self, holder: Holder) -> list[Lease]:
        return [self._live[lease_id] for lease_id in self._of.get(holder, ())]

    def last_of(self, holder: Holder) -> Lease | None:
        """Return the live lease that was granted last to the holder, or None."""
        lease_id = next(reversed(self._of.get(holder, {})), None)
        return None if lease_id is None else self._live[lease_id]

    def answering(self, holder: Holder, call: tuple[int, int]) -> Lease | None:
        """Return the live lease that this very request was granted before, or None."""
        lease = self._live.get(self._answered.get(call, 0))
        return lease if lease is not None and lease.holder == holder else None

    def _insert(self, lease: Lease) -> None:
        self._live[lease.lease_id] = lease
        if lease.call != (0, 0):
            self._answered[lease.call] = lease.lease_id
        self._of.setdefault(lease.holder, {})[lease.lease_id] = None
        if lease.version is not None:
            self._versions[lease.version] += 1

    def dump(self) -> dict[str, Any]:
        return {
            "next_id": self.next_id,
            "live": [
                [
                    lease.lease_id,
                    lease.stage,
                    *lease.holder,
                    lease.incarnation,
                    lease.slots.tobytes(),
                    lease.open,
                    lease.version,
                    lease.call,
                ]
                for lease in self
            ],
        }

    @classmethod
    def load(cls, data: dict[str, Any]) -> Leases:
        leases = cls()
        leases.next_id = data["next_id"]
        for lease_id, stage, service, instance, incarnation, slots, open_, version, call in data["live"]:
            numbers = array("q")
            numbers.frombytes(slots)
            lease = Lease(
                lease_id,
                stage,
                (service, instance),
                incarnation,
                numbers.tolist(),
                tuple(version) if version else None,
                tuple(call),
            )
            lease.open = open_
            leases._insert(lease)
        return leases
