"""Tests that everything that needs rewards waits for the stage that makes them, on the state machine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from proto.messages import (
    CommitStep,
    Complete,
    EndedTask,
    GetRunInfo,
    LeaseGrant,
    LeaseRequest,
    NextBatch,
    Outcome,
    StepBatch,
    TakeSamples,
    TaskResult,
    WaitEvals,
    WaitKind,
)
from services.scheduler import run_state
from services.scheduler.events import Configure, Recording, Tick
from services.scheduler.plan import EvalPlan, Plan
from services.scheduler.run_state import RunState
from shared.samples.text import Choice
from shared.stages import REFERENCE, REWARD_MODEL, REWARD_MODEL_PART, ROLLOUT
from tests.sim.invariants import check_invariants
from tests.unit.scheduler.bench import LEASE_S, STORE, Bench, ids, plan

STAGE = "reward-model"


def scored(**changes: Any) -> Plan:
    return plan(stages=(ROLLOUT, REFERENCE, REWARD_MODEL), **changes)


def evaluated(**changes: Any) -> Plan:
    return scored(evals=(EvalPlan("held", rows=[0, 1, 4], samples=2, every=2),), **changes)


def score(bench: Bench, grant: LeaseGrant, scores: Sequence[float], weight: float = 1.0) -> Any:
    """Complete a lease of the reward model, whose tasks have two samples each."""
    results = [TaskResult(task.task_id, task.fence, Outcome.DONE, STORE, 6, 2, 9, 8) for task in grant.batch.tasks]
    values = np.array(scores, np.float32)
    scalars = {REWARD_MODEL_PART: values, "reward": np.float32(weight) * values}
    return bench.ask(Complete(lease_id=grant.lease_id, stage=STAGE, incarnation=7, results=results, scalars=scalars))


def replays_alike(bench: Bench) -> bool:
    """Return whether the journal, and a snapshot of the present state, lead to the present state."""
    replayed = RunState(bench.plan)
    for event in bench.journal:
        replayed.apply(event)
    now = run_state.dump(bench.machine.run)
    return run_state.dump(replayed) == now == run_state.dump(run_state.load(bench.plan, now))


def test_rewards_are_the_sum_of_those_of_the_rollout_and_of_the_reward_model() -> None:
    bench = Bench(scored(tasks_per_step=2, group_size=2)).start()
    bench.complete(bench.granted(most=2), reward=[0, 1, 1, 0])
    bench.complete(bench.granted("reference", most=2))
    assert bench.ask(NextBatch(driver=1, step=1)) is None  # the rewards do not exist yet
    call = bench.calls
    grant = bench.granted(STAGE, most=2)
    assert [part.stage for part in grant.batch.parts] == ["rollout"]
    score(bench, grant, [0.5, 0.25, -1, 4], weight=2)
    batch = bench.answer(bench.effects, call)
    assert isinstance(batch, StepBatch)
    assert batch.scalars["reward"].tolist() == [1, 1.5, -1, 8]
    assert batch.scalars["reward"].dtype == np.float32
    assert batch.scalars[REWARD_MODEL_PART].tolist() == [0.5, 0.25, -1, 4]
    assert replays_alike(bench)


def test_groups_of_equal_rewards_are_dropped_once_the_reward_model_has_scored_them() -> None:
    bench = Bench(scored(filter_limit=1)).start()
    bench.complete(bench.granted(most=2), reward=1)  # equal before they are scored
    bench.complete(bench.granted(most=2), reward=[0, 1, 1, 0])
    assert bench.counts()["ROLLED_OUT"] == 4
    for _ in range(2):
        bench.complete(bench.granted("reference", most=2))
    score(bench, bench.granted(STAGE, most=2), [0, 1, 3, 3])
    score(bench, bench.granted(STAGE, most=2), [1, 0, 2, 3])  # with those of the rollout: equal
    counts = bench.counts()
    assert (counts["READY"], counts["DROPPED"]) == (3, 1)  # the limit leaves the second group of equal rewards
    assert replays_alike(bench)


def test_an_evaluation_waits_for_the_reward_model_and_for_no_other_stage() -> None:
    bench = Bench(evaluated()).start()
    bench.complete(bench.granted(most=8), reward=[0, 1, 0, 0, 1, 1], samples=2)
    assert bench.ask(WaitEvals(driver=1, step=0)) is None
    call = bench.calls
    assert bench.lease("reference") is None
    row = next(row for row in bench.machine.waits(bench.now) if "evaluation" in row.what)
    assert (row.kind, row.of) == (WaitKind.STEP, STAGE)
    assert "3 tasks that no reward-model has leased" in row.what
    grant = bench.granted(STAGE, most=2)
    assert (ids(grant), grant.split, grant.weights, grant.exact) == (["held/0/0", "held/0/1"], "held", None, False)
    score(bench, grant, [0.5, 0, 2, -1])
    assert bench.answer(bench.effects, call) is None
    assert replays_alike(bench)
    score(bench, bench.granted(STAGE, most=2), [0, 0])
    done = bench.answer(bench.effects, call)
    assert done.metrics["eval/held/reward"] == pytest.approx((0.75 + 0.5 + 1) / 3)
    assert done.metrics["eval/held/part/reward_model"] == pytest.approx((0.25 + 0.5 + 0) / 3)
    assert done.metrics["eval/held/pass@2"] == pytest.approx((1 + 2 + 1) / 3)
    check_invariants(bench.machine.run)


def test_evaluation_tasks_of_a_lost_reward_model_are_sampled_again_with_the_same_version() -> None:
    bench = Bench(evaluated()).start()
    bench.complete(bench.granted(most=8), reward=0, samples=2)
    bench.granted(STAGE, most=2)
    bench.event(Tick(), after_s=LEASE_S + 1)
    again = next(grant for _ in range(3) if ids(grant := bench.granted(most=8))[0].startswith("held/"))
    assert ids(again) == ["held/0/0", "held/0/1"]
    assert [task.fence for task in again.batch.tasks] == [2, 2]
    assert again.weights is not None
    bench.complete(again, reward=0, samples=2)
    score(bench, bench.granted(STAGE), [0] * 6)
    assert bench.ask(WaitEvals(driver=1, step=0)) is not None
    assert replays_alike(bench)


def test_evaluation_tasks_that_wait_for_their_rewards_survive_a_lost_store_and_a_return_to_an_earlier_step() -> None:
    bench = Bench(evaluated(), Configure(9, 3, 2, False)).start()
    bench.complete(bench.granted(most=8), reward=0, samples=2)
    assert len(bench.machine.run.ledger.unscored()) == 3
    bench.register("batch-store", 0, 2, limit_bytes=1 << 30, data_id="other")  # it comes back without its data
    ledger = bench.machine.run.ledger
    assert ledger.unscored() == []
    assert replays_alike(bench)
    bench.ask(GetRunInfo(driver=1))
    bench.publish_again(0)
    again = next(grant for _ in range(3) if (grant := bench.granted(most=8)).split == "held")
    assert (ids(again), again.split) == (["held/0/0", "held/0/1", "held/0/4"], "held")
    bench.complete(again, reward=0, samples=2)
    score(bench, bench.granted(STAGE), [0] * 6)
    check_invariants(bench.machine.run)
    assert bench.ask(WaitEvals(driver=1, step=0)) is not None


def test_the_recorder_gets_the_rewards_that_the_rollout_did_not_know() -> None:
    recording = Recording(Choice(every=1, per_step=4, tasks_per_step=4), hold_tasks=4)
    bench = Bench(evaluated(), Configure(5, 3, 2, False, recording)).start()
    bench.complete(bench.granted(most=8), reward=[0, 1, 0, 0, 1, 1], samples=2)
    score(bench, bench.granted(STAGE), [0.5, 0, 2, -1, 0, 0])
    due = bench.ask(TakeSamples(incarnation=5, taken=[], rewinds=0, final=True), wait_s=4.0)
    first = due.tasks[0]
    assert isinstance(first, EndedTask)
    assert (first.task_id, first.state, first.samples) == ("held/0/0", "scored", 2)
    assert first.rewards == {"reward": [0.5, 1], REWARD_MODEL_PART: [0.5, 0]}


def test_a_run_without_a_reward_model_has_its_rewards_after_the_rollout() -> None:
    assert plan().reward_stage == 0
    assert scored().reward_stage == 2


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_every_evaluation_is_scored_whatever_is_lost_in_between(seed: int, *, deterministic: bool) -> None:
    chance = random.Random(seed)
    given = evaluated(tasks_per_step=2, deterministic=deterministic, block_tasks=1)
    bench = Bench(given, Configure(4, 1000, 2, False)).start()
    held: list[LeaseGrant] = []
    committed, life = 0, 1

    def finish(grant: LeaseGrant) -> None:
        if grant.stage == STAGE:
            score(bench, grant, [chance.choice([0.0, 1.0]) for _ in range(2 * len(grant.batch.tasks))])
        else:
            bench.complete(grant, reward=chance.choice([0.0, 1.0]))

    def lose_the_store() -> None:
        nonlocal life
        life += 1
        bench.register("batch-store", 0, life, limit_bytes=1 << 30, data_id=str(life))

    for turn in range(4000):
        disturbed = turn < 60
        what = chance.random()
        if disturbed and what < 0.05:
            lose_the_store()
        elif disturbed and what < 0.1:
            bench.event(Tick(), after_s=LEASE_S + 1)  # every lease is lost
        elif what < 0.5:
            stage, most = chance.choice(["rollout", "reference", STAGE]), chance.randint(1, 3)
            request = LeaseRequest(stage=stage, service=stage, instance=0, incarnation=7, max_tasks=most)
            grant = bench.ask(request, wait_s=0.0)
            held += [grant] if isinstance(grant, LeaseGrant) else []
        elif held:
            finish(held.pop(chance.randrange(len(held))))
        bench.event(Tick())  # nothing waits for the next turn
        history = bench.machine.run.history
        if not history.driver:  # without a checkpoint, the run begins again
            bench.ask(GetRunInfo(driver=1))
            committed = history.committed_step
            bench.publish_again(committed)
        elif isinstance(bench.ask(NextBatch(driver=1, step=committed + 1), wait_s=0.0), StepBatch):
            committed += 1
            bench.ask(CommitStep(driver=1, step=committed, metrics={}))
            bench.publish(committed)
        check_invariants(bench.machine.run)
        evaluations = history.evaluations
        if committed == 4 and not evaluations.open and evaluations.begun("held", 4):
            break
    done = bench.machine.run.history.evaluations.done
    assert {step: rows["held"]["eval/held/rows_scored"] for step, rows in done.items()} == {0: 3, 2: 3, 4: 3}
    assert replays_alike(bench)
