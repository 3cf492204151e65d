"""The state that the journal rebuilds, and what all verbs share: counts, room, retries, clears, rows. Pure.

No clock, no I/O, no open calls. The verbs (durable events) are in granting, accepting and stepping; `core.py` combines
them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from proto.messages import (
    BatchMeta,
    BatchPart,
    DropReason,
    ErrorCode,
    PutTask,
    Register,
    TaskHandle,
    WeightsRef,
)
from services.scheduler import scalars
from services.scheduler.admission import Window
from services.scheduler.collection import ClearQueues
from services.scheduler.evaluations import Evaluation, Evaluations
from services.scheduler.events import (
    Configure,
    Effect,
    SaveEval,
    Tell,
    WriteRow,
)
from services.scheduler.leases import Holder, Leases
from services.scheduler.losses import Losses
from services.scheduler.plan import EpochOrder, Plan, due
from services.scheduler.slot_index import NO_SLOT
from services.scheduler.stores import Stores
from services.scheduler.tasks import EVALUATION, TaskState, TaskTable
from services.scheduler.versions import Versions
from services.scheduler.waiting_line import WaitingLine
from shared.rpc.errors import RpcError
from shared.stages import TRAIN, WEIGHTS

FAILURE = 4
"""Cost of a failed attempt. A task whose costs reach `FAILURE` times the allowed attempts is dropped."""
DEATH = 1
"""Cost of the death of a task's holder. It is lower because the task is rarely the cause; a task that always kills its
process still ends after `FAILURE` times as many deaths as attempts."""
TRAIN_SPLIT = 0
ADMITTED_AT_ONCE = 1024
"""Maximum number of tasks that one event admits, or the tasks of a step if more, so that no request waits long."""


class Ledger(Stores):
    """The tasks, leases, versions, evaluations and steps of one run. `out` collects the effects of the verbs."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.order = EpochOrder(plan)
        self.out: list[Effect] = []
        self.tasks = TaskTable(len(plan.stages), [TRAIN, *(each.name for each in plan.evals)])
        self.window = Window(by_completion=plan.by_completion)
        self.leases = Leases()
        self.clears = ClearQueues()
        self.versions = Versions()
        self.evaluations = Evaluations()
        self.ready = [WaitingLine() for _ in plan.stages]
        """Tasks that wait for a lease, by stage. Outdated entries are skipped when they reach the front."""
        makers = {key: i for i, stage in enumerate(plan.stages) for key in stage.makes}
        self._needed = [sum({1 << makers[key] for key in stage.needs}) for stage in plan.stages]
        """For each stage, a bit mask of the stages that make the keys it needs."""
        self.registry: dict[Holder, Register] = {}
        self.store_names: list[str] = []
        self.layouts: list[scalars.Layout] = []
        self.config = Configure(steps=0, attempts=3, keep_last=2, collect_at_commit=False)
        self.batches: dict[int, array[int]] = {}
        """Slots of each journaled step, in batch order, until their collection."""
        self.identities: dict[int, array[int]] = {}
        """Alternating epoch and row index of the tasks of each step, kept until the oldest checkpoint that recovery may
        fall back to covers the step. Empty in deterministic mode, where they follow from the step."""
        self.reopened: array[int] = array("q")
        """Alternating epoch and row index of tasks whose steps were taken back. They are admitted before all others."""
        self.driver = 0
        self.old_drivers: list[int] = []
        self.lineage = 0
        self.batched_step = 0
        self.committed_step = 0
        self.checkpoint_step = -1
        self.finished = False
        self.position = 0
        self.highest_fence = 1
        """The highest fence of any task so far. A collected task that is sampled again gets a higher one."""
        self.broken = ""
        """Deterministic mode: the reason why the run cannot continue with the same bits, or empty."""
        self.uncovered: dict[str, int] = {}
        self.gone: dict[str, str] = {}
        self.owed = 0
        """Number of leases by which evaluations are ahead of training, at most those of a step."""
        self.dropped = 0
        self.dropped_in_a_row = 0
        """Training tasks dropped since the last one with enough samples, in this life. No verb depends on it."""
        self.last_drop = ""
        """The last dropped task and the reason."""
        self.filtered = 0
        """Number of tasks with equal rewards dropped since the last batch. Their samples and sum of rewards follow."""
        self.filtered_samples = 0
        self.filtered_reward = 0.0
        self.batch_filtered = [0.0, 0.0]
        """Sum of rewards and number of samples of the tasks that were filtered before the newest batch."""
        self.checked = 0
        """`consume: completion`: number of staleness checks of finished tasks since the last commit."""
        self.stale = 0
        """Number of those checks that dropped the task."""
        self.dropped_reported = 0
        self.batch_dropped = 0
        """Number of drops between the last two batches."""
        self.losses = Losses()
        self.waiting_rows: dict[int, dict[str, float]] = {}
        self.next_row = 0 if plan.evals else 1

    def meta(self, slots: Iterable[int], *, needs: tuple[str, ...] | None = None) -> BatchMeta:
        """Return handles of tasks. Their parts are the stages that make a key of `needs` (None: all leased stages)."""
        used = [
            i for i, stage in enumerate(self.plan.stages) if needs is None or any(key in needs for key in stage.makes)
        ]
        table = self.tasks
        handles = [
            TaskHandle(
                table.task_id(slot),
                table.fence[slot],
                table.samples[slot],
                table.tokens[slot],
                table.nbytes[slot],
                [table.store[i][slot] for i in used],
            )
            for slot in slots
        ]
        parts = [BatchPart(self.plan.stages[i].name, list(self.plan.stages[i].makes)) for i in used]
        return BatchMeta(tasks=handles, parts=parts, stores=list(self.store_names) if used else [])

    def waiting_for(self, stage: int) -> list[int]:
        """Return the admission numbers that wait for `stage`, in order, from the task table alone."""
        return [admission for admission, _ in self.window.members() if self._waits(stage, admission)]

    def line_up(self) -> None:
        """Rebuild the waiting lines from the task table, after it was loaded."""
        for stage, line in enumerate(self.ready):
            line.fill(self.waiting_for(stage))

    def _waits(self, stage: int, admission: int) -> bool:
        if admission < self.window.head:
            return False
        slot = self.window.slot(admission)
        if slot < 0 or self.tasks.lease[slot] or self.tasks.done[slot] >> stage & 1:
            return False
        return stage == 0 or self.tasks.done[slot] & self._needed[stage] == self._needed[stage]

    def _step_of(self, admission: int) -> int:
        """Return the step that will consume this task. It becomes earlier if tasks before this one are dropped."""
        return self.batched_step + 1 + self.window.rank(admission) // self.plan.tasks_per_step

    def _retry(self, slot: int, cost: int, reason: str) -> None:
        """End an attempt without a result: clear its fence and return the task to PENDING, or drop the task."""
        failures = self.tasks.failures[slot] + cost
        if failures >= FAILURE * self.config.attempts:
            self._drop(slot, DropReason.ATTEMPTS, f"{self.config.attempts} attempts failed, the last: {reason}")
            return
        self.tasks.failures[slot] = failures
        self._again(slot)

    def _again(self, slot: int) -> None:
        """Return a task to PENDING under a higher fence, and clear the shards of the old one."""
        self._clear(slot, last=False)
        self.tasks.reset_attempt(slot)
        self.highest_fence = max(self.highest_fence, self.tasks.fence[slot])
        admission = self.tasks.admission[slot]
        if admission == EVALUATION:
            self._evaluation_of(slot).waiting.append(slot)
        else:
            self.ready[0].push(admission)

    def _revived(self, split: int, epoch: int, row: int, admission: int) -> int:
        """Add or reset a task that may have been sampled before, and return its slot.

        The task is PENDING under a fence that no store has seen, so that clears of earlier fences that are still in
        flight do not end it.
        """
        slot = self.tasks.slot_of(split, epoch, row)
        if slot == NO_SLOT:
            [slot] = self.tasks.add(split, epoch, [row], admission)
            self.tasks.fence[slot] = self.highest_fence + 1
        else:  # batched, or being collected
            self._clear(slot, last=False)
            self.tasks.reset_attempt(slot)
            self.tasks.clears[slot] = self.tasks.step[slot] = 0
            self.tasks.admission[slot] = admission
        return slot

    def _drop(self, slot: int, why: DropReason, reason: str) -> None:
        """Drop a task that can no longer be trained on or scored. `reason` explains `why` in one line."""
        task_id = self.tasks.task_id(slot)
        self.tasks.move(slot, TaskState.DROPPED)
        self.out.append(Tell("scheduler/dropped", {"task": task_id, "why": str(why), "reason": reason[:200]}))
        if self.tasks.admission[slot] == EVALUATION:
            one = self._evaluation_of(slot)
            one.dropped += 1
            self._end_of_evaluation_task(one)
        else:
            self.dropped += 1
            self.dropped_in_a_row += 1
            self.losses.drop(self.tasks.admission[slot], why)
            self.last_drop = (reason if reason.startswith(task_id) else f"{task_id}: {reason}")[:200]
            self.window.mark_dropped(self.tasks.admission[slot])
        self._collect(slot)

    def _evaluation_of(self, slot: int) -> Evaluation:
        return self.evaluations.open[self.tasks.splits[self.tasks.split[slot]], self.tasks.epoch[slot]]

    def _end_of_evaluation_task(self, one: Evaluation) -> None:
        one.left -= 1
        if one.left:
            return
        self.evaluations.finish(one)
        step = one.version[1]
        if one.rows_scored:
            self.out.append(SaveEval(one.name, step, one.accuracy, one.rows_scored, one.dropped))
        self.out.append(Tell("eval", {"step": step, **one.metrics()}))
        self._write_rows()

    def evaluated(self, step: int) -> dict[str, float] | None:
        """Return the accuracies of the evaluations due at version `step`, or None while some are missing."""
        done = self.evaluations.accuracy(step)
        wanted = [each.name for each in due(self.plan, self.config.steps, step)]
        return {name: done[name] for name in wanted} if all(name in done for name in wanted) else None

    def _admit(self) -> None:
        """Admit training tasks up to `Plan.max_live`, while there is room for all the bytes they may need.

        The tasks of the next step are admitted even without room, because a run that waited for room that only its own
        steps free would stand still. One event admits at most `ADMITTED_AT_ONCE` tasks, or those of a step if more.
        """
        left = (self.config.steps - self.batched_step) * self.plan.tasks_per_step
        bound = min(self.plan.max_live - self._open_batch_tasks(), left)
        if self.window.live >= bound or self.finished:
            return
        bound = min(bound, max(self._room_for_tasks(), self.plan.tasks_per_step))
        bound = min(bound, self.window.live + max(ADMITTED_AT_ONCE, self.plan.tasks_per_step))
        while self.window.live < bound:
            self._admit_some(bound - self.window.live)

    def _admit_some(self, most: int) -> None:
        """Admit up to `most` tasks: tasks that were taken back if there are any, else new ones of one epoch."""
        if self.reopened:
            slots = self._admit_again(most)
        else:
            epoch, rows = self.order.some(self.position, most)
            slots = self.tasks.add(TRAIN_SPLIT, epoch, rows, self.window.tail)
            self.position += len(rows)
        first = self.window.admit(slots)
        self.ready[0].admit(first, self.window.tail)

    def _admit_again(self, most: int) -> list[int]:
        """Revive up to `most` of the `reopened` tasks under the next admission numbers and return their slots."""
        taken, self.reopened = self.reopened[: 2 * most], self.reopened[2 * most :]
        names = zip(taken[::2], taken[1::2], strict=True)
        slots = [
            self._revived(TRAIN_SPLIT, epoch, row, admission)
            for admission, (epoch, row) in enumerate(names, self.window.tail)
        ]
        self.highest_fence = max([self.highest_fence, *(self.tasks.fence[slot] for slot in slots)])
        return slots

    def _open_batch_tasks(self) -> int:
        return len(self.batches.get(self.batched_step, ())) if self.batched_step > self.committed_step else 0

    def _collect_steps(self, last: int) -> None:
        for step in [step for step in self.batches if step <= min(last, self.committed_step)]:
            slots = self.batches.pop(step)
            self._cover(slots)
            for slot in slots:
                self._collect(slot)

    def _collect(self, slot: int) -> None:
        """Clear a task at every store that may hold it. It is COLLECTED once all of them have acknowledged."""
        waits = self._clear(slot, last=True)
        self.tasks.lease[slot] = 0
        self.tasks.clears[slot] = waits
        if not waits:
            self._collected(slot)

    def _clear(self, slot: int, *, last: bool) -> int:
        """Clear what was made under the task's fence, and return the number of acknowledgements to wait for."""
        stores = self._holders(slot)
        self.clears.push(self.tasks.task_id(slot), self.tasks.fence[slot], stores, last=last)
        return len(stores)

    def _collected(self, slot: int) -> None:
        self.clears.collected += 1
        self.tasks.remove(slot)

    def cleared(self, store: str, count: int) -> bool:
        """Remove the first `count` clears, which the store has acknowledged, from its queue."""
        for task_id, fence, last in self.clears.pop(store, count):
            slot = self.tasks.find(task_id) if last else NO_SLOT
            if slot != NO_SLOT and self.tasks.fence[slot] == fence:  # with a higher fence, the task is live again
                self.tasks.clears[slot] -= 1
                if not self.tasks.clears[slot]:
                    self._collected(slot)
        return True

    def _free_versions(self) -> None:
        if len(self.versions) < 2:
            return
        # By completion, a lease may outlive its use: tasks sampled with an older version are dropped.
        useful = self.batched_step - self.plan.staleness if self.plan.by_completion else 0
        named = {version for version in self.leases.versions() if version[1] >= useful} | self.evaluations.named()
        oldest = max(0, self.batched_step - self.plan.staleness) if self.plan.deterministic else None
        for ref in self.versions.unnamed(named, oldest, self._reference_steps()):
            self._clear_weights(ref)

    def _reference_steps(self) -> set[int]:
        """Return the steps of versions that the reference may still need, also after a return to the checkpoint."""
        first = self.plan.reference_version(min(max(self.checkpoint_step, 0), self.committed_step) + 1)
        every = self.plan.reference_every
        return set(range(max(first, every), self.committed_step + 1, every)) if every else set()

    def _clear_weights(self, ref: WeightsRef) -> None:
        self.clears.push(ref.task_id, ref.fence, [ref.store], last=False)

    def is_stray(self, entry: PutTask) -> bool:
        """Return whether `entry` of a store is neither accepted, nor under a live lease, nor of a live version."""
        split, epoch, index = entry.task_id.rsplit("/", 2)
        if split == WEIGHTS:
            version = (int(epoch), int(index))
            ref = self.versions.get(version)
            if ref is not None:
                return entry.fence < ref.fence
            newest = self.versions.newest
            # A version that is put but not published yet is of the driver's lineage and not older than the newest.
            return newest is not None and (version[0] < self.lineage or version < newest)
        slot = self.tasks.find(entry.task_id)
        return slot == NO_SLOT or entry.fence < self.tasks.fence[slot]

    def _write_rows(self) -> None:
        """Write metrics rows in step order, each once the evaluations due at its version are complete."""
        while self.next_row in self.waiting_rows:
            if self.evaluated(self.next_row) is None:
                return
            row = self.waiting_rows.pop(self.next_row)
            found = self.evaluations.row(self.next_row)
            self.out.append(WriteRow(self.next_row, {"step": 0.0, **row, **found} | {"step": float(self.next_row)}))
            self.next_row += 1

    def check_driver(self, driver: int) -> None:
        if driver != self.driver:
            raise RpcError(ErrorCode.CONFLICT, f"driver {driver}: a newer driver has taken over, or GetRunInfo is due")
