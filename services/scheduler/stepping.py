"""The driver's side: batches, commits, versions, checkpoints. Pure; every step is batched and committed once."""

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
        """A driver takes the run over; with `reload` a new lineage begins, at the latest step that can be reached."""
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
                # later checkpoints were refused by the trainer, and hold the weights of the steps taken back
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
        """The version that the reference has to stand at and that is in no store any more, in steps; 0: none."""
        step = self.plan.reference_version(self.committed_step + 1)
        return step if step and self.versions.at_step(step) is None else 0

    def _rewind(self, step: int) -> None:
        """The weights of the steps after `step` are gone, and their tasks cannot be replayed: train them again.

        Their tasks are sampled again before all others. Their rows go, except in deterministic mode, where the steps
        come out with the same bits. The caller begins a new lineage.
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
            # one that trains may have newer weights than it names
            if not self.measures(lease) or (lease.version is not None and lease.version[1] > step):
                self._give_up(lease, 0)
        if self.plan.deterministic:
            self._reopen()  # the versions to come have the bits of those taken back, and so have their scores
        else:
            self._take_back_evaluations(step)
            self._open_again(step)
        for ref in self.versions.after(step):
            self._clear_weights(ref)

    def _tell_rewind(self, step: int) -> None:
        """Say how far the run goes back, and discard the rows of the steps that are trained otherwise now."""
        self.out.append(Rewound(self.lineage, step, self.committed_step))
        waiting = {later: self.waiting_rows.pop(later) for later in [row for row in self.waiting_rows if row > step]}
        if not self.plan.deterministic:
            self.out.append(DiscardRows(self.lineage, step, waiting))
            self.next_row = min(self.next_row, step + 1)

    def _set_aside(self, slots: Iterable[int]) -> None:
        """What was made of these tasks goes; their identities are kept elsewhere."""
        for slot in slots:
            self.tasks.move(slot, TaskState.DROPPED)
            self._collect(slot)

    def _open_again(self, step: int) -> None:
        """Put the tasks of the steps after `step` before those that wait. No train task may be leased.

        Those that wait are sampled again too: their versions were chosen for earlier steps than they come to now, or
        were taken back.
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
        """Versions after `step` come with other weights: no score of the old ones may stand beside one of the new.

        No task of theirs may be leased. Each set is asked anew, as a whole, when its version is published again.
        """
        for one in self.evaluations.take_back(step):
            for slot in one.waiting:
                self.tasks.move(slot, TaskState.DROPPED)
                self._collect(slot)

    def batch(self, request: NextBatch) -> StepBatch | None:
        """The batch of a journaled step, always the same; None when the step is not journaled. Changes nothing."""
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
        """Consume tasks for the next step; None (and no change) while it cannot have as many as it takes."""
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
        """Whether a task that was dropped counts for the newest batch: in deterministic mode by its place."""
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
        if self.plan.deterministic:  # those of the step, not those since the last one
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
        """The step's tasks are TRAINED, exactly once. False (and no change): it was committed before."""
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
        """A version can be loaded; evaluations of it begin."""
        self.check_driver(request.driver)
        ref = request.ref
        if ref.lineage != self.lineage:
            raise RpcError(ErrorCode.CONFLICT, f"weights of lineage {ref.lineage}: this driver has {self.lineage}")
        if not 0 <= ref.step < 1 << 31 or ref.task_id != f"{WEIGHTS}/{ref.lineage}/{ref.step}":
            text = f"weights {ref.task_id[:80]!r} of step {ref.step}: {WEIGHTS}/<lineage>/<step below 2**31> expected"
            raise RpcError(ErrorCode.BAD_REQUEST, text)
        if not 0 <= ref.nbytes <= MOST or not 0 <= ref.fence < 1 << 32:
            raise RpcError(ErrorCode.BAD_REQUEST, f"{ref.task_id}: a number of it is out of range")
        old = self.versions.get((ref.lineage, ref.step))
        if old is not None and old.fence > ref.fence:
            raise RpcError(ErrorCode.CONFLICT, f"{ref.task_id}: fence {ref.fence} is over, it stands at {old.fence}")
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
                begun.version = version  # the same step again, and the first making of it went with its store
        for each in due(self.plan, self.config.steps, version[1]):
            if self.evaluations.known(each.name, version[1]):
                continue
            split = self.tasks.splits.index(each.name)
            one = Evaluation(each.name, split, version, len(each.rows), each.samples)
            self.evaluations.open[each.name, version[1]] = one
            if self.lineage:  # maybe asked before, of a version that was taken back
                one.waiting = deque(self._revived(split, version[1], row, EVALUATION) for row in each.rows)
                self.highest_fence = max([self.highest_fence, *(self.tasks.fence[slot] for slot in one.waiting)])
            else:
                one.waiting = deque(self.tasks.add(split, version[1], each.rows, EVALUATION))

    def checkpoint(self, request: CheckpointSaved) -> bool:
        """Collect what the oldest checkpoint that recovery may fall back to covers."""
        self.check_driver(request.driver)
        if not 0 <= request.step <= self.committed_step:
            raise RpcError(ErrorCode.CONFLICT, f"checkpoint of step {request.step}: {self.committed_step} is committed")
        # ones that are newer than the committed step are of steps taken back since
        kept = sorted({request.step, *(step for step in request.kept if step <= self.committed_step)})
        kept = kept[-(self.config.keep_last + request.at_stop) :]
        self.checkpoint_step = kept[-1]
        self._collect_steps(kept[0])
        for step in [each for each in self.identities if each <= kept[0]]:
            del self.identities[step]
        if self._wants_checkpoint({}):
            # No room for one more interval of replay: give up the older checkpoint's rather than stand still.
            self._collect_steps(kept[-1])
        return True

    def finish(self, request: FinishRun) -> bool:
        """The run is complete: no more leases."""
        self.check_driver(request.driver)
        self.finished = True
        return True
