"""`consume: completion`: a step takes the tasks that finished first, unless their tokens are too old.

The module is pure. In admission order, leases alone bound the staleness, because the step that takes a task determines
the oldest version that its lease allows. In completion order, a task may be overtaken by others, so the oldest token of
every finished task is checked before each step that might take it. Only finished tasks are dropped as stale, so no
other service ever holds a stale task.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from proto.messages import DropReason
from services.scheduler.attempts import drop
from services.scheduler.consumption import IN_ORDER
from services.scheduler.tasks import Task

if TYPE_CHECKING:
    from services.scheduler.run_state import RunState


def _drop_if_stale(run: RunState, task: Task) -> bool:
    run.checked += 1
    oldest = _oldest_version(run, task)
    staleness = run.batched_step - oldest
    if staleness <= run.plan.staleness:
        return False
    run.stale += 1
    text = f"oldest token of version {oldest}: {staleness} behind, but staleness is {run.plan.staleness}"
    drop(run, task, DropReason.STALE, text)
    return True


def _drop_stale(run: RunState) -> None:
    for admission in list(run.window.finished):
        _drop_if_stale(run, run.window.tasks[admission])


def _oldest_version(run: RunState, task: Task) -> int:
    """Return the oldest version among the task's tokens. A result without `version_min` is too old for any step."""
    versions = run.columns(task).get("version_min")
    return int(versions.min()) if versions is not None and len(versions) else -1 - run.plan.staleness


def _metrics(run: RunState) -> dict[str, float]:
    """Return the number of staleness checks since the last commit, and the number of tasks that these checks
    dropped."""
    counts = {"rollout/tasks_checked": float(run.checked), "rollout/tasks_stale": float(run.stale)}
    run.checked = run.stale = 0
    return counts


BY_COMPLETION = replace(
    IN_ORDER,
    takeable=lambda run: len(run.window.finished),
    take=lambda run: run.window.take(islice(run.window.finished, run.plan.tasks_per_step)),
    # No older version is kept, even for a live lease: tasks sampled with it would be dropped.
    versions_needed=lambda run: (run.batched_step - run.plan.staleness, None),
    drop_if_stale=_drop_if_stale,
    drop_stale=_drop_stale,
    metrics=_metrics,
)
