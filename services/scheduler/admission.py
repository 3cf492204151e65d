"""Admits as many training tasks as staleness and the room in the stores allow. The module is pure."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from proto.ids import make_task_id
from services.scheduler.attempts import revive
from services.scheduler.stores import room_for_tasks
from shared.stages import TRAIN

if TYPE_CHECKING:
    from services.scheduler.run_state import RunState

ADMITTED_AT_ONCE = 1024
"""Maximum number of tasks that one event admits, so that no request has to wait long. A step with more tasks raises
this limit."""


def admit(run: RunState) -> None:
    """Admit tasks: first those that a return to an earlier step set aside, then new ones in the order of the epochs."""
    more = 0 if run.finished else run.order.room(run)
    while more > 0:
        first = run.window.tail
        if run.reopened:
            tasks = revive(run, run.reopened[:more], first)
            del run.reopened[:more]
        else:
            epoch, rows = run.epochs.some(run.position, more)
            names = [make_task_id(TRAIN, epoch, row) for row in rows]
            tasks = [run.tasks.add(name, admission) for admission, name in enumerate(names, first)]
            run.position += len(rows)
        run.window.admit(tasks)
        for task in tasks:
            heapq.heappush(run.waiting[0], task.admission)
        more -= len(tasks)


def room_in_order(run: RunState) -> int:
    """Return the number of tasks to admit: up to `Plan.max_live`, if there is room for all the bytes they might need.

    The tasks of the next step are admitted even if there is no room, because only the run's own steps free room, and a
    run that waited for room would stall. One event admits at most `ADMITTED_AT_ONCE` tasks, or one step's tasks if a
    step has more.
    """
    step_tasks, live = run.plan.tasks_per_step, run.window.live
    left = (run.config.steps - run.batched_step) * step_tasks
    bound = min(run.plan.max_live - len(run.open_batch), left)
    if live >= bound:
        return 0
    return min(bound - live, max(room_for_tasks(run), step_tasks) - live, max(ADMITTED_AT_ONCE, step_tasks))
