"""Whole runs of `launch.cluster` with algorithms other than the quickstart's: the options really reach the numbers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TOPOLOGIES = REPOSITORY / "launch" / "topologies"


def run(topology: str, folder: Path, *overrides: str) -> list[dict[str, float]]:
    """The rows of metrics.jsonl."""
    command = [sys.executable, "-m", "launch.cluster", str(TOPOLOGIES / topology), "--run-dir", str(folder / "run")]
    for override in overrides:
        command += ["--set", override]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(260)
def test_supervised_fine_tuning_learns_from_the_answers(tmp_path: Path) -> None:
    rows = run("sft.yaml", tmp_path, "run.steps=15", "data.eval.heldout.every=15")
    assert rows[-1]["loss/policy"] < rows[1]["loss/policy"]
    assert rows[-1]["eval/heldout/accuracy"] > rows[0]["eval/heldout/accuracy"] + 0.05
    assert {row["reward/mean"] for row in rows[1:]} == {1.0}


@pytest.mark.timeout(260)
def test_filter_reward_kl_masks_and_entropy_act_in_one_run(tmp_path: Path) -> None:
    rows = run(
        "quickstart.yaml",
        tmp_path,
        "run.steps=4",
        "data.eval={}",
        "algorithm.tasks_per_step=16",
        "algorithm.mini_batch_tasks=8",
        "algorithm.kl={estimator: k1, in: reward, coef: 0.05}",
        "algorithm.advantage={name: rloo}",
        "algorithm.loss={name: cispo, aggregation: dr_grpo, ratio_mask: {level: geometric, low: 0.95, high: 1.05}}",
        "algorithm.filter_zero_variance={max_refill: 1}",
        "algorithm.entropy_coef=0.001",
        "algorithm.overlong=mask",
        "algorithm.overlong_penalty={tokens: 3}",
        "algorithm.normalise_rewards=batch",
    )
    rows = [row for row in rows if row["step"] > 0]
    assert len(rows) == 4
    assert 0 < sum(row["rollout/tasks_dropped"] for row in rows) <= 4 * 16
    assert any(row["reward/kl"] != 0 for row in rows)
    assert 0 < rows[-1]["policy/masked_fraction"] < 1  # sampled one version before it is trained on
    assert max(row["rollout/staleness_max"] for row in rows) <= 1
    assert all(math.isfinite(value) for row in rows for value in row.values())
    # what is trained on has variance; what was dropped lowers (or raises) the mean that is reported
    assert all(row["reward/std"] > 0 for row in rows)
