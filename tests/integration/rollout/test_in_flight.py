"""Tests, in a whole run, weights that arrive while an engine is sampling (`services.rollout.in_flight`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.integration.rollout.second_model import save_llama
from tests.integration.token_versions import TokenVersions
from tests.integration.whole_cluster import cluster

STEPS = 20
STALENESS = 2
QUICKSTART = Path(__file__).resolve().parents[3] / "launch" / "topologies" / "quickstart.yaml"
# A high temperature makes samples long, so the next version is announced before a block ends.
LONG = [
    f"run.steps={STEPS}",
    "data.eval={}",
    "algorithm.kl=null",
    "services.reference=null",
    "algorithm.tasks_per_step=2",
    "algorithm.group_size=8",
    f"staleness={STALENESS}",
    "sampling.max_new_tokens=900",
    "sampling.temperature=20.0",
]
TRANSFORMERS = ["services.rollout.in_flight=keep"]
# 2.0 is the highest temperature that vLLM accepts.
VLLM = ["services.rollout.engine=vllm", "services.rollout.in_flight=recompute", "sampling.temperature=2.0"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", [TRANSFORMERS, pytest.param(VLLM, marks=pytest.mark.long)], ids=["keep", "vllm"])
def test_sequences_continue_under_newer_weights_and_no_token_is_too_old(tmp_path: Path, engine: list[str]) -> None:
    model = save_llama(tmp_path / "llama", context_tokens=1024)
    with cluster(QUICKSTART, tmp_path, *LONG, *engine, f"policy.model={model}", limit_s=580) as run:
        versions = TokenVersions(run)
        versions.read_to_the_end(STEPS)
        steps, rows = versions.by_step(), run.rows()
    sequences = [(step, each) for step, tasks in steps.items() for task in tasks for each in task]
    assert len(sequences) >= (STEPS - 1) * 2 * 8
    mixed = 0
    for step, each in sequences:
        assert (np.diff(each) >= 0).all()
        assert step - 1 - int(each.max()) >= 0
        assert step - 1 - int(each.min()) <= STALENESS
        mixed += int(each.min() < each.max())
    assert mixed > 0
    assert max(row["rollout/staleness_max"] for row in rows) <= STALENESS
