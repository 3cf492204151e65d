"""Tests when tasks and weights are cleared from the stores."""

from __future__ import annotations

from proto.messages import (
    CheckpointSaved,
    CommitStep,
    LeaseGrant,
    NextBatch,
    Outcome,
    PutTask,
)
from services.scheduler.events import (
    Configure,
    Listed,
    SendClear,
)
from shared.topology.capacity import live_versions
from tests.unit.scheduler.bench import STORE, Bench, ids, plan


def test_trained_tasks_wait_for_the_oldest_kept_checkpoint() -> None:
    bench = Bench().start()
    batches = {step: bench.step(step) for step in (1, 2, 3, 4)}
    bench.acknowledge()
    bench.ask(CheckpointSaved(driver=1, step=2, kept=[2]))
    assert {task for task, _ in bench.acknowledge()} == {
        task.task_id for step in (1, 2) for task in batches[step].batch.tasks
    }
    bench.ask(CheckpointSaved(driver=1, step=4, kept=[2, 4]))
    assert bench.acknowledge() == set()
    assert bench.counts()["TRAINED"] == 8


def test_reconciliation_clears_only_shards_that_no_peer_may_read() -> None:
    bench = Bench().start()
    leased, done = bench.granted(most=1), bench.granted(most=1)
    bench.complete(done)
    lost = bench.granted(most=1)
    bench.complete(lost, outcome=Outcome.RETRY)
    held = [
        PutTask(ids(leased)[0], 1),
        PutTask(ids(done)[0], 1),
        PutTask(ids(lost)[0], 1),
        PutTask("train/0/77", 1),
        PutTask("weights/0/0", 1),
        PutTask("weights/0/1", 1),  # This version has been put and is about to be published.
    ]
    cleared = [
        effect for effect in bench.event(Listed(STORE, held)) if isinstance(effect, SendClear) and not effect.tracked
    ]
    assert [each.tasks for each in cleared] == [[PutTask(ids(lost)[0], 1), PutTask("train/0/77", 1)]]


def test_a_version_is_collected_when_no_lease_and_no_evaluation_refers_to_it() -> None:
    bench = Bench().start()
    grant = bench.granted()
    old = bench.granted(most=1)
    bench.complete(grant)
    bench.step(1)
    assert ("weights/0/0", 1) not in bench.acknowledge()
    bench.complete(old)
    assert ("weights/0/0", 1) in bench.acknowledge()
    assert bench.machine.run.history.versions.newest == (0, 1)


def test_slow_leases_keep_no_more_versions_alive_than_the_staleness_allows() -> None:
    """Steps 1 to 4 are trained. One task in each of steps 5 to 9 is never completed, and each of these tasks is leased
    under a different version."""
    bench = Bench(plan(staleness=4, tasks_per_step=2), Configure(20, 3, 2, False)).start()
    slow: list[LeaseGrant] = []
    for newest in range(5):
        grants = [bench.granted(most=1) for _ in range(2 if newest else 10)]
        slow.append(grants[-1])
        for grant in grants[:-1]:
            bench.complete(grant)
        if newest < 4:
            bench.step(newest + 1)
    assert [grant.weights.step for grant in slow if grant.weights is not None] == [0, 1, 2, 3, 4]
    assert bench.ask(NextBatch(driver=1, step=5)) is None
    assert len(bench.machine.run.history.versions.refs) == live_versions(4) == 5
    bench.complete(slow[0])
    bench.ask(CommitStep(driver=1, step=5, metrics={}))
    assert len(bench.machine.run.history.versions.refs) + 1 == 5  # Version 5 is being written.
