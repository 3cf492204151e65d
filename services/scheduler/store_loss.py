"""What happens when a store comes back without its data (its host was lost, the run was resumed). Pure.

Its unfinished tasks are rolled again under higher fences, and the run returns to the newest checkpoint: steps after it
cannot be replayed, so their tasks go and later ones are trained instead (promise 1; in deterministic mode the same ones
are rolled again, from the same versions). No weight update is kept whose
tasks could be trained again (promise 2): the trainer reloads the checkpoint too.
"""

from __future__ import annotations

from proto.messages import Register
from services.scheduler.events import Tell
from services.scheduler.stepping import Stepping
from shared.rundir import service_name


class StoreLoss(Stepping):
    """The verb that a registration with another `data_id` turns into."""

    def lost_data(self, old: Register | None, new: Register) -> bool:
        """Whether `new` is the same store with nothing of what `old` held."""
        return old is not None and old.data_id != new.data_id

    def lose_store(self, request: Register) -> None:
        """Forget all that lay in the store."""
        store = service_name(request.service, request.instance)
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
        cause = f"{store} came back without its data: back to step {step}, {replayed} steps and {again} tasks again"
        self.out.append(Tell("scheduler/store_lost", {"store": store, "cause": cause}))

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
                    self._drop(one.waiting.popleft(), "the version's weights were lost with their store")
