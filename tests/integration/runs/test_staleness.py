"""Checks the age of the tokens in each batch. The ages are read from the shards over many steps of real runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.token_versions import TokenVersions
from tests.integration.whole_cluster import cluster

STEPS, FEW = 200, 40
AFTER = 40
"""Number of extra steps. Their shards may be gone before they are read, because the store stops when the run ends."""
TASKS = 4
QUICKSTART = Path(__file__).resolve().parents[3] / "launch" / "topologies" / "quickstart.yaml"
CHEAP = [
    "data.eval={}",
    "algorithm.kl=null",
    "services.reference=null",
    f"algorithm.tasks_per_step={TASKS}",
    "algorithm.group_size=2",
    "services.rollout.block_tasks=1",
    "services.batch-store.memory=256MiB",
    # A shard is collected when the second-newest checkpoint covers it, long after it is read here.
    "checkpoint.every=50",
]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("staleness", "consume", "steps"),
    [
        (0, "order", FEW),
        (1, "order", FEW),  # This is the quickstart's setting.
        (2, "completion", FEW),
        (0, "order", STEPS),
        (1, "order", STEPS),
        (2, "order", STEPS),
        (2, "completion", STEPS),
    ],
)
def test_no_token_is_older_than_staleness_allows(staleness: int, consume: str, steps: int, tmp_path: Path) -> None:
    overrides = [*CHEAP, f"run.steps={steps + AFTER}", f"staleness={staleness}", f"consume={consume}"]
    with cluster(QUICKSTART, tmp_path, *overrides, limit_s=580) as run:
        versions = TokenVersions(run)
        versions.read_to_the_end(steps + AFTER)
        found = {step: tasks for step, tasks in versions.by_step().items() if step <= steps}
        rows = run.rows()[:steps]
    assert sorted(found) == list(range(1, steps + 1))
    wrong = {step: len(tasks) for step, tasks in found.items() if len(tasks) != TASKS}
    assert not wrong, wrong
    ages = [step - 1 - each for step, tasks in found.items() for task in tasks for each in task]
    assert min(int(each.min()) for each in ages) >= 0
    oldest = max(int(each.max()) for each in ages)
    assert oldest <= staleness
    assert max(row["rollout/staleness_max"] for row in rows) <= staleness
    if staleness:
        assert oldest > 0  # Some rollouts ran ahead.
    if consume == "completion":
        assert sum(row["rollout/tasks_checked"] for row in rows) >= steps * TASKS
        assert sum(row["rollout/tasks_stale"] for row in rows) == sum(row["rollout/tasks_dropped"] for row in rows)
