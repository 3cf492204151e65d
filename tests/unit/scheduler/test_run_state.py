"""Tests the transition table, the story of a task, and the errors that `validate` finds."""

from __future__ import annotations

from itertools import pairwise

import pytest

from proto.messages import NextBatch, Outcome, TaskState
from services.scheduler.tasks import TRANSITIONS, Tasks
from tests.sim.invariants import check_invariants
from tests.unit.scheduler.bench import Bench, ids


@pytest.mark.parametrize("before", TaskState)
@pytest.mark.parametrize("after", TaskState)
def test_a_task_changes_state_only_as_the_table_of_transitions_allows(before: TaskState, after: TaskState) -> None:
    tasks = Tasks(stages=1)
    task = tasks.add("train/0/0", 0)
    task.state = before
    tasks.counts = {state: int(state == before) for state in TaskState}
    if after in TRANSITIONS[before]:
        tasks.move(task, after)
        assert tasks.counts == {state: int(state == after) for state in TaskState}
        assert (tasks.find("train/0/0") is None) == (after == TaskState.COLLECTED)
    else:
        with pytest.raises(ValueError, match=f"train/0/0, fence 1: {before} -> {after} is not a transition"):
            tasks.move(task, after)
        assert task.state == before


def test_story_includes_every_change_to_a_task_with_its_cause() -> None:
    bench = Bench().start()
    first = bench.granted(most=2)
    bench.complete(first, outcome=Outcome.RETRY)
    bench.complete(bench.granted())
    bench.complete(bench.granted())
    bench.ask(NextBatch(driver=1, step=1))
    story = bench.machine.run.ledger.tasks.story(ids(first)[0])
    assert [(each.fence, each.before, each.after, each.cause) for each in story] == [
        (1, None, TaskState.PENDING, "Configure"),
        (1, TaskState.PENDING, TaskState.LEASED, "Leased"),
        (1, TaskState.LEASED, TaskState.PENDING, "Complete"),
        (2, TaskState.PENDING, TaskState.LEASED, "Leased"),
        (2, TaskState.LEASED, TaskState.ROLLED_OUT, "Complete"),
        (2, TaskState.ROLLED_OUT, TaskState.READY, "Complete"),
        (2, TaskState.READY, TaskState.BATCHED, "NextBatch"),
    ]
    assert all(earlier.after == later.before for earlier, later in pairwise(story))


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("state", TaskState.READY, "its fields contradict its state"),
        ("lease", 9, "its fields contradict its state"),
        ("clears", 1, "1 stores have yet to acknowledge its last clear"),
    ],
)
def test_validate_names_an_inconsistent_task_and_includes_its_story(field: str, value: object, problem: str) -> None:
    run = Bench().start().machine.run
    check_invariants(run)
    task = next(iter(run.ledger.tasks))
    setattr(task, field, value)
    with pytest.raises(AssertionError, match=f"^{task.task_id}, fence 1, {task.state}: {problem}; None -> PENDING"):
        check_invariants(run)


def test_validate_finds_wrong_counts_and_a_task_that_no_lease_can_get() -> None:
    run = Bench().start().machine.run
    run.ledger.tasks.counts[TaskState.READY] += 1
    run.ledger.leave_line(0, run.ledger.tasks["train/0/0"])
    with pytest.raises(AssertionError, match=r"^step 0: counts, tasks that wait for stage 0"):
        check_invariants(run)
