"""The orders in which steps consume tasks. The module is pure, and the plan decides once which order applies.

- In admission order (the default), a step takes the oldest tasks, and a lease's version follows from the step that will
  consume its tasks. Leases alone bound the staleness.
- By completion (`consume: completion`), a step takes the tasks that finished first. A task may be overtaken by others,
  so the oldest token of every finished task is checked before each step that might take it. Only finished tasks are
  dropped as stale, so no other service ever holds a stale task.
- In deterministic mode, a step takes fixed admission numbers, each lease holds one whole fixed block of tasks, and a
  version is used for sampling only after its evaluations are complete. Arrival order, failures and drops never move a
  task into another block or step, because batch shapes and versions determine the last bits of the results
  (docs/architecture.md, promise 9). This holds even if processes are killed.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from itertools import islice

from proto.messages import DropReason
from services.scheduler.evaluations import Evaluation
from services.scheduler.leases import Version
from services.scheduler.ledger import Consumption, TaskLedger
from services.scheduler.plan import Plan
from services.scheduler.tasks import EVALUATION, Task

ADMITTED_AT_ONCE = 1024
"""Maximum number of tasks that one event admits, so that no request has to wait long. A step with more tasks raises
this limit."""


def order_of(plan: Plan) -> Consumption:
    """Return the order in which the steps of a run consume tasks."""
    return DETERMINISTIC if plan.deterministic else BY_COMPLETION if plan.by_completion else IN_ORDER


# ---- admission order


def _step_in_order(ledger: TaskLedger, admission: int) -> int:
    """Return the step of a task. If tasks before this one are dropped, it may move to an earlier step."""
    return ledger.history.batched_step + 1 + ledger.window.rank(admission) // ledger.plan.tasks_per_step


def _room_in_order(ledger: TaskLedger) -> int:
    """Return the number of tasks to admit: up to `Plan.max_live`, if there is room for all the bytes they might need.

    The tasks of the next step are admitted even if there is no room, because only the run's own steps free room, and a
    run that waited for room would stall. One event admits at most `ADMITTED_AT_ONCE` tasks, or one step's tasks if a
    step has more.
    """
    plan, history = ledger.plan, ledger.history
    step_tasks, live = plan.tasks_per_step, ledger.window.live
    left = (history.config.steps - history.batched_step) * step_tasks
    bound = min(plan.max_live - len(history.open_batch), left)
    if live >= bound:
        return 0
    return min(bound - live, max(ledger.room_for_tasks(), step_tasks) - live, max(ADMITTED_AT_ONCE, step_tasks))


def _choose_in_order(ledger: TaskLedger, stage: int, most: int) -> list[Task]:
    """Remove up to `most` waiting tasks, oldest first, from the waiting line and return them.

    For the rollout stage, the tasks all belong to one step; for later stages, they share one version of its model.
    """
    chosen: list[Task] = []
    group = -1
    while len(chosen) < most:
        task = ledger.first_waiting(stage)
        if task is None:
            break
        step = ledger.order.step_of(ledger, task.admission)
        key = step if stage == 0 else ledger.plan.version_of_model(stage, step)
        if group not in (-1, key):
            break
        group = key
        chosen.append(task)
        ledger.leave_line(stage, task)
    return chosen


def _version_in_order(ledger: TaskLedger, oldest: int, holds: Version | None) -> Version | None:
    if holds is not None and holds[1] >= oldest:
        return holds
    newest = ledger.history.versions.newest
    return newest if newest is not None and newest[1] >= oldest else None


def _retry_or_drop(ledger: TaskLedger, task: Task, cost: int, reason: str) -> None:
    """Clear the attempt's fence and return the task to PENDING, or drop the task."""
    if ledger.count_failure(task, cost):
        text = f"{ledger.history.config.attempts} attempts failed, the last one: {reason}"
        ledger.drop(task, DropReason.ATTEMPTS, text)
    else:
        ledger.sample_again(task)


def _admit_again(ledger: TaskLedger, step: int, tasks: list[Task]) -> None:
    """Put the tasks of the steps after `step` before the waiting tasks, which are also sampled again.

    The waiting tasks are sampled again because their versions were withdrawn, or were chosen for steps to which the
    tasks no longer belong.
    Evaluations of versions after `step` are discarded: scores of old and new weights are not mixed, and each set is
    evaluated again as a whole when its version is published again. When this is called, none of these tasks may be
    leased.

    If only the initial model is left, and the tasks of the first steps are no longer remembered because a checkpoint
    covered them, every task that has ever been admitted is sampled again.
    """
    history = ledger.history
    ledger.sample_unscored([version[1] for version in history.evaluations.versions() if version[1] > step])
    ledger.set_aside(tasks)
    ledger.set_aside([ledger.tasks[task_id] for task_id in history.evaluations.take_back(step)])
    remembered = step + 1 in history.identities
    again = history.take_identities(step)
    window = ledger.window.clear()
    if step == 0 and history.checkpoint_step > 0 and not remembered:
        ledger.reopen_first(ledger.names(0, ledger.position), others=False)
    else:
        ledger.reopen_first([*again, *(task.task_id for task in window)])
    ledger.set_aside(window)
    ledger.line_up()


IN_ORDER = Consumption(
    fixed=False,
    step_of=_step_in_order,
    room=_room_in_order,
    takeable=lambda ledger: ledger.window.rank(ledger.window.settled()),
    take=lambda ledger: ledger.window.take(islice(ledger.window.tasks, ledger.plan.tasks_per_step)),
    choose=_choose_in_order,
    choose_rows=lambda ledger, evaluation, most: evaluation.waiting[:most],
    version=_version_in_order,
    versions_needed=lambda ledger: (0, None),
    retry=_retry_or_drop,
    take_back=_admit_again,
    drop_if_stale=lambda ledger, task: False,
    drop_stale=lambda ledger: None,
    metrics=lambda ledger: {},
)


# ---- by completion


def _drop_if_stale(ledger: TaskLedger, task: Task) -> bool:
    oldest, allowed = _oldest_version(ledger, task), ledger.plan.staleness
    staleness = ledger.history.batched_step - oldest
    ledger.count_checked(stale=staleness > allowed)
    if staleness <= allowed:
        return False
    text = f"oldest token of version {oldest}: {staleness} behind, but staleness is {allowed}"
    ledger.drop(task, DropReason.STALE, text)
    return True


def _drop_stale(ledger: TaskLedger) -> None:
    for admission in list(ledger.window.finished):
        _drop_if_stale(ledger, ledger.window.tasks[admission])


def _oldest_version(ledger: TaskLedger, task: Task) -> int:
    """Return the oldest version among the task's tokens. A result without `version_min` is too old for any step."""
    versions = ledger.tasks.scalars(task).get("version_min")
    return int(versions.min()) if versions is not None and len(versions) else -1 - ledger.plan.staleness


BY_COMPLETION = replace(
    IN_ORDER,
    takeable=lambda ledger: len(ledger.window.finished),
    take=lambda ledger: ledger.window.take(islice(ledger.window.finished, ledger.plan.tasks_per_step)),
    # No older version is kept, even for a live lease: tasks sampled with it would be dropped.
    versions_needed=lambda ledger: (ledger.history.batched_step - ledger.plan.staleness, None),
    drop_if_stale=_drop_if_stale,
    drop_stale=_drop_stale,
    metrics=TaskLedger.take_checks,
)


# ---- deterministic mode


def _fixed_room(ledger: TaskLedger) -> int:
    plan, history = ledger.plan, ledger.history
    last = min(history.config.steps, history.committed_step + plan.staleness + 1) * plan.tasks_per_step
    return min(last - ledger.window.tail, max(ledger.room_for_tasks(), plan.tasks_per_step) - ledger.window.live)


def _fixed_takeable(ledger: TaskLedger) -> int:
    """Return the number of tasks per step if every task of the next step is ready or dropped, else 0."""
    step_tasks = ledger.plan.tasks_per_step
    return step_tasks if ledger.window.settled() >= (ledger.history.batched_step + 1) * step_tasks else 0


def _fixed_take(ledger: TaskLedger) -> list[Task]:
    window, end = ledger.window, (ledger.history.batched_step + 1) * ledger.plan.tasks_per_step
    return window.take([number for number in range(window.head, end) if number in window.tasks], end)


def _block(ledger: TaskLedger, stage: int, admission: int, most: int) -> list[Task]:
    """Return the live tasks of the fixed block that contains `admission`, or [] until the whole block has been
    admitted.

    For a stage after the rollout, return only the part of the block that contains `admission`, with at most `most`
    admission numbers.
    """
    size = ledger.plan.block_tasks
    first = admission // size * size
    end = first + size
    if stage > 0:
        first += (admission - first) // most * most
        end = min(first + most, end)
    tasks = ledger.window.tasks
    return [tasks[number] for number in range(first, end) if number in tasks] if end <= ledger.window.tail else []


def _choose_block(ledger: TaskLedger, stage: int, most: int) -> list[Task]:
    """Return one whole block, or [] unless all of its tasks are waiting."""
    first = ledger.first_waiting(stage)
    block = _block(ledger, stage, first.admission, most) if first is not None else []
    return block if all(ledger.is_waiting(stage, task) for task in block) else []


def _choose_rows(ledger: TaskLedger, evaluation: Evaluation, most: int) -> list[str]:
    """Find the first fixed block of `most` rows that has waiting tasks, and return these tasks in row order."""
    rows = ledger.plan.eval_rows(evaluation.name)
    place = {task_id: bisect_left(rows, int(task_id.rpartition("/")[2])) for task_id in evaluation.waiting}
    block = min(place.values()) // most
    return sorted((task_id for task_id in place if place[task_id] // most == block), key=place.__getitem__)


def _fixed_version(ledger: TaskLedger, exact: int, holds: Version | None) -> Version | None:
    """Return the version of exactly this step once this version and all older ones have been evaluated.

    After a return to a checkpoint, the versions that the run does not publish again have therefore been evaluated, so
    no evaluation is missed.
    """
    evaluates = any(version[1] <= exact for version in ledger.history.evaluations.versions())
    return None if evaluates else ledger.history.versions.at_step(exact)


def _retry_block(ledger: TaskLedger, task: Task, cost: int, reason: str) -> None:
    """Sample the task's whole block again. After too many failed attempts, the task is not dropped; instead, the run
    ends."""
    if ledger.count_failure(task, cost):
        ledger.history.break_off(
            f"{task.task_id}: {ledger.history.config.attempts} attempts failed, the last one: {reason}; without "
            "this task, a deterministic run would produce different bits; raise lease.attempts and resume"
        )
    ledger.sample_again(task)
    if task.admission != EVALUATION:
        for other in _block(ledger, 0, task.admission, ledger.plan.block_tasks):
            if other.made:
                ledger.sample_again(other)


def _reopen(ledger: TaskLedger, step: int, tasks: list[Task]) -> None:
    """Put the tasks of the batches after `step` back in their former places, and resample all later tasks that have a
    result.

    The tasks get fences that no store has seen, because clears of earlier fences may still be in flight. The scores of
    versions after `step` are kept, because the new versions are bit-identical.
    """
    for task in list(ledger.window.tasks.values()):
        if task.made:
            ledger.sample_again(task)
    first = ledger.history.committed_step * ledger.plan.tasks_per_step
    again = ledger.revive(ledger.names(first, ledger.window.head - first), first)
    ledger.window.reopen(again)
    for task in again:
        ledger.wait(0, task)


DETERMINISTIC = replace(
    IN_ORDER,
    fixed=True,
    step_of=lambda ledger, admission: 1 + admission // ledger.plan.tasks_per_step,
    room=_fixed_room,
    takeable=_fixed_takeable,
    take=_fixed_take,
    choose=_choose_block,
    choose_rows=_choose_rows,
    version=_fixed_version,
    versions_needed=lambda ledger: (0, max(0, ledger.history.batched_step - ledger.plan.staleness)),
    retry=_retry_block,
    take_back=_reopen,
)
