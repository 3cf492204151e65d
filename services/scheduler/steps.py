"""Driver requests: batches, commits, checkpoints, and the return to an earlier step. The module is pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from proto.messages import (
    CheckpointSaved,
    CommitStep,
    ErrorCode,
    GetRunInfo,
    NextBatch,
    PublishWeights,
    RunInfo,
    StepBatch,
    TaskState,
)
from services.scheduler.ended import Filtered
from services.scheduler.leasing import handles
from services.scheduler.ledger import TaskLedger
from services.scheduler.tasks import Task
from shared.rpc.errors import RpcError

HOPELESS_STEPS, HOPELESS_TASKS = 10, 256
"""Maximum number of consecutive drops, in steps and in tasks, before the run ends. The larger limit applies."""
REMEMBERED_STEPS, REMEMBERED_TASKS = 4096, 1 << 18
"""Maximum number of steps before the oldest kept checkpoint whose batches and metrics rows stay in the journal, and of
tasks in their batches. The smaller limit applies."""
FULL_SHARE = 0.8
"""Fraction of a store's room that trained tasks may take up before a checkpoint is requested."""


def take_over(ledger: TaskLedger, request: GetRunInfo) -> RunInfo:
    """Let a driver take over the run. If `reload` is true, a new lineage begins at the latest step that can be
    reached."""
    history = ledger.history
    history.take_over(request.driver)
    if any(task.lost for task in history.open_batch):
        _reopen(ledger)
    if request.reload:
        loaded = max(history.checkpoint_step, 0) if request.loaded_step < 0 else request.loaded_step
        if not all(replayable(ledger, step) for step in range(loaded + 1, history.committed_step + 1)):
            rewind(ledger, loaded)
            history.lower_checkpoint(loaded)  # the trainer refused later checkpoints
        history.begin_lineage()
    return RunInfo(
        steps=history.config.steps,
        committed_step=history.committed_step,
        open_step=history.batched_step if history.batched_step > history.committed_step else 0,
        lineage=history.lineage,
        checkpoint_step=history.checkpoint_step,
        stopping=history.finished,
        checkpoint_now=bool(ledger.shards.uncovered) and _wants_checkpoint(ledger, {}),
        reference_step=history.lost_reference(),
        drivers=len(history.old_drivers) + 1,
        waiting_rates={str(step): rate for step, row in history.waiting_rows.items() if (rate := row.get("policy/lr"))},
    )


def publish(ledger: TaskLedger, request: PublishWeights) -> None:
    """Publish a version, which can then be loaded, and open its evaluations."""
    replaced = ledger.history.publish(request)
    if replaced is not None:
        ledger.shards.clear_version(replaced)
    ledger.evaluate((request.ref.lineage, request.ref.step))
    ledger.free_versions()


# ---- the return to an earlier step


def replayable(ledger: TaskLedger, step: int) -> bool:
    """Return whether all shards of a trained step still exist."""
    tasks = ledger.history.batches.get(step)
    if tasks is None or any(task.lost for task in tasks):
        return False
    return not any(ledger.shards.lies_in(task, store) for store in ledger.shards.gone for task in tasks)


def _reopen(ledger: TaskLedger) -> None:
    """Roll back the batch of the open step. Its tasks with lost shards are sampled again; the others remain ready."""
    tasks = ledger.history.reopen_step()
    for task in tasks:
        ledger.tasks.move(task, TaskState.READY)
    ledger.window.put_back(tasks)
    ledger.losses.put_back()
    for task in [task for task in tasks if task.lost]:
        task.lost = False
        if task.made:  # the retry of another task may have begun a new attempt of this one
            ledger.retry(task, 0, "its shards are lost")


def rewind(ledger: TaskLedger, step: int, *, reached: int = 0, cause: str = "") -> None:
    """Return the run to `step`, because the weights of later steps are lost and their tasks cannot be replayed.

    The tasks of these steps are sampled again before all others. The steps' metrics rows are discarded, except in
    deterministic mode, where the steps produce the same bits again. The caller begins a new lineage. If the journal no
    longer contains the newest committed step, `reached` is that step. `Rewound` describes `cause`.
    """
    history, order = ledger.history, ledger.order
    taken_back: list[Task] = []
    ledger.take_back_samples(step)
    for later in [later for later in history.batches if later > step]:
        tasks = history.take_batch(later)
        taken_back += tasks
        if later <= history.committed_step:
            ledger.shards.count_uncovered(tasks, -1)
    history.return_to(step, reached=reached, cause=cause, keep_rows=order.fixed)
    for lease in list(ledger.leases):
        # The holder of a training lease may have newer weights than the lease names.
        if lease.measured is None or lease.measured > step:
            ledger.give_up(lease, 0)
    order.take_back(ledger, step, taken_back)
    for ref in history.versions.take_back(step):
        ledger.shards.clear_version(ref)


# ---- batches


def _check_hope(ledger: TaskLedger) -> None:
    """Raise RpcError(bad_data) if the next step waits for tasks and too many consecutive tasks were dropped.

    Deterministic mode is exempt: dropped tasks are not replaced, so its steps do not wait for other tasks.
    """
    step_tasks, order = ledger.plan.tasks_per_step, ledger.order
    most = max(HOPELESS_STEPS * step_tasks, HOPELESS_TASKS)
    if ledger.dropped_in_a_row < most or order.fixed or order.takeable(ledger) >= step_tasks:
        return
    raise RpcError(
        ErrorCode.BAD_DATA,
        f"step {ledger.history.batched_step + 1}: {ledger.dropped_in_a_row} tasks in a row were dropped; the last was "
        f"{ledger.last_drop}; fix the reward function, the workflow or the data, then resume",
    )


def batch(ledger: TaskLedger, request: NextBatch) -> StepBatch | None:
    """Return the batch of a journaled step, or None if the step is not journaled. The state does not change."""
    history = ledger.history
    history.check_driver(request.driver)
    if history.broken:
        raise RpcError(ErrorCode.BAD_REQUEST, history.broken)
    step = request.step
    if not 1 <= step <= history.config.steps:
        raise RpcError(ErrorCode.BAD_REQUEST, f"step {step}: this run has steps 1..{history.config.steps}")
    if step > history.batched_step:
        if step != history.committed_step + 1:
            raise RpcError(ErrorCode.CONFLICT, f"step {step}: the next step is {history.committed_step + 1}")
        history.check_versions()
        _check_hope(ledger)
        return None
    tasks = history.batches.get(step)
    if tasks is None:
        raise RpcError(
            ErrorCode.CONFLICT,
            f"step {step}: its tasks were collected, so it cannot be replayed; load a later checkpoint "
            "(gc.after: checkpoint keeps what replay needs)",
        )
    return _step_batch(ledger, step, tasks)


def form_batch(ledger: TaskLedger, request: NextBatch) -> StepBatch | None:
    """Form the batch of the next step. Return None, and change nothing, while there are too few tasks."""
    step_tasks, order = ledger.plan.tasks_per_step, ledger.order
    if order.takeable(ledger) < step_tasks:
        return None
    tasks = order.take(ledger)
    for task in tasks:
        ledger.tasks.move(task, TaskState.BATCHED)
    ledger.history.begin_step(request.step, tasks)
    end = request.step * step_tasks  # in deterministic mode, drops are counted by admission number
    ledger.losses.batched((task.admission for task in tasks), lambda admission: not order.fixed or admission < end)
    formed = _step_batch(ledger, request.step, tasks)
    order.drop_stale(ledger)
    ledger.free_versions()
    return formed


def _step_batch(ledger: TaskLedger, step: int, tasks: Sequence[Task]) -> StepBatch:
    columns = ledger.tasks.merged_scalars(tasks)
    newest = step == ledger.history.batched_step
    drops = ledger.losses.batch_drops if newest else {}
    filtered = ledger.losses.batch_filtered if newest else Filtered()
    rewards = columns.get("reward")
    reward_sum, samples = filtered.reward_sum, filtered.samples
    if rewards is not None:
        reward_sum, samples = reward_sum + float(np.sum(rewards, dtype=np.float64)), samples + len(rewards)
    return StepBatch(
        step=step,
        batch=handles(ledger, tasks),
        scalars=columns,
        reward_mean_unfiltered=reward_sum / samples if samples else 0.0,
        samples_failed=sum(task.failed for task in tasks),
        # Deterministic mode counts the drops of this step instead of the drops since the last batch.
        dropped=ledger.plan.tasks_per_step - len(tasks) if ledger.order.fixed else sum(drops.values()),
        drops=drops,
        lost=ledger.losses.batch_lost if newest else {},
        checkpoint_now=_wants_checkpoint(ledger, ledger.shards.held_by(tasks)),
    )


# ---- commits and checkpoints


def commit(ledger: TaskLedger, request: CommitStep) -> bool:
    """Mark the tasks of a step as TRAINED, once.

    Return False, and change nothing, if the step was already committed.
    """
    step, history = request.step, ledger.history
    history.check_driver(request.driver)
    tasks = history.commit(step)
    if tasks is None:
        return False
    for task in tasks:
        ledger.tasks.move(task, TaskState.TRAINED)
    ledger.shards.count_uncovered(tasks, 1)
    ledger.records.trained(step, tasks)
    if history.config.collect_at_commit:
        ledger.collect_steps(step)
    collected = float(ledger.tasks.counts[TaskState.COLLECTED])
    row = {"policy/version": float(step), **request.metrics, "gc/tasks": collected, **ledger.order.metrics(ledger)}
    history.add_row(step, row)
    ledger.free_versions()
    return True


def checkpoint(ledger: TaskLedger, request: CheckpointSaved) -> None:
    """Collect the steps covered by the oldest checkpoint to which recovery may fall back, and forget what nobody needs
    of earlier ones."""
    history = ledger.history
    history.check_driver(request.driver)
    kept = history.checkpoint(request)
    ledger.collect_steps(kept[0])
    remembered = min(REMEMBERED_STEPS, REMEMBERED_TASKS // ledger.plan.tasks_per_step)
    history.forget_before(kept[0], request.kept, remembered)
    if _wants_checkpoint(ledger, {}):
        # There is no room to replay another interval, so give up replay from the older checkpoints rather than stall.
        ledger.collect_steps(kept[-1])


def _wants_checkpoint(ledger: TaskLedger, batch: Mapping[str, int]) -> bool:
    """Return whether any trained steps that no checkpoint covers cannot be replayed or are about to limit admission.

    `batch` holds, by store, the bytes of a step that is about to be trained.
    """
    plan, shards, history = ledger.plan, ledger.shards, ledger.history
    if shards.uncovered.keys() & shards.gone.keys() or any(task.lost for task in history.trained()):
        return True
    if not plan.task_bytes or history.config.collect_at_commit:
        return False
    live = plan.max_live * plan.task_bytes
    return any(
        shards.uncovered.get(store, 0) + batch.get(store, 0) > FULL_SHARE * (room - live)
        for store, room in shards.room(history.version_bytes)
    )
