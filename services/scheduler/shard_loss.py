"""Handles shards that a store has lost. The store's inventory or a reader reveals a loss, which the store must confirm.

The module is pure. An unfinished task is sampled again under a higher fence, which does not count as a failed attempt.
A task that belongs to a step is only marked, because its shards may no longer be needed:

- open step: the failed read starts a new driver life, which finds the step reopened. The other tasks of the step keep
  their results, so if steps consume tasks in the order of admission, the step gets the same tasks in the same order.
  Workers that had begun the step are reloaded (`services/policy_trainer/resume.py`), so no task is trained twice
  (promise 2).
- committed step: a checkpoint is requested. A trainer that must reload before the checkpoint is saved returns to the
  previous one.

If a version is lost, `NextBatch` tells the driver to resume, and the driver publishes the version again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from proto.ids import split_task_id
from proto.messages import PutTask, TaskState
from services.scheduler.events import Claim, Listed, ShardsLost, Tell
from services.scheduler.leases import Version
from services.scheduler.store_loss import lose_evaluations
from services.scheduler.stores import away_stores, lies_in
from services.scheduler.tasks import Task
from shared.stages import WEIGHTS

if TYPE_CHECKING:
    from services.scheduler.run_state import RunState

AUDITED_AT_ONCE = 8192
"""Maximum number of tasks compared with inventories between two ticks. This bounds how long requests are delayed."""
_HOLDING = frozenset({TaskState.ROLLED_OUT, TaskState.READY, TaskState.BATCHED, TaskState.TRAINED})


def claims(run: RunState, store: str, tasks: Iterable[PutTask]) -> list[Claim]:
    """Return a claim on the store for each of these tasks whose fence is current."""
    found: list[Claim] = []
    for each in tasks:
        if _is_live_version(run, store, each):
            found.append(Claim(each))
            continue
        task = run.tasks.find(each.task_id)
        if task is not None and task.fence == each.fence and task.state in _HOLDING and not task.clears:
            found.append(_claim(run, store, task))
    return found


def whole_steps(run: RunState, tasks: Iterable[PutTask]) -> list[PutTask]:
    """Return these tasks and all other tasks of their steps, so that all damage to a step is found at once."""
    found = {each.task_id: each for each in tasks}
    for members in run.batches.values():
        if any(member.task_id in found for member in members):
            found |= {member.task_id: PutTask(member.task_id, member.fence) for member in members}
    return list(found.values())


@dataclass
class Audit:
    """The inventory of one store, and the claims that it does not satisfy."""

    store: str
    held: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    missing: list[Claim] = field(default_factory=list)

    def expect(self, claim: Claim) -> None:
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
            self._read[page.store] = Audit(page.store)
        audit = self._read.get(page.store)
        if audit is None:
            return
        audit.held.update(
            ((task.task_id, task.fence), each) for task, each in zip(page.tasks, page.hashes, strict=True)
        )
        if page.last:
            self._complete[page.store] = self._read.pop(page.store)

    def tick(self) -> None:
        """Allow `AUDITED_AT_ONCE` more tasks to be compared."""
        self._room = AUDITED_AT_ONCE

    def compare(self, run: RunState) -> list[Audit]:
        """Compare as many tasks as are allowed now, and return the completed audits.

        `missing` may also contain results accepted after the inventory began, so the store is asked again about each of
        these.
        """
        over: list[Audit] = []
        while self._room > 0 and (self._compared or self._complete):
            if not self._compared:
                self._begin(run)
            some = list(islice(self._left, self._room))
            for task in some:
                if task.state in _HOLDING and not task.lost and not task.clears:
                    for store in {run.store_names[part.store] for part in task.made}:
                        if store in self._compared:
                            self._compared[store].expect(_claim(run, store, task))
            if len(some) < self._room:
                over += self._compared.values()
                self._compared = {}
            self._room -= max(len(some), 1)
        return over

    def _begin(self, run: RunState) -> None:
        self._compared, self._complete = self._complete, {}
        self._left = iter(list(run.tasks))
        for ref in run.versions.refs:
            if ref.store in self._compared:
                self._compared[ref.store].expect(Claim(PutTask(ref.task_id, ref.fence)))


def lose_shards(run: RunState, event: ShardsLost) -> bool:
    """Resample or mark the tasks whose shards the store has lost.

    Return False if none of the tasks is current.
    """
    store, count = event.store, 0
    for each in event.tasks:
        if _is_live_version(run, store, each):
            _lose_version(run, each)
            count += 1
            continue
        task = run.tasks.find(each.task_id)
        if task is None or task.fence != each.fence or task.clears or task.lost or not lies_in(run, task, store):
            continue
        if task.state in (TaskState.BATCHED, TaskState.TRAINED):
            run.tasks.edit(task).lost = True
        elif task.state in _HOLDING:
            run.order.retry(run, task, 0, f"{store} lost its shards")
        else:
            continue
        count += 1
    if count:
        run.out.append(Tell("scheduler/shards_lost", {"store": store, "tasks": float(count)}))
    return count > 0


def _claim(run: RunState, store: str, task: Task) -> Claim:
    hashes = tuple(part.content_hash for part in task.made if run.store_names[part.store] == store)
    return Claim(PutTask(task.task_id, task.fence), hashes)


def _version(task_id: str) -> Version | None:
    split, lineage, step = split_task_id(task_id)
    return (lineage, step) if split == WEIGHTS else None


def _is_live_version(run: RunState, store: str, each: PutTask) -> bool:
    version = _version(each.task_id)
    ref = run.versions.get(version) if version is not None else None
    return ref is not None and (ref.store, ref.fence) == (store, each.fence)


def _lose_version(run: RunState, each: PutTask) -> None:
    """Forget a version.

    Its store holds nothing of the version, which may therefore be put again under the same fence.
    """
    version = _version(each.task_id)
    if version is not None and run.versions.remove(version) is not None:
        run.clears.push((each.task_id, each.fence, False), away_stores(run))  # these stores may hold damaged copies
        run.lost_version = each.task_id
        lose_evaluations(run, run.committed_step)
