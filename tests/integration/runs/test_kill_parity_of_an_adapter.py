"""Tests that a deterministic run that trains an adapter gives bit-identical results when its services are killed. The
trainer itself computes the log-probs of the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from shared.model.adapter import is_adapter
from tests.integration import parity_run as parity
from tests.integration.whole_cluster import Cluster

pytestmark = pytest.mark.timeout(400)

RUN = (
    *(setting for setting in parity.SMALL if not setting.startswith(("run.steps", "data.eval"))),
    "data.eval={}",
    "policy.lora={rank: 4, alpha: 6.0}",
    "services.reference=null",
    "optimizer.lr=3.0e-3",
)
SERVICES = ("policy-trainer-worker", "rollout", "policy-trainer", "scheduler", "batch-store")
IN_REWARD = "algorithm.kl={coef: 0.01, estimator: k2, in: reward}"


def play(folder: Path, steps: int, kills: Mapping[int, Sequence[str]], *overrides: str) -> Cluster:
    """Run to the end, and kill services after the commits of these steps."""
    with parity.start(folder, f"run.steps={steps}", *overrides, small=RUN) as run:
        for step, services in kills.items():
            run.wait_for(f"step {step}", lambda step=step: parity.committed(run, step))
            for service in services:
                parity.kill(run, service)
        assert run.end() == 0, run.output()
    return run


def check(undisturbed: Cluster, killed: Cluster) -> None:
    """Check that both runs have trained the same adapter, which has left the base."""
    assert parity.differences(undisturbed.path, killed.path) == []
    rows = parity.trained_rows(undisturbed.path)
    assert all(row.get("loss/kl", row.get("reward/kl", 0.0)) > 1e-6 for row in rows[3:])
    files = [name for name in parity.bits(killed.path) if name.startswith("checkpoints/")]
    tensors = [name for file in files if file.endswith("/model.safetensors") for name in load_file(killed.path / file)]
    assert tensors
    assert all(is_adapter(name) for name in tensors)
    assert not killed.run.log_file("reference", 0).exists()


@pytest.mark.long
def test_an_adapter_has_the_same_bits_after_the_trainer_and_the_engine_were_killed(tmp_path: Path) -> None:
    undisturbed = play(tmp_path / "undisturbed", 3, {})
    kills = {1: ("rollout", "policy-trainer-worker"), 2: ("policy-trainer",)}
    check(undisturbed, play(tmp_path / "killed", 3, kills))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return play(tmp_path_factory.mktemp("undisturbed"), parity.STEPS, {})


@pytest.mark.long
@pytest.mark.parametrize("service", SERVICES)
def test_an_adapter_has_the_same_bits_after_a_service_was_killed_again_and_again(
    service: str, undisturbed: Cluster, tmp_path: Path
) -> None:
    check(undisturbed, play(tmp_path, parity.STEPS, dict.fromkeys((1, 4, 6), (service,))))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "overrides",
    [("services.policy-trainer.workers=2",), ("checkpoint.memory_every=null", IN_REWARD), ("staleness=0",)],
    ids=["dp2", "from checkpoints, KL in the reward", "staleness 0"],
)
def test_an_adapter_has_the_same_bits_after_every_service_was_killed_with_other_settings(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    kills = {step: (service,) for step, service in zip((1, 2, 4, 5, 7), SERVICES, strict=True)}
    undisturbed = play(tmp_path / "undisturbed", parity.STEPS, {}, *overrides)
    check(undisturbed, play(tmp_path / "killed", parity.STEPS, kills, *overrides))
