"""What happens when a store comes back without its data (its host was lost, the run was resumed), or not at all. Pure.

Its unfinished tasks are rolled again under higher fences. If it held more than those, the run returns to the newest
checkpoint: steps after it cannot be replayed, so their tasks are opened again and trained once more (promise 1; in
deterministic mode from the same versions). No weight update is kept whose tasks could be trained again (promise 2): the
trainer reloads the checkpoint too. A store that held nothing of a step must never take one back.

A store of a host that joined and is gone for good costs less where it can: what it held of trained tasks matters only
to a trainer that reloads, so a checkpoint is ordered and the run goes on. It must never keep others waiting.
"""

from __future__ import annotations

from proto.messages import DropReason, Register
from services.scheduler.events import Tell
from services.scheduler.stepping import Stepping
from services.scheduler.stores import TRAINER_STORE
from shared.rundir import parse_service_name, service_name


class StoreLoss(Stepping):
    """The verbs that a registration with another `data_id`, and a store's silence, turn into."""

    def lost_data(self, old: Register | None, new: Register) -> bool:
        """Whether `new` is the same store with nothing of what is wanted of it."""
        if old is not None:
            return old.data_id != new.data_id
        name = service_name(new.service, new.instance)
        return self.gone.pop(name, new.data_id) != new.data_id and name in self.uncovered

    def come_back_empty(self, store: str) -> None:
        """A store has nothing of what it held; and what its host's services have put there for a lease went too."""
        every = [slot for slots in self.batches.values() for slot in slots]
        if self.plan.deterministic:
            every += [slot for _, slot in self.window.members()]
        # versions, and what the trainer puts for a step, are not in the table
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
        """Forget all that lay in the store."""
        step = max(self.checkpoint_step, 0)
        again = len(self.window.members())
        replayed = self.committed_step - step
        for lease in list(self.leases):
            self._give_up(lease, 0)
        self._rewind(step)
        self.finished = self.finished and self.committed_step >= self.config.steps
        self.lineage += 1  # whatever is trained from here on differs from what was published before
        self.driver = 0  # whoever drives must resume: its workers and its published version are not those of `step`
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
        """A store that joined is gone for good; False (and no change): it is not here.

        What it owes is done, its room is nobody's, unfinished tasks with shards there are rolled again. So are those
        leased on its host, if that has no other store: their results could be put nowhere.
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
        if any(self._lies_in(slot, store) for slot in wanted):  # by a step that is open: its shards are read now
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
        """Unfinished tasks with shards in the store are rolled again; returns how many of them were not leased."""
        for lease in list(self.leases):
            if any(self._lies_in(slot, store) for slot in lease.slots if self.tasks.lease[slot] == lease.lease_id):
                self._give_up(lease, 0)
        lost = [each for each in self.window.members() if self._lies_in(each[1], store)]
        for admission, slot in lost:
            self.window.mark_unready(admission)
            self._retry(slot, 0, f"{store} {why}")
        return len(lost)

    def _lose_evaluations(self, step: int) -> None:
        """Versions before `step` (in deterministic mode: that nobody samples with any more) are not published again:
        what was not scored stays unknown.

        Those that were not taken back with their version go on with its next publication; rows that were scored keep
        their score.
        """
        first = step - self.plan.staleness if self.plan.deterministic else step
        for one in list(self.evaluations.open.values()):
            if one.version[1] < first:
                while one.waiting:
                    why = "the version's weights were lost with their store"
                    self._drop(one.waiting.popleft(), DropReason.WEIGHTS_LOST, why)
