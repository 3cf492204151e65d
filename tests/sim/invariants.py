"""The invariants of the scheduler's durable state, which hold after every event."""

from __future__ import annotations

from typing import assert_never

from proto.messages import TaskState
from services.scheduler.run_state import RunState
from services.scheduler.tasks import Task

_LEASABLE = frozenset({TaskState.LEASED, TaskState.ROLLED_OUT})
_UNFINISHED = frozenset({TaskState.PENDING, TaskState.LEASED, TaskState.ROLLED_OUT, TaskState.READY})
_ACKNOWLEDGING = frozenset({TaskState.TRAINED, TaskState.SCORED, TaskState.DROPPED})


def check_invariants(run: RunState) -> None:
    """Check the invariants that hold after every event.

    Raises AssertionError. If a single task is at fault, the error names that task and its state changes.
    """
    history, ledger = run.history, run.ledger
    counts = dict.fromkeys(TaskState, 0) | {TaskState.COLLECTED: ledger.tasks.counts[TaskState.COLLECTED]}
    batched = {task.task_id: step for step, tasks in history.batches.items() for task in tasks}
    measured = {task_id for one in history.evaluations.open.values() for task_id in one.waiting}
    measured |= {task.task_id for task in ledger.unscored()}
    for task in ledger.tasks:
        counts[task.state] += 1
        waits = ledger.window.tasks.get(task.admission) is task or task.task_id in measured
        problem = _problem(run, task, waits, batched.get(task.task_id, 0))
        if problem:
            text = f"{task.task_id}, fence {task.fence}, {task.state}: {problem}"
            raise AssertionError(f"{text}; {ledger.tasks.told(task.task_id)}")
    window, leases, records = ledger.window, ledger.leases, ledger.records
    checks = {
        "counts": ledger.tasks.counts == counts,
        "uncovered bytes": run.shards.uncovered == dict(run.shards.held_by(history.trained())),
        "the bound on live tasks": ledger.order.fixed or window.live <= run.plan.max_live,
        "the window": list(window.tasks) == sorted(window.tasks),
        "bytes kept for the recorder": records.held_bytes == sum(nbytes for _, nbytes in records.held),
        "versions of leases": leases.versions() == {lease.version for lease in leases if lease.version},
    }
    for stage in range(len(run.plan.stages)):
        waiting = [number for number, task in window.tasks.items() if ledger.is_waiting(stage, task)]
        checks[f"tasks that wait for stage {stage}"] = set(waiting) <= set(ledger._lines[stage])
    wrong = [name for name, holds in checks.items() if not holds]
    if wrong:
        raise AssertionError(f"step {history.committed_step}: {', '.join(wrong)} ({ledger.tasks.cause})")


def _problem(run: RunState, task: Task, waits: bool, batched: int) -> str:
    """Return a description of what is wrong with a task, or an empty string.

    `waits` is true if the window or an evaluation contains the task. `batched` is the step that consumed the task,
    or 0.
    """
    lease = run.ledger.leases.get(task.lease)
    due = run.ledger.records.find(task)
    ends = task.clears > 0 or (due is not None and due.nbytes > 0)
    match task.state:
        case TaskState.PENDING:
            right = not task.made and not task.lease and waits
        case TaskState.LEASED:
            right = not task.made and lease is not None
        case TaskState.ROLLED_OUT:
            right = (waits or lease is not None) and task.parts[0] is not None and not all(task.parts)
        case TaskState.READY:
            right = waits and all(task.parts) and task.admission in run.ledger.window.finished
        case TaskState.BATCHED:
            right = batched > run.history.committed_step
        case TaskState.TRAINED:
            right = 0 < batched <= run.history.committed_step or ends
        case TaskState.SCORED | TaskState.DROPPED:
            right = ends
        case TaskState.COLLECTED:
            right = False
        case _:
            assert_never(task.state)
    if not right:
        return "its fields contradict its state"
    if task.lease and (task.state not in _LEASABLE or lease is None or task.task_id not in lease.tasks):
        return f"lease {task.lease} does not hold it"
    if task.lost and task.state in _UNFINISHED:
        return "it is marked as lost, but an unfinished task with lost shards is sampled again"
    if task.clears and task.state not in _ACKNOWLEDGING:
        return f"{task.clears} stores have yet to acknowledge its last clear"
    return ""
