"""Decides which holder gets which block of tasks with which version, and what happens to the tasks of lost leases.

The module is pure. Generation for training continues during an evaluation: engines alternate between training blocks
and evaluation blocks. An engine that holds the evaluated version also samples training blocks with it as long as that
version is recent enough for their step. Once the version is too old, the engine switches between the two versions only
after as many leases as make up a step, so it seldom has to load one version in place of the other. Evaluation goes
first when a second version is waiting to be evaluated, so that evaluations do not pile up. In deterministic mode,
evaluation always goes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from proto.messages import BatchMeta, BatchPart, ErrorCode, LeaseGrant, LeaseRequest, TaskHandle
from services.scheduler.evaluations import Evaluation
from services.scheduler.leases import CallId, TaskLease, Version
from services.scheduler.plan import stage_index
from services.scheduler.tasks import EVALUATION, Task, TaskState
from services.scheduler.versions import free_versions
from shared.rpc.errors import RpcError
from shared.rundir import service_name
from shared.stages import TRAIN

if TYPE_CHECKING:
    from services.scheduler.run_state import RunState


def stage_of(run: RunState, request: LeaseRequest) -> int:
    """Return the index of the requested stage. Raises RpcError(bad_request) if the request can never be served."""
    stage = stage_index(run.plan, request.stage)
    if stage < 0:
        known = ", ".join(each.name for each in run.plan.stages)
        raise RpcError(ErrorCode.BAD_REQUEST, f"stage {request.stage!r}: the stages of this run are {known}")
    if request.max_tasks < 1:
        raise RpcError(ErrorCode.BAD_REQUEST, f"max_tasks {request.max_tasks}: it must be at least 1")
    return stage


def lease(run: RunState, request: LeaseRequest, call: CallId) -> LeaseGrant | None:
    """Lease a block of tasks, the oldest first. Return None, and change nothing, if there is nothing to lease."""
    stage = stage_of(run, request)
    if run.finished:
        return None
    if stage > 0:
        return _lease_later_stage(run, stage, request, call)
    evaluations = [each for each in run.evaluations.open.values() if each.waiting and run.versions.get(each.version)]
    version = training_version(run, request, {each.version for each in evaluations})
    if evaluations and (version is None or _evaluation_goes_first(run, evaluations, version, request)):
        return _lease_evaluation(run, evaluations[0], request, call)
    tasks = run.order.choose(run, 0, request.max_tasks) if version is not None else []
    if not tasks:
        return None
    run.eval_lease_debt = max(run.eval_lease_debt - 1, 0)
    return _grant(run, 0, request, call, tasks, version)


def training_version(run: RunState, request: LeaseRequest, measured: set[Version]) -> Version | None:
    """Return the version for the oldest waiting task, or None if no task is waiting or the version has not been
    published yet.

    `measured` holds the versions under evaluation. An engine that holds one of these versions keeps it if allowed.
    """
    first = first_waiting(run, 0)
    if first is None:
        return None
    held = _version_held(run, request) if measured else None
    return run.order.version(run, _oldest_step(run, first), held if held in measured else None)


def _oldest_step(run: RunState, task: Task) -> int:
    """Return the step of the oldest version with which a training task may be sampled."""
    return max(0, run.order.step_of(run, task.admission) - 1 - run.plan.staleness)


def _evaluation_goes_first(
    run: RunState, evaluations: Sequence[Evaluation], version: Version, request: LeaseRequest
) -> bool:
    """Return whether evaluation goes before a training block that would be sampled with `version`."""
    measured = evaluations[0].version
    if run.order.fixed or any(each.version != measured for each in evaluations):
        return True
    leaves = _version_held(run, request) == measured != version
    return run.eval_lease_debt < (_leases_a_step(run, request) if leaves else 1)


def _leases_a_step(run: RunState, request: LeaseRequest) -> int:
    return -(-run.plan.tasks_per_step // request.max_tasks)


def _version_held(run: RunState, request: LeaseRequest) -> Version:
    """Return the version that the engine will hold when it begins the requested lease."""
    holds = (request.holds_lineage, request.holds_step)
    last = run.leases.last_of((request.service, request.instance))
    if last is None or last.version is None:
        return holds
    return last.version if measures(last) else max(holds, last.version)


def measures(lease: TaskLease) -> bool:
    """Return whether the lease belongs to an evaluation, which requires its exact version."""
    first = next(iter(lease.tasks.values()), None)
    return first is not None and first.admission == EVALUATION


def _lease_evaluation(run: RunState, one: Evaluation, request: LeaseRequest, call: CallId) -> LeaseGrant:
    rows = run.plan.block_rows or request.max_tasks * run.plan.group_size
    most = max(rows // one.samples, 1)  # as many samples as a training block has
    chosen = dict.fromkeys(run.order.choose_rows(run, one, most))
    one.waiting = [each for each in one.waiting if each not in chosen]
    run.eval_lease_debt = min(run.eval_lease_debt + 1, _leases_a_step(run, request))
    return _grant(run, 0, request, call, [run.tasks.known(each) for each in chosen], one.version)


def _lease_later_stage(run: RunState, stage: int, request: LeaseRequest, call: CallId) -> LeaseGrant | None:
    """Lease tasks that share one version of the stage's model. Return None until that version is published.

    A task in a step after a refresh waits for that refresh's version. Once that version exists, the steps up to it have
    been trained, so drops of earlier tasks can no longer move the task to a step before the refresh.
    """
    first = first_waiting(run, stage)
    if first is None:
        return None
    wanted = _version_of_model(run, stage, run.order.step_of(run, first.admission))
    version = run.versions.at_step(wanted) if wanted else None
    if wanted and version is None:
        return None
    tasks = run.order.choose(run, stage, request.max_tasks)
    return _grant(run, stage, request, call, tasks, version) if tasks else None


def _version_of_model(run: RunState, stage: int, step: int) -> int:
    """Return the step of the version with which a later stage scores the tasks of `step`, or 0 for the model
    directory."""
    return run.plan.reference_version(step) if run.plan.stages[stage].refreshed else 0


def waits(run: RunState, stage: int, task: Task) -> bool:
    """Return whether a task in the window is waiting for a lease of `stage`."""
    return not task.lease and task.parts[stage] is None and all(task.parts[each] for each in run.needs[stage])


def first_waiting(run: RunState, stage: int) -> Task | None:
    """Return the oldest task that is waiting for `stage`, or None. Outdated entries of the waiting line are removed."""
    line = run.waiting[stage]
    while line:
        task = run.window.tasks.get(line[0])
        if task is not None and waits(run, stage, task):
            return task
        heapq.heappop(line)
    return None


def choose_in_order(run: RunState, stage: int, most: int) -> list[Task]:
    """Remove up to `most` waiting tasks, oldest first, from the waiting line and return them.

    For the rollout stage, the tasks all belong to one step; for later stages, they share one version of its model.
    """
    chosen: list[Task] = []
    group = -1
    while len(chosen) < most:
        task = first_waiting(run, stage)
        if task is None:
            break
        step = run.order.step_of(run, task.admission)
        key = step if stage == 0 else _version_of_model(run, stage, step)
        if group not in (-1, key):
            break
        group = key
        chosen.append(task)
        while run.waiting[stage] and run.waiting[stage][0] == task.admission:  # the task may have been added twice
            heapq.heappop(run.waiting[stage])
    return chosen


def _grant(
    run: RunState, stage: int, request: LeaseRequest, call: CallId, tasks: Sequence[Task], version: Version | None
) -> LeaseGrant:
    holder, lease_id = (request.service, request.instance), run.leases.next_id
    held = {task.task_id: task for task in tasks}
    granted = run.leases.add(TaskLease(lease_id, stage, holder, request.incarnation, version, call, held))
    for task in tasks:
        run.tasks.edit(task).lease = lease_id
        if stage == 0:
            run.tasks.move(task, TaskState.LEASED)
    return describe(run, granted)


def describe(run: RunState, lease: TaskLease, lease_s: float = 0.0) -> LeaseGrant:
    """Return the grant of a live lease, which is the same for every retry. `state.py` fills in `lease_s`."""
    stage = run.plan.stages[lease.stage]
    first = next(iter(lease.tasks.values()), None)
    evaluation = run.evaluations.of(first) if first is not None and measures(lease) else None
    # An engine may still hold a later version of an earlier lineage; that version was rolled back.
    outlived = lease.version is not None and lease.version[0] < run.lineage
    exact = run.order.fixed or evaluation is not None or lease.stage > 0 or outlived
    oldest = 0
    if lease.version is not None and first is not None:
        oldest = lease.version[1] if exact else _oldest_step(run, first)
    return LeaseGrant(
        lease_id=lease.lease_id,
        stage=stage.name,
        split=TRAIN if first is None else first.split,
        lease_s=lease_s,
        batch=handles(run, lease.tasks.values(), needs=stage.needs),
        min_step=oldest,
        exact=exact and lease.stage == 0,
        group_size=evaluation.samples if evaluation else run.plan.group_size,
        block_rows=run.plan.block_rows if lease.stage == 0 else 0,
        weights=run.versions.get(lease.version) if lease.version is not None else None,
    )


def handles(run: RunState, tasks: Iterable[Task], *, needs: tuple[str, ...] | None = None) -> BatchMeta:
    """Return handles of tasks.

    Only the parts of stages that produce a key in `needs` are included, or all parts if `needs` is None.
    """
    stages = run.plan.stages
    used = [i for i, stage in enumerate(stages) if needs is None or any(key in needs for key in stage.makes)]
    rows = [
        TaskHandle(
            task.task_id,
            task.fence,
            task.samples,
            task.tokens,
            task.nbytes,
            [part.store for i in used if (part := task.parts[i]) is not None],
        )
        for task in tasks
    ]
    parts = [BatchPart(stages[i].name, list(stages[i].makes)) for i in used]
    return BatchMeta(tasks=rows, parts=parts, stores=list(run.store_names) if used else [])


def give_up(run: RunState, lease: TaskLease, cost: int) -> None:
    """End a lease and retry the tasks that it still holds."""
    for task in list(lease.tasks.values()):
        if task.lease == lease.lease_id:  # the retry of another task may have begun a new attempt of this one
            run.order.retry(run, task, cost, f"lease of {service_name(*lease.holder)} was lost")
    run.leases.remove(lease)
    free_versions(run)
