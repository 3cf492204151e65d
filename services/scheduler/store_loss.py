"""Recovery from a store that comes back without its data (host lost, run resumed elsewhere) or not at all. Pure.

Its unfinished tasks are sampled again under higher fences. If it held anything of a batched step or a version, the run
returns to the newest checkpoint: steps after it cannot be replayed, so their tasks are reopened and trained again
(docs/architecture.md, promise 1; in deterministic mode from the same versions). The trainer reloads the checkpoint,
too, so no weight update is kept whose tasks are trained again (promise 2). If the store held nothing of a batched
step, no step is taken back.

The permanent loss of a store of a joined host costs less. Its shards of trained tasks matter only to a trainer that
reloads, so a checkpoint is ordered and the run continues without waiting for the store.
"""

from __future__ import annotations

from proto.messages import DropReason, Register
from services.scheduler.events import Tell
from services.scheduler.stepping import Stepping
from services.scheduler.stores import TRAINER_STORE
from shared.rundir import parse_service_name, service_name


class StoreLoss(Stepping):
    """The verbs for a registration with another `data_id` and for a store that stays silent."""

    def lost_data(self, old: Register | None, new: Register) -> bool:
        """Return whether a store registers again without the data that the run still needs."""
        if old is not None:
            return old.data_id != new.data_id
        name = service_name(new.service, new.instance)
        return self.gone.pop(name, new.data_id) != new.data_id and name in self.uncovered

    def come_back_empty(self, store: str) -> None:
        """Handle a store that lost its data, including what services of its host had put there for their leases."""
        every = [slot for slots in self.batches.values() for slot in slots]
        if self.plan.deterministic:
            every += [slot for _, slot in self.window.members()]
        # Weight versions and what the trainer puts for a step are not in the task table.
        if store == TRAINER_STORE or any(self._lies_in(slot, store) for slot in every):
            self.lose_store(store, "came back without its data")
            return
        for lease in list(self.leases):
            if store in self._stores_of(lease.holder):
                self._give_up(lease, 0)
        again = self._roll_without(store, "lost its data")
        cause = f"{store} came back without its data: it held nothing of a step, {again} tasks again"
        self.out.append(Tell("scheduler/store_lost", {"store": store, "cause": cause}))

    def lose_store(self, store: str, why: str) -> None:
        """Return to the newest checkpoint without anything that was in the store."""
        step = max(self.checkpoint_step, 0)
        again = len(self.window.members())
        replayed = self.committed_step - step
        for lease in list(self.leases):
            self._give_up(lease, 0)
        self._rewind(step)
        self.finished = self.finished and self.committed_step >= self.config.steps
        self.lineage += 1  # versions trained from now on differ from those published before
        self.driver = 0  # the driver must resume: its workers and its published version are not at `step`
        self._collect_steps(step)
        for admission, slot in self.window.members():
            if self.tasks.done[slot]:
                self.window.mark_unready(admission)
                self._retry(slot, 0, f"{store} lost its data")
        self.versions.forget(store)
        self._lose_evaluations(step)
        cause = f"{store} {why}: back to step {step}, {replayed} steps and {again} tasks again"
        self.out.append(Tell("scheduler/store_lost", {"store": store, "cause": cause}))

    def part_with(self, store: str) -> bool:
        """Remove a joined store that is gone for good. Return False, without any change, if it is not registered.

        Its pending clears count as done and its room is no longer used. Unfinished tasks with shards there are sampled
        again. So are tasks leased on its host if that has no other store, as their results would have no store.
        """
        row = self.registry.pop(parse_service_name(store), None)
        if row is None:
            return False
        self.gone[store] = row.data_id
        self.cleared(store, self.clears.pending_at(store))
        self.clears.remove_store(store)
        members = [slot for _, slot in self.window.members()]
        every = [*members, *(slot for slots in self.batches.values() for slot in slots)]
        wanted = every if self.plan.deterministic else self.batches.get(self.committed_step + 1, ())
        if any(self._lies_in(slot, store) for slot in wanted):  # the shards of an open step are being read
            self.lose_store(store, "is gone")
            return True
        bereft = self._without_store(row.host_id)
        for lease in [each for each in self.leases if each.holder in bereft]:
            self._give_up(lease, 0)
        self._roll_without(store, "is gone")
        again = sum(not self.tasks.done[slot] for slot in members)
        cause = f"{store} is gone: {again} tasks wait for a rollout now; steps since the checkpoint are saved next"
        self.out.append(Tell("scheduler/store_lost", {"store": store, "cause": cause}))
        return True

    def _roll_without(self, store: str, why: str) -> int:
        """Sample unfinished tasks with shards in the store again, and return how many of them were not leased."""
        for lease in list(self.leases):
            if any(self._lies_in(slot, store) for slot in lease.slots if self.tasks.lease[slot] == lease.lease_id):
                self._give_up(lease, 0)
        lost = [each for each in self.window.members() if self._lies_in(each[1], store)]
        for admission, slot in lost:
            self.window.mark_unready(admission)
            self._retry(slot, 0, f"{store} {why}")
        return len(lost)

    def _lose_evaluations(self, step: int) -> None:
        """Drop the waiting tasks of evaluations whose versions will not be published again; their rows stay unscored.

        These are versions before `step`, or in deterministic mode versions too old to be sampled with. Other open
        evaluations continue when their version is published again. Scored rows keep their scores.
        """
        first = step - self.plan.staleness if self.plan.deterministic else step
        for one in list(self.evaluations.open.values()):
            if one.version[1] < first:
                while one.waiting:
                    why = "the version's weights were lost with their store"
                    self._drop(one.waiting.popleft(), DropReason.WEIGHTS_LOST, why)
