"""Tests the zero-variance filter with bounded refill, and per-sample values from a later stage."""

from __future__ import annotations

from typing import Any

import numpy as np

from proto.messages import Complete, ErrorCode, LeaseGrant, NextBatch, Outcome, Refusal, StepBatch, TaskResult
from proto.tensors import Array
from services.scheduler import run_state, steps
from services.scheduler.events import Fail
from services.scheduler.run_state import RunState
from shared.stages import REFERENCE, ROLLOUT
from tests.unit.scheduler.bench import STORE, Bench, ids, plan


def complete(bench: Bench, grant: LeaseGrant, scalars: dict[str, Array], samples: int = 2) -> Any:
    results = [
        TaskResult(task.task_id, task.fence, Outcome.DONE, STORE, 5, samples, 20, 50) for task in grant.batch.tasks
    ]
    return bench.ask(
        Complete(lease_id=grant.lease_id, stage=grant.stage, incarnation=7, results=results, scalars=scalars)
    )


def rewards(*pairs: tuple[float, float]) -> dict[str, Array]:
    return {"reward": np.array(pairs, np.float32).ravel()}


def roll_out(bench: Bench, *pairs: tuple[float, float]) -> list[str]:
    """Lease as many tasks as there are pairs of rewards, complete them, and return their ids."""
    done: list[str] = []
    while len(done) < len(pairs):
        grant = bench.granted(most=len(pairs) - len(done))
        complete(bench, grant, rewards(*pairs[len(done) : len(done) + len(grant.batch.tasks)]))
        done += ids(grant)
    return done


def next_batch(bench: Bench, step: int = 1) -> StepBatch | None:
    batch = bench.ask(NextBatch(driver=1, step=step))
    assert batch is None or isinstance(batch, StepBatch)
    return batch


def test_a_group_of_equal_rewards_is_dropped_and_another_takes_its_place() -> None:
    bench = Bench(plan(filter_limit=4)).start()
    done = roll_out(bench, (1, 1), (0, 1), (0, 0), (1, 0))
    assert next_batch(bench) is None
    refill = roll_out(bench, (0, 1), (1, 0))
    batch = next_batch(bench)
    assert batch is not None
    assert [task.task_id for task in batch.batch.tasks] == [done[1], done[3], *refill]
    assert batch.dropped == 2
    assert batch.reward_mean_unfiltered == (2 + 1 + 0 + 1 + 1 + 1) / 12
    assert bench.acknowledge() == {(done[0], 1), (done[2], 1)}


def test_a_group_of_equal_rewards_is_trained_on_without_the_filter() -> None:
    bench = Bench(plan()).start()
    done = roll_out(bench, (1, 1), (0, 1), (0, 0), (1, 0))
    batch = next_batch(bench)
    assert batch is not None
    assert [task.task_id for task in batch.batch.tasks] == done


def test_number_of_refills_is_bounded_per_step() -> None:
    bench = Bench(plan(filter_limit=2)).start()
    done = [name for _ in range(6) for name in roll_out(bench, (1, 1))]
    batch = next_batch(bench)
    assert batch is not None
    assert [task.task_id for task in batch.batch.tasks] == done[2:]
    assert batch.dropped == 2
    again = roll_out(bench, (1, 1))
    assert bench.machine.run.ledger.losses.filtered.tasks == 1
    assert bench.acknowledge() == {(task, 1) for task in (*done[:2], *again)}


def test_tasks_put_together_are_dropped_together_or_not_at_all() -> None:
    """The tasks share one file, and a store frees no part of the file while any of the tasks is live."""
    bench = Bench(plan(filter_limit=3)).start()
    first = roll_out(bench, (1, 1), (1, 0), (0, 0))
    second = roll_out(bench, (1, 1), (0, 0), (0, 1))
    assert [bench.machine.run.ledger.losses.filtered.tasks, bench.acknowledge()] == [2, {(first[0], 1), (first[2], 1)}]
    [third] = roll_out(bench, (0, 0))
    assert bench.acknowledge() == {(third, 1)}
    batch = next_batch(bench)
    assert batch is not None
    assert [task.task_id for task in batch.batch.tasks] == [first[1], *second]


def test_a_repeated_request_gets_the_same_unfiltered_mean_even_after_a_restart() -> None:
    bench = Bench(plan(filter_limit=4)).start()
    roll_out(bench, (1, 1), (0, 1), (0, 1), (1, 0), (1, 0))
    first = next_batch(bench)
    assert first is not None
    assert first.reward_mean_unfiltered == 0.6
    assert first.scalars["reward"].mean() == 0.5
    roll_out(bench, (1, 1))
    again = next_batch(bench)
    assert again is not None
    assert again.reward_mean_unfiltered == first.reward_mean_unfiltered
    replayed = RunState(bench.plan)
    for event in bench.journal:
        replayed.apply(event)
    found = steps.batch(replayed.ledger, NextBatch(driver=1, step=1))
    assert found is not None
    assert found.reward_mean_unfiltered == first.reward_mean_unfiltered
    loaded = run_state.load(bench.plan, run_state.dump(bench.machine.run))
    assert run_state.dump(loaded) == run_state.dump(bench.machine.run)


# --------------------------------------------------------------------------- values of a later stage


def with_reference() -> Bench:
    return Bench(plan(stages=(ROLLOUT, REFERENCE))).start()


def test_values_from_the_reference_are_added_to_those_from_the_rollout() -> None:
    bench = with_reference()
    roll_out(bench, (1, 0), (0, 1), (0, 0), (1, 1))
    given = 0
    while given < 4:
        grant = bench.granted("reference")
        count = len(grant.batch.tasks)
        values = np.arange(2 * given, 2 * (given + count), dtype=np.float32)
        assert complete(bench, grant, {"kl": values}).refused == []
        given += count
    batch = next_batch(bench)
    assert batch is not None
    assert batch.scalars["kl"].tolist() == list(range(8))
    assert batch.scalars["reward"].tolist() == [1, 0, 0, 1, 0, 0, 1, 1]


def test_values_with_a_wrong_sample_count_or_an_unknown_name_are_refused() -> None:
    bench = with_reference()
    roll_out(bench, (1, 0), (0, 1))
    grant = bench.granted("reference", most=1)
    refused: list[Refusal] = complete(bench, grant, {"kl": np.zeros(3, np.float32)}, samples=3).refused
    assert [each.code for each in refused] == [ErrorCode.CONFLICT]
    grant = bench.granted("reference", most=1)
    before = run_state.dump(bench.machine.run)
    reply = complete(bench, grant, {"reward": np.zeros(2, np.float32)})
    assert isinstance(reply, Fail)
    assert "it does not produce the scalar 'reward'" in str(reply)
    assert run_state.dump(bench.machine.run) == before
