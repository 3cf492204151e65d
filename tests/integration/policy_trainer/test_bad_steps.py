"""Tests that a run whose advantage or loss is not finite either stops and names the step, or skips it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.integration.policy_trainer.bad_numbers import ADVANTAGE_STEP, EMPTY_STEP, LOSS_STEP, TASKS
from tests.integration.tiny.harness import ROOT
from tests.integration.whole_cluster import cluster

QUICKSTART = ROOT / "launch" / "topologies" / "quickstart.yaml"
STEPS = 20
SMALL = (
    f"run.steps={STEPS}",
    "run.deterministic=true",
    "staleness=0",
    "data.eval={}",
    "data.train.shuffle=false",
    f"algorithm.tasks_per_step={TASKS}",
    f"algorithm.mini_batch_tasks={TASKS // 2}",
    "algorithm.group_size=4",
    "algorithm.kl=null",
    "services.reference=null",
    "services.rollout.block_tasks=8",
    "reward.function=tests.integration.policy_trainer.bad_numbers:reward",
    "algorithm.advantage={name: 'tests.integration.policy_trainer.bad_numbers:advantage'}",
    "algorithm.loss={name: 'tests.integration.policy_trainer.bad_numbers:loss', anchor: rollout}",
    "checkpoint={every: 1, keep_last: 30}",
)


@pytest.mark.long
@pytest.mark.timeout(280)
def test_a_bad_step_stops_the_run_which_can_be_resumed_to_skip_it(tmp_path: Path) -> None:
    with cluster(QUICKSTART, tmp_path, *SMALL, limit_s=120) as stopped:
        assert stopped.end() == 1
        output = stopped.output()
        assert f"step {ADVANTAGE_STEP} refused, weights untouched: 4 advantages are not finite, in tasks" in output
        assert f"train/0/{TASKS + 1};" in output
        assert "run.on_bad_step" in output
        assert [row["step"] for row in stopped.rows()] == [1]
    with cluster(QUICKSTART, tmp_path, *SMALL, "run.on_bad_step=skip", limit_s=150, resume=True) as running:
        pid = running.wait_for("the worker", lambda: running.pid("policy-trainer-worker"))
        running.wait_for("the step with a bad loss", lambda: len(running.rows()) >= LOSS_STEP)
        os.kill(pid, signal.SIGKILL)
        assert running.end() == 0, running.output()
        rows = running.rows()
        skipped = [line for line in running.log("policy-trainer") if line["event"] == "update skipped"]
        states = running.journaled_steps()
        weights = {step: everything(running.path, step) for step in range(1, STEPS + 1)}
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    # A bad advantage or a lack of rewards spoils the whole step; a bad gradient spoils each of the step's two updates.
    assert [row["policy/updates_skipped"] for row in rows] == [0, 1, 0, 2, 0, 1] + [0] * (STEPS - 6)
    assert [row["rollout/tasks_dropped"] for row in rows] == [0] * 5 + [TASKS] + [0] * (STEPS - 6)
    assert all(row[name] == 0 for row in (rows[1], rows[3], rows[5]) for name in ("policy/grad_norm", "loss/policy"))
    named = {line["step"]: line["tasks"] for line in skipped if line["step"] == ADVANTAGE_STEP}
    assert named == {ADVANTAGE_STEP: [f"train/0/{TASKS + 1}"]}
    in_loss = [line["tasks"] for line in skipped if line["step"] == LOSS_STEP]
    first = TASKS * (LOSS_STEP - 1)
    assert sorted(in_loss[0] + in_loss[1]) == sorted(f"train/0/{first + index}" for index in range(TASKS))
    # A skipped step keeps the weights and optimizer state of the previous step bit for bit.
    same = [step for step in range(2, STEPS + 1) if weights[step] == weights[step - 1]]
    assert same == [ADVANTAGE_STEP, LOSS_STEP, EMPTY_STEP]
    # The tasks of a skipped step were consumed like any others.
    assert {step: state for step, (state, _) in states.items()} == dict.fromkeys(range(1, STEPS + 1), "TRAINED")
    assert rows[-1]["gc/tasks"] >= TASKS


def everything(run: Path, step: int) -> dict[str, bytes]:
    """Return every tensor of a checkpoint: the weights and the optimizer state."""
    found: dict[str, bytes] = {}
    for file in sorted((run / "checkpoints" / f"step-{step}").glob("*.safetensors")):
        found |= {f"{file.name}/{name}": tensor.tobytes() for name, tensor in load_file(file).items()}
    return found
