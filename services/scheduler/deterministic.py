"""Deterministic mode: fixed blocks of tasks with fixed versions, even if processes are killed. The module is pure.

A step takes fixed admission numbers, each lease holds one whole fixed block of tasks, and a version is used for
sampling only after its evaluations are complete. Arrival order, failures and drops never move a task into another block
or step, because batch shapes and versions determine the last bits of the results (docs/architecture.md, promise 9).
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import TYPE_CHECKING

from proto.ids import make_task_id
from services.scheduler.attempts import FAILURE, revive, sample_again
from services.scheduler.consumption import IN_ORDER
from services.scheduler.evaluations import next_rows
from services.scheduler.leases import Version
from services.scheduler.leasing import first_waiting, waits
from services.scheduler.stores import room_for_tasks
from services.scheduler.tasks import EVALUATION, Task
from shared.stages import TRAIN

if TYPE_CHECKING:
    from services.scheduler.run_state import RunState


def _room(run: RunState) -> int:
    step_tasks = run.plan.tasks_per_step
    last = min(run.config.steps, run.committed_step + run.plan.staleness + 1) * step_tasks
    return min(last - run.window.tail, max(room_for_tasks(run), step_tasks) - run.window.live)


def _takeable(run: RunState) -> int:
    """Return the number of tasks per step if every task of the next step is ready or dropped, else 0."""
    step_tasks = run.plan.tasks_per_step
    return step_tasks if run.window.settled() >= (run.batched_step + 1) * step_tasks else 0


def _take(run: RunState) -> list[Task]:
    end = (run.batched_step + 1) * run.plan.tasks_per_step
    return run.window.take([each for each in range(run.window.head, end) if each in run.window.tasks], end)


def _block(run: RunState, stage: int, admission: int, most: int) -> list[Task]:
    """Return the live tasks of the fixed block that contains `admission`, or [] until the whole block has been
    admitted.

    For a stage after the rollout, return only the part of the block that contains `admission`, with at most `most`
    admission numbers.
    """
    size = run.plan.block_tasks
    first = admission // size * size
    end = first + size
    if stage > 0:
        first += (admission - first) // most * most
        end = min(first + most, end)
    tasks = run.window.tasks
    return [tasks[each] for each in range(first, end) if each in tasks] if end <= run.window.tail else []


def _choose_block(run: RunState, stage: int, most: int) -> list[Task]:
    """Return one whole block, or [] unless all of its tasks are waiting."""
    first = first_waiting(run, stage)
    block = _block(run, stage, first.admission, most) if first is not None else []
    return block if all(waits(run, stage, task) for task in block) else []


def _version(run: RunState, exact: int, held: Version | None) -> Version | None:
    """Return the version of exactly this step once this version and all older ones have been evaluated.

    After a return to a checkpoint, the versions that the run does not publish again have therefore been evaluated, so
    no evaluation is missed.
    """
    evaluates = any(each.version[1] <= exact for each in run.evaluations.open.values())
    return None if evaluates else run.versions.at_step(exact)


def _retry(run: RunState, task: Task, cost: int, reason: str) -> None:
    """Sample the task's whole block again. After too many failed attempts, the task is not dropped; instead, the run
    ends."""
    run.tasks.edit(task).failures += cost
    if task.failures >= FAILURE * run.config.attempts:
        run.broken = (
            f"{task.task_id}: {run.config.attempts} attempts failed, the last one: {reason}; without "
            "this task, a deterministic run would produce different bits; raise lease.attempts and resume"
        )
    sample_again(run, task)
    if task.admission != EVALUATION:
        for other in _block(run, 0, task.admission, run.plan.block_tasks):
            if other.made:
                sample_again(run, other)


def _reopen(run: RunState, step: int, tasks: list[Task]) -> None:
    """Put the tasks of the batches after `step` back in their former places, and resample all later tasks that have a
    result.

    The tasks get fences that no store has seen, because clears of earlier fences may still be in flight. The scores of
    versions after `step` are kept, because the new versions are bit-identical.
    """
    for task in list(run.window.tasks.values()):
        if task.made:
            sample_again(run, task)
    first = run.committed_step * run.plan.tasks_per_step
    places = map(run.epochs.at, range(first, run.window.head))
    again = revive(run, [make_task_id(TRAIN, epoch, row) for epoch, row in places], first)
    run.window.reopen(again)
    for task in again:
        heapq.heappush(run.waiting[0], task.admission)


DETERMINISTIC = replace(
    IN_ORDER,
    fixed=True,
    step_of=lambda run, admission: 1 + admission // run.plan.tasks_per_step,
    room=_room,
    takeable=_takeable,
    take=_take,
    choose=_choose_block,
    choose_rows=next_rows,
    version=_version,
    versions_needed=lambda run: (0, max(0, run.batched_step - run.plan.staleness)),
    retry=_retry,
    take_back=_reopen,
)
