"""The quickstart under parallel backends: the same batches give the rows of one rank, and a run of its own learns."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.recorded_run import Recording, again, record
from tests.integration.tiny.harness import ROOT
from tests.integration.whole_cluster import cluster

QUICKSTART = ROOT / "launch" / "topologies" / "quickstart.yaml"
STEPS = 30
LIMIT = 1e-4
LIMIT_S = 500.0
LAYOUTS = {
    "torch dp2": ("services.policy-trainer.workers=2",),
    "megatron tp2": ("services.policy-trainer.backend=megatron", "services.policy-trainer.parallel={tp: 2}"),
}
SAME = (
    "reward/mean",
    "reward/std",
    "loss/policy",
    "loss/kl",
    "policy/entropy",
    "policy/clip_fraction",
    "policy/grad_norm",
    "policy/lr",
    "rollout/length_mean",
    "rollout/logprob_mismatch",
    "rollout/staleness_mean",
    "rollout/staleness_max",
)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    """Thirty steps of the quickstart on one rank; no checkpoint comes, so no task is collected."""
    folder = tmp_path_factory.mktemp("one-rank")
    with cluster(QUICKSTART, folder, "checkpoint.every=1000", "optimizer.eps=1e-5", limit_s=LIMIT_S) as running:
        kept = record(running, STEPS, folder)
    try:
        yield kept
    finally:
        shutil.rmtree(kept.shards)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_quickstart_writes_the_rows_of_one_rank_and_goes_on_learning(
    layout: str, recording: Recording, tmp_path: Path
) -> None:
    """Sampling follows the weights, so two live runs drift apart: the journaled batches are trained again instead, by
    all services under the other layout, and what it then samples itself must learn."""
    with again(recording, tmp_path / "run", *LAYOUTS[layout], limit_s=LIMIT_S) as services:
        live = services.wait_for(
            "steps of its own", lambda: rows if (rows := services.rows()) and rows[-1]["step"] >= 2 * STEPS else None
        )
        replayed = services.replayed()
    assert [row["step"] for row in replayed[:STEPS]] == list(range(1, STEPS + 1))
    for expected, row in zip(recording.rows[:STEPS], replayed, strict=False):
        for name in SAME:
            # a token whose ratio is at the clip's edge may fall on the other side: one of them is allowed
            room = max(LIMIT, 1.5 / tokens(expected)) if name == "policy/clip_fraction" else LIMIT
            assert row[name] == pytest.approx(expected[name], rel=LIMIT, abs=room), f"step {row['step']:g} {name}"
    assert all(math.isfinite(value) for row in live for value in row.values())
    rewards = [row["reward/mean"] for row in live]
    assert mean(rewards[-10:]) > mean(rewards[:10]) + 0.02


def tokens(row: dict[str, float]) -> float:
    """Sampled tokens of a step of 64 groups of 8."""
    return row["rollout/length_mean"] * 64 * 8


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
