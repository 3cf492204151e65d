"""Tests that a run resumed with the other backend and a different number of ranks continues with the same training
state.
"""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from proto.tensors import Array
from tests.integration.tiny.harness import ROOT
from tests.integration.whole_cluster import Cluster, cluster

QUICKSTART = ROOT / "launch" / "topologies" / "quickstart.yaml"
LR, EACH = 3e-4, 2
LIVES = (
    {"backend": "torch"},
    {"backend": "megatron", "parallel": {"tp": 2}},
    {"backend": "torch", "workers": 2},
)
"""Configurations of the trainer's successive lives. Each life trains at least EACH steps before it is killed; the last
one trains to the end."""
STEPS = EACH * len(LIVES) + 1
SMALL = (
    f"run.steps={STEPS}",
    "data.eval={}",
    "algorithm.tasks_per_step=16",
    f"optimizer.lr={LR}",
    "checkpoint={every: 1, keep_last: 20}",
)


def loaded(run: Cluster) -> list[int]:
    """Return the checkpoint from which each life of the workers started."""
    return [line["step"] for line in run.log("policy-trainer") if line["event"] == "workers loaded"]


def tensors(run: Path, step: int) -> tuple[dict[str, Array], dict[str, Array]]:
    folder = run / "checkpoints" / f"step-{step}"
    return load_file(folder / "model.safetensors"), load_file(folder / "optimizer.safetensors")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_training_continues_under_the_other_backend_and_back(tmp_path: Path) -> None:
    begun: list[int] = []
    for number, life in enumerate(LIVES):
        overrides = (*SMALL, f"services.policy-trainer={json.dumps(life)}")
        with cluster(QUICKSTART, tmp_path, *overrides, limit_s=180, resume=number > 0) as run:
            if number < len(LIVES) - 1:
                until = EACH * (number + 1)
                run.wait_for(f"step {until}", lambda until=until: len(run.rows()) >= until)
                run.process.send_signal(signal.SIGKILL)
                run.process.wait()
            else:
                assert run.end() == 0, run.output()
            begun.append(loaded(run)[-1])
            rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert begun[0] == 0
    assert all(EACH * number - 1 <= step for number, step in enumerate(begun))
    assert begun[1] < begun[2] < STEPS
    for step in range(1, STEPS + 1):
        weights, optimizer = tensors(tmp_path / "run", step)
        counts = {name: float(value) for name, value in optimizer.items() if name.startswith("step/")}
        assert set(counts.values()) == {float(step)}, "AdamW's count of updates was not carried over"
        assert {f"exp_avg/{name}" for name in weights} <= optimizer.keys()
        if step > 1:
            before, _ = tensors(tmp_path / "run", step - 1)
            assert weights.keys() == before.keys()
            # An AdamW update moves a weight by at most a few times the learning rate, so training did not restart.
            assert max(float(abs(weights[name] - before[name]).max()) for name in weights) <= 4 * LR
            assert any((weights[name] != before[name]).any() for name in weights)
