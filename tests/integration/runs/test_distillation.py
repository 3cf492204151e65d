"""Tests that a policy learns from a teacher, that a teacher equal to the policy adds nothing, and that kills of a
teacher and of the ranks that read its log-probs change no bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import parity_run as parity
from tests.integration.tiny.harness import ROOT, processes_of
from tests.integration.whole_cluster import cluster

pytestmark = pytest.mark.timeout(600)

TOPOLOGIES = ROOT / "launch" / "topologies"
RECIPE, SFT = TOPOLOGIES / "recipes" / "distill.yaml", TOPOLOGIES / "sft.yaml"
MODEL = TOPOLOGIES / "models" / "tiny-qwen3"
OF_TEACHER = ("run.name=teacher", "run.steps=150", "optimizer.lr=1e-3", "data.eval.heldout.every=150")
"""The settings with which the recipe makes its teacher."""
BARS = {"{kl: reverse}": 0.62, "{kl: forward, top_k: 8}": 0.75}
"""The accuracy that each form of distillation reaches at step 40."""
SELF = (
    *(setting for setting in parity.SMALL if not setting.startswith(("run.steps", "data.eval"))),
    "run.steps=4",
    "data.eval={}",
    f"teacher={{model: {MODEL}}}",
    "algorithm.kl={coef: 0.01}",
)
"""A small deterministic run with a reference and a teacher, which is the model with which the run begins."""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with cluster(SFT, tmp_path_factory.mktemp("teacher"), *OF_TEACHER, limit_s=300) as run:
        assert run.end() == 0, run.output()
        return run.path / "export"


def test_the_recipe_says_how_its_teacher_is_made() -> None:
    text = RECIPE.read_text()
    for setting in OF_TEACHER[:-1]:
        assert f"--set {setting}" in text


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("distill", BARS)
def test_a_policy_learns_from_a_teacher_alone(tmp_path: Path, teacher: Path, distill: str, seed: int) -> None:
    given = (f"run.seed={seed}", f"teacher.model={teacher}", f"algorithm.distill={distill}")
    with cluster(RECIPE, tmp_path, *given, limit_s=300) as run:
        assert run.end() == 0, run.output()
        rows = run.rows()
    accuracy = {row["step"]: row["eval/heldout/accuracy"] for row in rows if "eval/heldout/accuracy" in row}
    divergence = [row["teacher/kl"] for row in rows if row["step"]]
    print(accuracy, divergence[:3], divergence[-3:])
    assert accuracy[40] >= BARS[distill]
    assert sum(divergence[-5:]) < 0.7 * sum(divergence[:5])


@pytest.mark.parametrize("kl", ["reverse", pytest.param("forward, top_k: 8", marks=pytest.mark.long)])
def test_a_teacher_equal_to_the_policy_adds_nothing_and_its_kill_changes_no_bit(tmp_path: Path, kl: str) -> None:
    """The teacher and then a rank of the trainer are killed in the middle of steps."""
    one_update = ("algorithm.mini_batch_tasks=16", "algorithm.loss.anchor=rollout") if kl != "reverse" else ()
    small = (*SELF, f"algorithm.distill={{coef: 0.5, kl: {kl}}}", *one_update)
    (tmp_path / "undisturbed").mkdir()
    (tmp_path / "killed").mkdir()
    with parity.start(tmp_path / "undisturbed", small=small) as run:
        assert run.end() == 0, run.output()
        undisturbed, rows = run.path, run.rows()
    assert abs(rows[0]["teacher/kl"]) < 1e-6
    if kl == "reverse":
        assert 0 < rows[0]["teacher/gap_max"] < 1e-5
        assert rows[-1]["teacher/gap_max"] > 1e-3  # the policy has moved
    else:
        assert 0.5 < rows[0]["teacher/mass"] < 1
        assert rows[-1]["teacher/kl"] > 1e-6
    with parity.start(tmp_path / "killed", small=small) as run:
        for step, service in ((1, "teacher"), (2, "policy-trainer-worker")):
            run.wait_for(f"the commit of step {step}", lambda step=step: parity.committed(run, step))
            parity.kill(run, service)
        assert run.end() == 0, run.output()
        assert parity.differences(undisturbed, run.path) == []
        assert not processes_of(run.path)
        assert not run.run.shm.exists()
