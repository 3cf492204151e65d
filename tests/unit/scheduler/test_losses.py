"""Tests drops and losses by reason, reward parts, and services that have waited longer than their limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from proto.messages import (
    Complete,
    DropReason,
    GetStatus,
    Heartbeat,
    LeaseGrant,
    LossReason,
    NextBatch,
    Outcome,
    StepBatch,
    TaskHandle,
    TaskResult,
    Trouble,
    TroubleKind,
    TroubleRow,
    WaitEvals,
)
from proto.tensors import Array
from services.monitor.state import rows_of
from services.scheduler import run_state, steps
from services.scheduler.ended import Losses
from services.scheduler.events import Fail
from services.scheduler.plan import EvalPlan
from services.scheduler.run_state import RunState
from services.scheduler.tasks import Tasks
from tests.unit.scheduler.bench import STORE, Bench, ids, plan


def complete(bench: Bench, grant: LeaseGrant, results: list[TaskResult], **scalars: Array) -> None:
    bench.ask(
        Complete(lease_id=grant.lease_id, stage=grant.stage, incarnation=7, results=results, scalars=dict(scalars))
    )


def done(task: TaskHandle, **lost: int) -> TaskResult:
    failed = sum(lost.values())
    return TaskResult(task.task_id, task.fence, Outcome.DONE, STORE, 5, 4, 20, 50, samples_failed=failed, lost=lost)


def drop(task: TaskHandle, why: str, **lost: int) -> TaskResult:
    failed = sum(lost.values())
    return TaskResult(task.task_id, task.fence, Outcome.DROP, reason="x", samples_failed=failed, why=why, lost=lost)


def rewards(*groups: Sequence[float]) -> Array:
    return np.array(groups, np.float32).ravel()


def test_dropped_tasks_and_lost_samples_are_counted_by_reason_in_status_and_batch() -> None:
    bench = Bench(plan(group_size=4, filter_limit=4)).start()
    first, second, third, *_ = (grant := bench.granted(most=3)).batch.tasks
    complete(
        bench,
        grant,
        [drop(first, DropReason.TOO_LONG), drop(second, DropReason.REWARD_FAILED, timeout=3, raised=1), done(third)],
        reward=rewards([1, 1, 1, 1]),
    )
    for _ in range(2):
        grant = bench.granted(most=2)
        results = [done(grant.batch.tasks[0], timeout=1), done(grant.batch.tasks[1])]
        complete(bench, grant, results, reward=rewards([0, 1, 1, 1], [1, 0, 0, 1]))
    status = bench.ask(GetStatus())
    assert status.dropped == {DropReason.TOO_LONG: 1, DropReason.REWARD_FAILED: 1, DropReason.FILTERED: 1}
    assert status.lost == {LossReason.TIMEOUT: 5, LossReason.RAISED: 1}
    assert status.last_drop.startswith(third.task_id)
    batch = bench.ask(NextBatch(driver=1, step=1))
    assert isinstance(batch, StepBatch)
    assert (batch.dropped, batch.drops, batch.lost) == (3, status.dropped, status.lost)
    told = {row.topic: row.values for row in rows_of(status, 1.0)}["cluster/losses"]
    assert (told["dropped/too_long"], told["lost/timeout"]) == (1, 5)
    replayed = RunState(bench.plan)
    for event in bench.journal:
        replayed.apply(event)
    again = steps.batch(replayed.ledger, NextBatch(driver=1, step=1))
    assert again is not None
    assert (again.drops, again.lost) == (batch.drops, batch.lost)
    loaded = run_state.load(bench.plan, run_state.dump(bench.machine.run))
    assert run_state.dump(loaded) == run_state.dump(bench.machine.run)
    assert loaded.ledger.losses.dropped == status.dropped


def test_unknown_reasons_and_losses_without_a_reason_count_as_other() -> None:
    bench = Bench(plan(group_size=4)).start()
    first, second = (grant := bench.granted(most=2)).batch.tasks
    results = [drop(first, "of_tomorrow"), TaskResult(second.task_id, 1, Outcome.DROP, samples_failed=4, lost={"x": 1})]
    complete(bench, grant, results)
    status = bench.ask(GetStatus())
    assert status.dropped == {DropReason.OTHER: 2}
    assert status.lost == {LossReason.OTHER: 4}


def test_in_deterministic_mode_a_drop_counts_for_the_step_of_its_admission() -> None:
    losses = Losses()
    for admission in (5, 1):  # The drop that belongs to the later step comes first.
        losses.drop(admission, DropReason.BAD_ROW)
    losses.batched([0, 2, 3], lambda admission: admission < 4)
    assert losses.batch_drops == {DropReason.BAD_ROW: 1}
    losses.batched([4, 6, 7], lambda admission: admission < 8)
    assert losses.batch_drops == {DropReason.BAD_ROW: 1}
    bench = Bench(plan(deterministic=True, group_size=4)).start()
    for most in (2, 2, 2):
        grant = bench.granted(most=most)
        last = int(ids(grant)[-1].rpartition("/")[2])
        ends = [drop(task, DropReason.BAD_ROW) if int(task.task_id[8:]) in (3, 5) else done(task) for task in
                grant.batch.tasks]  # fmt: skip
        complete(bench, grant, ends, reward=rewards(*([[0, 1, 1, 1]] * sum(each.samples > 0 for each in ends))))
    assert last == 5
    batch = bench.ask(NextBatch(driver=1, step=1))
    assert (batch.dropped, batch.drops) == (1, {DropReason.BAD_ROW: 1})


def beat(bench: Bench, *troubles: Trouble, instance: int = 0) -> None:
    bench.ask(Heartbeat(service="rollout", instance=instance, incarnation=7, state="READY", troubles=list(troubles)))


def test_problems_stay_in_the_status_until_a_heartbeat_no_longer_reports_them() -> None:
    bench = Bench().start()
    bench.register("rollout", 0, 7)
    beat(bench, Trouble(TroubleKind.REWARDS, "rewards failing: 3 of 4"))
    expected = [TroubleRow("rollout", 0, TroubleKind.REWARDS, "rewards failing: 3 of 4")]
    assert bench.ask(GetStatus()).troubles == expected
    beat(bench)
    assert bench.ask(GetStatus()).troubles == []


@pytest.mark.parametrize("request_", [NextBatch(driver=1, step=1), WaitEvals(driver=1, step=5)])
def test_a_service_that_asks_for_the_end_of_the_run_fails_the_drivers_call(request_: NextBatch | WaitEvals) -> None:
    bench = Bench(plan(evals=())).start() if isinstance(request_, NextBatch) else evaluating()
    bench.register("rollout", 0, 7)
    beat(bench, Trouble(TroubleKind.JUDGE, "the judge is out"))
    assert bench.ask(request_, wait_s=100) is None
    waiting = bench.calls
    beat(bench, Trouble(TroubleKind.JUDGE, "the judge has not answered for 600 s", True))
    told = bench.answer(bench.effects, waiting)
    assert isinstance(told, Fail)
    assert told.message == "rollout/0: the judge has not answered for 600 s"
    beat(bench)
    assert bench.ask(request_, wait_s=100) is None


def evaluating() -> Bench:
    return Bench(plan(evals=(EvalPlan(name="held", rows=[0], samples=1, every=5),))).start()


def test_too_many_problems_in_a_heartbeat_are_refused() -> None:
    bench = Bench().start()
    bench.register("rollout", 0, 7)
    many = Heartbeat(service="rollout", instance=0, incarnation=7, state="READY", troubles=[Trouble("x", "y")] * 17)
    assert "17 troubles in one heartbeat; at most 16" in bench.ask(many).message
    long = Heartbeat(service="rollout", instance=0, incarnation=7, state="READY", troubles=[Trouble("x", "y" * 2000)])
    assert "no text may have more than 1024 characters" in bench.ask(long).message


def test_reward_parts_that_some_tasks_lack_are_nan_and_other_columns_that_some_lack_are_omitted() -> None:
    both = {
        "reward": np.zeros(2, np.float32),
        "reward/part/a": np.array([1, 2], np.float32),
        "own": np.ones(2, np.int32),
    }
    plain = {"reward": np.ones(1, np.float32)}
    tasks = Tasks(1)
    first, second = tasks.add("train/0/0", 0), tasks.add("train/0/1", 1)
    for task, columns in ((first, both), (second, plain)):
        task.samples = len(columns["reward"])
        tasks.keep_scalars(task, columns)
    for order in ([first, second], [second, first]):
        found = tasks.merged_scalars(order)
        assert set(found) == {"reward", "reward/part/a"}
        assert sorted(found["reward/part/a"][:3], key=lambda each: (np.isnan(each), each))[:2] == [1, 2]
        assert np.isnan(found["reward/part/a"]).sum() == 1
        assert np.isnan(found["reward/part/a"][0]) == (order[0] is second)
