"""Ends attempts: a task is sampled again under a higher fence, or dropped. The module is pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import TYPE_CHECKING

from proto.messages import DropReason, TaskState
from services.scheduler.collection import clear, collect, release
from services.scheduler.evaluations import end_task
from services.scheduler.events import Tell
from services.scheduler.records import record_dropped
from services.scheduler.tasks import EVALUATION, Task

if TYPE_CHECKING:
    from services.scheduler.run_state import RunState

FAILURE = 4
"""Cost of a failed attempt. A task whose costs reach `FAILURE` times the allowed attempts is dropped."""
DEATH = 1
"""Cost of an attempt whose holder died. It is lower than `FAILURE` because the task is rarely the cause. A task that
always kills its process is still dropped, after `FAILURE` deaths for each allowed attempt."""


def retry_or_drop(run: RunState, task: Task, cost: int, reason: str) -> None:
    """End an attempt that has no result: clear its fence and return the task to PENDING, or drop the task."""
    run.tasks.edit(task).failures += cost
    if task.failures >= FAILURE * run.config.attempts:
        drop(run, task, DropReason.ATTEMPTS, f"{run.config.attempts} attempts failed, the last one: {reason}")
    else:
        sample_again(run, task)


def sample_again(run: RunState, task: Task) -> None:
    """Return a task to PENDING under a higher fence, and clear the shards of its old fence."""
    clear(run, task, last=False)
    release(run, task)
    run.records.forget(task.task_id)
    run.tasks.begin_attempt(task)
    run.highest_fence = max(run.highest_fence, task.fence)
    if task.admission == EVALUATION:
        run.evaluations.of(task).waiting.append(task.task_id)
    else:
        run.window.mark_unready(task.admission)
        heapq.heappush(run.waiting[0], task.admission)


def revive(run: RunState, task_ids: Iterable[str], first: int = EVALUATION) -> list[Task]:
    """Add or reset tasks that may have been sampled before, and return them.

    The tasks are PENDING under fences that no store has seen. Clears of earlier fences may still be in flight and do
    not affect the new attempts. The admission numbers count up from `first`, unless `first` is `EVALUATION`.
    """
    revived: list[Task] = []
    for number, task_id in enumerate(task_ids):
        admission = first if first == EVALUATION else first + number
        task = run.tasks.find(task_id)
        if task is None:
            task = run.tasks.add(task_id, admission, run.highest_fence + 1)
        else:  # the task is batched or being collected
            clear(run, task, last=False)
            run.records.forget(task_id)
            run.tasks.begin_attempt(task)
            task.admission = admission
        revived.append(task)
    run.highest_fence = max([run.highest_fence, *(task.fence for task in revived)])
    return revived


def drop(run: RunState, task: Task, why: DropReason, reason: str) -> None:
    """Drop a task that can no longer be trained on or scored. `reason` explains `why` in one line."""
    run.tasks.move(task, TaskState.DROPPED)
    run.out.append(Tell("scheduler/dropped", {"task": task.task_id, "why": str(why), "reason": reason[:200]}))
    if task.admission == EVALUATION:
        one = run.evaluations.of(task)
        one.dropped += 1
        end_task(run, one)
    else:
        run.dropped_in_a_row += 1
        run.losses.drop(task.admission, why)
        run.last_drop = (reason if reason.startswith(task.task_id) else f"{task.task_id}: {reason}")[:200]
        run.window.drop(task.admission)
    record_dropped(run, task, why, reason)
    collect(run, task)
