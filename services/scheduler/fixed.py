"""Deterministic mode: fixed blocks of tasks with fixed versions, independent of which processes are killed when. Pure.

A step takes fixed admission numbers, a lease is one whole fixed block of them, and a version is used for sampling only
after its evaluations. Order of arrival, failures and drops never move a task into another block or step, because batch
shapes and versions decide the last bits (docs/architecture.md, promise 9).
"""

from __future__ import annotations

from bisect import bisect_left

from proto.messages import ErrorCode
from services.scheduler.evaluations import Evaluation
from services.scheduler.ledger import FAILURE, TRAIN_SPLIT, Ledger
from services.scheduler.tasks import EVALUATION, TaskState
from shared.rpc.errors import RpcError


class Fixed(Ledger):
    """The ledger with the changes of `run.deterministic`. Without it every method is that of `Ledger`."""

    def _step_of(self, admission: int) -> int:
        if not self.plan.deterministic:
            return super()._step_of(admission)
        return 1 + admission // self.plan.tasks_per_step

    def _block(self, stage: int, admission: int, most: int) -> list[int]:
        """Return the live admission numbers of the fixed block of `admission`, or [] until all of it is admitted.

        For a later stage than the rollout, return the part of the block, with at most `most` numbers, that holds it.
        """
        size = self.plan.block_tasks
        first, end = admission // size * size, admission // size * size + size
        if stage > 0:
            first += (admission - first) // most * most
            end = min(first + most, end)
        if end > self.window.tail:
            return []
        return [each for each in range(first, end) if self.window.slot(each) >= 0]

    def _step_is_settled(self, step: int) -> bool:
        return self.window.settled >= step * self.plan.tasks_per_step

    def _evaluates(self, version: int) -> bool:
        """Return whether this version or an older one is still being evaluated.

        Training tasks are not sampled with the version until then. Evaluations older than the versions of a checkpoint
        are therefore complete, and a run that returns to the checkpoint misses none.
        """
        return any(each.version[1] <= version for each in self.evaluations.open.values())

    def _evaluation_block(self, one: Evaluation, most: int) -> list[int]:
        """Remove and return the waiting tasks of the first block of `most` rows that has any."""
        rows = next(each.rows for each in self.plan.evals if each.name == one.name)
        place = {slot: bisect_left(rows, self.tasks.index[slot]) for slot in one.waiting}
        block = min(place.values()) // most
        slots = sorted((slot for slot in one.waiting if place[slot] // most == block), key=place.__getitem__)
        for slot in slots:
            one.waiting.remove(slot)
        return slots

    def _retry(self, slot: int, cost: int, reason: str) -> None:
        """Retry the whole block of the task. Too many failed attempts end the run instead of dropping the task."""
        if not self.plan.deterministic:
            super()._retry(slot, cost, reason)
            return
        self.tasks.failures[slot] += cost
        if self.tasks.failures[slot] >= FAILURE * self.config.attempts:
            self.broken = (
                f"{self.tasks.task_id(slot)}: {self.config.attempts} attempts failed, the last: {reason}; without it a "
                "deterministic run would have other bits: raise lease.attempts and resume"
            )
        admission = self.tasks.admission[slot]
        self._again(slot)
        if admission == EVALUATION:
            return
        for each in self._block(0, admission, self.plan.block_tasks):
            other = self.window.slot(each)
            if self.tasks.done[other]:
                if self.tasks.state[other] == TaskState.READY:
                    self.window.mark_unready(each)
                self._again(other)

    def _check_whole(self) -> None:
        """Raises RpcError(bad_request) if the run can no longer produce the bits of an undisturbed run."""
        if self.broken:
            raise RpcError(ErrorCode.BAD_REQUEST, self.broken)

    def _admit(self) -> None:
        if not self.plan.deterministic:
            super()._admit()
            return
        last = min(self.config.steps, self.committed_step + self.plan.staleness + 1) * self.plan.tasks_per_step
        if self.window.tail >= last or self.finished:
            return
        room = max(self._room_for_tasks(), self.plan.tasks_per_step)
        while (more := min(last - self.window.tail, room - self.window.live)) > 0:
            self._admit_some(more)

    def _reopen(self) -> None:
        """Reopen the tasks of steps that were taken back, in their places, and retry all later ones with a result.

        No training task may be leased. The tasks get fences that no store has seen, because clears of earlier fences
        may still be in flight.
        """
        for admission, slot in self.window.members():
            if self.tasks.done[slot]:
                self.window.mark_unready(admission)
                self._again(slot)
        places = range(self.committed_step * self.plan.tasks_per_step, self.window.head)
        rows = [(admission, *self.order.at(admission)) for admission in places]
        slots = [self._revived(TRAIN_SPLIT, epoch, row, admission) for admission, epoch, row in rows]
        self.window.reopen(slots)
        for admission, slot in zip(places, slots, strict=True):
            self.ready[0].push(admission)
            self.highest_fence = max(self.highest_fence, self.tasks.fence[slot])
