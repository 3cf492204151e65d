"""Tests `checkpoint.keep_best` in a whole run that loses its driver, is stopped and is resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shared.checkpoint_files import MODEL
from shared.rundir import checkpoint_steps
from tests.integration.tiny.harness import QUICKSTART, ROOT
from tests.integration.whole_cluster import Cluster, cluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]
STEPS = 12
METRIC = "eval/heldout/accuracy"
SETS = (
    f"run.steps={STEPS}",
    "data.eval.heldout={source: 'builtin:addition?split=test', every: 3, rows: 128}",
    f"checkpoint={{every: 5, keep_last: 1, keep_best: {METRIC}}}",
    "algorithm.kl=null",
    "services.reference=null",
)


def at_step(run: Cluster, step: int) -> bool:
    return any(row["step"] >= step for row in run.rows())


def test_the_best_checkpoint_survives_kills_and_is_exported(tmp_path: Path) -> None:
    with cluster(QUICKSTART, tmp_path, *SETS, limit_s=600) as run:
        run.wait_for("step 4", lambda: at_step(run, 4))
        driver = run.wait_for("driver", lambda: run.pid("policy-trainer"))
        os.kill(driver, signal.SIGKILL)
        run.wait_for("step 7", lambda: at_step(run, 7))
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 1
    kept = checkpoint_steps(run.path / "checkpoints")
    assert 3 in kept or 6 in kept  # the best so far, or one whose evaluation is not complete
    with cluster(QUICKSTART, tmp_path, *SETS, limit_s=600, resume=True) as run:
        assert run.end() == 0, run.output()
    rows = {int(row["step"]): row for row in run.rows() if METRIC in row}
    assert set(rows) == {3, 6, 9, 12}
    best = max(rows, key=lambda step: (rows[step]["eval/heldout/rows_scored"], rows[step][METRIC], -step))
    # Step 9 may still have been under evaluation when the last checkpoint was written.
    assert {best, STEPS} <= set(checkpoint_steps(run.path / "checkpoints")) <= {best, 9, STEPS}
    assert json.loads(run.run.best_note.read_text()) == {"step": best, "metric": METRIC, "value": rows[best][METRIC]}
    weights = (run.path / "export-best" / MODEL).read_bytes()
    assert weights == (run.path / "checkpoints" / f"step-{best}" / MODEL).read_bytes()
    _scores_the_same(run.path / "export-best", tmp_path / "again", rows[best][METRIC])


def _scores_the_same(model: Path, path: Path, accuracy: float) -> None:
    """Check that the exported model has the same accuracy on the same rows."""
    command = [sys.executable, "-m", "launch.cluster", str(QUICKSTART), "--evaluate", "--checkpoint", str(model)]
    command += ["--run-dir", str(path), "--set", "data.eval.heldout.rows=128"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = (path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)[METRIC] == pytest.approx(accuracy, abs=1.5 / 128)
