"""Tests the driver's own computations: advantages, token weights and the metrics row."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from msgspec.structs import replace

from proto.messages import (
    BatchMeta,
    DropReason,
    ErrorCode,
    ForwardBackwardDone,
    LossReason,
    OptimStepDone,
    StepBatch,
    TaskHandle,
)
from services.policy_trainer.bad_data import MAX_IN_A_ROW, BadSteps, check_batch, check_finite
from services.policy_trainer.metrics import StepMetrics, batch_row, staleness_counts
from services.policy_trainer.scheduler_calls import StepTasks
from services.policy_trainer.update import sample_weights, trained_tokens
from shared.rpc.errors import RpcError

SYNC_KEYS = {"sync/canary_error", "sync/bytes", "time/sync", "sync/sent"}
COUNTS = np.array([3, 0, 5, 2], np.int32)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 10, 0, 1 / 10, 1 / 10]),
        ("seq_mean_token_mean", [1 / 9, 0, 1 / 15, 1 / 6]),
        ("seq_mean_token_sum", [1 / 3, 0, 1 / 3, 1 / 3]),
        ("dr_grpo", [1 / 32, 0, 1 / 32, 1 / 32]),
    ],
)
def test_token_weights_follow_the_table(aggregation: str, expected: list[float]) -> None:
    np.testing.assert_allclose(sample_weights(aggregation, COUNTS, max_new_tokens=8), expected, rtol=1e-6)


def test_weights_of_a_mean_sum_to_one() -> None:
    for aggregation in ("token_mean", "seq_mean_token_mean"):
        assert float((sample_weights(aggregation, COUNTS, max_new_tokens=8) * COUNTS).sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "dr_grpo"])
def test_overlong_samples_are_masked_before_counting_except_in_the_sample_count_of_dr_grpo(aggregation: str) -> None:
    scalars = {"loss_tokens": np.array([3, 8, 5], np.int32), "truncated": np.array([0, 1, 0], np.uint8)}
    assert trained_tokens("keep", scalars).tolist() == [3, 8, 5]
    masked = trained_tokens("mask", scalars)
    assert masked.tolist() == [3, 0, 5]
    found = sample_weights(aggregation, masked, max_new_tokens=8)
    without = sample_weights(aggregation, np.array([3, 5]), max_new_tokens=8)
    assert found[1] == 0
    factor = 2 / 3 if aggregation == "dr_grpo" else 1.0
    np.testing.assert_allclose(found[[0, 2]], without * factor, rtol=1e-6)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="token_sum"):
        sample_weights("token_sum", COUNTS, max_new_tokens=8)


def step_batch(rewards: list[float]) -> StepBatch:
    tasks = [TaskHandle("train/0/7", 1, 2, 10, 0, []), TaskHandle("train/0/9", 1, 2, 12, 0, [])]
    return StepBatch(
        step=5,
        batch=BatchMeta(tasks=tasks),
        scalars={
            "reward": np.array(rewards, np.float32),
            "length": np.array([3, 4, 5, 4], np.int32),
            "loss_tokens": np.array([3, 4, 5, 4], np.int32),
            "truncated": np.array([0, 0, 1, 0], np.uint8),
            "version_min": np.array([4, 3, 3, 4], np.int32),
            "sync_error": np.array([1e-6, 1e-6, 3e-6, 3e-6], np.float32),
            "sync_seconds": np.array([1, 1, 2, 2], np.float32),
            "sync_bytes": np.full(4, 4096, np.float32),
            "sync_sent": np.array([1, 1, 0, 1], np.float32),
        },
        reward_mean_unfiltered=0.25,
    )


@pytest.mark.parametrize("what", ["rewards", "advantages"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_number_is_refused_and_its_task_is_named(
    bad: float, what: Literal["rewards", "advantages"]
) -> None:
    check_finite(StepTasks.of(step_batch([1, 0, 1, 0])), what, np.array([1, 0, 1, 0]))
    with pytest.raises(RpcError, match="train/0/9") as caught:
        check_finite(StepTasks.of(step_batch([1, 0, 1, 0])), what, np.array([1, 0, bad, 0]))
    assert (caught.value.code, caught.value.names) == (ErrorCode.BAD_DATA, ["train/0/9"])
    assert "\n" not in str(caught.value)


def test_a_step_whose_tasks_are_all_dropped_counts_as_bad_data_and_still_has_a_row() -> None:
    empty = StepBatch(step=5, batch=BatchMeta(tasks=[]), scalars={}, reward_mean_unfiltered=0.0, dropped=2)
    with pytest.raises(RpcError, match="step 5 refused, weights untouched: all 2 of its tasks were dropped") as caught:
        check_batch(StepTasks.of(empty))
    assert caught.value.code == ErrorCode.BAD_DATA
    metrics = StepMetrics(step=5)
    metrics.policy.skipped = 1
    row = metrics.row(empty, step_s=2.0)
    assert (row["policy/updates_skipped"], row["rollout/tasks_dropped"]) == (1.0, 2.0)
    whole = StepMetrics(step=5).row(step_batch([1, 0, 0, 0]), step_s=2.0)
    assert row.keys() == whole.keys() - SYNC_KEYS - {"reward/length_correlation"}
    assert {row[name] for name in ("reward/mean", "rollout/staleness_mean", "throughput/tokens_per_s")} == {0.0}


def test_mini_batches_carry_their_own_samples() -> None:
    batch = step_batch([1, 0, 0, 1])
    parts = StepTasks.of(batch).tasks.with_scalars({"place": np.arange(4)}).split(1)
    assert [part.task_ids for part in parts] == [("train/0/7",), ("train/0/9",)]
    assert [part.scalars["place"].tolist() for part in parts] == [[0, 1], [2, 3]]


def test_row_is_computed_from_sums_over_calls() -> None:
    metrics = StepMetrics(step=5)
    for imbalance in (1.5, 1.25):
        sums = {
            "tokens": 8.0,
            "policy": 0.5,
            "kl": 0.25,
            "entropy": 4.0,
            "clipped": 2.0,
            "masked": 1.0,
            "mismatch": 0.8,
            "mismatch_max": 0.25 * imbalance,
            "version": 28.0,
            "engine_tokens": 2.0,
            "engine": 2e-6,
            "engine_max": 3e-6,
            "lag_tokens": 6.0,
            "lag": 0.3,
        }
        metrics.policy.add_gradient(ForwardBackwardDone(sums=sums, seconds=0.5, imbalance=imbalance))
    metrics.policy.add_update(OptimStepDone(grad_norm=3.0, lr=1e-4, seconds=0.25))
    row = metrics.row(step_batch([1, 0, 0, 0]), step_s=2.0)
    assert row["loss/policy"] == 1.0
    assert row["loss/kl"] == 0.5
    assert row["policy/entropy"] == 0.5
    assert row["policy/clip_fraction"] == 0.25
    assert row["policy/masked_fraction"] == 0.125
    assert row["rollout/logprob_mismatch"] == pytest.approx(0.1)
    assert row["rollout/logprob_mismatch_max"] == 0.375  # The maximum comes from the first of the two calls.
    assert row["rollout/logprob_mismatch_engine"] == pytest.approx(1e-6)
    assert row["rollout/logprob_mismatch_engine_max"] == 3e-6
    assert row["rollout/logprob_mismatch_lag"] == pytest.approx(0.05)
    assert row["rollout/staleness_mean"] == pytest.approx(0.5)
    assert row["rollout/staleness_max"] == 1.0
    assert (row["sync/canary_error"], row["sync/bytes"], row["time/sync"]) == (pytest.approx(3e-6), 4096.0, 1.5)
    assert row["sync/sent"] == 0.75
    assert row["rollout/length_mean"] == 4.0
    assert row["rollout/truncated_fraction"] == 0.25
    assert row["reward/mean"] == 0.25
    assert row["policy/version"] == 5.0
    assert row["time/forward_backward"] == 1.0
    assert row["dispatch/imbalance"] == 1.5
    assert row["throughput/samples_per_s"] == 2.0
    assert row["throughput/tokens_per_s"] == 8.0


def test_a_mismatch_over_no_tokens_is_left_out_of_the_row() -> None:
    row = StepMetrics(step=5).row(step_batch([1, 0, 0, 0]), step_s=2.0)
    assert not [name for name in row if name.startswith("rollout/logprob_mismatch_") and not name.endswith("_max")]


def test_drops_losses_and_reward_parts_are_in_the_row() -> None:
    batch = step_batch([1, 1, 0, 1])
    drops = {DropReason.FILTERED: 2, DropReason.STALE: 1, DropReason.TOO_LONG: 3, DropReason.REWARD_FAILED: 1}
    named = {"reward/part/form": np.array([0, np.nan, 1, 0.5], np.float32), "workflow/none": np.full(4, np.nan)}
    batch = replace(batch, scalars=batch.scalars | named, dropped=7, drops=drops, lost={LossReason.JUDGE: 4})
    row = batch_row(batch)
    assert (row["rollout/tasks_dropped"], row["rollout/tasks_filtered"], row["rollout/tasks_failed"]) == (7, 2, 4)
    assert {name: value for name, value in row.items() if "/dropped/" in name or "/lost/" in name} == {
        "rollout/dropped/filtered": 2,
        "rollout/dropped/stale": 1,
        "rollout/dropped/too_long": 3,
        "rollout/dropped/reward_failed": 1,
        "rollout/lost/judge": 4,
    }
    assert row["reward/part/form"] == 0.5
    assert "workflow/none" not in row
    assert row["rollout/zero_variance_fraction"] == (1 + 2) / (2 + 2)
    assert batch_row(step_batch([1, 0, 0, 1]))["rollout/zero_variance_fraction"] == 0


def test_only_bad_data_is_skipped_and_only_when_the_run_allows_it() -> None:
    bad, other = RpcError(ErrorCode.BAD_DATA, "nan", names=["train/0/7"]), RpcError(ErrorCode.LOST, "gone")
    with pytest.raises(RpcError, match=r"nan; to skip such updates, set run\.on_bad_step: skip") as caught:
        BadSteps("stop").skip(3, bad)
    assert caught.value.names == ["train/0/7"]
    BadSteps("skip").skip(3, bad)
    with pytest.raises(RpcError, match="gone"):
        BadSteps("skip").skip(3, other)


def test_a_run_that_skips_every_step_ends() -> None:
    steps = BadSteps("skip")
    for step in range(1, MAX_IN_A_ROW):
        steps.ended(step, 0)
    steps.ended(MAX_IN_A_ROW, 1)
    for step in range(1, MAX_IN_A_ROW):
        steps.ended(step, 0)
    with pytest.raises(RpcError, match="10 steps in a row"):
        steps.ended(MAX_IN_A_ROW, 0)


def test_length_and_reward_are_correlated_within_groups_only() -> None:
    assert batch_row(step_batch([1, 0, 0, 1]))["reward/length_correlation"] == pytest.approx(-1.0)
    assert batch_row(step_batch([0, 1, 0, 1]))["reward/length_correlation"] == pytest.approx(0.0)
    assert "reward/length_correlation" not in batch_row(step_batch([1, 1, 0, 0]))
    assert "reward/length_correlation" not in batch_row(step_batch([0.1, 0.1, 0.1, 0.1]))


def test_samples_are_counted_by_the_staleness_of_their_oldest_token() -> None:
    batch = step_batch([1, 0, 1, 0])
    assert staleness_counts(batch) == {0: 2, 1: 2}
    assert staleness_counts(replace(batch, scalars={})) == {}
