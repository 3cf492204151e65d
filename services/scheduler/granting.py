"""Leases: who gets which block of tasks with which version, and what happens when a lease is lost. Pure.

Generation never stands still through an evaluation: engines sample blocks of both in turn. An engine that holds the
version which is measured samples training blocks with it too, as long as their step may be; where it may not be, the
engine leaves it after as many leases as a step has, and comes back after as many, so that it seldom loads weights to
and fro. Only when a second version waits to be measured does evaluation go first: nothing may pile up. In deterministic
mode it always does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from proto.messages import (
    ErrorCode,
    LeaseGrant,
    LeaseRequest,
)
from services.scheduler.evaluations import Evaluation
from services.scheduler.events import LeaseExpired
from services.scheduler.fixed import Fixed
from services.scheduler.leases import Lease
from services.scheduler.ledger import FAILURE, TRAIN_SPLIT
from services.scheduler.plan import stage_index
from services.scheduler.tasks import EVALUATION, TaskState
from services.scheduler.versions import Version
from shared.rpc.errors import RpcError
from shared.rundir import service_name


class Granting(Fixed):
    """The verbs of leasing."""

    def stage(self, request: LeaseRequest) -> int:
        """Index of the stage a request is about. Raises RpcError when it cannot be served, ever."""
        stage = stage_index(self.plan, request.stage)
        if stage < 0:
            known = ", ".join(each.name for each in self.plan.stages)
            raise RpcError(ErrorCode.BAD_REQUEST, f"stage {request.stage!r}: this run has {known}")
        if request.max_tasks < 1:
            raise RpcError(ErrorCode.BAD_REQUEST, f"max_tasks {request.max_tasks}: ask for 1 or more")
        return stage

    def lease(self, request: LeaseRequest, call: tuple[int, int]) -> LeaseGrant | None:
        """Give a block of tasks, the oldest first; None (and no change) when there is nothing to give."""
        stage = self.stage(request)
        if self.finished:
            return None
        if stage > 0:
            return self._lease_later_stage(stage, request, call)
        waiting = [each for each in self.evaluations.open.values() if each.waiting and self.versions.get(each.version)]
        version = self._training_version(request, {each.version for each in waiting})
        if waiting and (version is None or self._evaluation_goes_first(waiting, version, request)):
            return self._lease_evaluation(waiting[0], request, call)
        return self._lease_rollout(version, request, call) if version is not None else None

    def _evaluation_goes_first(self, waiting: Sequence[Evaluation], version: Version, request: LeaseRequest) -> bool:
        """Before a training block that would be sampled with `version`."""
        measured = waiting[0].version
        if self.plan.deterministic or any(each.version != measured for each in waiting):
            return True
        leaves = self._stands_at(request) == measured != version
        return self.owed < (self._leases_a_step(request) if leaves else 1)

    def _leases_a_step(self, request: LeaseRequest) -> int:
        return -(-self.plan.tasks_per_step // request.max_tasks)

    def _stands_at(self, request: LeaseRequest) -> Version:
        """What the engine will hold when it comes to the lease that it asks for."""
        holds = (request.holds_lineage, request.holds_step)
        last = self.leases.last_of((request.service, request.instance))
        if last is None or last.version is None:
            return holds
        return last.version if self.measures(last) else max(holds, last.version)

    def measures(self, lease: Lease) -> bool:
        """Whether it is one of an evaluation, which wants exactly its version."""
        slot = next((slot for slot in lease.slots if self.tasks.lease[slot] == lease.lease_id), None)
        return slot is not None and self.tasks.admission[slot] == EVALUATION

    def _lease_evaluation(self, one: Evaluation, request: LeaseRequest, call: tuple[int, int]) -> LeaseGrant:
        rows = self.plan.block_rows or request.max_tasks * self.plan.group_size
        most = max(rows // one.samples, 1)  # as many rows as a training block has
        if self.plan.deterministic:
            slots = self._evaluation_block(one, most)
        else:
            slots = [one.waiting.popleft() for _ in range(min(most, len(one.waiting)))]
        self.owed = min(self.owed + 1, self._leases_a_step(request))
        return self._grant(0, request, call, slots, one.version)

    def _lease_later_stage(self, stage: int, request: LeaseRequest, call: tuple[int, int]) -> LeaseGrant | None:
        """Tasks that stand under one version of the reference; None too while it is not published yet.

        A task of a step after a refresh waits for the version of that step, which has been trained by then: it can no
        more fall back to a step before the refresh when tasks before it are dropped.
        """
        first = self._peek(stage)
        if first is None:
            return None
        wanted = self.plan.reference_version(self._step_of(first))
        version = self.versions.at_step(wanted) if wanted else None
        if wanted and version is None:
            return None
        slots = self._pop_ready(stage, request.max_tasks)
        return self._grant(stage, request, call, slots, version) if slots else None

    def _training_version(self, request: LeaseRequest, measured: set[Version]) -> Version | None:
        """What the oldest task that waits is to be sampled with; None: nothing waits, or its version is not there yet.

        `measured`: versions that an engine which holds one of them had better keep.
        """
        first = self._peek(0)
        if first is None:
            return None
        oldest = max(0, self._step_of(first) - 1 - self.plan.staleness)
        if self.plan.deterministic:
            return None if self._evaluates(oldest) else self.versions.at_step(oldest)
        if measured and (stands := self._stands_at(request)) in measured and stands[1] >= oldest:
            return stands
        newest = self.versions.newest
        return newest if newest is not None and newest[1] >= oldest else None

    def _lease_rollout(self, version: Version, request: LeaseRequest, call: tuple[int, int]) -> LeaseGrant | None:
        slots = self._pop_ready(0, request.max_tasks)
        if not slots:
            return None
        self.owed = max(self.owed - 1, 0)
        return self._grant(0, request, call, slots, version)

    def _peek(self, stage: int) -> int | None:
        """The oldest admission number that waits for `stage`."""
        line = self.ready[stage]
        while (admission := line.peek()) is not None:
            if self._waits(stage, admission):
                return admission
            line.pop()
        return None

    def _pop_ready(self, stage: int, most: int) -> list[int]:
        """Up to `most` waiting tasks, oldest first; for the rollout stage all of one step, for later ones all under one
        version of the reference. In deterministic mode one whole block or nothing."""
        first = self._peek(stage)
        if self.plan.deterministic and first is not None:
            block = self._block(stage, first, most)
            return self._leased_slots(block) if all(self._waits(stage, each) for each in block) else []
        slots: list[int] = []
        group = -1
        while len(slots) < most:
            admission = self._peek(stage)
            if admission is None:
                break
            step = self._step_of(admission)
            key = step if stage == 0 else self.plan.reference_version(step)
            if group not in (-1, key):
                break
            group = key
            self.ready[stage].pop()
            slots += self._leased_slots([admission])
        return slots

    def _leased_slots(self, admissions: Iterable[int]) -> list[int]:
        """Slots of tasks that the lease to come takes: they wait no more."""
        slots = [self.window.slot(admission) for admission in admissions]
        for slot in slots:
            self.tasks.lease[slot] = self.leases.next_id
        return slots

    def _grant(
        self,
        stage: int,
        request: LeaseRequest,
        call: tuple[int, int],
        slots: list[int],
        version: Version | None,
    ) -> LeaseGrant:
        holder = (request.service, request.instance)
        lease = self.leases.add(stage, holder, request.incarnation, slots, version, call)
        for slot in slots:
            self.tasks.lease[slot] = lease.lease_id
            if stage == 0:
                self.tasks.move(slot, TaskState.LEASED)
        return self.describe(lease)

    def describe(self, lease: Lease, lease_s: float = 0.0) -> LeaseGrant:
        """The grant of a live lease, again the same for a retry (`lease_s` is filled in by `state.py`)."""
        stage = self.plan.stages[lease.stage]
        slots = [slot for slot in lease.slots if self.tasks.lease[slot] == lease.lease_id]
        split = self.tasks.split[slots[0]] if slots else TRAIN_SPLIT
        evaluation = self._evaluation_of(slots[0]) if slots and self.measures(lease) else None
        # An engine may still hold a later version of that lineage, which was taken back.
        outlived = lease.version is not None and lease.version[0] < self.lineage
        exact = self.plan.deterministic or evaluation is not None or lease.stage > 0 or outlived
        oldest = 0
        if lease.version is not None and slots:
            oldest = lease.version[1]
            if not exact and lease.stage == 0:
                oldest = max(0, self._step_of(self.tasks.admission[slots[0]]) - 1 - self.plan.staleness)
        return LeaseGrant(
            lease_id=lease.lease_id,
            stage=stage.name,
            split=self.tasks.splits[split],
            lease_s=lease_s,
            batch=self.meta(slots, needs=stage.needs),
            min_step=oldest,
            exact=exact and lease.stage == 0,
            group_size=evaluation.samples if evaluation else self.plan.group_size,
            block_rows=self.plan.block_rows if lease.stage == 0 else 0,
            weights=self.versions.get(lease.version) if lease.version is not None else None,
        )

    def expire(self, event: LeaseExpired) -> bool:
        """No progress: the tasks go back, and it counts as a failed attempt of theirs if it was their turn."""
        lease = self.leases.get(event.lease_id)
        if lease is not None:
            self._give_up(lease, 0 if event.untouched else FAILURE)
        return lease is not None

    def _give_up(self, lease: Lease, cost: int) -> None:
        for slot in lease.slots:
            if self.tasks.lease[slot] == lease.lease_id:
                self._retry(slot, cost, f"lease of {service_name(*lease.holder)} was lost")
        self.leases.remove(lease)
        self._free_versions()
