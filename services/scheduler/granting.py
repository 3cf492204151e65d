"""Leases: which holder gets which block of tasks with which version, and what happens to tasks of lost leases. Pure.

Training generation continues during an evaluation: engines sample blocks of both in turn. An engine that holds the
evaluated version also samples training blocks with it while it is recent enough for their step. When it is too old, the
engine changes between the versions only after as many leases as a step has, so weights are seldom loaded back and
forth. Evaluation goes first when a second version waits to be evaluated, so that evaluations do not pile up, and always
in deterministic mode.
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
        """Return the index of the requested stage. Raises RpcError(bad_request) if the request can never be served."""
        stage = stage_index(self.plan, request.stage)
        if stage < 0:
            known = ", ".join(each.name for each in self.plan.stages)
            raise RpcError(ErrorCode.BAD_REQUEST, f"stage {request.stage!r}: this run has {known}")
        if request.max_tasks < 1:
            raise RpcError(ErrorCode.BAD_REQUEST, f"max_tasks {request.max_tasks}: ask for 1 or more")
        return stage

    def lease(self, request: LeaseRequest, call: tuple[int, int]) -> LeaseGrant | None:
        """Lease a block of tasks, the oldest first. Return None, without any change, if there is nothing to lease."""
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
        """Return whether evaluation goes before a training block that would be sampled with `version`."""
        measured = waiting[0].version
        if self.plan.deterministic or any(each.version != measured for each in waiting):
            return True
        leaves = self._stands_at(request) == measured != version
        return self.owed < (self._leases_a_step(request) if leaves else 1)

    def _leases_a_step(self, request: LeaseRequest) -> int:
        return -(-self.plan.tasks_per_step // request.max_tasks)

    def _stands_at(self, request: LeaseRequest) -> Version:
        """Return the version that the engine will hold when it begins the requested lease."""
        holds = (request.holds_lineage, request.holds_step)
        last = self.leases.last_of((request.service, request.instance))
        if last is None or last.version is None:
            return holds
        return last.version if self.measures(last) else max(holds, last.version)

    def measures(self, lease: Lease) -> bool:
        """Return whether the lease belongs to an evaluation, which requires its exact version."""
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
        """Lease tasks that share one version of the reference. Return None until that version is published.

        A task of a step after a refresh waits for the version of the refresh. By then that version has been trained,
        so drops of earlier tasks can no longer move the task to a step before the refresh.
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
        """Return the version for the oldest waiting task. None if no task waits or its version is not published yet.

        `measured` are the versions under evaluation, which an engine that holds one of them keeps if it may.
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
        """Return the oldest admission number that waits for `stage`, or None."""
        line = self.ready[stage]
        while (admission := line.peek()) is not None:
            if self._waits(stage, admission):
                return admission
            line.pop()
        return None

    def _pop_ready(self, stage: int, most: int) -> list[int]:
        """Remove up to `most` waiting tasks, oldest first, and return their slots.

        Tasks of the rollout stage are all of one step; those of later stages share one version of the reference. In
        deterministic mode, return one whole block or nothing.
        """
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
        """Assign tasks to the next lease, so that they no longer wait, and return their slots."""
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
        """Return the grant of a live lease, the same for every retry. `state.py` fills in `lease_s`."""
        stage = self.plan.stages[lease.stage]
        slots = [slot for slot in lease.slots if self.tasks.lease[slot] == lease.lease_id]
        split = self.tasks.split[slots[0]] if slots else TRAIN_SPLIT
        evaluation = self._evaluation_of(slots[0]) if slots and self.measures(lease) else None
        # An engine may still hold a later version of an earlier lineage, which was taken back.
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
        """End a lease without progress and retry its tasks. It counts as a failed attempt if their work had begun."""
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
