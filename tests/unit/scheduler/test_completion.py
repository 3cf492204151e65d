"""Tests `consume: completion` on the state machine: steps take the tasks that finish first and drop those that are too
old."""

from __future__ import annotations

import numpy as np

from proto.messages import CommitStep, Complete, LeaseGrant, NextBatch, Outcome, StepBatch, TaskResult
from services.scheduler import run_state
from services.scheduler.events import WriteRow
from services.scheduler.run_state import RunState
from tests.unit.scheduler.bench import STORE, Bench, ids, plan


def begun() -> Bench:
    return Bench(plan(by_completion=True)).start()


def complete(bench: Bench, grant: LeaseGrant, versions: tuple[int, int] | None, tasks: slice = slice(None)) -> None:
    """Complete tasks; the oldest tokens of their samples alternate between two versions. None omits the versions."""
    results = [
        TaskResult(task.task_id, task.fence, Outcome.DONE, STORE, 5, 2, 20, 50) for task in grant.batch.tasks[tasks]
    ]
    scalars = {"version_min": np.array(versions * len(results), np.int32)} if versions else {}
    final = tasks.stop is None
    request = Complete(
        lease_id=grant.lease_id, stage="rollout", incarnation=7, results=results, scalars=scalars, final=final
    )
    assert bench.ask(request).refused == []


def batched(bench: Bench, step: int) -> list[str] | None:
    batch = bench.ask(NextBatch(driver=1, step=step))
    return [task.task_id for task in batch.batch.tasks] if isinstance(batch, StepBatch) else None


def trained(bench: Bench, step: int) -> None:
    bench.ask(CommitStep(driver=1, step=step, metrics={}))
    bench.publish(step)


def overtaken(bench: Bench) -> LeaseGrant:
    """Return a lease of version 0 that is still held after the first step, which consists of other tasks."""
    slow, fast = bench.granted(), bench.granted()
    complete(bench, fast, (0, 0))
    assert batched(bench, 1) == ids(fast)
    trained(bench, 1)
    return slow


def test_a_step_takes_the_tasks_that_finished_first() -> None:
    bench = begun()
    slow = overtaken(bench)
    complete(bench, slow, (0, 0))
    assert batched(bench, 2) == ids(slow)  # The tasks are one version behind, as staleness allows.


def test_a_step_in_admission_order_waits_for_a_slow_task() -> None:
    bench = Bench(plan()).start()
    slow, fast = bench.granted(), bench.granted()
    complete(bench, fast, (0, 0))
    assert batched(bench, 1) is None
    complete(bench, slow, (0, 0))


def test_a_task_whose_oldest_token_is_too_old_when_it_finishes_is_dropped_and_counted() -> None:
    bench = begun()
    slow = overtaken(bench)
    newer = bench.granted()
    complete(bench, newer, (1, 1))
    assert batched(bench, 2) == ids(newer)
    trained(bench, 2)
    complete(bench, slow, (2, 0))  # One sample began with version 0, which is two versions behind for step 3.
    refill = bench.granted(most=8)
    assert not set(ids(refill)) & set(ids(slow))
    complete(bench, refill, (2, 2))
    assert set(ids(slow)) <= {task for task, _ in bench.acknowledge()}
    batch = bench.ask(NextBatch(driver=1, step=3))
    assert [task.task_id for task in batch.batch.tasks] == ids(refill)[:4]
    assert batch.dropped == 4
    bench.ask(CommitStep(driver=1, step=3, metrics={}))
    row = [effect.row for effect in bench.effects if isinstance(effect, WriteRow)][-1]
    assert row["rollout/tasks_stale"] == 4
    assert row["rollout/tasks_checked"] >= 8


def test_a_version_is_collected_once_no_result_of_its_leases_can_be_trained_on() -> None:
    bench = begun()
    slow = overtaken(bench)
    newer = bench.granted()
    assert (
        bench.machine.run.history.versions.refs.get((0, 0)) is not None
    )  # Step 2 may still take tasks from the slow lease.
    complete(bench, newer, (1, 1))
    assert batched(bench, 2) == ids(newer)
    assert bench.machine.run.ledger.leases.get(slow.lease_id) is not None
    assert bench.machine.run.history.versions.refs.get((0, 0)) is None


def test_a_task_that_becomes_too_old_while_it_waits_is_dropped_before_the_next_step() -> None:
    bench = begun()
    slow = overtaken(bench)
    newer = bench.granted()
    complete(bench, newer, (1, 1))
    complete(bench, slow, (0, 0))  # The tasks are fresh enough for step 2, which already has enough tasks.
    assert batched(bench, 2) == ids(newer)
    assert bench.counts().get("READY", 0) == 0
    assert set(ids(slow)) <= {task for task, _ in bench.acknowledge()}


def test_a_result_without_its_versions_is_not_trusted() -> None:
    bench = begun()
    grant = bench.granted()
    complete(bench, grant, None)
    assert bench.counts().get("READY", 0) == 0
    assert set(ids(grant)) <= {task for task, _ in bench.acknowledge()}


def test_journal_and_snapshot_restore_the_same_state() -> None:
    bench = begun()
    slow, fast = bench.granted(), bench.granted()
    complete(bench, slow, (0, 0), slice(0, 1))
    complete(bench, fast, (0, 0))
    assert batched(bench, 1) == [ids(slow)[0], *ids(fast)[:3]]
    trained(bench, 1)
    packed = run_state.dump(bench.machine.run)
    again = RunState(bench.plan)
    for event in bench.journal:
        again.apply(event)
    assert run_state.dump(again) == packed
    assert run_state.dump(run_state.load(bench.plan, packed)) == packed
