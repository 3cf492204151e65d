"""Provides views of the scheduler's durable state to property tests, and checks to run after every event."""

from __future__ import annotations

from collections.abc import Iterable

from proto.messages import LeaseRequest
from services.scheduler.events import DiscardRows, Durable, Tell, WriteRow
from services.scheduler.leasing import training_version
from services.scheduler.plan import Plan
from services.scheduler.run_state import RunState
from services.scheduler.state import Scheduler
from services.scheduler.tasks import Task
from tests.sim.invariants import check_invariants


def find(run: RunState, task_id: str) -> Task | None:
    return run.ledger.tasks.find(task_id)


def live_ids(run: RunState) -> list[str]:
    """Return the training tasks that have not been batched yet, in admission order."""
    return [task.task_id for task in run.ledger.window.tasks.values()]


def batch_ids(run: RunState, step: int) -> list[str]:
    return [task.task_id for task in run.history.batches.get(step, ())]


def taken_back_ids(run: RunState) -> list[str]:
    """Return the tasks of steps that were rolled back, which are admitted before all others."""
    return list(run.ledger.reopened)


def leased(run: RunState) -> list[Task]:
    """Return the tasks that live leases hold."""
    return [task for lease in run.ledger.leases for task in lease.tasks.values()]


def waits_for_clears(run: RunState) -> bool:
    """Return whether any task is waiting for a store to acknowledge the task's last clear."""
    return any(task.clears for task in run.ledger.tasks)


def could_train(run: RunState, request: LeaseRequest) -> bool:
    """Return whether a training task with a published version is waiting for a lease."""
    return training_version(run.ledger, request, set()) is not None


def replayed(plan: Plan, events: Iterable[Durable]) -> tuple[Scheduler, dict[int, dict[str, float]], set[str]]:
    """Return a machine after `events`, the metrics rows by step that result from them, and the tasks that they drop."""
    machine = Scheduler(plan, lease_s=5.0, incarnation=2)
    rows: dict[int, dict[str, float]] = {}
    dropped: set[str] = set()
    for event in events:
        for effect in machine.run.apply(event).effects:
            if isinstance(effect, WriteRow):
                rows[effect.step] = effect.row
            elif isinstance(effect, DiscardRows):
                rows = {step: row for step, row in rows.items() if step <= effect.step}
            elif isinstance(effect, Tell) and effect.topic == "scheduler/dropped":
                dropped.add(str(effect.values["task"]))
    return machine, rows, dropped


def validate(run: RunState) -> None:
    """Check the rules that must hold after every event."""
    check_invariants(run)
