"""Tests a real run on two nodes of a real Ray cluster, with the rollout on the node that is not the head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.rundir import RunDir
from tests.integration.hosts.ray_cluster import assert_nothing_left, ray_cluster, run_on, volatile_folders
from tests.integration.tiny.harness import ctl, wait_for

STEPS = 4
LIMIT_S = 80.0
PLACES = ("placement={engine: ray, hosts: {b: {}}}", "services.rollout.host=b", f"run.steps={STEPS}")


@pytest.mark.timeout(90)
def test_a_run_on_two_nodes_completes_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow = tmp_path / "other packages" / "proto"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").write_text("raise ImportError('the proto of another package')\n")
    monkeypatch.setenv("PYTHONPATH", str(shadow.parent))  # This applies to nodes, their workers and the launcher.
    path = tmp_path / "run"
    with ray_cluster("b") as cluster, run_on(cluster, path, *PLACES) as launcher:
        away = path / "hosts" / "b"
        wait_for("the other host", lambda: (away / "run.json").exists() or launcher.poll() is not None, LIMIT_S)
        assert launcher.poll() is None, launcher.communicate()[0]
        wait_for("a restarted process on the other host", lambda: _restarted(path), LIMIT_S)
        folders = volatile_folders(path)
        assert len(cluster.actors()) == 1
        output, _ = launcher.communicate(timeout=LIMIT_S)
        assert launcher.returncode == 0, output
        assert "host b has joined" in output
        assert "neither a token" in output
        assert_nothing_left(path, folders, cluster)
    assert len((path / "metrics.jsonl").read_text().splitlines()) == STEPS
    assert (away / "logs" / "rollout-0.jsonl").exists()
    assert not RunDir.open(path).log_file("rollout", 0).exists()


def _restarted(path: Path) -> bool:
    """Restart the store of the other host through the home host once it is READY, and return whether it becomes READY
    again."""
    done = ctl(path, "status", "--json")
    rows = (
        {(row["service"], row["instance"]): row for row in json.loads(done.stdout)["services"]} if done.stdout else {}
    )
    row = rows.get(("batch-store", 1))
    if row is None or row["state"] != "READY":
        return False
    if not row["restarts"]:
        assert ctl(path, "restart", "batch-store/1").returncode == 0
    return bool(row["restarts"])
