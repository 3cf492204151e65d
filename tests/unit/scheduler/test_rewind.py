"""When a run is rewound, the tasks of undone steps precede all others, and other decisions are kept."""

from __future__ import annotations

from typing import Any

import pytest

from proto.messages import (
    CheckpointSaved,
    CommitStep,
    GetRunInfo,
    LeaseGrant,
    LeaseRequest,
    NextBatch,
    Outcome,
    StepBatch,
)
from services.scheduler import run_state
from services.scheduler.events import Configure, DiscardRows, Rewound, Tick, WriteRow
from services.scheduler.plan import Plan
from services.scheduler.run_state import RunState
from tests.unit.scheduler.bench import Bench, ids, plan

AT_COMMIT, AT_CHECKPOINT = Configure(40, 3, 2, True), Configure(40, 3, 2, False)
TASK_BYTES, WEIGHT_BYTES = 50, 100


def begun(made: Plan, config: Configure = AT_CHECKPOINT, limit_bytes: int = 1 << 30) -> Bench:
    bench = Bench(made, config)
    bench.register("batch-store", 0, 1, limit_bytes=limit_bytes, data_id="first")
    bench.ask(GetRunInfo(driver=1))
    bench.publish(0)
    return bench


def resumed(bench: Bench, loaded: int = -1, **store: Any) -> None:
    """Kill everything, restart the stores empty, and have the driver load a checkpoint (-1: the newest)."""
    life = bench.machine.run.shards.registry["batch-store", 0].incarnation + 1
    bench.register("batch-store", 0, life, data_id=f"{life}", **{"limit_bytes": 1 << 30, **store})
    bench.ask(GetRunInfo(driver=1))
    bench.ask(GetRunInfo(driver=1, reload=True, loaded_step=loaded))
    bench.publish_again(bench.machine.run.history.committed_step)


def lease_now(bench: Bench) -> LeaseGrant | None:
    """Lease up to two tasks. If there are none, return None and leave no call deferred."""
    request = LeaseRequest(stage="rollout", service="rollout", instance=0, incarnation=7, max_tasks=2)
    grant = bench.ask(request, wait_s=0.0)
    bench.event(Tick())
    return grant if isinstance(grant, LeaseGrant) else None


def names(batch: StepBatch) -> list[str]:
    return [task.task_id for task in batch.batch.tasks]


def saved(bench: Bench, step: int, *kept: int, at_stop: bool = False) -> None:
    bench.ask(CheckpointSaved(driver=1, step=step, kept=[*kept, step], at_stop=at_stop))


@pytest.mark.parametrize("config", [AT_COMMIT, AT_CHECKPOINT], ids=["commit", "checkpoint"])
@pytest.mark.parametrize("by_completion", [False, True], ids=["order", "completion"])
def test_the_tasks_of_undone_steps_are_sampled_again_before_all_others(
    config: Configure, *, by_completion: bool
) -> None:
    bench = begun(plan(by_completion=by_completion), config)
    bench.step(1)
    saved(bench, 1)
    lost = [bench.step(step) for step in (2, 3, 4)]
    waits = bench.granted()
    tail = bench.machine.run.ledger.window.tail
    resumed(bench)
    run = bench.machine.run
    assert run.ledger.window.head >= tail
    again = [bench.step(step) for step in (2, 3, 4)]
    assert [names(batch) for batch in again] == [names(batch) for batch in lost]
    fences = {task.task_id: task.fence for batch in lost for task in batch.batch.tasks}
    assert all(task.fence > fences[task.task_id] for batch in again for task in batch.batch.tasks)
    assert names(bench.step(5)) == ids(waits)


def test_filtered_and_dropped_tasks_stay_dropped() -> None:
    bench = begun(plan(filter_limit=8))
    bad = bench.granted(most=2)
    bench.complete(bad, outcome=Outcome.DROP)
    equal = bench.granted(most=2)
    bench.complete(equal, reward=1.0)
    assert bench.counts()["DROPPED"] == 4

    def train(step: int) -> list[str]:
        while not isinstance(batch := bench.ask(NextBatch(driver=1, step=step)), StepBatch):
            bench.complete(bench.granted(most=1), reward=(0.0, 1.0))
        bench.ask(CommitStep(driver=1, step=step, metrics={}))
        bench.publish(step)
        return names(batch)

    lost = train(1) + train(2)
    resumed(bench)
    assert train(1) + train(2) == lost
    assert not {*ids(bad), *ids(equal)} & {*lost}


def test_a_run_that_goes_back_further_reopens_earlier_tasks_before_later_ones() -> None:
    """The newest checkpoint turns out to be damaged after some tasks were reopened."""
    bench = begun(plan(), AT_COMMIT)
    steps = [names(bench.step(1))]
    saved(bench, 1)
    steps.append(names(bench.step(2)))
    saved(bench, 2, 1)
    steps += [names(bench.step(step)) for step in (3, 4, 5)]
    resumed(bench)
    assert bench.machine.run.history.committed_step == 2
    resumed(bench, loaded=1)
    assert bench.machine.run.history.committed_step == 1
    assert [names(bench.step(step)) for step in (2, 3, 4, 5)] == steps[1:]


def test_task_ids_of_a_step_are_kept_until_the_oldest_checkpoint_covers_the_step() -> None:
    bench = begun(plan(), AT_COMMIT)
    for step in (1, 2, 3, 4):
        bench.step(step)
        saved(bench, step, *([step - 1] if step > 1 else []))
    assert list(bench.machine.run.history.identities) == [4]


def test_earlier_checkpoints_remain_after_a_checkpoint_made_at_a_stop() -> None:
    bench = begun(plan(), Configure(9, 3, 1, False))
    bench.step(1)
    saved(bench, 1)
    lost = [names(bench.step(step)) for step in (2, 3)]
    saved(bench, 3, 1, at_stop=True)
    resumed(bench)
    assert bench.machine.run.history.committed_step == 3
    resumed(bench, loaded=1)  # The checkpoint of step 3 is damaged.
    assert [names(bench.step(step)) for step in (2, 3)] == lost


@pytest.mark.parametrize(("config", "steps"), [(AT_COMMIT, 2), (AT_CHECKPOINT, 3)], ids=["commit", "checkpoint"])
@pytest.mark.parametrize("by_completion", [False, True], ids=["order", "completion"])
def test_reopened_tasks_always_fit_into_a_store_of_the_smallest_accepted_size(
    config: Configure, steps: int, *, by_completion: bool
) -> None:
    """The store has exactly the space that `worst_case_bytes` requires: for the tasks of two steps, and for those of
    one step that waits for its checkpoint."""
    limit_bytes = 3 * WEIGHT_BYTES + steps * 4 * TASK_BYTES
    made = plan(task_bytes=TASK_BYTES, weight_bytes=WEIGHT_BYTES, by_completion=by_completion)
    bench = begun(made, config, limit_bytes)
    run = bench.machine.run
    most = 0
    kept, ordered = [0], 0

    def train(step: int) -> list[str]:
        """Train a step, during which the checkpoint that the previous step ordered is saved."""
        nonlocal most, ordered
        held: list[LeaseGrant] = []
        while not isinstance(batch := bench.ask(NextBatch(driver=1, step=step)), StepBatch):
            while grant := lease_now(bench):
                held.append(grant)
            taken = run.shards.uncovered_bytes + 3 * WEIGHT_BYTES + run.ledger.window.live * TASK_BYTES
            assert taken <= limit_bytes
            most = max(most, taken)
            bench.complete(held.pop())
        for grant in held:
            bench.complete(grant)
        if ordered:
            kept.append(ordered)
            saved(bench, ordered, *kept[-2:-1])
        bench.ask(CommitStep(driver=1, step=step, metrics={}))
        bench.publish(step)
        ordered = step if batch.checkpoint_now else 0
        return names(batch)

    history = [train(step) for step in (1, 2, 3)]
    for _ in range(3):
        resumed(bench, limit_bytes=limit_bytes)
        back, ordered = run.history.committed_step, 0
        assert back < len(history)
        lost = {name for step in history[back:] for name in step}
        del history[back:]
        history += [train(step) for step in range(back + 1, back + 5)]
        assert lost <= {name for step in history[back:] for name in step}
    assert most == limit_bytes
    trained = [name for step in history for name in step]
    assert len(trained) == len(set(trained))


def test_rows_of_undone_steps_are_discarded_and_written_again() -> None:
    bench = begun(plan())
    for step in (1, 2, 3):
        bench.step(step)
        if step == 1:
            saved(bench, 1)
    resumed(bench)
    told = [effect for effect in bench.effects if isinstance(effect, DiscardRows | Rewound)]
    assert told == [Rewound(0, 1, 3), DiscardRows(0, 1, {})]
    bench.effects.clear()
    bench.step(2)
    assert [effect.step for effect in bench.effects if isinstance(effect, WriteRow)] == [2]


def test_a_run_at_its_checkpoint_does_not_go_back() -> None:
    bench = begun(plan())
    bench.step(1)
    saved(bench, 1)
    grant = bench.granted()
    resumed(bench)
    assert not [effect for effect in bench.effects if isinstance(effect, DiscardRows | Rewound)]
    assert names(bench.step(2)) == ids(grant)


def test_replaying_a_rewind_gives_the_same_state() -> None:
    bench = begun(plan(), AT_COMMIT)
    for step in (1, 2, 3, 4):
        bench.step(step)
    saved(bench, 2, 1)
    resumed(bench)
    bench.step(3)
    copy = RunState(bench.plan)
    for event in bench.journal:
        copy.apply(event)
    packed = run_state.dump(bench.machine.run)
    assert run_state.dump(copy) == packed
    assert run_state.dump(run_state.load(bench.plan, packed)) == packed
    assert copy.ledger.reopened
