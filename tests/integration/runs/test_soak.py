"""Tests that a short soak of every service names the process that leaks memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.cluster_run import ROOT
from tests.bench.growth import MB
from tests.bench.soak import Soak, verdict

MINUTES, WARM_UP_MIN = 4.0, 1.5
LEAKING, BYTES_PER_MIN = "services.exporter", 1.0 * MB


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_leak_of_a_megabyte_a_minute_in_one_service_fails_a_soak_of_all_services(tmp_path: Path) -> None:
    leak = {
        "PYTHONPATH": str(ROOT / "tests" / "bench" / "leak"),
        "SOAK_LEAK": LEAKING,
        "SOAK_LEAK_BYTES": str(round(BYTES_PER_MIN / 60)),
    }
    samples = list(Soak(tmp_path, [], leak).samples(MINUTES))
    found, offenders = verdict(samples, WARM_UP_MIN)
    assert samples[-1].step > 50
    assert {
        "launch.cluster",
        "services.batch_store/0",
        "services.exporter/0",
        "services.monitor/0",
        "services.policy_trainer.worker/0",
        "services.policy_trainer/0",
        "services.recorder/0",
        "services.reference/0",
        "services.scheduler/0",
        "services.tracker/0",
        "services.web/0",
        "b: launch.host",
        "b: services.batch_store/1",
        "b: services.rollout/0",
    } <= {each.process for each in found}
    [memory] = [each for each in found if each.process == f"{LEAKING}/0" and each.quantity.unit == MB]
    assert memory.per_min == pytest.approx(BYTES_PER_MIN, rel=0.5)
    assert any(line.startswith(f"{LEAKING}/0: memory") for line in offenders)
