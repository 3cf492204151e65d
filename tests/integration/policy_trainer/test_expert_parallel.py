"""Tests a whole run of a mixture of experts on two expert-parallel ranks of backend megatron."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.integration.rollout.second_model import SHORT, save_mixture
from tests.integration.tiny.harness import ROOT
from tests.integration.whole_cluster import cluster

pytestmark = pytest.mark.timeout(400)

QUICKSTART = ROOT / "launch" / "topologies" / "quickstart.yaml"


@pytest.mark.long
def test_a_run_trains_a_mixture_whose_experts_are_on_two_ranks(tmp_path: Path) -> None:
    model = save_mixture("qwen3_moe", tmp_path / "model")
    trainer = "services.policy-trainer={backend: megatron, parallel: {ep: 2}}"
    with cluster(QUICKSTART, tmp_path, f"policy.model={model}", trainer, *SHORT, limit_s=380) as run:
        assert run.end() == 0, run.output()
        rows = run.rows()
    assert len(rows) == 4
    assert min(row["policy/grad_norm"] for row in rows) > 0
    assert max(row["sync/canary_error"] for row in rows) <= 1e-4
    assert 0 < max(row["rollout/logprob_mismatch_max"] for row in rows) <= 1e-3
    before, after = load_file(model / "model.safetensors"), load_file(run.path / "export" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all((before[name] != after[name]).any() for name in before)
