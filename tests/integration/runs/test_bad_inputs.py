"""Runs whose inputs become unusable after the checks before the start end after one death, with one line."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.integration.tiny.harness import QUICKSTART
from tests.integration.whole_cluster import Cluster, cluster

MODEL = QUICKSTART.parent / "models" / "tiny-qwen3"
SMALL = ("algorithm.tasks_per_step=8", "algorithm.group_size=2", "algorithm.kl=null", "services.reference=null")
LIMIT_S = 150.0


def failure(running: Cluster) -> str:
    """Return the line with which the run failed, once no process has died twice."""
    assert running.end() == 1
    [line] = [each for each in running.output().splitlines() if each.startswith("the run failed: ")]
    return line


def exits(running: Cluster, name: str) -> list[int]:
    lines = [json.loads(line) for line in running.run.log_file("supervisor", 0).read_text().splitlines()]
    return [line["status"] for line in lines if line["event"] == "exited" and line["name"] == name]


@pytest.mark.timeout(200)
def test_a_rollout_that_restarts_on_other_rows_ends_the_run(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    rows = [json.dumps({"prompt": f"{number}+1=", "answer": str(number + 1)}) for number in range(40)]
    data.write_text("\n".join(rows) + "\n")
    with cluster(QUICKSTART, tmp_path, *SMALL, f"data.train.source=jsonl:{data}", limit_s=LIMIT_S) as running:
        running.wait_for("a step", lambda: len(running.rows()) >= 1)
        rollout = running.wait_for("the rollout", lambda: running.pid("rollout"))
        (tmp_path / "other").write_text("\n".join(reversed(rows)) + "\n")
        os.replace(tmp_path / "other", data)  # the open file is still the old one
        os.kill(rollout, signal.SIGKILL)
        line = failure(running)
        assert exits(running, "rollout/0") == [-signal.SIGKILL, os.EX_CONFIG]
    assert line.startswith(f"the run failed: rollout/0: source 'jsonl:{data}': row ")
    assert line.endswith(
        " changed since the run began; restore the rows and resume the run, or begin a new run (another start would "
        "fail, too)"
    )


@pytest.mark.timeout(200)
def test_a_model_that_breaks_after_the_checks_ends_the_run(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    with cluster(QUICKSTART, tmp_path, *SMALL, f"policy.model={model}", limit_s=LIMIT_S) as running:
        running.wait_for("the end of the checks", lambda: (running.path / "run.json").exists())
        os.truncate(model / "model.safetensors", 1000)
        line = failure(running)
        ends = [exits(running, name) for name in ("scheduler/0", "policy-trainer-worker/0", "rollout/0")]
    assert [os.EX_CONFIG] in ends  # the first of them that looks at the model
    assert all(each in ([], [0], [os.EX_CONFIG]) for each in ends)
    assert f"policy.model: {model} is not the model with which the run in {running.path} began: " in line
    assert "model.safetensors has changed; restore it and resume the run, or begin a new run" in line
