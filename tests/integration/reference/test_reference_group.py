"""Tests a reference that is sharded across two ranks in a whole run: its log-probs, its refreshes and the death of one
rank."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from proto import blockfile
from proto.errors import WireError
from proto.tensors import Array
from services.reference.frozen import FrozenTorch
from shared.topology.passes import FASTEST
from tests.integration.reference.test_reference_refresh import assert_follows, refreshed
from tests.integration.tiny.harness import ROOT
from tests.integration.whole_cluster import Cluster, cluster

QUICKSTART = ROOT / "launch" / "topologies" / "quickstart.yaml"
MODEL = ROOT / "launch" / "topologies" / "models" / "tiny-qwen3"
EVERY, STEPS = 20, 50
"""Number of steps between refreshes, and number of steps of the run. A step takes a tenth of a second, and the test
needs time to look at the state between two refreshes."""
SMALL = (
    f"run.steps={STEPS}",
    "data.eval={}",
    "algorithm.tasks_per_step=16",
    f"checkpoint.every={EVERY}",
    f"algorithm.kl={{estimator: k3, in: loss, coef: 0.01, refresh_every: {EVERY}}}",
    "services.reference={backend: megatron, parallel: {tp: 2}}",
)
KEYS = ("token_ids", "lengths", "loss_mask", "ref_logprobs")


def scored_tasks(shm: Path) -> dict[str, dict[str, Array]]:
    """Return the shards of the scored training tasks that are in the memory of the run's stores."""
    found: dict[str, dict[str, Array]] = {}
    for file in shm.glob("*/*.blk"):
        with contextlib.suppress(FileNotFoundError, WireError):
            data = file.read_bytes()
            block = blockfile.parse(data, len(data))
            for index, task_id in enumerate(block.task_ids):
                if task_id.startswith("train/"):
                    for shard in block.shards(index):
                        dtype = np.dtype(shard.dtype.numpy)
                        values = np.frombuffer(data, dtype, shard.nbytes // dtype.itemsize, shard.offset)
                        found.setdefault(task_id, {})[shard.key] = values
    return {task_id: shards for task_id, shards in found.items() if set(KEYS) <= shards.keys()}


def assert_scored_as_one_rank_scores(shards: dict[str, dict[str, Array]]) -> None:
    """Check the log-probs of the initial model in at least 16 tasks."""
    frozen = FrozenTorch(MODEL, "float32", 4096, passes=FASTEST)
    frozen.load()
    assert len(shards) >= 16
    assert max(np.abs(task["ref_logprobs"]).max() for task in shards.values()) > 1
    for task_id, task in shards.items():
        expected = frozen.logprobs(task["token_ids"], task["lengths"], task["loss_mask"], 1.0, lambda: None)
        # A log-prob of -20 comes from logits whose own rounding errors are larger than 1e-5.
        np.testing.assert_allclose(task["ref_logprobs"], expected, rtol=1e-6, atol=1e-5, err_msg=task_id)


def rank_pid(running: Cluster, instance: int) -> int | None:
    for row in running.status().get("services", []):
        if (row["service"], row["instance"], row["state"]) == ("reference", instance, "READY"):
            return int(row["pid"])
    return None


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "place",
    [
        pytest.param((), id="apart"),
        pytest.param(("placement.colocate=[policy-trainer, reference]",), id="colocated", marks=pytest.mark.long),
    ],
)
def test_two_ranks_score_like_one_follow_the_policy_and_survive_the_death_of_a_rank(
    place: tuple[str, ...], tmp_path: Path
) -> None:
    with cluster(QUICKSTART, tmp_path, *SMALL, *place, limit_s=260) as running:
        running.wait_for("the run", (running.path / "run.json").exists)
        shm = running.run.shm
        # The first tasks are the same in every run. Later ones can exceed the bound by rounding alone: of 288 tasks,
        # six do, although one rank and two ranks are both within 1.2e-5 of the float64 result.
        shards = running.wait_for("16 tasks", lambda: found if len(found := scored_tasks(shm)) >= 16 else None)
        assert len(running.rows()) < EVERY, "too late: the reference may have been refreshed"
        follower = running.wait_for("rank 1", lambda: rank_pid(running, 1))
        running.wait_for("the first refresh", lambda: refreshed(running, 0) and refreshed(running, 1))
        os.kill(follower, signal.SIGKILL)
        assert running.end() == 0, running.output()
        rows = running.rows()
        loads = [set(refreshed(running, instance)) for instance in (0, 1)]
    assert_scored_as_one_rank_scores(shards)
    assert_follows(rows, every=EVERY, steps=STEPS, least_kl=1e-5)
    # After the death of one rank, both ranks restart, and their leases name the version to load.
    assert loads == [{EVERY, 2 * EVERY}] * 2
