"""Tests that no process's resident memory grows with the number of steps in a run."""

from __future__ import annotations

import pytest

from tests.bench.growth import measure

STEPS, FIRST = 300, 100
MOST = 0.08
"""Maximum growth of a process's resident memory over 200 steps (100,000 samples): less than 4 MiB for the smallest
process and 40 MiB for the largest. The measured growth is 3 to 5%, due to the allocator."""


@pytest.mark.long
@pytest.mark.timeout(1300)
def test_no_process_of_a_run_grows_between_steps_100_and_300() -> None:
    growth = measure(STEPS, FIRST, limit_s=1200)
    services = {name.partition("/")[0].removeprefix("services.") for name in growth}
    assert {"batch_store", "monitor", "policy_trainer", "policy_trainer.worker", "rollout", "scheduler"} <= services
    assert {name: (each.early, each.late) for name, each in growth.items() if each.share > MOST} == {}
