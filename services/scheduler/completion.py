"""Decides which results are accepted or refused, and what happens to their tasks. The module is pure.

A request is checked as a whole before anything changes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from proto.messages import Complete, DropReason, ErrorCode, Outcome, Refusal, TaskResult, TaskState
from proto.tensors import Array
from services.scheduler.ended import drop_reason
from services.scheduler.leases import TaskLease
from services.scheduler.ledger import DEATH, FAILURE, TaskLedger
from services.scheduler.plan import stage_index
from services.scheduler.tasks import EVALUATION, StagePart, Task, layout_of
from shared.rpc.errors import RpcError
from shared.stages import REWARD

MOST_LAYOUTS = 1 << 16
"""Maximum number of distinct sets of scalars in a run, because the run keeps the names of each."""


def complete(ledger: TaskLedger, request: Complete) -> list[Refusal]:
    """Accept results and return the refused ones."""
    lease = ledger.leases.get(request.lease_id)
    if lease is not None and lease.incarnation != request.incarnation:
        lease = None
    stage = stage_index(ledger.plan, request.stage)
    _check(ledger, request, stage)
    filters = stage == ledger.plan.reward_stage and (stage > 0 or _filters(ledger, request))
    refused: list[Refusal] = []
    first = 0
    for result in request.results:
        task = ledger.tasks.find(result.task_id)
        problem = _problem(task, stage, lease, result)
        if problem is None and task is not None and stage > 0 and request.scalars and result.samples != task.samples:
            problem = ErrorCode.CONFLICT, f"{task.task_id}: scalars of {result.samples} samples, not {task.samples}"
        if problem is not None:
            refused.append(Refusal(result.task_id, result.fence, *problem))
        elif task is not None and task.parts[stage] is None:
            if result.outcome == Outcome.DONE and result.store in ledger.shards.gone:
                ledger.retry(task, DEATH, f"{result.store} is gone")
            elif result.outcome == Outcome.DONE:
                values = {name: column[first : first + result.samples] for name, column in request.scalars.items()}
                _accept(ledger, task, stage, result, values, filters=filters)
            elif result.outcome == Outcome.RETRY:
                ledger.retry(task, FAILURE, result.reason)
            else:
                _drop(ledger, task, stage, result)
        first += result.samples if result.outcome == Outcome.DONE else 0
    if lease is not None:
        if request.final and lease.tasks:
            ledger.give_up(lease, 0 if request.untouched else DEATH)
        elif not lease.tasks:
            ledger.leases.remove(lease)
        ledger.free_versions()
    return refused


def _check(ledger: TaskLedger, request: Complete, stage: int) -> None:
    """Raise RpcError(bad_request) if the request cannot be accepted in any state of the run."""
    if stage < 0:
        raise RpcError(ErrorCode.BAD_REQUEST, f"stage {request.stage!r}: not in this run's graph")
    strange = sorted(request.scalars.keys() - ledger.plan.stages[stage].scalars) if stage > 0 else []
    if strange:
        raise RpcError(ErrorCode.BAD_REQUEST, f"stage {request.stage}: it does not produce the scalar {strange[0]!r}")
    for result in request.results:
        numbers = (
            (result.samples, 16),
            (result.samples_failed, 16),
            (result.tokens, 32),
            (result.nbytes, 48),
            (result.content_hash, 64),
            *((count, 16) for count in result.lost.values()),
        )
        if any(not 0 <= number < 1 << bits for number, bits in numbers):
            raise RpcError(ErrorCode.BAD_REQUEST, f"{result.task_id}: a number in its result is out of range")
    layout = layout_of(request.scalars)
    if len(ledger.tasks.layouts) >= MOST_LAYOUTS and layout not in ledger.tasks.layouts:
        text = f"scalars {', '.join(request.scalars)[:200]}: a run may have at most {MOST_LAYOUTS} different sets"
        raise RpcError(ErrorCode.BAD_REQUEST, text)
    samples = sum(result.samples for result in request.results if result.outcome == Outcome.DONE)
    for name, values in request.scalars.items():
        if values.shape != (samples,):
            raise RpcError(
                ErrorCode.BAD_REQUEST,
                f"scalar {name!r} of shape {list(values.shape)}: the results have {samples} samples in total",
            )


def _problem(task: Task | None, stage: int, lease: TaskLease | None, result: TaskResult) -> tuple[str, str] | None:
    """Return `(code, message)` if the result is refused, else None."""
    if task is None:
        return ErrorCode.COLLECTED, f"{result.task_id}: collected, or never admitted"
    if result.fence < task.fence:
        return (
            ErrorCode.COLLECTED,
            f"{result.task_id}: fence {result.fence} is outdated; the current one is {task.fence}",
        )
    if result.fence > task.fence:
        return ErrorCode.CONFLICT, f"{result.task_id}: fence {result.fence} was never issued (current: {task.fence})"
    accepted = task.parts[stage]
    if accepted is not None:
        if result.outcome != Outcome.RETRY and accepted.content_hash == result.content_hash:
            return None
        return ErrorCode.CONFLICT, f"{result.task_id}: fence {task.fence} was accepted with different content"
    if task.state == TaskState.DROPPED:
        return ErrorCode.COLLECTED, f"{result.task_id}: dropped"
    if lease is None or task.lease != lease.lease_id or lease.stage != stage:
        return ErrorCode.LOST, f"{result.task_id}: the lease is no longer held"
    return None


def _accept(
    ledger: TaskLedger, task: Task, stage: int, result: TaskResult, values: dict[str, Array], *, filters: bool
) -> None:
    ledger.release(task)
    _place(ledger, task, stage, result)
    if stage == 0:
        task.samples, task.failed, task.tokens = result.samples, result.samples_failed, result.tokens
        ledger.tasks.keep_scalars(task, values)
        if task.admission != EVALUATION:
            ledger.losses.lose(task.admission, result)
    elif values:
        earlier = ledger.tasks.scalars(task)
        if REWARD in values and REWARD in earlier:
            values |= {REWARD: earlier[REWARD] + values[REWARD]}
        ledger.tasks.keep_scalars(task, earlier | values)
    if task.admission == EVALUATION:
        scalars = ledger.tasks.scalars(task)
        if not len(scalars.get(REWARD, ())):
            ledger.drop(task, DropReason.OTHER, "no sample was scored")
        elif stage < ledger.plan.reward_stage:
            ledger.wait_for_rewards(task)
        else:
            _end_scored(ledger, task, scalars, task.failed)
        return
    if stage == 0 and result.samples < min(2, ledger.plan.group_size):
        text = f"{result.samples} of {ledger.plan.group_size} samples are left"
        ledger.drop(task, DropReason.REWARD_FAILED, text)
        return
    ledger.count_usable()
    if filters and _filter(ledger, task):
        return
    if task.state == TaskState.LEASED:
        ledger.tasks.move(task, TaskState.ROLLED_OUT)
    if all(task.parts):
        if not ledger.order.drop_if_stale(ledger, task):
            ledger.tasks.move(task, TaskState.READY)
            ledger.window.mark_ready(task.admission)
        return
    ledger.wait_for_later_stages(task)


def _drop(ledger: TaskLedger, task: Task, stage: int, result: TaskResult) -> None:
    """Drop a task. If it has a store, that store has the text of its failed samples, or of its row, for the
    recorder."""
    if result.store and result.store not in ledger.shards.gone:
        _place(ledger, task, stage, result)
    if result.samples_failed and task.admission == EVALUATION:
        ledger.tell("scheduler/dropped", {"task": task.task_id, "reason": result.reason[:200]})
        _end_scored(ledger, task, {REWARD: np.zeros(0, np.float32)}, result.samples_failed)
    else:
        if task.admission != EVALUATION:  # evaluations count their failed samples themselves
            ledger.losses.lose(task.admission, result)
        ledger.drop(task, drop_reason(result.why), result.reason)


def _place(ledger: TaskLedger, task: Task, stage: int, result: TaskResult) -> None:
    """Note where the shards of a result are."""
    part = StagePart(ledger.shards.index(result.store), result.content_hash, result.nbytes)
    task.parts = (*task.parts[:stage], part, *task.parts[stage + 1 :])


def _filters(ledger: TaskLedger, request: Complete) -> bool:
    """Return whether this step's filter has room for all tasks in the request whose rewards are all equal.

    The filter drops all of these tasks or none. Their shards share a file, which a store frees only when all tasks in
    the file are cleared. If only some were dropped, the file would remain, and the bytes of the dropped tasks in it
    would not be counted. With a reward model, each task has files of its own.
    """
    rewards = request.scalars.get(REWARD)
    if rewards is None or ledger.losses.filtered.tasks >= ledger.plan.filter_limit:
        return False
    samples = [result.samples for result in request.results if result.outcome == Outcome.DONE and result.samples]
    groups = np.split(rewards, np.cumsum(samples))[: len(samples)]
    equal = sum(bool((group == group[0]).all()) for group in groups)
    return ledger.losses.filtered.tasks + equal <= ledger.plan.filter_limit


def _filter(ledger: TaskLedger, task: Task) -> bool:
    """Drop a task whose rewards are all equal, because no group estimator learns from it. Admission replaces it.

    At most `filter_limit` tasks are dropped per step, so a run continues even if all its tasks are solved. Source:
    dynamic sampling in DAPO (arXiv 2503.14476), section 3.2. Return whether the task was dropped.
    """
    rewards, filtered = ledger.tasks.scalars(task).get(REWARD), ledger.losses.filtered
    if rewards is None or (rewards != rewards[0]).any() or filtered.tasks >= ledger.plan.filter_limit:
        return False
    filtered.tasks += 1
    filtered.samples += len(rewards)
    filtered.reward_sum += float(np.sum(rewards, dtype=np.float64))
    ledger.drop(task, DropReason.FILTERED, f"all {len(rewards)} rewards are {float(rewards[0])}")
    return True


def _end_scored(ledger: TaskLedger, task: Task, scalars: Mapping[str, Array], failed: int) -> None:
    evaluation = ledger.history.evaluations.of(task)
    ledger.history.score(evaluation, task.row, scalars, failed)
    ledger.tasks.move(task, TaskState.SCORED)
    ledger.records.scored(task, evaluation.version[0])
    ledger.collect(task)
