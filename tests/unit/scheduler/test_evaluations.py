"""Tests evaluations and the metrics rows that wait for them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from proto.messages import (
    BatchMeta,
    CommitStep,
    GetRunInfo,
    NextBatch,
    Outcome,
    StepBatch,
    TaskHandle,
    WaitEvals,
)
from services.scheduler.evaluations import Evaluation, best_of
from services.scheduler.events import (
    Configure,
    Tell,
    WriteRow,
)
from services.scheduler.plan import EvalPlan, Plan
from shared.evaluation import draws, scores
from tests.unit.scheduler.bench import Bench, ids, plan


def evaluated() -> Plan:
    return plan(evals=(EvalPlan("held", rows=[0, 1, 4], samples=1, every=2),))


def test_evaluations_are_leased_first_with_their_exact_version_and_are_not_counted_by_admission() -> None:
    bench = Bench(evaluated()).start()
    grant = bench.granted(most=8)
    assert ids(grant) == ["held/0/0", "held/0/1", "held/0/4"]
    assert (grant.split, grant.exact, grant.group_size, grant.weights and grant.weights.step) == ("held", True, 1, 0)
    assert bench.machine.run.ledger.window.live == 8
    assert bench.complete(grant, samples=1, reward=0.5) == []
    assert bench.acknowledge() == {(task, 1) for task in ids(grant)}
    assert bench.ask(WaitEvals(driver=1, step=0)).accuracy == {"held": 0.5}
    (told,) = [effect.values for effect in bench.effects if isinstance(effect, Tell) and effect.topic == "eval"]
    assert (told["step"], told["eval/held/reward"]) == (0, 0.5)
    assert "eval/held/accuracy" not in told  # a reward of 0.5 is neither right nor wrong


def test_a_run_without_steps_samples_nothing_but_its_evaluations() -> None:
    bench = Bench(evaluated(), Configure(0, 3, 2, False)).start()
    grant = bench.granted(most=8)
    assert ids(grant) == ["held/0/0", "held/0/1", "held/0/4"]
    assert bench.machine.run.ledger.window.live == 0
    assert bench.ask(WaitEvals(driver=1, step=0)) is None
    bench.complete(grant, samples=1, reward=0.5)
    done = bench.ask(WaitEvals(driver=1, step=0))
    [row] = [effect.row for effect in bench.effects if isinstance(effect, WriteRow)]
    assert done.metrics == {name: value for name, value in row.items() if name.startswith("eval/")}
    assert done.metrics["eval/held/rows_scored"] == 3.0


def test_rows_are_written_in_step_order_and_wait_for_their_evaluation() -> None:
    bench = Bench(evaluated(), Configure(3, 3, 2, False)).start()
    held = bench.granted(most=8)
    for _ in range(2):
        bench.complete(bench.granted())
    for step in (1, 2):
        assert isinstance(bench.ask(NextBatch(driver=1, step=step)), StepBatch)
        bench.ask(CommitStep(driver=1, step=step, metrics={"loss/policy": float(step)}))
    rows = [effect for effect in bench.effects if isinstance(effect, WriteRow)]
    assert rows == []
    bench.complete(held, samples=1)
    rows = [effect for effect in bench.effects if isinstance(effect, WriteRow)]
    assert [row.step for row in rows] == [0, 1]  # The row of step 2 waits for the evaluation of version 2.
    assert rows[0].row["eval/held/accuracy"] == 1.0


def test_a_driver_that_takes_over_gets_the_rates_of_rows_that_are_not_written_yet() -> None:
    bench = Bench(evaluated(), Configure(3, 3, 2, False)).start()
    held = bench.granted(most=8)
    for _ in range(2):
        bench.complete(bench.granted())
    for step in (1, 2):
        bench.ask(NextBatch(driver=1, step=step))
        bench.ask(CommitStep(driver=1, step=step, metrics={"policy/lr": step / 8}))
    assert bench.ask(GetRunInfo(driver=2)).waiting_rates == {"1": 0.125, "2": 0.25}
    bench.complete(held, samples=1)
    assert bench.ask(GetRunInfo(driver=3)).waiting_rates == {"2": 0.25}


def test_the_driver_also_waits_for_earlier_evaluations_because_rows_are_written_in_order() -> None:
    bench = Bench(evaluated(), Configure(2, 3, 2, False)).start()
    first = bench.granted(most=8)
    for _ in range(2):
        bench.complete(bench.granted())
    for step in (1, 2):
        bench.step(step)
    last = bench.granted(most=8)
    assert (first.weights and first.weights.step, last.weights and last.weights.step) == (0, 2)
    bench.complete(last, samples=1)
    assert bench.ask(WaitEvals(driver=1, step=2)) is None
    bench.complete(first, samples=1)
    assert bench.ask(WaitEvals(driver=1, step=2)).accuracy == {"held": 1.0}
    assert [row.step for row in bench.effects if isinstance(row, WriteRow)] == [0, 1, 2]


def test_several_samples_per_row_give_their_mean_and_the_best_of_them() -> None:
    """Rows [1, 0, 0, 0], [0, 0, 0, 0] and [1, 1, 0, 0] have a mean of 0.25, and two of three rows are solved."""
    bench = Bench(plan(evals=(EvalPlan("held", rows=[0, 1, 4], samples=4, every=2),))).start()
    grant = bench.granted(most=8)
    bench.complete(grant, samples=4, reward=[1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0])
    (row,) = [effect.row for effect in bench.effects if isinstance(effect, WriteRow)]
    assert row["eval/held/accuracy"] == row["eval/held/avg@4"] == 0.25
    assert row["eval/held/reward"] == row["eval/held/pass@1"] == 0.25
    assert row["eval/held/pass@2"] == pytest.approx((1 / 2 + 0 + 5 / 6) / 3)
    assert row["eval/held/pass@4"] == pytest.approx(2 / 3)
    assert [row[f"eval/held/{name}"] for name in ("rows_scored", "rows_dropped", "samples_failed")] == [3, 0, 0]


def test_pass_at_k_is_the_best_of_k_samples_averaged_over_all_subsets() -> None:
    three_of_eight = [0.0] * 5 + [1.0] * 3
    assert [best_of(k, three_of_eight) for k in draws(8)] == pytest.approx([0.375, 9 / 14, 13 / 14, 1.0], abs=1e-15)
    assert best_of(2, [0.0, 0.5, 1.0, 1.0]) == pytest.approx(0.916667, abs=1e-6)
    rewards = sorted([-1.0, 0.25, 0.5, 0.5, 2.0, 7.5, -3.0])
    for k in range(1, 8):
        subsets = [max(chosen) for chosen in itertools.combinations(rewards, k)]
        assert best_of(k, rewards) == pytest.approx(math.fsum(subsets) / len(subsets), abs=1e-12)
    assert best_of(8, rewards) == 7.5
    assert best_of(512, [0.0] * 1000 + [1.0] * 24) == pytest.approx(1 - math.comb(1000, 512) / math.comb(1024, 512))


@pytest.mark.parametrize(
    ("samples", "ks"), [(1, []), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (10, [1, 2, 4, 8, 10])]
)
def test_pass_at_k_is_given_for_powers_of_two_and_for_all_samples(samples: int, ks: list[int]) -> None:
    evaluation = Evaluation.of("held", (0, 0), samples, ["held/0/0"])
    evaluation.score(0, {"reward": np.ones(samples, np.float32)}, 0)
    names = [name for name in evaluation.metrics() if "/pass@" in name]
    assert sorted(names) == sorted(f"eval/held/pass@{k}" for k in ks)
    assert {f"eval/held/{name}" for name in scores(samples)} <= evaluation.metrics().keys()


def test_named_rewards_are_reported_and_failed_samples_count_as_0() -> None:
    evaluation = Evaluation.of("held", (0, 0), 2, ["held/0/0", "held/0/1", "held/0/2"])
    form, other = np.array([0.5, 1.0], np.float32), np.array([np.nan, 0.25], np.float32)
    columns = {"reward/part/form": form, "reward/part/other": other, "workflow/turns": form}
    evaluation.score(1, {"reward": np.array([1, 0], np.float32), **columns}, 0)
    evaluation.score(2, {"reward": np.ones(1, np.float32), "reward/part/form": np.ones(1, np.float32)}, 1)
    metrics = evaluation.metrics()
    assert metrics["eval/held/part/form"] == (0.75 + 0.5) / 2
    assert metrics["eval/held/part/other"] == 0.25
    assert metrics["eval/held/accuracy"] == metrics["eval/held/reward"] == 0.5
    assert not any("turns" in name for name in metrics)
    evaluation.score(0, {"reward": np.array([0.5, 0], np.float32)}, 0)
    assert "eval/held/accuracy" not in evaluation.metrics()


def test_failed_samples_in_an_evaluation_are_counted_as_wrong_answers() -> None:
    """The rows have four samples each. In the first row, one is solved and three fail; in the second, all fail; the
    third row cannot be evaluated at all."""
    bench = Bench(plan(evals=(EvalPlan("held", rows=[0, 1, 4], samples=4, every=2),))).start()
    grant = bench.granted(most=8)
    first, second, third = grant.batch.tasks

    def ends(task: TaskHandle, **how: Any) -> None:
        alone = msgspec.structs.replace(grant, batch=BatchMeta(tasks=[task]))
        assert bench.complete(alone, final=task is third, **how) == []

    ends(first, samples=1, failed=3, reward=1.0)
    ends(second, outcome=Outcome.DROP, samples=0, failed=4)
    ends(third, outcome=Outcome.DROP, samples=0)
    (row,) = [effect.row for effect in bench.effects if isinstance(effect, WriteRow)]
    assert row["eval/held/accuracy"] == row["eval/held/avg@4"] == 0.25 / 2
    assert row["eval/held/pass@4"] == 0.5
    assert row["eval/held/pass@2"] == 0.25
    assert [row[f"eval/held/{name}"] for name in ("rows_scored", "rows_dropped", "samples_failed")] == [2, 1, 7]
