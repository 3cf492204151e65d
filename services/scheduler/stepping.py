"""Requests of the driver: batches, commits, versions, checkpoints. Each step is batched and committed once. Pure."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from proto.messages import (
    CheckpointSaved,
    CommitStep,
    ErrorCode,
    FinishRun,
    GetRunInfo,
    NextBatch,
    PublishWeights,
    RunInfo,
    StepBatch,
)
from services.scheduler import scalars
from services.scheduler.evaluations import Evaluation
from services.scheduler.events import DiscardRows, Rewound, SaveStep
from services.scheduler.freshness import Freshness
from services.scheduler.plan import due
from services.scheduler.plausible import MOST
from services.scheduler.tasks import EVALUATION, TaskState
from shared.rpc.errors import RpcError
from shared.stages import WEIGHTS


class Stepping(Freshness):
    """The verbs of the driver."""

    def run_info(self, request: GetRunInfo) -> RunInfo:
        """Let a driver take over the run. With `reload` a new lineage begins at the latest step that can be reached."""
        if request.driver in self.old_drivers:
            raise RpcError(ErrorCode.CONFLICT, f"driver {request.driver}: a newer driver has taken over")
        if request.driver != self.driver:
            if self.driver:
                self.old_drivers.append(self.driver)
            self.driver = request.driver
        if request.reload:
            loaded = max(self.checkpoint_step, 0) if request.loaded_step < 0 else request.loaded_step
            if not all(map(self._replayable, range(loaded + 1, self.committed_step + 1))):
                self._rewind(loaded)
                # The trainer refused later checkpoints, which hold the weights of the steps taken back.
                self.checkpoint_step = min(self.checkpoint_step, loaded or -1)
            self.lineage += 1
        return RunInfo(
            steps=self.config.steps,
            committed_step=self.committed_step,
            open_step=self.batched_step if self.batched_step > self.committed_step else 0,
            lineage=self.lineage,
            checkpoint_step=self.checkpoint_step,
            stopping=self.finished,
            checkpoint_now=bool(self.uncovered) and self._wants_checkpoint({}),
            reference_step=self._lost_reference(),
        )

    def _lost_reference(self) -> int:
        """Return the step of the version that the reference needs, if no store has it any longer, else 0."""
        step = self.plan.reference_version(self.committed_step + 1)
        return step if step and self.versions.at_step(step) is None else 0

    def _rewind(self, step: int) -> None:
        """Return the run to `step`: the weights of later steps are lost and their tasks cannot be replayed.

        Their tasks are sampled again before all others. Their metrics rows are discarded, except in deterministic mode,
        where the steps produce the same bits again. The caller begins a new lineage.
        """
        for later in [each for each in self.batches if each > step]:
            slots = self.batches.pop(later)
            if later <= self.committed_step:
                self._cover(slots)
            if not self.plan.deterministic:
                self._set_aside(slots)
        if step < self.committed_step:
            self._tell_rewind(step)
        self.batched_step = self.committed_step = min(step, self.committed_step)
        for lease in list(self.leases):
            # The holder of a training lease may have newer weights than the lease names.
            if not self.measures(lease) or (lease.version is not None and lease.version[1] > step):
                self._give_up(lease, 0)
        if self.plan.deterministic:
            self._reopen()  # the new versions and their scores have the same bits as those taken back
        else:
            self._take_back_evaluations(step)
            self._open_again(step)
        for ref in self.versions.after(step):
            self._clear_weights(ref)

    def _tell_rewind(self, step: int) -> None:
        """Report the rewind, and discard the rows of steps that will be trained with other weights."""
        self.out.append(Rewound(self.lineage, step, self.committed_step))
        waiting = {later: self.waiting_rows.pop(later) for later in [row for row in self.waiting_rows if row > step]}
        if not self.plan.deterministic:
            self.out.append(DiscardRows(self.lineage, step, waiting))
            self.next_row = min(self.next_row, step + 1)

    def _set_aside(self, slots: Iterable[int]) -> None:
        """Drop these tasks and collect their shards. Their identities are kept elsewhere."""
        for slot in slots:
            self.tasks.move(slot, TaskState.DROPPED)
            self._collect(slot)

    def _open_again(self, step: int) -> None:
        """Put the tasks of the steps after `step` before the waiting ones. No training task may be leased.

        The waiting tasks are sampled again, too: their versions were taken back, or chosen for other steps than those
        that they now belong to.
        """
        again: array[int] = array("q")
        for later in [each for each in self.identities if each > step]:
            again += self.identities.pop(later)
        waiting = [slot for _, slot in self.window.members()]
        self.reopened = again + self._identities_of(waiting) + self.reopened
        self._set_aside(waiting)
        self.window.restart()
        self.line_up()

    def _identities_of(self, slots: Iterable[int]) -> array[int]:
        return array("q", [number for slot in slots for number in (self.tasks.epoch[slot], self.tasks.index[slot])])

    def _take_back_evaluations(self, step: int) -> None:
        """Discard the evaluations of versions after `step`, which will have other weights.

        None of their tasks may be leased. Scores of old and new weights are not mixed: each set is evaluated again as a
        whole when its version is published again.
        """
        for one in self.evaluations.take_back(step):
            for slot in one.waiting:
                self.tasks.move(slot, TaskState.DROPPED)
                self._collect(slot)

    def batch(self, request: NextBatch) -> StepBatch | None:
        """Return the batch of a journaled step, always the same, or None if it is not journaled. Changes nothing."""
        self.check_driver(request.driver)
        self._check_whole()
        step = request.step
        if not 1 <= step <= self.config.steps:
            raise RpcError(ErrorCode.BAD_REQUEST, f"step {step}: this run has steps 1..{self.config.steps}")
        if step > self.batched_step:
            if step != self.committed_step + 1:
                raise RpcError(ErrorCode.CONFLICT, f"step {step}: the next step is {self.committed_step + 1}")
            self.check_hope()
            return None
        slots = self.batches.get(step)
        if slots is None:
            raise RpcError(
                ErrorCode.CONFLICT,
                f"step {step}: its tasks were collected, it cannot be replayed; load a later checkpoint "
                "(gc.after: checkpoint keeps what replay needs)",
            )
        return self._step_batch(step, slots)

    def form_batch(self, request: NextBatch) -> StepBatch | None:
        """Form the batch of the next step. Return None, without any change, while there are too few tasks."""
        if self.takeable() < self.plan.tasks_per_step:
            return None
        slots = self.take()
        for slot in slots:
            self.tasks.move(slot, TaskState.BATCHED)
            self.tasks.step[slot] = request.step
        self.batches[request.step] = array("I", slots)
        if not self.plan.deterministic:
            self.identities[request.step] = self._identities_of(slots)
        self.batched_step = request.step
        self.out.append(SaveStep(request.step, "BATCHED", [self.tasks.task_id(slot) for slot in slots], {}))
        self.batch_dropped = self.dropped - self.dropped_reported
        self.dropped_reported = self.dropped
        self.losses.batched((self.tasks.admission[slot] for slot in slots), self._belongs_to_batch)
        self.batch_filtered = [self.filtered_reward, float(self.filtered_samples)]
        self.filtered, self.filtered_samples, self.filtered_reward = 0, 0, 0.0
        batch = self._step_batch(request.step, slots)
        self.drop_stale()
        self._free_versions()
        return batch

    def _belongs_to_batch(self, admission: int) -> bool:
        """Return whether a dropped task counts for the newest batch. In deterministic mode its place decides."""
        return not self.plan.deterministic or admission < self.batched_step * self.plan.tasks_per_step

    def _step_batch(self, step: int, slots: Sequence[int]) -> StepBatch:
        packed = [self.tasks.scalars[slot] or b"\0\0" for slot in slots]
        columns = scalars.flatten(
            self.layouts,
            [
                (int.from_bytes(data[:2], "little"), self.tasks.samples[slot], data[2:])
                for slot, data in zip(slots, packed, strict=True)
            ],
        )
        newest = step == self.batched_step
        dropped = self.batch_dropped if newest else 0
        if self.plan.deterministic:  # the drops of this step, not those since the last batch
            dropped = self.plan.tasks_per_step - len(slots)
        rewards = columns.get("reward")
        reward_sum, samples = self.batch_filtered if newest else [0.0, 0.0]
        if rewards is not None:
            reward_sum, samples = reward_sum + float(np.sum(rewards, dtype=np.float64)), samples + len(rewards)
        return StepBatch(
            step=step,
            batch=self.meta(slots),
            scalars=columns,
            reward_mean_unfiltered=reward_sum / samples if samples else 0.0,
            samples_failed=sum(self.tasks.failed[slot] for slot in slots),
            dropped=dropped,
            drops=self.losses.batch_drops if newest else {},
            lost=self.losses.batch_lost if newest else {},
            checkpoint_now=self._wants_checkpoint(self.held_in(slots)),
        )

    def commit(self, request: CommitStep) -> bool:
        """Mark the tasks of a step as TRAINED, once. Return False, without any change, if it was committed before."""
        self.check_driver(request.driver)
        if request.step <= self.committed_step:
            return False
        if request.step != self.batched_step:
            raise RpcError(
                ErrorCode.CONFLICT,
                f"commit of step {request.step}: {self.committed_step} is committed, "
                f"the open step is {self.batched_step if self.batched_step > self.committed_step else 'none'}",
            )
        self.committed_step = request.step
        for slot in self.batches[request.step]:
            self.tasks.move(slot, TaskState.TRAINED)
        self._uncover(self.batches[request.step])
        self.out.append(SaveStep(request.step, "TRAINED", None, request.metrics))
        if self.config.collect_at_commit:
            self._collect_steps(request.step)
        row = {"policy/version": float(request.step), **request.metrics, "gc/tasks": float(self.clears.collected)}
        if self.plan.by_completion:
            row |= {"rollout/tasks_checked": float(self.checked), "rollout/tasks_stale": float(self.stale)}
            self.checked = self.stale = 0
        if request.step >= self.next_row:
            self.waiting_rows[request.step] = row
        self._write_rows()
        self._free_versions()
        return True

    def publish(self, request: PublishWeights) -> bool:
        """Publish a version, which can then be loaded, and open its evaluations."""
        self.check_driver(request.driver)
        ref = request.ref
        if ref.lineage != self.lineage:
            raise RpcError(ErrorCode.CONFLICT, f"weights of lineage {ref.lineage}: this driver has {self.lineage}")
        if not 0 <= ref.step < 1 << 31 or ref.task_id != f"{WEIGHTS}/{ref.lineage}/{ref.step}":
            text = f"weights {ref.task_id[:80]!r} of step {ref.step}: {WEIGHTS}/<lineage>/<step below 2**31> expected"
            raise RpcError(ErrorCode.BAD_REQUEST, text)
        if not 0 <= ref.nbytes <= MOST or not 0 <= ref.fence < 1 << 32:
            raise RpcError(ErrorCode.BAD_REQUEST, f"{ref.task_id}: its size or fence is out of range")
        old = self.versions.get((ref.lineage, ref.step))
        if old is not None and old.fence > ref.fence:
            raise RpcError(ErrorCode.CONFLICT, f"{ref.task_id}: fence {ref.fence} is over, it is now {old.fence}")
        self.versions.put(ref)
        if old is not None and old.fence < ref.fence:
            self._clear_weights(old)
        self._open_evaluations((ref.lineage, ref.step))
        if ref.step == 0 and self.next_row == 0:
            self.waiting_rows.setdefault(0, {"policy/version": 0.0})
        self._write_rows()
        self._free_versions()
        return True

    def _open_evaluations(self, version: tuple[int, int]) -> None:
        for begun in self.evaluations.open.values():
            if begun.version[1] == version[1] and self.versions.get(begun.version) is None:
                begun.version = version  # the step was published again because its store lost the first version
        for each in due(self.plan, self.config.steps, version[1]):
            if self.evaluations.known(each.name, version[1]):
                continue
            split = self.tasks.splits.index(each.name)
            one = Evaluation(each.name, split, version, len(each.rows), each.samples)
            self.evaluations.open[each.name, version[1]] = one
            if self.lineage:  # the tasks may exist already, for a version that was taken back
                one.waiting = deque(self._revived(split, version[1], row, EVALUATION) for row in each.rows)
                self.highest_fence = max([self.highest_fence, *(self.tasks.fence[slot] for slot in one.waiting)])
            else:
                one.waiting = deque(self.tasks.add(split, version[1], each.rows, EVALUATION))

    def checkpoint(self, request: CheckpointSaved) -> bool:
        """Collect the steps that are covered by the oldest checkpoint to which recovery may fall back."""
        self.check_driver(request.driver)
        if not 0 <= request.step <= self.committed_step:
            raise RpcError(ErrorCode.CONFLICT, f"checkpoint of step {request.step}: {self.committed_step} is committed")
        # Checkpoints newer than the committed step belong to steps that were taken back.
        kept = sorted({request.step, *(step for step in request.kept if step <= self.committed_step)})
        kept = kept[-(self.config.keep_last + request.at_stop) :]
        self.checkpoint_step = kept[-1]
        self._collect_steps(kept[0])
        for step in [each for each in self.identities if each <= kept[0]]:
            del self.identities[step]
        if self._wants_checkpoint({}):
            # No room for another interval of replay: give up that of the older checkpoints rather than stand still.
            self._collect_steps(kept[-1])
        return True

    def finish(self, request: FinishRun) -> bool:
        """Complete the run. No more leases are granted."""
        self.check_driver(request.driver)
        self.finished = True
        return True
