"""The tasks of a run: admission, waiting lines, leases, and the ends of attempts. The module is pure.

An attempt ends with an accepted result (`completion.py`), with a new attempt under a higher fence, or with a drop. A
task that has ended is cleared from the stores and is COLLECTED once every store that may hold its shards has
acknowledged the task's last clear.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

from proto.ids import make_task_id
from proto.messages import DropReason, PutTask, TaskState
from services.scheduler.ended import Losses, Records
from services.scheduler.evaluations import Evaluation
from services.scheduler.events import Effect, Tell
from services.scheduler.history import RunHistory
from services.scheduler.leases import CallId, Holder, Leases, TaskLease, Version
from services.scheduler.plan import EpochOrder, Plan, due
from services.scheduler.shards import StoredShards
from services.scheduler.tasks import EVALUATION, AdmissionWindow, Task, Tasks
from shared.rundir import service_name
from shared.stages import TRAIN

FAILURE = 4
"""Cost of a failed attempt. A task whose costs reach `FAILURE` times the allowed attempts is dropped."""
DEATH = 1
"""Cost of an attempt whose holder died. It is lower than `FAILURE` because the task is rarely the cause. A task that
always kills its process is still dropped, after `FAILURE` deaths for each allowed attempt."""
_SAVED = ("position", "highest_fence", "eval_lease_debt", "reopened", "checked", "stale")


@dataclass(frozen=True)
class Consumption:
    """One function for each decision that depends on the order in which steps consume tasks (`orders.py`)."""

    fixed: bool
    """Whether a task always keeps its step and its version, so that training a step again yields bit-identical
    results."""
    step_of: Callable[[TaskLedger, int], int]
    """Return the step that will consume the task with this admission number."""
    room: Callable[[TaskLedger], int]
    """Return the number of tasks to admit now."""
    takeable: Callable[[TaskLedger], int]
    """Return the number of tasks that the next step could take."""
    take: Callable[[TaskLedger], list[Task]]
    """Remove the tasks of the next step from the window and return them. There must be enough takeable tasks."""
    choose: Callable[[TaskLedger, int, int], list[Task]]
    """Return the waiting tasks to lease next for a stage, given the maximum number of tasks."""
    choose_rows: Callable[[TaskLedger, Evaluation, int], list[str]]
    """Return the waiting tasks to lease next for an evaluation, given the maximum number of rows."""
    version: Callable[[TaskLedger, int, Version | None], Version | None]
    """Return the version for a training lease, or None if it is not published yet.

    The arguments are the oldest step that the version may have, and the version that the engine should keep if allowed.
    """
    versions_needed: Callable[[TaskLedger], tuple[int, int | None]]
    """Return the oldest step whose version a lease may still need, and the step from which all versions are kept (None
    if there is no such step)."""
    retry: Callable[[TaskLedger, Task, int, str], None]
    """End an attempt that has no result. The last two arguments are its cost (see `FAILURE`) and the reason."""
    take_back: Callable[[TaskLedger, int, list[Task]], None]
    """Reopen the tasks of all batches after a step. No training task may be leased when this is called."""
    drop_if_stale: Callable[[TaskLedger, Task], bool]
    """Drop a finished task that is too old for the next step, and return whether it was dropped."""
    drop_stale: Callable[[TaskLedger], None]
    """Drop all finished tasks that are too old for the next step. This runs after each batch."""
    metrics: Callable[[TaskLedger], dict[str, float]]
    """Return the values that this order adds to the metrics row of a step, and reset the counters."""


class TaskLedger:
    """The live tasks of a run, the leases that hold them, and the lines in which they wait."""

    def __init__(self, plan: Plan, order: Consumption, history: RunHistory, shards: StoredShards) -> None:
        self.plan = plan
        self.order = order
        self.history = history
        self.shards = shards
        self.epochs = EpochOrder(plan)
        self.tasks = Tasks(len(plan.stages))
        self.window = AdmissionWindow()
        self.leases = Leases()
        self.losses = Losses()
        self.records = Records(history)
        self.reopened: list[str] = []
        """Tasks of steps that were rolled back, and tasks that were waiting at that time. They are admitted before all
        others."""
        self.position = 0
        """Number of tasks that were admitted from the epoch order."""
        self.highest_fence = 1
        """The highest fence of any task so far. A collected task that is sampled again gets a higher fence."""
        self.eval_lease_debt = 0
        """Number of leases by which evaluations are ahead of training. It is at most the number of leases in a step."""
        self.dropped_in_a_row = 0
        """Number of training tasks dropped in this life since the last task with enough samples. No event depends on
        this number."""
        self.last_drop = ""
        """The last dropped task and the reason why it was dropped."""
        self.checked = 0
        """With `consume: completion`, the number of staleness checks of finished tasks since the last commit."""
        self.stale = 0
        """Number of those checks after which the task was dropped."""
        makers = {key: i for i, stage in enumerate(plan.stages) for key in stage.makes}
        self._needs = [tuple(sorted({makers[key] for key in stage.needs})) for stage in plan.stages]
        """For each stage, the stages that produce the keys it needs."""
        self._lines: list[list[int]] = [[] for _ in plan.stages]
        """For each stage, a heap of the admission numbers of the tasks that wait for it. Outdated entries are
        skipped."""
        self._unscored: set[str] = set()
        """Ids of the evaluation tasks that wait for the stage that makes the rewards. Outdated entries are skipped."""
        self._effects: list[Effect] = []

    def saved(self) -> dict[str, Any]:
        """Return the values that a snapshot stores unchanged."""
        return {name: getattr(self, name) for name in _SAVED}

    def restore(self, saved: dict[str, Any], losses: Losses) -> None:
        """Replace the values that a snapshot stores, once the tasks, the window and the leases are loaded."""
        for name in _SAVED:
            setattr(self, name, saved[name])
        self.losses = losses
        self.line_up()

    def take_effects(self) -> list[Effect]:
        """Return the effects since the last call."""
        effects, self._effects = self._effects, []
        return effects

    def tell(self, topic: str, values: dict[str, float | str]) -> None:
        self._effects.append(Tell(topic, values))

    # ---- admission

    def admit(self) -> None:
        """Admit tasks: first those that a return to an earlier step set aside, then new ones in the order of the
        epochs."""
        more = 0 if self.history.finished else self.order.room(self)
        while more > 0:
            first = self.window.tail
            if self.reopened:
                tasks = self.revive(self.reopened[:more], first)
                del self.reopened[:more]
            else:
                names = self.names(self.position, more)
                tasks = [self.tasks.add(name, admission) for admission, name in enumerate(names, first)]
                self.position += more
            self.window.admit(tasks)
            for task in tasks:
                self.wait(0, task)
            more -= len(tasks)

    def names(self, position: int, count: int) -> list[str]:
        """Return the ids of `count` tasks from `position` in the order of the epochs."""
        return [make_task_id(TRAIN, epoch, row) for epoch, row in self.epochs.some(position, count)]

    def room_for_tasks(self) -> int:
        """Return the number of tasks for which there is room, in addition to those of the open batch.

        The location of a task's shards is unknown until the task is leased, so each store must have room for all of
        them.
        """
        if not self.plan.task_bytes:
            return self.plan.max_live
        room = self.shards.room(self.history.version_bytes)
        free = min((nbytes - self.shards.uncovered.get(store, 0) for store, nbytes in room), default=0)
        return free // self.plan.task_bytes - len(self.history.open_batch)

    def revive(self, task_ids: Iterable[str], first: int = EVALUATION) -> list[Task]:
        """Add or reset tasks that may have been sampled before, and return them.

        The tasks are PENDING under fences that no store has seen. Clears of earlier fences may still be in flight and
        do not affect the new attempts. The admission numbers count up from `first`, unless `first` is `EVALUATION`.
        """
        revived: list[Task] = []
        for number, task_id in enumerate(task_ids):
            admission = first if first == EVALUATION else first + number
            task = self.tasks.find(task_id)
            if task is None:
                task = self.tasks.add(task_id, admission, self.highest_fence + 1)
            else:  # the task is batched or being collected
                self._clear(task, last=False)
                self.records.forget(task_id)
                self.tasks.begin_attempt(task)
                task.admission = admission
            revived.append(task)
        self.highest_fence = max([self.highest_fence, *(task.fence for task in revived)])
        return revived

    def evaluate(self, version: Version) -> None:
        """Open the evaluations that are due at a newly published version."""
        history, step = self.history, version[1]
        for evaluation in history.evaluations.open.values():
            if evaluation.version[1] == step and evaluation.version not in history.versions.refs:
                evaluation.version = version  # the step was published again because the store lost the first version
        for planned in due(self.plan, history.config.steps, step):
            if history.evaluations.begun(planned.name, step):
                continue
            waiting = [make_task_id(planned.name, step, row) for row in planned.rows]
            history.open_evaluation(planned.name, version, planned.samples, waiting)
            if history.lineage:  # the tasks may already exist, for a version that was rolled back
                self.revive(waiting)
            else:
                for task_id in waiting:
                    self.tasks.add(task_id, EVALUATION)

    def reopen_first(self, task_ids: list[str], *, others: bool = True) -> None:
        """Admit these tasks before all others. Unless `others` is true, forget the tasks that were to be reopened
        before."""
        self.reopened = [*task_ids, *self.reopened] if others else task_ids

    def skip_numbers(self, fence: int, distance: int) -> None:
        """Leave out `distance` fences above `fence` and all earlier ones, and as many lease ids."""
        self.highest_fence = max(self.highest_fence, fence) + distance
        self.tasks.least_fence = self.highest_fence + 1
        self.leases.next_id += distance

    def raise_pending(self) -> None:
        """Raise the fence of every PENDING task to the lowest one that new attempts may have."""
        for task in self.tasks:
            if task.state == TaskState.PENDING:
                task.fence = max(task.fence, self.tasks.least_fence)
        self.highest_fence = max(self.highest_fence, self.tasks.least_fence)

    # ---- waiting lines

    def wait(self, stage: int, task: Task) -> None:
        """Add a task to the line of those that wait for a lease of `stage`."""
        heapq.heappush(self._lines[stage], task.admission)

    def is_waiting(self, stage: int, task: Task) -> bool:
        """Return whether a task in the window is waiting for a lease of `stage`."""
        return not task.lease and task.parts[stage] is None and all(task.parts[need] for need in self._needs[stage])

    def first_waiting(self, stage: int) -> Task | None:
        """Return the oldest task that is waiting for `stage`, or None. Outdated entries of the line are removed."""
        line = self._lines[stage]
        while line:
            task = self.window.tasks.get(line[0])
            if task is not None and self.is_waiting(stage, task):
                return task
            heapq.heappop(line)
        return None

    def leave_line(self, stage: int, task: Task) -> None:
        """Remove the first task of a line, which may have been added twice."""
        line = self._lines[stage]
        while line and line[0] == task.admission:
            heapq.heappop(line)

    def wait_for_later_stages(self, task: Task) -> None:
        """Add a task, which has just left a lease, to the lines of all later stages that it is waiting for.

        A task is leased to one stage at a time, and meanwhile may have been removed from the lines of the others.
        """
        for stage in range(1, len(self.plan.stages)):
            if self.is_waiting(stage, task):
                self.wait(stage, task)

    def wait_for_rewards(self, task: Task) -> None:
        """Let an evaluation task wait for the stage that makes the rewards."""
        self.tasks.move(task, TaskState.ROLLED_OUT)
        self._unscored.add(task.task_id)

    def unscored(self) -> list[Task]:
        """Return the evaluation tasks that wait for a lease of the stage that makes the rewards, in a fixed order."""
        found = (self.tasks.find(task_id) for task_id in self._unscored)
        waiting = [task for task in found if task is not None and self._is_unscored(task)]
        self._unscored = {task.task_id for task in waiting}
        return sorted(waiting, key=lambda task: (task.epoch, task.split, task.row))

    def _is_unscored(self, task: Task) -> bool:
        return task.admission == EVALUATION and task.state == TaskState.ROLLED_OUT and not task.lease

    def sample_unscored(self, steps: Container[int]) -> None:
        """Sample those of `unscored` again whose versions are of these steps."""
        for task in self.unscored():
            if task.epoch in steps:
                self.sample_again(task)

    def line_up(self) -> None:
        """Rebuild the waiting lines from the tasks. A sorted list is a heap."""
        self._unscored = {task.task_id for task in self.tasks if self._is_unscored(task)}
        tasks = self.window.tasks.items()
        for stage in range(len(self._lines)):
            self._lines[stage] = [number for number, task in tasks if self.is_waiting(stage, task)]

    # ---- leases

    def grant(
        self, stage: int, holder: Holder, incarnation: int, call: CallId, tasks: Iterable[Task], version: Version | None
    ) -> TaskLease:
        """Lease tasks that are waiting for a stage."""
        granted = {task.task_id: task for task in tasks}
        lease = TaskLease(self.leases.next_id, stage, holder, incarnation, version, call, granted)
        for task in granted.values():
            task.lease = lease.lease_id
            if stage == 0:
                self.tasks.move(task, TaskState.LEASED)
        return self.leases.add(lease)

    def count_turn(self, *, measures: bool, leases_a_step: int = 0) -> None:
        """Count a rollout lease, which lets evaluation get ahead of training or training catch up."""
        change = 1 if measures else -1
        self.eval_lease_debt = max(self.eval_lease_debt + change, 0)
        if measures:
            self.eval_lease_debt = min(self.eval_lease_debt, leases_a_step)

    def give_up(self, lease: TaskLease, cost: int) -> None:
        """End a lease and retry the tasks that it still holds."""
        for task in list(lease.tasks.values()):
            if task.lease == lease.lease_id:  # the retry of another task may have begun a new attempt of this one
                self.retry(task, cost, f"lease of {service_name(*lease.holder)} was lost")
        self.leases.remove(lease)
        self.free_versions()

    def release(self, task: Task) -> None:
        """Remove a task from the lease that holds it, if any."""
        lease = self.leases.get(task.lease)
        if lease is not None:
            del lease.tasks[task.task_id]
            task.lease = 0

    def free_versions(self) -> None:
        """Remove the versions that no lease, evaluation or reference can still need."""
        history = self.history
        if len(history.versions.refs) < 2:
            return
        useful, oldest = self.order.versions_needed(self)
        named = {version for version in self.leases.versions() if version[1] >= useful} | history.evaluations.versions()
        for ref in history.versions.unnamed(named, oldest, history.reference_steps()):
            self.shards.clear_version(ref)

    # ---- ends of attempts

    def count_usable(self) -> None:
        """Note that a task has enough samples."""
        self.dropped_in_a_row = 0

    def retry(self, task: Task, cost: int, reason: str) -> None:
        """End an attempt that has no result, in the way of the run's order."""
        self.order.retry(self, task, cost, reason)

    def count_failure(self, task: Task, cost: int) -> bool:
        """Add the cost of a failed attempt, and return whether the task has used up all its attempts."""
        task.failures += cost
        return task.failures >= FAILURE * self.history.config.attempts

    def sample_again(self, task: Task) -> None:
        """Return a task to PENDING under a higher fence, and clear the shards of its old fence."""
        self._clear(task, last=False)
        self.release(task)
        self.records.forget(task.task_id)
        self.tasks.begin_attempt(task)
        self.highest_fence = max(self.highest_fence, task.fence)
        if task.admission == EVALUATION:
            self.history.evaluations.of(task).waiting.append(task.task_id)
        else:
            self.window.mark_unready(task.admission)
            self.wait(0, task)

    def drop(self, task: Task, why: DropReason, reason: str) -> None:
        """Drop a task that can no longer be trained on or scored. `reason` explains `why` in one line."""
        self.tasks.move(task, TaskState.DROPPED)
        self.tell("scheduler/dropped", {"task": task.task_id, "why": str(why), "reason": reason[:200]})
        if task.admission == EVALUATION:
            evaluation = self.history.evaluations.of(task)
            evaluation.dropped += 1
            self.history.end_task(evaluation)
        else:
            self.dropped_in_a_row += 1
            self.losses.drop(task.admission, why)
            self.last_drop = (reason if reason.startswith(task.task_id) else f"{task.task_id}: {reason}")[:200]
            self.window.drop(task.admission)
        self.records.dropped(task, why, reason)
        self.collect(task)

    def set_aside(self, tasks: Iterable[Task]) -> None:
        """Drop these tasks without counting them as losses, and collect their shards."""
        for task in tasks:
            self.tasks.move(task, TaskState.DROPPED)
            self.collect(task)

    # ---- collection

    def _clear(self, task: Task, *, last: bool) -> int:
        """Clear the shards made under the task's fence, and return the number of acknowledgements to wait for."""
        lease = self.leases.get(task.lease)
        return self.shards.clear(task, lease.holder if lease is not None else None, last=last)

    def collect(self, task: Task) -> None:
        """Clear a task from every store. The task must have ended. If its samples are to be recorded, the clear waits
        for the recorder."""
        due = self.records.find(task)
        if due is None or task.parts[0] is None:
            self._collect(task)
            return
        self.records.hold(due, max(task.nbytes, 1))
        self.release(task)
        recording = self.history.config.recording
        room = recording.hold_tasks * self.plan.task_bytes if recording is not None else 0
        excess = self.records.held_bytes - room if self.plan.task_bytes else 0
        given_up: list[PutTask] = []
        for waiting, nbytes in self.records.held:
            if excess <= 0:
                break
            given_up.append(waiting)
            excess -= nbytes
        self.take_samples(given_up, lost=True)

    def _collect(self, task: Task) -> None:
        """Clear a task from every store that may hold it. The task is COLLECTED once all these stores have
        acknowledged."""
        waits = self._clear(task, last=True)
        self.release(task)
        if waits:
            task.clears = waits
        else:
            self.tasks.move(task, TaskState.COLLECTED)

    def collect_steps(self, last: int) -> None:
        """Collect the trained tasks of all steps up to `last`."""
        last = min(last, self.history.committed_step)
        for step in [step for step in self.history.batches if step <= last]:
            tasks = self.history.take_batch(step)
            self.shards.count_uncovered(tasks, -1)
            for task in tasks:
                self.collect(task)

    def cleared(self, store: str, count: int) -> None:
        """Remove the first `count` clears, which the store has acknowledged, from the store's queue."""
        for task_id, fence, last in self.shards.clears.pop(store, count):
            task = self.tasks.find(task_id) if last else None
            if task is not None and task.fence == fence:  # with a higher fence, the task is live again
                task.clears -= 1
                if not task.clears:
                    self.tasks.move(task, TaskState.COLLECTED)

    def take_samples(self, tasks: Iterable[PutTask], *, lost: bool) -> bool:
        """Stop waiting for the recorder to take these tasks.

        The recorder has taken them or, if `lost` is true, is too slow or silent.

        Return False, and change nothing, if none of the tasks is due.
        """
        count = 0
        for taken in tasks:
            due = self.records.due.get(taken.task_id)
            if due is None or due.fence != taken.fence:
                continue
            count += 1
            self.records.forget(taken.task_id)
            task = self.tasks.find(taken.task_id)
            if due.nbytes and task is not None:
                self._collect(task)
        if lost and count:
            self.records.lost += count
            self.tell("scheduler/samples_lost", {"tasks": float(count), "total/tasks": float(self.records.lost)})
        return count > 0

    def take_back_samples(self, step: int) -> None:
        """Forget the due tasks of steps and versions after `step`, and note that recorded samples must be discarded.

        In deterministic mode, the recorded samples are kept, because the repeated steps produce the same ones.
        """
        later = [PutTask(task_id, due.fence) for task_id, due in self.records.due.items() if due.step > step]
        self.take_samples(later, lost=False)
        if self.history.config.recording is not None and not self.order.fixed:
            self.records.rewinds.append((self.history.lineage, step))

    # ---- staleness

    def count_checked(self, *, stale: bool) -> None:
        """Count a check of a finished task's staleness."""
        self.checked += 1
        self.stale += stale

    def take_checks(self) -> dict[str, float]:
        """Return the number of staleness checks since the last commit, and the number of tasks that these checks
        dropped."""
        counts = {"rollout/tasks_checked": float(self.checked), "rollout/tasks_stale": float(self.stale)}
        self.checked = self.stale = 0
        return counts
