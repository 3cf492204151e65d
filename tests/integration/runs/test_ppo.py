"""Tests that PPO learns, that a critic learns what explains the reward, and that policy, critic, reference and engine
take turns on one device without changing a bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.integration.tiny.harness import ROOT
from tests.integration.whole_cluster import cluster

pytestmark = pytest.mark.timeout(600)

PPO = ROOT / "launch" / "topologies" / "recipes" / "ppo.yaml"
MODEL = PPO.parents[1] / "models" / "tiny-qwen3"
AT_60, AT_140 = 0.60, 0.80
EXPLAINED = 0.9
MODULE = """
def high(sample):
    return float(sample.row["prompt"].strip()[0] >= "5")
"""


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ppo_learns(tmp_path: Path, seed: int) -> None:
    with cluster(PPO, tmp_path, f"run.seed={seed}", limit_s=550) as run:
        assert run.end() == 0, run.output()
        rows = run.rows()
    accuracy = {row["step"]: row["eval/heldout/accuracy"] for row in rows if "eval/heldout/accuracy" in row}
    print(accuracy)
    assert accuracy[60] >= AT_60
    assert accuracy[140] >= AT_140


@pytest.mark.long
def test_a_critic_explains_a_reward_that_depends_on_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy does not change, so a critic of any quality would learn from nothing but the prompts."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    overrides = (
        "run.steps=30",
        "data.eval={}",
        "reward={function: 'mine:high'}",
        "algorithm.advantage={name: gae, lam: 1.0}",
        "critic.warmup_steps=30",
    )
    with cluster(PPO, tmp_path, *overrides, limit_s=400) as run:
        assert run.end() == 0, run.output()
        rows = run.rows()
        trained = load_file(run.path / "export" / "model.safetensors")
    explained = [row["critic/explained_variance"] for row in rows if row["step"] > 0]
    means = [sum(explained[first : first + 10]) / 10 for first in (0, 10, 20)]
    print(means)
    assert means[2] >= EXPLAINED
    initial = load_file(MODEL / "model.safetensors")
    assert all(np.array_equal(trained[name], weight) for name, weight in initial.items())
    assert not any("policy/lr" in row for row in rows)


SMALL = (
    "run.deterministic=true",
    "run.steps=5",
    "algorithm.tasks_per_step=32",
    "algorithm.kl={coef: 0.01}",
    "critic.num_iterations=2",
    "data.eval.heldout={source: 'builtin:addition?split=test', every: 2, rows: 32}",
    "services.batch-store.memory=256MiB",
)
TOGETHER = "placement.colocate=[policy-trainer, critic, reference, rollout]"


@pytest.mark.long
def test_models_that_take_turns_on_one_device_learn_the_same_bits_as_apart(tmp_path: Path) -> None:
    weights: list[dict[str, dict[str, np.ndarray]]] = []
    for name, more in (("apart", ()), ("together", (TOGETHER,))):
        (tmp_path / name).mkdir()
        with cluster(PPO, tmp_path / name, *SMALL, *more, limit_s=250) as run:
            assert run.end() == 0, run.output()
            assert "restarted" not in run.output()
            assert [row["step"] for row in run.rows()] == [1, 2, 3, 4, 5]
            assert "eval/heldout/accuracy" in run.rows()[1]
            folders = ("export", "export-critic")
            weights.append({folder: load_file(run.path / folder / "model.safetensors") for folder in folders})
    apart, together = weights
    for folder, named in apart.items():
        assert named.keys() == together[folder].keys()
        assert all(np.array_equal(tensor, together[folder][key]) for key, tensor in named.items())
    assert apart["export-critic"]["score.weight"].any()
