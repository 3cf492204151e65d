"""Checks in whole runs whose rewards fail that the console reports the failure at once and that a judge that never
answers ends the run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.integration.tiny.harness import ROOT
from tests.integration.whole_cluster import cluster

QUICKSTART = ROOT / "launch" / "topologies" / "quickstart.yaml"
REWARDS = """
import time
import urllib.request

def hangs(sample):
    time.sleep(600)

def judged(sample):
    with urllib.request.urlopen("http://127.0.0.1:9", timeout=2) as answer:
        return float(answer.read())
"""
SMALL = (
    "run.steps=3",
    "data.eval={}",
    "algorithm.tasks_per_step=8",
    "algorithm.mini_batch_tasks=8",
    "services.rollout.block_tasks=4",
)
TOLD_S = 10.0


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "my_failing_rewards.py").write_text(REWARDS)
    return {"PYTHONPATH": str(tmp_path)}


@pytest.mark.long
@pytest.mark.timeout(320)
def test_rewards_that_hang_are_reported_on_the_console_with_the_line_they_hang_at(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    overrides = (*SMALL, "reward.function=my_failing_rewards:hangs", "reward.timeout_s=2")
    with cluster(QUICKSTART, tmp_path, *overrides, limit_s=280, environment=environment, calls=False) as running:
        running.wait_for("a notice", lambda: "rollout/0: rewards failing: " in running.output())
        began = time.monotonic()
        place = "my_failing_rewards.py:6"
        running.wait_for("the console's line", lambda: f"(at {place})\n" in running.output())
        assert time.monotonic() - began < TOLD_S
        status = running.wait_for(
            "dropped tasks", lambda: found if (found := running.status()).get("dropped") else None
        )
        assert set(status["dropped"]) == {"reward_failed"}
        assert set(status["lost"]) == {"timeout"}
        assert place in status["last_drop"]
        running.wait_for("the counts", lambda: "dropped tasks 4 (reward_failed 4)  lost samples" in running.output())
        traces = [line["exception"] for line in running.log("rollout") if line["event"] == "sample failed"]
        assert traces
        assert all("line 6 in hangs" in trace for trace in traces)


@pytest.mark.long
@pytest.mark.timeout(320)
def test_a_judge_that_never_answers_ends_the_run_with_one_line(tmp_path: Path, environment: dict[str, str]) -> None:
    overrides = (*SMALL, "reward.function=my_failing_rewards:judged", "reward.retry.limit_s=5")
    with cluster(QUICKSTART, tmp_path, *overrides, limit_s=280, environment=environment) as running:
        running.wait_for(
            "a notice", lambda: "a judge is not responding; rewards are waiting for it" in running.output()
        )
        assert running.end() == 1
        output = running.output()
        assert running.rows() == []
        assert len({line["incarnation"] for line in running.log("policy-trainer")}) == 1
    [line] = [each for each in output.splitlines() if each.startswith("the run failed: ")]
    assert "the judge of my_failing_rewards:judged has not answered for 5 s (reward.retry.limit_s)" in line
    assert "Connection refused" in line
    assert "my_failing_rewards.py:9" in line
    assert "Traceback" not in output
    assert "(another start would fail, too)" in line
    assert "dropped" not in output
