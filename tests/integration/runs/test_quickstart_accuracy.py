"""Tests that the quickstart, exactly as `make demo` runs it, learns its task as well as GRPO in one plain process."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shared.topology import load
from tests.integration.tiny.harness import ROOT
from tests.integration.whole_cluster import cluster
from tests.reference import plain_grpo

pytestmark = [pytest.mark.long, pytest.mark.timeout(3200)]

QUICKSTART = ROOT / "launch" / "topologies" / "quickstart.yaml"
STEPS, EVERY = 200, 20
LAST = 3
"""Number of final evaluations whose accuracy is averaged. One evaluation of 256 rows has a standard error of 0.02."""
AT_LEAST = 0.80
APART = 0.06
"""Maximum difference between the two accuracies. The programs use different random numbers, so the accuracies differ
as they would with two seeds of one program. Each mean has a standard error below 0.02 from the 256 rows alone, so 0.06
is twice the combined error. A wrongly scaled loss or lost samples would cost more."""
LIMIT_S = 1500.0


def accuracy(evaluations: Sequence[float]) -> float:
    assert len(evaluations) == STEPS // EVERY, evaluations
    return statistics.fmean(evaluations[-LAST:])


def plain_accuracy() -> float:
    """Return the plain loop's accuracy after the same number of steps at the quickstart's maximum staleness."""
    command = [sys.executable, "-m", "tests.reference.plain_grpo", "--steps", str(STEPS), "--eval-every", str(EVERY)]
    command += ["--staleness", "1", "--threads", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return accuracy([row["eval"] for row in rows if row["step"] > 0 and "eval" in row])


def test_the_plain_loop_and_the_quickstart_do_the_same_work_and_both_learn(tmp_path: Path) -> None:
    topology = load(QUICKSTART)
    algorithm, optimizer = topology.algorithm, topology.optimizer
    assert (topology.run.steps, topology.data.eval["heldout"].every, topology.staleness) == (STEPS, EVERY, 1)
    assert (algorithm.tasks_per_step, algorithm.group_size) == (plain_grpo.TASKS_PER_STEP, plain_grpo.GROUP_SIZE)
    assert (algorithm.loss.clip, algorithm.loss.anchor) == ((plain_grpo.CLIP, plain_grpo.CLIP), "rollout")
    assert algorithm.kl is not None
    assert (algorithm.kl.estimator, algorithm.kl.coef) == ("k3", plain_grpo.KL_COEF)
    assert algorithm.advantage.std_epsilon == plain_grpo.STD_EPSILON
    assert (optimizer.lr, optimizer.clip_norm) == (plain_grpo.LEARNING_RATE, plain_grpo.CLIP_NORM)
    assert topology.sampling.max_new_tokens == plain_grpo.MAX_NEW_TOKENS
    assert Path(topology.policy.model) == plain_grpo.MODEL
    with cluster(QUICKSTART, tmp_path, limit_s=LIMIT_S) as running:
        assert running.end() == 0
        rows = running.rows()
    ours = accuracy([row["eval/heldout/accuracy"] for row in rows if "eval/heldout/accuracy" in row])
    assert ours >= AT_LEAST
    theirs = plain_accuracy()
    print(f"mean accuracy of the last {LAST} evaluations: quickstart {ours:.3f}, plain loop {theirs:.3f}")
    assert abs(ours - theirs) <= APART
