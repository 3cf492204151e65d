"""Tests that a deterministic run of a mixture of experts, whose trainer replays routes, gives bit-identical results
when its services are killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.integration import parity_run as parity
from tests.integration.tiny.harness import ROOT
from tests.integration.whole_cluster import Cluster

pytestmark = pytest.mark.timeout(400)

MODEL = ROOT / "launch" / "topologies" / "models" / "tiny-moe"
RUN = (
    *(setting for setting in parity.SMALL if not setting.startswith(("run.steps", "data.eval"))),
    "data.eval={}",
    f"policy.model={MODEL}",
    "algorithm.kl=null",
    "services.reference=null",
    "algorithm.load_balance={coef: 0.01}",
)
SERVICES = ("policy-trainer-worker", "rollout", "policy-trainer", "scheduler", "batch-store")


def play(folder: Path, replay: str, steps: int, kills: Mapping[int, Sequence[str]]) -> Cluster:
    """Run to the end, and kill services after the commits of these steps."""
    overrides = (f"run.steps={steps}", f"algorithm.router_replay={replay}")
    with parity.start(folder, *overrides, small=RUN) as run:
        for step, services in kills.items():
            run.wait_for(f"step {step}", lambda step=step: parity.committed(run, step))
            for service in services:
                parity.kill(run, service)
        assert run.end() == 0, run.output()
    return run


def check(undisturbed: Cluster, killed: Cluster) -> None:
    """Check that both runs have trained the same weights, with routes that the updated routers would not all choose."""
    assert parity.differences(undisturbed.path, killed.path) == []
    rows = parity.trained_rows(undisturbed.path)
    assert all(row["loss/load_balance"] > 0.01 and "moe/replay_mismatch" in row for row in rows)
    assert any(row["moe/replay_mismatch"] > 0 for row in rows)


@pytest.mark.long
def test_routes_of_the_engine_are_replayed_with_the_same_bits_after_kills(tmp_path: Path) -> None:
    undisturbed = play(tmp_path / "undisturbed", "rollout", 3, {})
    kills = {1: ("rollout", "policy-trainer-worker"), 2: ("policy-trainer",)}
    check(undisturbed, play(tmp_path / "killed", "rollout", 3, kills))


@pytest.mark.long
@pytest.mark.parametrize("replay", ["rollout", "train"])
def test_routes_are_replayed_with_the_same_bits_after_every_service_was_killed(replay: str, tmp_path: Path) -> None:
    kills = {step: (service,) for step, service in zip((1, 2, 4, 5, 7), SERVICES, strict=True)}
    undisturbed = play(tmp_path / "undisturbed", replay, parity.STEPS, {})
    check(undisturbed, play(tmp_path / "killed", replay, parity.STEPS, kills))
