"""Driver requests: batches, commits, checkpoints, and the return to an earlier step. The module is pure.

Each step is batched and committed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from proto.ids import make_task_id
from proto.messages import CheckpointSaved, CommitStep, ErrorCode, GetRunInfo, NextBatch, RunInfo, StepBatch, TaskState
from services.scheduler import scalars
from services.scheduler.collection import clear_weights, collect_steps, set_aside, take_back_samples
from services.scheduler.evaluations import write_rows
from services.scheduler.events import DiscardRows, ForgetSteps, Rewound, SaveStep
from services.scheduler.leasing import give_up, handles, measures
from services.scheduler.losses import Filtered
from services.scheduler.records import record_trained
from services.scheduler.stores import count_uncovered, held_in, replayable, wants_checkpoint
from services.scheduler.tasks import Task
from services.scheduler.versions import free_versions, lost_reference
from shared.rpc.errors import RpcError
from shared.stages import TRAIN

if TYPE_CHECKING:
    from services.scheduler.run_state import RunState

HOPELESS_STEPS, HOPELESS_TASKS = 10, 256
"""Maximum number of consecutive drops, in steps and in tasks, before the run ends. The larger limit applies."""
REMEMBERED_STEPS, REMEMBERED_TASKS = 4096, 1 << 18
"""Maximum number of steps before the oldest kept checkpoint whose batches and metrics rows stay in the journal, and of
tasks in their batches. The smaller limit applies."""


def check_driver(run: RunState, driver: int) -> None:
    """Raise RpcError(conflict) unless `driver` is the current driver of the run."""
    if driver != run.driver:
        raise RpcError(ErrorCode.CONFLICT, f"driver {driver}: a newer driver has taken over, or GetRunInfo is due")


def take_over(run: RunState, request: GetRunInfo) -> RunInfo:
    """Let a driver take over the run. If `reload` is true, a new lineage begins at the latest step that can be
    reached."""
    if request.driver in run.old_drivers:
        raise RpcError(ErrorCode.CONFLICT, f"driver {request.driver}: a newer driver has taken over")
    if request.driver != run.driver:
        if run.driver:
            run.old_drivers.append(run.driver)
        run.driver = request.driver
    run.lost_version = ""  # a driver that resumes publishes the versions that may be needed
    if any(task.lost for task in run.open_batch):
        reopen(run)
    if request.reload:
        loaded = max(run.checkpoint_step, 0) if request.loaded_step < 0 else request.loaded_step
        if not all(replayable(run, step) for step in range(loaded + 1, run.committed_step + 1)):
            rewind(run, loaded)
            # The trainer refused later checkpoints, which hold weights of steps that were rolled back.
            run.checkpoint_step = min(run.checkpoint_step, loaded or -1)
        run.lineage += 1
    return RunInfo(
        steps=run.config.steps,
        committed_step=run.committed_step,
        open_step=run.batched_step if run.batched_step > run.committed_step else 0,
        lineage=run.lineage,
        checkpoint_step=run.checkpoint_step,
        stopping=run.finished,
        checkpoint_now=bool(run.uncovered) and wants_checkpoint(run, {}),
        reference_step=lost_reference(run),
        drivers=len(run.old_drivers) + 1,
    )


# ---- the return to an earlier step


def reopen(run: RunState) -> None:
    """Roll back the batch of the open step. Its tasks with lost shards are sampled again; the others remain ready."""
    step = run.batched_step
    tasks = run.batches.pop(step)
    del run.identities[step]
    run.batched_step = run.committed_step
    for task in tasks:
        run.tasks.move(task, TaskState.READY)
    run.window.put_back(tasks)
    run.losses.put_back()
    for task in [each for each in tasks if each.lost]:
        run.tasks.edit(task).lost = False
        if task.made:  # the retry of another task may have begun a new attempt of this one
            run.order.retry(run, task, 0, "its shards are lost")


def rewind(run: RunState, step: int, *, reached: int = 0, cause: str = "") -> None:
    """Return the run to `step`, because the weights of later steps are lost and their tasks cannot be replayed.

    The tasks of these steps are sampled again before all others. The steps' metrics rows are discarded, except in
    deterministic mode, where the steps produce the same bits again. The caller begins a new lineage. If the journal no
    longer contains the newest committed step, `reached` is that step. `Rewound` describes `cause`.
    """
    taken_back: list[Task] = []
    take_back_samples(run, step)
    for later in [each for each in run.batches if each > step]:
        tasks = run.batches.pop(later)
        taken_back += tasks
        if later <= run.committed_step:
            count_uncovered(run, tasks, -1)
    committed = max(run.committed_step, reached)
    if step < committed:
        run.out.append(Rewound(run.lineage, step, committed, cause))
        waiting = {later: run.waiting_rows.pop(later) for later in [row for row in run.waiting_rows if row > step]}
        if not run.order.fixed:
            run.out.append(DiscardRows(run.lineage, step, waiting))
            run.next_row = min(run.next_row, step + 1)
    run.batched_step = run.committed_step = min(step, run.committed_step)
    for lease in list(run.leases):
        # The holder of a training lease may have newer weights than the lease names.
        if not measures(lease) or (lease.version is not None and lease.version[1] > step):
            give_up(run, lease, 0)
    run.order.take_back(run, step, taken_back)
    for ref in run.versions.take_back(step):
        clear_weights(run, ref)


def admit_again(run: RunState, step: int, tasks: list[Task]) -> None:
    """Put the tasks of the steps after `step` before the waiting tasks, which are sampled again, too.

    The waiting tasks are sampled again because their versions were withdrawn, or were chosen for steps to which the
    tasks no longer belong.
    Evaluations of versions after `step` are discarded: scores of old and new weights are not mixed, and each set is
    evaluated again as a whole when its version is published again. When this is called, none of these tasks may be
    leased.

    If only the initial model is left, and the tasks of the first steps are no longer remembered because a checkpoint
    covered them, every task that has ever been admitted is sampled again.
    """
    set_aside(run, tasks)
    set_aside(run, map(run.tasks.known, run.evaluations.take_back(step)))
    remembered = step + 1 in run.identities
    again: list[str] = []
    for later in [each for each in run.identities if each > step]:
        again += run.identities.pop(later)
    window = run.window.clear()
    run.reopened = [*again, *(task.task_id for task in window), *run.reopened]
    if step == 0 and run.checkpoint_step > 0 and not remembered:
        run.reopened = [make_task_id(TRAIN, *run.epochs.at(position)) for position in range(run.position)]
    set_aside(run, window)
    run.line_up()


# ---- batches


def check_hope(run: RunState) -> None:
    """Raise RpcError(bad_data) if the next step waits for tasks and too many consecutive tasks were dropped.

    Deterministic mode is exempt: dropped tasks are not replaced, so its steps do not wait for other tasks.
    """
    most = max(HOPELESS_STEPS * run.plan.tasks_per_step, HOPELESS_TASKS)
    if run.dropped_in_a_row < most or run.order.fixed or run.order.takeable(run) >= run.plan.tasks_per_step:
        return
    raise RpcError(
        ErrorCode.BAD_DATA,
        f"step {run.batched_step + 1}: {run.dropped_in_a_row} tasks in a row were dropped; the last was "
        f"{run.last_drop}; fix the reward function, the workflow or the data, then resume",
    )


def check_versions(run: RunState) -> None:
    """Raise RpcError(missing) if a store has lost a version and the driver has not resumed since."""
    if run.lost_version:
        raise RpcError(ErrorCode.MISSING, f"{run.lost_version}: its store has lost it; resume and publish it again")


def batch(run: RunState, request: NextBatch) -> StepBatch | None:
    """Return the batch of a journaled step, or None if the step is not journaled. The state does not change."""
    check_driver(run, request.driver)
    if run.broken:
        raise RpcError(ErrorCode.BAD_REQUEST, run.broken)
    step = request.step
    if not 1 <= step <= run.config.steps:
        raise RpcError(ErrorCode.BAD_REQUEST, f"step {step}: this run has steps 1..{run.config.steps}")
    if step > run.batched_step:
        if step != run.committed_step + 1:
            raise RpcError(ErrorCode.CONFLICT, f"step {step}: the next step is {run.committed_step + 1}")
        check_versions(run)
        check_hope(run)
        return None
    tasks = run.batches.get(step)
    if tasks is None:
        raise RpcError(
            ErrorCode.CONFLICT,
            f"step {step}: its tasks were collected, so it cannot be replayed; load a later checkpoint "
            "(gc.after: checkpoint keeps what replay needs)",
        )
    return _step_batch(run, step, tasks)


def form_batch(run: RunState, request: NextBatch) -> StepBatch | None:
    """Form the batch of the next step. Return None, and change nothing, while there are too few tasks."""
    if run.order.takeable(run) < run.plan.tasks_per_step:
        return None
    tasks = run.order.take(run)
    for task in tasks:
        run.tasks.move(task, TaskState.BATCHED)
    run.batches[request.step] = tasks
    run.identities[request.step] = [task.task_id for task in tasks]
    run.batched_step = request.step
    run.out.append(SaveStep(request.step, TaskState.BATCHED, [task.task_id for task in tasks]))
    end = run.batched_step * run.plan.tasks_per_step  # in deterministic mode, drops are counted by admission number
    run.losses.batched((task.admission for task in tasks), lambda admission: not run.order.fixed or admission < end)
    formed = _step_batch(run, request.step, tasks)
    run.order.drop_stale(run)
    free_versions(run)
    return formed


def _step_batch(run: RunState, step: int, tasks: Sequence[Task]) -> StepBatch:
    columns = scalars.flatten(run.layouts, [(task.layout, task.samples, task.scalars) for task in tasks])
    newest = step == run.batched_step
    drops = run.losses.batch_drops if newest else {}
    filtered = run.losses.batch_filtered if newest else Filtered()
    rewards = columns.get("reward")
    reward_sum, samples = filtered.reward_sum, filtered.samples
    if rewards is not None:
        reward_sum, samples = reward_sum + float(np.sum(rewards, dtype=np.float64)), samples + len(rewards)
    return StepBatch(
        step=step,
        batch=handles(run, tasks),
        scalars=columns,
        reward_mean_unfiltered=reward_sum / samples if samples else 0.0,
        samples_failed=sum(task.failed for task in tasks),
        # Deterministic mode counts the drops of this step instead of the drops since the last batch.
        dropped=run.plan.tasks_per_step - len(tasks) if run.order.fixed else sum(drops.values()),
        drops=drops,
        lost=run.losses.batch_lost if newest else {},
        checkpoint_now=wants_checkpoint(run, held_in(run, tasks)),
    )


# ---- commits and checkpoints


def commit(run: RunState, request: CommitStep) -> bool:
    """Mark the tasks of a step as TRAINED, once.

    Return False, and change nothing, if the step was already committed.
    """
    check_driver(run, request.driver)
    step = request.step
    if step <= run.committed_step:
        return False
    if step != run.batched_step:
        raise RpcError(
            ErrorCode.CONFLICT,
            f"commit of step {step}: step {run.committed_step} is committed "
            f"and the open step is {run.batched_step if run.batched_step > run.committed_step else 'none'}",
        )
    run.committed_step = step
    for task in run.batches[step]:
        run.tasks.move(task, TaskState.TRAINED)
    count_uncovered(run, run.batches[step], 1)
    run.out.append(SaveStep(step, TaskState.TRAINED))
    record_trained(run, step, run.batches[step])
    if run.config.collect_at_commit:
        collect_steps(run, step)
    collected = float(run.tasks.counts[TaskState.COLLECTED])
    row = {"policy/version": float(step), **request.metrics, "gc/tasks": collected, **run.order.metrics(run)}
    if step >= run.next_row:
        run.waiting_rows[step] = row
    write_rows(run)
    free_versions(run)
    return True


def checkpoint(run: RunState, request: CheckpointSaved) -> None:
    """Collect the steps covered by the oldest checkpoint to which recovery may fall back, and forget what nobody needs
    of earlier ones."""
    check_driver(run, request.driver)
    if not 0 <= request.step <= run.committed_step:
        raise RpcError(ErrorCode.CONFLICT, f"checkpoint of step {request.step}: step {run.committed_step} is committed")
    # Checkpoints newer than the committed step belong to steps that were rolled back.
    kept = sorted({request.step, *(step for step in request.kept if step <= run.committed_step)})
    kept = kept[-(run.config.keep_last + request.at_stop) :]
    run.checkpoint_step = kept[-1]
    collect_steps(run, kept[0])
    run.identities = {step: names for step, names in run.identities.items() if step > kept[0]}
    run.evaluations.forget(min(kept[0], run.next_row), request.kept)  # later rows are not written yet
    remembered = min(REMEMBERED_STEPS, REMEMBERED_TASKS // run.plan.tasks_per_step)
    if (old := min(kept[0], run.next_row - 1 - remembered)) > 0:
        run.out.append(ForgetSteps(old))
    if wants_checkpoint(run, {}):
        # There is no room to replay another interval, so give up replay from the older checkpoints rather than stall.
        collect_steps(run, kept[-1])
