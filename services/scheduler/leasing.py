"""Decides which holder gets which block of tasks with which version, and what happens to the tasks of lost leases.

The module is pure. Generation for training continues during an evaluation: engines alternate between training blocks
and evaluation blocks. An engine that holds the evaluated version also samples training blocks with it as long as that
version is recent enough for their step. Once the version is too old, the engine switches between the two versions only
after as many leases as make up a step, so it seldom has to load one version in place of the other. Evaluation goes
first when a second version is waiting to be evaluated, so that evaluations do not pile up. In deterministic mode,
evaluation always goes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from proto.messages import BatchMeta, BatchPart, ErrorCode, LeaseGrant, LeaseRequest, TaskHandle
from services.scheduler.evaluations import Evaluation
from services.scheduler.leases import CallId, TaskLease, Version
from services.scheduler.ledger import TaskLedger
from services.scheduler.plan import stage_index
from services.scheduler.tasks import Task
from shared.rpc.errors import RpcError
from shared.stages import TRAIN


def stage_of(ledger: TaskLedger, request: LeaseRequest) -> int:
    """Return the index of the requested stage. Raises RpcError(bad_request) if the request can never be served."""
    stage = stage_index(ledger.plan, request.stage)
    if stage < 0:
        names = ", ".join(planned.name for planned in ledger.plan.stages)
        raise RpcError(ErrorCode.BAD_REQUEST, f"stage {request.stage!r}: the stages of this run are {names}")
    if request.max_tasks < 1:
        raise RpcError(ErrorCode.BAD_REQUEST, f"max_tasks {request.max_tasks}: it must be at least 1")
    return stage


def lease(ledger: TaskLedger, request: LeaseRequest, call: CallId) -> LeaseGrant | None:
    """Lease a block of tasks, the oldest first. Return None, and change nothing, if there is nothing to lease."""
    stage = stage_of(ledger, request)
    if ledger.history.finished:
        return None
    if stage > 0:
        return _lease_later_stage(ledger, stage, request, call)
    history = ledger.history
    opened = history.evaluations.open.values()
    evaluations = [one for one in opened if one.waiting and one.version in history.versions.refs]
    version = training_version(ledger, request, {evaluation.version for evaluation in evaluations})
    if evaluations and (version is None or _evaluation_goes_first(ledger, evaluations, version, request)):
        return _lease_evaluation(ledger, evaluations[0], request, call)
    tasks = ledger.order.choose(ledger, 0, request.max_tasks) if version is not None else []
    if not tasks:
        return None
    ledger.count_turn(measures=False)
    return _grant(ledger, 0, request, call, tasks, version)


def training_version(ledger: TaskLedger, request: LeaseRequest, measured: set[Version]) -> Version | None:
    """Return the version for the oldest waiting task, or None if no task is waiting or the version has not been
    published yet.

    `measured` holds the versions under evaluation. An engine that holds one of these versions keeps it if allowed.
    """
    first = ledger.first_waiting(0)
    if first is None:
        return None
    holds = _version_held(ledger, request) if measured else None
    return ledger.order.version(ledger, _oldest_step(ledger, first), holds if holds in measured else None)


def _oldest_step(ledger: TaskLedger, task: Task) -> int:
    """Return the step of the oldest version with which a training task may be sampled."""
    return max(0, ledger.order.step_of(ledger, task.admission) - 1 - ledger.plan.staleness)


def _evaluation_goes_first(
    ledger: TaskLedger, evaluations: Sequence[Evaluation], version: Version, request: LeaseRequest
) -> bool:
    """Return whether evaluation goes before a training block that would be sampled with `version`."""
    measured = evaluations[0].version
    if ledger.order.fixed or any(evaluation.version != measured for evaluation in evaluations):
        return True
    leaves = _version_held(ledger, request) == measured != version
    return ledger.eval_lease_debt < (_leases_a_step(ledger, request) if leaves else 1)


def _leases_a_step(ledger: TaskLedger, request: LeaseRequest) -> int:
    return -(-ledger.plan.tasks_per_step // request.max_tasks)


def _version_held(ledger: TaskLedger, request: LeaseRequest) -> Version:
    """Return the version that the engine will hold when it begins the requested lease."""
    holds = (request.holds_lineage, request.holds_step)
    last = ledger.leases.last_of((request.service, request.instance))
    if last is None or last.version is None:
        return holds
    return last.version if last.measured is not None else max(holds, last.version)


def _lease_evaluation(ledger: TaskLedger, evaluation: Evaluation, request: LeaseRequest, call: CallId) -> LeaseGrant:
    rows = ledger.plan.block_rows or request.max_tasks * ledger.plan.group_size
    most = max(rows // evaluation.samples, 1)  # as many samples as a training block has
    chosen = dict.fromkeys(ledger.order.choose_rows(ledger, evaluation, most))
    evaluation.waiting = [task_id for task_id in evaluation.waiting if task_id not in chosen]
    ledger.count_turn(measures=True, leases_a_step=_leases_a_step(ledger, request))
    return _grant(ledger, 0, request, call, [ledger.tasks[task_id] for task_id in chosen], evaluation.version)


def _lease_later_stage(ledger: TaskLedger, stage: int, request: LeaseRequest, call: CallId) -> LeaseGrant | None:
    """Lease tasks that share one version of the stage's model. Return None until that version is published.

    Tasks of evaluations that wait for their rewards come first.

    A task in a step after a refresh waits for that refresh's version. Once that version exists, the steps up to it have
    been trained, so drops of earlier tasks can no longer move the task to a step before the refresh.
    """
    if stage == ledger.plan.reward_stage and (unscored := ledger.unscored()):
        # The tasks of one evaluation, so that the lease has one version.
        chosen = [task for task in unscored if (task.epoch, task.split) == (unscored[0].epoch, unscored[0].split)]
        return _grant(ledger, stage, request, call, chosen[: request.max_tasks], None)
    first = ledger.first_waiting(stage)
    if first is None:
        return None
    wanted = ledger.plan.version_of_model(stage, ledger.order.step_of(ledger, first.admission))
    version = ledger.history.versions.at_step(wanted) if wanted else None
    if wanted and version is None:
        return None
    tasks = ledger.order.choose(ledger, stage, request.max_tasks)
    return _grant(ledger, stage, request, call, tasks, version) if tasks else None


def _grant(
    ledger: TaskLedger, stage: int, request: LeaseRequest, call: CallId, tasks: Sequence[Task], version: Version | None
) -> LeaseGrant:
    holder = (request.service, request.instance)
    return describe(ledger, ledger.grant(stage, holder, request.incarnation, call, tasks, version))


def describe(ledger: TaskLedger, lease: TaskLease, lease_s: float = 0.0) -> LeaseGrant:
    """Return the grant of a live lease, which is the same for every retry. `state.py` fills in `lease_s`."""
    stage = ledger.plan.stages[lease.stage]
    first = next(iter(lease.tasks.values()), None)
    evaluation = ledger.history.evaluations.of(first) if first is not None and lease.measured is not None else None
    # An engine may still hold a later version of an earlier lineage; that version was rolled back.
    outlived = lease.version is not None and lease.version[0] < ledger.history.lineage
    exact = ledger.order.fixed or evaluation is not None or lease.stage > 0 or outlived
    oldest = 0
    if lease.version is not None and first is not None:
        oldest = lease.version[1] if exact else _oldest_step(ledger, first)
    return LeaseGrant(
        lease_id=lease.lease_id,
        stage=stage.name,
        split=TRAIN if first is None else first.split,
        lease_s=lease_s,
        batch=handles(ledger, lease.tasks.values(), needs=stage.needs),
        min_step=oldest,
        exact=exact and lease.stage == 0,
        group_size=evaluation.samples if evaluation else ledger.plan.group_size,
        block_rows=ledger.plan.block_rows if lease.stage == 0 else 0,
        weights=ledger.history.versions.refs.get(lease.version) if lease.version is not None else None,
    )


def handles(ledger: TaskLedger, tasks: Iterable[Task], *, needs: tuple[str, ...] | None = None) -> BatchMeta:
    """Return handles of tasks.

    Only the parts of stages that produce a key in `needs` are included, or all parts if `needs` is None.
    """
    stages = ledger.plan.stages
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
    return BatchMeta(tasks=rows, parts=parts, stores=list(ledger.shards.store_names) if used else [])
