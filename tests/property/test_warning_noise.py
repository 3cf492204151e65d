"""Tests that noise around a level never causes a warning about a change, whatever the noise's scale, sign and order."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from services.monitor.warnings.facts import Facts
from services.monitor.warnings.history import error_of_median, noise
from services.monitor.warnings.live import SETTLE_S, Trend
from services.monitor.warnings.watch import Watch

LEVELS = {
    "reward/mean": 0.5,
    "reward/std": 0.4,
    "rollout/zero_variance_fraction": 0.3,
    "rollout/length_mean": 100.0,
    "rollout/truncated_fraction": 0.05,
    "policy/entropy": 0.5,
    "policy/grad_norm": 1.0,
    "policy/clip_fraction": 0.02,
    "loss/kl": 0.1,
    "rollout/logprob_mismatch_engine": 0.005,
    "rollout/logprob_mismatch_lag": 0.03,
    "time/wait_batch": 0.3,
    "reward/length_correlation": 0.9,
}
QUIET = {"reward-flat"}
"""Warnings that may appear. A reward that does not change for 100 steps is flat, and a warning of this kind reports
it.
"""
SERIES = st.lists(st.floats(-1.0, 1.0), min_size=120, max_size=120)


@settings(max_examples=40)
@given(st.integers(0), st.floats(0.0, 0.3))
def test_noise_around_a_level_causes_no_warning(seed: int, size: float) -> None:
    source, watch, kinds = random.Random(seed), Watch(Facts(kl_coef=0.001)), set[str]()
    for step in range(1, 150):
        values = {name: level * (1.0 + size * source.uniform(-1.0, 1.0)) for name, level in LEVELS.items()}
        row = {"step": step, "time/step": 1.0, "policy/lr": 1e-6, "policy/updates_skipped": 0.0, **values}
        kinds |= {each.kind for each in watch.take_row(row, 0.0)}
    assert kinds <= QUIET


ODD = st.one_of(st.none(), st.sampled_from([0.0, -1.0, 1e-308, 1e308, -1e308]), st.floats(-2.0, 2.0))
NAMES = [
    *LEVELS,
    *(
        "step",
        "time/step",
        "policy/lr",
        "policy/updates_skipped",
        "loss/policy",
        "reward/kl",
        "reward/part/a",
        "reward/part/b",
    ),
    *("rollout/staleness_max", "rollout/tasks_checked", "rollout/tasks_stale", "rollout/is_eff_sample_size"),
    *("eval/held/reward", "eval/held/rows_scored"),
]


@settings(max_examples=60)
@given(st.lists(st.dictionaries(st.sampled_from(NAMES), ODD, min_size=8), min_size=1, max_size=8), st.booleans())
def test_rows_with_odd_and_missing_values_raise_no_error(
    pattern: list[dict[str, float | None]], completion: bool
) -> None:
    watch = Watch(Facts(kl_coef=0.001, by_completion=completion))
    for step in range(90):
        row = pattern[step % len(pattern)]
        watch.take_row({"time/step": 1.0, **row} if step % 3 else row, 0.0)
        watch.tick(float(step), 1e10)


@given(SERIES, st.floats(1e-3, 1e3), st.floats(-100.0, 100.0))
def test_the_noise_scales_with_the_values_and_ignores_an_offset(
    values: list[float], scale: float, offset: float
) -> None:
    moved = [offset + scale * value for value in values]
    assert abs(noise(moved) - scale * noise(values)) <= 1e-6 * (scale + abs(offset))
    assert error_of_median(moved, 4) == 1.2533 * noise(moved) / 2


@settings(max_examples=15)
@given(st.integers(0), st.floats(0.0, 1.0))
def test_fluctuating_memory_is_not_reported_as_growing(seed: int, size: float) -> None:
    source, trend = random.Random(seed), Trend()
    for minute in range(60):
        level = (1 << 30) * (1.0 + size * source.random())
        for second in range(0, 60, 10):
            trend.add(SETTLE_S + 60.0 * minute + second, 1.0, level)
        assert trend.growth() is None


@settings(max_examples=15)
@given(st.floats(1e5, 1e8), st.floats(0.0, 0.2))
def test_memory_that_grows_steadily_is_reported_with_its_rate(per_s: float, wobble: float) -> None:
    trend = Trend()
    trend.add(0.0, 1.0, 1e9)
    for second in range(int(SETTLE_S), int(SETTLE_S) + 40 * 60, 10):
        trend.add(float(second), 1.0, 1e9 + per_s * (second + 60 * wobble * (second // 10 % 3)))
    growth = trend.growth()
    assert growth is not None
    assert abs(growth.bytes_per_s - per_s) < 0.1 * per_s


def test_memory_that_fills_a_cache_is_not_reported_as_growing() -> None:
    trend = Trend()
    for second in range(0, 3600, 10):
        trend.add(float(second), 1.0, 1e9 * (2.0 - 0.5 ** (second / 600)))
    assert trend.growth() is None


def test_a_new_process_starts_a_new_trend() -> None:
    trend = Trend()
    for second in range(0, 3600, 10):
        trend.add(float(second), 1.0, 1e9 + 1e6 * second)
    assert trend.growth() is not None
    trend.add(3600.0, 2.0, 1e9)
    assert trend.growth() is None
