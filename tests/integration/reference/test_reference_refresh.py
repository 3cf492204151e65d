"""Tests a reference that is refreshed every few steps of a whole run, and is killed during the run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.integration import parity_run as parity
from tests.integration.tiny.harness import ROOT
from tests.integration.whole_cluster import Cluster, cluster

QUICKSTART = ROOT / "launch" / "topologies" / "quickstart.yaml"
EVERY, STEPS = 3, 8
SMALL = (
    f"run.steps={STEPS}",
    "data.eval={}",
    "algorithm.tasks_per_step=16",
    f"checkpoint.every={EVERY}",
    f"algorithm.kl={{estimator: k3, in: loss, coef: 0.01, refresh_every: {EVERY}}}",
)


def refreshed(running: Cluster, instance: int = 0) -> list[int]:
    """Return the steps of the versions that one rank of the reference has loaded, including those loaded before its
    restarts.
    """
    log = running.path / "logs" / f"reference-{instance}.jsonl"  # The run might not exist yet.
    lines = log.read_text().splitlines() if log.exists() else []
    return [line["step"] for line in map(json.loads, lines) if line["event"] == "reference refreshed"]


def assert_follows(rows: list[dict[str, float]], *, every: int, steps: int, least_kl: float) -> None:
    """Check that a step's KL is 0 exactly when the reference equals the trained policy, that is, right after a
    refresh."""
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        version = (row["step"] - 1) // every * every
        assert row["reference/version"] == version
        if row["step"] - 1 == version:
            assert abs(row["loss/kl"]) < 1e-6, row["step"]
        else:
            assert row["loss/kl"] > least_kl, row["step"]


@pytest.mark.long
@pytest.mark.timeout(260)
def test_the_reference_keeps_its_refreshed_version_after_a_restart(tmp_path: Path) -> None:
    # Each step takes a quarter of a second, which leaves time to kill the reference before the last refresh.
    steps = 40
    with cluster(QUICKSTART, tmp_path, *SMALL, f"run.steps={steps}", limit_s=240) as running:
        running.wait_for("the first refresh", lambda: EVERY in refreshed(running))
        pid = running.wait_for("the reference", lambda: running.pid("reference"))
        os.kill(pid, signal.SIGKILL)
        assert running.end() == 0
        rows = running.rows()
        loads = refreshed(running)
    assert_follows(rows, every=EVERY, steps=steps, least_kl=1e-3)
    # The second process has no state; its leases name the version to load.
    assert set(loads) == set(range(EVERY, steps, EVERY))


TOGETHER = (
    "run.deterministic=true",
    "staleness=0",
    "placement.colocate=[policy-trainer, reference, rollout]",
    "algorithm.group_size=4",
    "services.rollout.block_tasks=4",
)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_refreshes_work_with_determinism_and_colocation(tmp_path: Path) -> None:
    """The reference leaves the devices between its turns and returns with the weights of its last refresh. A run whose
    reference and trainer are killed ends with bit-identical results.
    """
    paths = []
    for name in ("undisturbed", "killed"):
        with parity.start(tmp_path / name, *TOGETHER, small=SMALL) as running:
            if name == "killed":
                for step, service in ((EVERY + 1, "reference"), (EVERY + 2, "policy-trainer-worker")):
                    running.wait_for(f"step {step}", lambda step=step: parity.committed(running, step))
                    parity.kill(running, service)
            assert running.end() == 0, running.output()
            rows = running.rows()
        paths.append(running.path)
        assert_follows(rows, every=EVERY, steps=STEPS, least_kl=1e-3)
    assert parity.differences(*paths) == []
