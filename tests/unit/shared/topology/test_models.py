"""Tests the records of a run's models, which the processes that run them get instead of the topology."""

from __future__ import annotations

import subprocess
from pathlib import Path

from shared.rundir import SOCKET_NAME_BYTES
from shared.topology import load
from shared.topology.models import POLICY_WORKER
from tests.unit.shared.topology.small_topology import edited, make, write

ROOT = Path(__file__).resolve().parents[4]


def test_a_run_trains_the_policy_and_freezes_the_reference(tmp_path: Path) -> None:
    topology = load(write(make(tmp_path)), ["sampling.temperature=0.7", "optimizer.lr=0.5", "run.seed=3"])
    [policy] = topology.trained
    assert policy == topology.policy_model
    assert (policy.name, policy.service, policy.folder) == ("policy", POLICY_WORKER, Path(topology.policy.model))
    assert (policy.optimizer.lr, policy.seed, policy.shares_devices) == (0.5, 3, False)
    assert policy.publishes is not None
    assert (policy.publishes.route, policy.publishes.mapped, policy.publishes.earlier) == ("shards", True, 0)
    [reference] = topology.frozen
    assert (reference.name, reference.temperature, reference.stage) == ("reference", 0.7, "reference")
    assert not reference.refreshed
    assert topology.ranks == {POLICY_WORKER: 1, "reference": 1}


def test_a_run_without_a_kl_term_has_no_frozen_model(tmp_path: Path) -> None:
    assert load(edited(make(tmp_path), "  kl:\n    coef: 0.001\n", "")).frozen == ()


def test_the_folders_of_a_model_bear_its_name_but_the_checkpoints_of_the_policy_are_at_the_top(tmp_path: Path) -> None:
    [policy] = load(write(make(tmp_path))).trained
    run = Path("run")
    assert policy.checkpoints(run / "checkpoints") == run / "checkpoints"
    assert policy.snapshots_in(run) == run / "trainer" / "policy"
    assert policy.offloaded(run, 2) == run / "offloaded" / "policy" / "rank-2"


def test_only_the_record_names_the_service_of_the_ranks() -> None:
    command = ["git", "grep", "-l", POLICY_WORKER, "--", "proto/*.py", "shared/*.py", "services/*.py", "launch/*.py"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert files == ["shared/topology/models.py"]


def test_the_name_of_every_socket_fits(tmp_path: Path) -> None:
    plan = load(write(make(tmp_path))).services_plan()
    assert max(len(f"/{spec.service}-9999") for spec in plan) <= SOCKET_NAME_BYTES
