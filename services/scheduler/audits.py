"""Compares the inventories of the stores with the results that they must hold. The module is pure.

The store's inventory or a reader reveals a loss, which the store must confirm. `recovery.py` handles lost shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from proto.messages import PutTask, TaskState
from services.scheduler.events import CheckShards, Listed, ShardClaim
from services.scheduler.ledger import TaskLedger
from services.scheduler.tasks import Task
from shared.stages import WEIGHTS

AUDITED_AT_ONCE = 8192
"""Maximum number of tasks compared with inventories between two ticks. This bounds how long requests are delayed."""
_HOLDING = frozenset({TaskState.ROLLED_OUT, TaskState.READY, TaskState.BATCHED, TaskState.TRAINED})


def claims(ledger: TaskLedger, store: str, tasks: Iterable[PutTask]) -> list[ShardClaim]:
    """Return a claim on the store for each of these tasks whose fence is current."""
    current: list[ShardClaim] = []
    for entry in tasks:
        if ledger.history.is_live_version(store, entry):
            current.append(ShardClaim(entry))
            continue
        task = ledger.tasks.find(entry.task_id)
        if task is not None and task.fence == entry.fence and task.state in _HOLDING and not task.clears:
            current.append(_claim(ledger, store, task))
    return current


def whole_steps(ledger: TaskLedger, tasks: Iterable[PutTask]) -> list[PutTask]:
    """Return these tasks and all other tasks of their steps, so that all damage to a step is found at once."""
    reported = {entry.task_id: entry for entry in tasks}
    for members in ledger.history.batches.values():
        if any(member.task_id in reported for member in members):
            reported |= {member.task_id: PutTask(member.task_id, member.fence) for member in members}
    return list(reported.values())


def is_stray(ledger: TaskLedger, entry: PutTask) -> bool:
    """Return whether the store's `entry` belongs to none of the accepted results, live leases, live versions and
    holds."""
    if ledger.shards.holds.covers(entry.task_id):
        return False
    split, epoch, index = entry.task_id.rsplit("/", 2)
    if split == WEIGHTS:
        version = (int(epoch), int(index))
        ref = ledger.history.versions.refs.get(version)
        if ref is not None:
            return entry.fence < ref.fence
        newest = ledger.history.versions.newest
        # A version that has been put but not yet published has the driver's lineage and is not older than the newest
        # published one.
        return newest is not None and (version[0] < ledger.history.lineage or version < newest)
    task = ledger.tasks.find(entry.task_id)
    return task is None or entry.fence < task.fence


@dataclass
class Audit:
    """The inventory of one store, and the claims that it does not satisfy."""

    held: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    missing: list[ShardClaim] = field(default_factory=list)

    def expect(self, claim: ShardClaim) -> None:
        """Add a claim to `missing` if the inventory does not satisfy it."""
        if not claim.met(self.held):
            self.missing.append(claim)


class Audits:
    """The inventories of all stores, read page by page, and their comparison with the accepted results.

    One pass over the tasks serves all stores whose inventories are complete when it begins, so that the work does not
    grow with the number of stores.
    """

    def __init__(self) -> None:
        self._read: dict[str, Audit] = {}
        """Inventories that are being read, by store."""
        self._complete: dict[str, Audit] = {}
        """Complete inventories that wait for the next pass."""
        self._compared: dict[str, Audit] = {}
        """Inventories that are being compared in the current pass."""
        self._left: Iterator[Task] = iter(())
        self._room = AUDITED_AT_ONCE
        """Number of tasks that may still be compared before the next tick."""

    def add(self, page: Listed) -> None:
        """Add a page of an inventory. Pages that do not follow a first page are ignored."""
        if page.first:
            self._read[page.store] = Audit()
        audit = self._read.get(page.store)
        if audit is None:
            return
        audit.held.update(
            ((task.task_id, task.fence), hashes) for task, hashes in zip(page.tasks, page.hashes, strict=True)
        )
        if page.last:
            self._complete[page.store] = self._read.pop(page.store)

    def tick(self) -> None:
        """Allow `AUDITED_AT_ONCE` more tasks to be compared."""
        self._room = AUDITED_AT_ONCE

    def compare(self, ledger: TaskLedger) -> list[CheckShards]:
        """Compare as many tasks as are allowed now, and have the stores check the missing results.

        A result that was accepted after the inventory began may also be missing from it.
        """
        checks: list[CheckShards] = []
        while self._room > 0 and (self._compared or self._complete):
            if not self._compared:
                self._begin(ledger)
            some = list(islice(self._left, self._room))
            for task in some:
                if task.state in _HOLDING and not task.lost and not task.clears:
                    for store in {ledger.shards.store_names[part.store] for part in task.made}:
                        if store in self._compared:
                            self._compared[store].expect(_claim(ledger, store, task))
            if len(some) < self._room:
                checks += [
                    CheckShards(store, audit.missing) for store, audit in self._compared.items() if audit.missing
                ]
                self._compared = {}
            self._room -= max(len(some), 1)
        return checks

    def _begin(self, ledger: TaskLedger) -> None:
        self._compared, self._complete = self._complete, {}
        self._left = iter(list(ledger.tasks))
        for ref in ledger.history.versions.refs.values():
            if ref.store in self._compared:
                self._compared[ref.store].expect(ShardClaim(PutTask(ref.task_id, ref.fence)))


def _claim(ledger: TaskLedger, store: str, task: Task) -> ShardClaim:
    hashes = tuple(part.content_hash for part in task.made if ledger.shards.store_names[part.store] == store)
    return ShardClaim(PutTask(task.task_id, task.fence), hashes)
