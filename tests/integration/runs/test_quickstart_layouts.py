"""Tests that with parallel backends, the quickstart writes the same rows for the same batches as on one rank, and that
a full run learns.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.runs.recorded_run import Recording, again, record, train_again
from tests.integration.tiny.harness import ROOT
from tests.integration.whole_cluster import cluster

pytestmark = pytest.mark.timeout(600)

QUICKSTART = ROOT / "launch" / "topologies" / "quickstart.yaml"
STEPS = 30
EPS = 1e-4
"""Value of Adam's epsilon. Adam divides a gradient that is only rounding error by its own size. With the default of
1e-8, two layouts with different rounding move such weights apart by the whole learning rate, and after twenty steps a
token at the clipping limit falls on the other side, so grad_norm then differs by 1e-3."""
LIMIT, LATER_LIMIT = 1e-4, 5e-4
"""Tolerance in the first twenty steps, and later. Differences in rounding grow with every update."""
LIMIT_S = 500.0
LAYOUTS = {
    "torch dp2": ("services.policy-trainer.workers=2",),
    "megatron tp2": ("services.policy-trainer.backend=megatron", "services.policy-trainer.parallel={tp: 2}"),
}
WHOLE = {**LAYOUTS, "megatron tp1": ("services.policy-trainer.backend=megatron",)}
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
    """Record thirty steps of the quickstart on one rank, without checkpoints, so that no task is collected."""
    folder = tmp_path_factory.mktemp("live")
    with cluster(QUICKSTART, folder, "checkpoint.every=1000", f"optimizer.eps={EPS}", limit_s=LIMIT_S) as running:
        kept = record(running, STEPS, folder)
    try:
        yield kept
    finally:
        shutil.rmtree(kept.shards)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_quickstart_writes_the_rows_of_one_rank_and_continues_to_learn(
    layout: str, recording: Recording, tmp_path: Path
) -> None:
    """Sampling depends on the weights, so two live runs would diverge. The test therefore trains on the journaled
    batches again. Then the driver's process continues from the workers' step.
    """
    with again(recording, tmp_path / "run", *LAYOUTS[layout], limit_s=LIMIT_S) as services:
        services.start("scheduler", "batch-store", "policy-trainer-worker", "rollout", "reference", "monitor")
        rows = asyncio.run(train_again(services, STEPS))
        services.start("policy-trainer")  # The driver continues from the workers' step.
        live = services.wait_for(
            "the driver", lambda: found if (found := services.rows()) and found[-1]["step"] >= 2 * STEPS else None
        )
    assert len(rows) == STEPS
    for expected, row in zip(recording.rows, rows, strict=False):
        limit = LIMIT if row["step"] <= 20 else LATER_LIMIT
        for name in SAME:
            assert row[name] == pytest.approx(expected[name], rel=limit, abs=limit), f"step {row['step']:g} {name}"
    assert [row["step"] for row in live] == list(range(1, len(live) + 1))
    assert all(math.isfinite(value) for row in live for value in row.values())
    rewards = [row["reward/mean"] for row in live]
    assert mean(rewards[-10:]) > mean(rewards[:10]) + 0.05


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", WHOLE)
def test_the_whole_quickstart_reaches_its_accuracy(layout: str, tmp_path: Path) -> None:
    with cluster(QUICKSTART, tmp_path, *WHOLE[layout], limit_s=1100) as running:
        assert running.end() == 0
        last = running.rows()[-1]
    assert last["step"] == 200
    assert last["eval/heldout/accuracy"] >= 0.8
