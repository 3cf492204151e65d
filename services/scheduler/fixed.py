"""Deterministic mode: which tasks belong together, and with which version, whatever is killed when. Pure.

A step takes fixed admission numbers, a lease is a fixed block of them as a whole, and a version is sampled with only
after its evaluations. Must never let an order of arrival, a failure or a drop move a task into another block or step:
batch shapes and versions decide the last bits (promise 9).
"""

from __future__ import annotations

from bisect import bisect_left

from proto.messages import ErrorCode
from services.scheduler.evaluations import Evaluation
from services.scheduler.ledger import FAILURE, TRAIN_SPLIT, Ledger
from services.scheduler.tasks import EVALUATION, TaskState
from shared.rpc.errors import RpcError


class Fixed(Ledger):
    """What `run.deterministic` changes in the ledger; without it every verb is the ledger's own."""

    def _step_of(self, admission: int) -> int:
        if not self.plan.deterministic:
            return super()._step_of(admission)
        return 1 + admission // self.plan.tasks_per_step

    def _block(self, stage: int, admission: int, most: int) -> list[int]:
        """The live admission numbers of the fixed block that `admission` belongs to; [] while it is not all admitted.

        A block of the rollout stage, or a part of it with at most `most` tasks for a later stage.
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
        """Whether this version or an older one is still being evaluated.

        Nothing is sampled with it before: so whatever a checkpoint's own versions do not reach has been scored, and a
        run that returns to the checkpoint misses no evaluation.
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
        """The whole block is made again, never a part of it; too many attempts end the run instead of a task."""
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
        """Raises RpcError(bad_request) when the next step can never be what an undisturbed run would make of it."""
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
        """Steps after the committed one were taken back: their tasks, in their places, and all later ones that had got
        further, are made again. No train task may be leased.

        Under fences that no store has heard of: clears of earlier ones may still be on their way.
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
