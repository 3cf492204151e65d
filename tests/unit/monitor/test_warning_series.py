"""Recorded runs that went wrong cause the matching warnings. Recorded runs that learned cause none."""

from __future__ import annotations

import pytest

from shared.topology.monitor import WarningKind
from tests.unit.monitor.recorded import FOLDER, Recording, read, recordings, replay

SICK: dict[str, list[tuple[int, str]]] = {
    "small-batch": [(10, "zero-variance"), (30, "reward-flat"), (138, "kl-blow-up"), (189, "truncation")],
    "groups-of-two": [(10, "zero-variance"), (17, "truncation"), (27, "reward-flat")],
    "large-learning-rate": [(5, "kl-blow-up"), (10, "truncation"), (12, "reward-flat")],
    "collapsed-entropy": [(12, "reward-flat"), (122, "entropy-collapse"), (125, "truncation"), (125, "length-hacking")],
    "paid-for-length": [
        (5, "kl-blow-up"),
        (20, "truncation"),
        (32, "zero-variance"),
        (40, "length-hacking"),
        (69, "reward-flat"),
    ],
    "rising-learning-rate": [
        (25, "zero-variance"),
        (30, "reward-flat"),
        (33, "kl-blow-up"),
        (40, "reward-falling"),
        (57, "truncation"),
        (58, "length-hacking"),
        (99, "truncation"),
        (101, "length-hacking"),
    ],
    "too-stale": [(13, "zero-variance"), (30, "reward-flat"), (34, "staleness"), (40, "reward-falling")],
    "waiting-trainer": [(5, "reward-slow"), (10, "zero-variance"), (22, "trainer-starved")],
    "memorized-rows": [(20, "overfitting"), (58, "zero-variance")],
    "useless-critic": [(24, "explained-variance")],
    "unbounded-reward": [(20, "truncation"), (24, "gradient"), (40, "length-hacking")],
    "growing-memory": [(0, "memory-trend")],
    "wrong-logprobs": [(5, "mismatch")],
    "busy-trainer": [(33, "rollouts-starved")],
    "full-store": [(141, "store-full")],
    "slow-failing-reward": [(0, "reward-failing"), (5, "reward-slow"), (10, "reward-flat")],
}
"""Warnings of each recording, with their steps."""
NOT_RECORDED = {"learning-rate"}
"""Kinds that occur in no recorded run. A small real run causes the warning
(tests/integration/monitor/test_warnings.py)."""


def by_name(recording: Recording) -> str:
    return recording.name


@pytest.mark.parametrize("name", SICK)
def test_a_recorded_run_that_goes_wrong_causes_the_expected_warnings(name: str) -> None:
    told = replay(read(FOLDER / "sick" / f"{name}.jsonl.xz"))
    assert [(each.step, each.kind) for each in told] == SICK[name]
    assert all(any(letter.isdigit() for letter in each.text) and each.remedy for each in told)


def test_every_recording_of_a_run_that_went_wrong_is_tested() -> None:
    assert sorted(each.name for each in recordings("sick")) == sorted(SICK)


def test_the_kinds_that_occur_in_no_recording_are_listed() -> None:
    assert set(WarningKind) - {kind for warnings in SICK.values() for _, kind in warnings} == NOT_RECORDED


@pytest.mark.parametrize("recording", recordings("healthy"), ids=by_name)
def test_a_healthy_run_causes_no_warning(recording: Recording) -> None:
    assert len(recording.rows) > 20
    assert replay(recording) == []


def test_there_are_recordings_of_at_least_ten_healthy_runs() -> None:
    assert len(recordings("healthy")) >= 10
