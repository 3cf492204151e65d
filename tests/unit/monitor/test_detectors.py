"""Each change in a metric causes only its own kind of warning, which states the observed values; healthy runs cause no
warnings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from services.monitor.warnings.facts import Facts
from services.monitor.warnings.live import SETTLE_S
from services.monitor.warnings.watch import OF_ROWS, Watch
from shared.runfiles.warnings import WarningRecord
from tests.unit.monitor.test_watch import row, telemetry

Values = dict[str, float | None]
FACTS = Facts(kl_coef=0.001, local=frozenset({"rollout/0"}))


def told(change: Callable[[int], Values], facts: Facts = FACTS, steps: int = 120) -> list[WarningRecord]:
    """Return the warnings for a healthy run whose row for each step s also has the values from `change(s)`."""
    watch = Watch(facts)
    return [each for step in range(1, steps + 1) for each in watch.take_row(row(step, **change(step)), 0.0)]


def after(step: int, begin: int, before: float, then: float) -> float:
    return then if step > begin else before


def evaluated(step: int) -> Values:
    """Return the results of the evaluation at `step`, if there is one. The results at step 20 are the best."""
    if step % 20:
        return {}
    return {"eval/held/reward": after(step, 20, 0.8, 0.5), "eval/held/rows_scored": 256.0, "eval/easy/reward": 0.9}


CASES: list[tuple[str, Callable[[int], Values], str]] = [
    ("zero-variance", lambda s: {"rollout/zero_variance_fraction": after(s, 60, 0.55, 0.9)}, "90% of the groups"),
    (
        "zero-variance",
        lambda s: {"rollout/zero_variance_fraction": min(0.1 + 0.005 * s, 0.6)},
        "50% of the groups have equal rewards, and no advantage (median of 10 steps; 13% at the start)",
    ),
    ("reward-flat", lambda s: {"reward/mean": 0.3 + 0.01 * (s % 2)}, "flat: 0.305 in the first 10 steps"),
    ("reward-falling", lambda s: {"reward/mean": after(s, 60, 0.2 + 0.01 * s, 0.3)}, "fallen from 0.7"),
    ("entropy-collapse", lambda s: {"policy/entropy": 0.6 * 0.97**s}, "to 0.05 nats, from 0.51 nats at the start"),
    ("entropy-collapse", lambda s: {"policy/entropy": after(s, 60, 0.6, 0.13)}, "from 0.6 nats 20 steps ago"),
    ("kl-blow-up", lambda s: {"loss/kl": after(s, 60, 0.3, 2.5)}, "2.5 nats per token"),
    ("kl-blow-up", lambda s: {"loss/kl": after(s, 60, 0.02, 0.4)}, "0.4 nats per token"),
    ("mismatch", lambda s: {"rollout/logprob_mismatch_engine": 0.01 + 0.0005 * s}, "disagree by 0.03"),
    ("mismatch", lambda s: {"rollout/logprob_mismatch_engine": 0.1}, "disagree by 0.1 nats per token on tokens"),
    ("truncation", lambda s: {"rollout/truncated_fraction": after(s, 60, 0.01, 0.4)}, "; 1% at the start"),
    ("gradient", lambda s: {"policy/grad_norm": after(s, 60, 2.0, 50.0)}, "from 2 to 50"),
    ("gradient", lambda s: {"policy/updates_skipped": after(s, 60, 0.0, 1.0)}, "updates skipped for bad data: 1"),
    ("learning-rate", lambda s: {"policy/lr": 0.0}, "the learning rate is 0.0e+00"),
    ("overfitting", evaluated, "eval/held/reward has fallen from 0.800 (step 20) to 0.500"),
    (
        "explained-variance",
        lambda s: {"critic/explained_variance": after(s, 60, 0.1, -0.3)},
        "critic/explained_variance is -0.3 (median of 20 steps)",
    ),
    (
        "staleness",
        lambda s: {"rollout/staleness_max": 1.0, "rollout/logprob_mismatch_lag": 0.5},
        "moved by 0.5 nats since sampling",
    ),
    (
        "staleness",
        lambda s: {"rollout/staleness_max": 1.0, "rollout/is_eff_sample_size": 0.3},
        "leave 30% of the tokens",
    ),
    ("trainer-starved", lambda s: {"time/wait_batch": after(s, 60, 0.2, 0.95)}, "waiting for samples"),
]


@pytest.mark.parametrize(("kind", "change", "text"), CASES)
def test_each_change_in_a_metric_is_reported_by_exactly_one_kind_of_warning(
    kind: str, change: Callable[[int], Values], text: str
) -> None:
    [only] = told(change)
    assert only.kind == kind
    assert text in only.text


@pytest.mark.parametrize("rise", [(0.1, 0.45), (0.28, 0.5), (0.45, 0.7), (0.6, 0.7)])
def test_groups_with_equal_rewards_are_not_reported_if_they_are_few_or_hardly_more_than_at_the_start(
    rise: tuple[float, float],
) -> None:
    assert told(lambda step: {"rollout/zero_variance_fraction": after(step, 60, *rise)}) == []


def test_every_kind_of_warning_about_rows_is_tested() -> None:
    assert {kind for kind, _, _ in CASES} | {"length-hacking"} == set(OF_ROWS)


@pytest.mark.parametrize(
    ("rise", "correlation", "expected"),
    [(0.0, 0.0, "while the reward has not risen"), (0.01, 0.9, "a correlation of 0.90"), (0.01, 0.0, "")],
)
def test_growing_length_is_reported_unless_the_reward_rises_for_another_reason(
    rise: float, correlation: float, expected: str
) -> None:
    def grows(step: int) -> Values:
        return {
            "rollout/length_mean": 100.0 + 2.0 * step,
            "reward/mean": 0.3 + rise * step + 0.001 * (step % 3),
            "reward/length_correlation": correlation,
        }

    found = [each for each in told(grows, steps=55) if each.kind == "length-hacking"]
    assert [expected in each.text for each in found] == [True] * bool(expected)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"policy/updates_skipped": 1.0}, "updates are skipped"),
        ({"policy/lr": 1e-12}, "the learning rate is 1.0e-12"),
        ({"policy/grad_norm": 0.0}, "the gradient norm is 0.0e+00"),
        ({"rollout/zero_variance_fraction": 0.7}, "70% of the groups have equal rewards"),
        ({"rollout/truncated_fraction": 0.4}, "40% of the samples are cut"),
        ({"policy/clip_fraction": 0.6}, "60% of the tokens are clipped"),
        ({"policy/clip_fraction": 0.0, "loss/kl": 1e-6}, "the policy has hardly moved"),
        ({}, "no cause is visible in the metrics"),
    ],
)
def test_a_flat_reward_is_reported_with_its_likely_cause(change: Values, cause: str) -> None:
    found = told(lambda step: {"reward/mean": 0.3 + 0.01 * (step % 2), **change})
    assert [cause in each.text for each in found if each.kind == "reward-flat"] == [True]


def test_parts_of_the_reward_that_disagree_are_reported_by_name() -> None:
    def parts(step: int) -> Values:
        wave = 0.01 * (step % 2)
        return {
            "reward/mean": 0.3 + wave,
            "reward/part/form": 0.2 + 0.01 * step,
            "reward/part/sense": 0.9 - 0.01 * step,
        }

    [flat] = [each for each in told(parts) if each.kind == "reward-flat"]
    assert "form rises while sense falls" in flat.text


def test_a_critic_that_explains_nothing_is_reported_after_20_steps_without_a_sign_change() -> None:
    facts = replace(FACTS, critic_lr=1e-3, critic_warmup_steps=10)

    def at(explained: Callable[[int], float]) -> list[int]:
        return [each.step for each in told(lambda step: {"critic/explained_variance": explained(step)}, facts)]

    assert at(lambda step: -0.1) == [30]
    assert at(lambda step: -0.1 if step % 20 else 0.01) == []
    assert at(lambda step: 0.0) == []


def test_a_reward_that_is_flat_while_only_the_critic_learns_is_not_reported() -> None:
    def flat(step: int) -> Values:
        return {"reward/mean": 0.3 + 0.01 * (step % 2)}

    assert told(flat, replace(FACTS, critic_warmup_steps=100)) == []
    [only] = told(flat)
    assert only.kind == "reward-flat"


def test_rewards_that_become_equal_after_success_are_reported_as_tasks_that_are_too_easy() -> None:
    def solved(step: int) -> Values:
        return {
            "reward/mean": min(0.3 + 0.01 * step, 0.98),
            "rollout/zero_variance_fraction": after(step, 70, 0.2, 0.9),
        }

    [only] = told(solved)
    assert "too easy" in only.text


def test_dropped_stale_tasks_are_reported_if_tasks_are_taken_in_completion_order() -> None:
    facts = replace(FACTS, by_completion=True, staleness=2)
    [only] = told(lambda step: {"rollout/tasks_checked": 10.0, "rollout/tasks_stale": 3.0}, facts)
    assert (only.kind, "30% of the checked tasks" in only.text) == ("staleness", True)


def test_supervised_runs_whose_services_take_turns_cause_no_warnings_about_waiting_or_sampling() -> None:
    def odd(step: int) -> Values:
        return {
            "time/wait_batch": 0.95,
            "rollout/truncated_fraction": 1.0,
            "reward/mean": 0.3,
            "policy/entropy": 0.6**step,
        }

    assert told(odd, replace(FACTS, alternates=True, sampled=False, kl_coef=0.0)) == []


def live(
    kind: str, rows: Callable[[Watch, int], None], facts: Facts = FACTS, seconds: int = 300
) -> list[WarningRecord]:
    """Return the warnings for `seconds` seconds of telemetry from a run whose trainer never waits."""
    watch = Watch(facts)
    for step in range(1, 31):
        watch.take_row(row(step, **{"time/wait_batch": 0.01}), 0.0)
    found: list[WarningRecord] = []
    for second in range(seconds):
        rows(watch, second)
        found += watch.tick(float(second), 8e9)
    assert {each.kind for each in found} <= {kind}
    return found


def test_idle_rollouts_are_reported_while_the_trainer_works() -> None:
    def rows(watch: Watch, second: int) -> None:
        if second % 10 == 0:
            watch.take_topic(telemetry("rollout", float(second), {"generate_s": 1.0}))

    [only] = live("rollouts-starved", rows)
    assert "idle for 8" in only.text or "idle for 9" in only.text
    assert live("rollouts-starved", rows, replace(FACTS, alternates=True)) == []


@pytest.mark.parametrize(
    ("held", "spilled", "refused_each", "text"),
    [
        (0.95, 0.0, 0, "holds 95% of its 1000.0 KiB; beyond the limit, puts are refused"),
        (0.5, 0.3, 0, "is on disk and must be read back"),
        (0.5, 0.0, 1, "14 puts were refused (BUSY) in the last 15 s"),
        (0.85, 0.05, 0, ""),
    ],
)
def test_a_store_at_its_limit_is_reported_with_its_cost(
    held: float, spilled: float, refused_each: int, text: str
) -> None:
    def rows(watch: Watch, second: int) -> None:
        limit = 1000.0 * 1024
        values = {"bytes": held * limit, "limit_bytes": limit, "spilled_bytes": spilled * held * limit}
        values["busy"] = float(refused_each * second)
        watch.take_topic(telemetry("store", float(second), values, "batch-store"))

    found = live("store-full", rows, seconds=60)
    assert [(each.about, text in each.text) for each in found] == ([("batch-store/0", True)] if text else [])


def test_memory_growth_is_reported_only_if_memory_will_run_out_before_the_run_ends() -> None:
    def grows(bytes_per_s: float, name: str) -> Callable[[Watch, int], None]:
        def rows(watch: Watch, second: int) -> None:
            if second % 10 == 0:
                values = {f"{name}/pid": 7.0, f"{name}/rss_bytes": 1e9 + bytes_per_s * second}
                watch.take_topic(telemetry("cluster/services", float(second), values, "monitor"))

        return rows

    seconds = int(SETTLE_S) + 2400
    facts = replace(FACTS, steps=100_000)
    [only] = live("memory-trend", grows(1e6, "rollout/0"), facts, seconds)
    assert (only.about, "3.4 GiB an hour" in only.text) == ("rollout/0", True)
    assert live("memory-trend", grows(1e6, "rollout/0"), replace(FACTS, steps=200), seconds) == []  # the run ends first
    assert live("memory-trend", grows(1e6, "rollout/7"), facts, seconds) == []  # the process is on another machine


def test_rewards_that_take_as_long_as_sampling_are_reported() -> None:
    def rows(reward_s: float) -> Callable[[Watch, int], None]:
        def each(watch: Watch, second: int) -> None:
            watch.take_topic(telemetry("rollout", float(second), {"generate_s": 1.0}))
            watch.take_topic(
                telemetry("reward", float(second), {"samples": 64.0, "samples_failed": 0.0, "seconds": reward_s})
            )

        return each

    [only] = live("reward-slow", rows(2.0))
    assert "for each block of samples, rewards take 2 s" in only.text
    assert live("reward-slow", rows(0.5)) == []
