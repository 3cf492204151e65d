"""Tests small real runs that go wrong. While such a run is in progress, warnings about its problems, and about nothing
else, appear on the console and in the warnings file.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.runfiles import warnings
from tests.integration.tiny.harness import QUICKSTART
from tests.integration.whole_cluster import cluster

REWARDS = """
import random, time

def always_one(sample):
    time.sleep(0.02)
    if random.random() < 0.2:
        raise ValueError("no number in the answer")
    return 1.0
"""
SMALL = (
    "run.steps=24",
    "data.eval={}",
    "algorithm.tasks_per_step=8",
    "algorithm.mini_batch_tasks=8",
    "algorithm.kl=null",
    "services.reference=null",
)
LIMIT_S = 560.0


def warned(folder: Path, *overrides: str) -> set[str]:
    """Run the quickstart with overrides and return the kinds of its warnings; check that the console shows each warning
    once.
    """
    (folder / "my_odd_rewards.py").write_text(REWARDS)
    environment = {"PYTHONPATH": str(folder)}
    with cluster(QUICKSTART, folder, *SMALL, *overrides, limit_s=LIMIT_S, environment=environment) as running:
        assert running.end() == 0
        told = warnings.read(running.run.warnings)
        output = (running.path / "cluster.out").read_text().splitlines()
    assert [line for line in output if line.startswith("warning at")] == [warnings.line_of(each) for each in told]
    kinds = [each.kind for each in told]
    assert len(kinds) == len(set(kinds))
    return set(kinds)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_warns_about_a_reward_that_is_slow_often_fails_and_never_varies(tmp_path: Path) -> None:
    kinds = warned(tmp_path, "reward.function=my_odd_rewards:always_one", "reward.processes=1")
    assert (
        {"reward-slow", "reward-failing", "reward-flat"}
        <= kinds
        <= {
            "reward-slow",
            "reward-failing",
            "reward-flat",
            "trainer-starved",
        }
    )


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_warns_about_a_short_length_limit_and_a_tiny_learning_rate(tmp_path: Path) -> None:
    kinds = warned(tmp_path, "sampling.max_new_tokens=3", "optimizer.lr=1.0e-12", "algorithm.tasks_per_step=16")
    assert {"truncation", "learning-rate"} <= kinds


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_same_run_gives_no_warnings_of_kinds_that_are_turned_off(tmp_path: Path) -> None:
    off = "monitor.warnings.off=[truncation, learning-rate]"
    kinds = warned(tmp_path, "sampling.max_new_tokens=3", "optimizer.lr=1.0e-12", "run.steps=12", off)
    assert not {"truncation", "learning-rate"} & kinds
