"""The order in which steps consume tasks: the strategies' interface, and the default strategy. The module is pure.

The plan decides once which strategy applies. In admission order (the default), a step takes the oldest tasks, and a
lease's version follows from the step that will consume its tasks. `staleness.py` contains the strategy for `consume:
completion`, and `deterministic.py` the one for `run.deterministic`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from services.scheduler.admission import room_in_order
from services.scheduler.attempts import retry_or_drop
from services.scheduler.evaluations import Evaluation
from services.scheduler.leases import Version
from services.scheduler.leasing import choose_in_order
from services.scheduler.steps import admit_again
from services.scheduler.tasks import Task

if TYPE_CHECKING:
    from services.scheduler.run_state import RunState


@dataclass(frozen=True)
class Consumption:
    """One function for each decision that depends on the order of consumption."""

    fixed: bool
    """Whether a task always keeps its step and its version, so that training a step again yields bit-identical
    results."""
    step_of: Callable[[RunState, int], int]
    """Return the step that will consume the task with this admission number."""
    room: Callable[[RunState], int]
    """Return the number of tasks to admit now."""
    takeable: Callable[[RunState], int]
    """Return the number of tasks that the next step could take."""
    take: Callable[[RunState], list[Task]]
    """Remove the tasks of the next step from the window and return them. There must be enough takeable tasks."""
    choose: Callable[[RunState, int, int], list[Task]]
    """Return the waiting tasks to lease next for a stage, given the maximum number of tasks."""
    choose_rows: Callable[[RunState, Evaluation, int], list[str]]
    """Return the waiting tasks to lease next for an evaluation, given the maximum number of rows."""
    version: Callable[[RunState, int, Version | None], Version | None]
    """Return the version for a training lease, or None if it is not published yet.

    The arguments are the oldest step that the version may have, and the version that the engine should keep if allowed.
    """
    versions_needed: Callable[[RunState], tuple[int, int | None]]
    """Return the oldest step whose version a lease may still need, and the step from which all versions are kept (None
    if there is no such step)."""
    retry: Callable[[RunState, Task, int, str], None]
    """End an attempt that has no result. The last two arguments are its cost (see `attempts.FAILURE`) and the
    reason."""
    take_back: Callable[[RunState, int, list[Task]], None]
    """Reopen the tasks of all batches after a step. No training task may be leased when this is called."""
    drop_if_stale: Callable[[RunState, Task], bool]
    """Drop a finished task that is too old for the next step, and return whether it was dropped."""
    drop_stale: Callable[[RunState], None]
    """Drop all finished tasks that are too old for the next step. This runs after each batch."""
    metrics: Callable[[RunState], dict[str, float]]
    """Return the values that this order adds to the metrics row of a step, and reset the counters."""


def _step_of(run: RunState, admission: int) -> int:
    """Return the step of a task. If tasks before this one are dropped, it may move to an earlier step."""
    return run.batched_step + 1 + run.window.rank(admission) // run.plan.tasks_per_step


def _version(run: RunState, oldest: int, held: Version | None) -> Version | None:
    if held is not None and held[1] >= oldest:
        return held
    newest = run.versions.newest
    return newest if newest is not None and newest[1] >= oldest else None


IN_ORDER = Consumption(
    fixed=False,
    step_of=_step_of,
    room=room_in_order,
    takeable=lambda run: run.window.rank(run.window.settled()),
    take=lambda run: run.window.take(islice(run.window.tasks, run.plan.tasks_per_step)),
    choose=choose_in_order,
    choose_rows=lambda run, one, most: one.waiting[:most],
    version=_version,
    versions_needed=lambda run: (0, None),
    retry=retry_or_drop,
    take_back=admit_again,
    drop_if_stale=lambda run, task: False,
    drop_stale=lambda run: None,
    metrics=lambda run: {},
)
