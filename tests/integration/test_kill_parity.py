"""Promise 9: a deterministic run has the same bits again, on other engines, whatever is killed, and resumed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import parity_run as parity

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with parity.start(folder) as run:
        assert run.end() == 0, run.output()
        assert run.rows()[-1]["step"] == parity.STEPS
        assert {row["rollout/staleness_max"] for row in run.rows()[1:]} == {1.0}
        yield run.path


def test_the_same_seed_has_the_same_bits_with_another_number_of_engines(undisturbed: Path, tmp_path: Path) -> None:
    with parity.start(tmp_path, "services.rollout.instances=2") as run:
        assert run.end() == 0, run.output()
    assert parity.differences(undisturbed, run.path) == []


def test_another_seed_has_other_bits(undisturbed: Path) -> None:
    """What is compared can differ: versions differ from step to step."""
    rows = parity.trained_rows(undisturbed)
    assert len({row["policy/grad_norm"] for row in rows[1:]}) == parity.STEPS
    assert len(set(parity.bits(undisturbed).values())) > 2


def test_every_service_killed_once_changes_no_bit(undisturbed: Path, tmp_path: Path) -> None:
    kills = {2: ["rollout", "reference"], 4: ["batch-store", "scheduler"], 5: ["policy-trainer"]}
    kills |= {7: ["policy-trainer-worker", "monitor"]}
    with parity.start(tmp_path) as run:
        for step, services in kills.items():
            run.wait_for(f"step {step}", lambda step=step: parity.committed(run, step))
            for service in services:
                parity.kill(run, service)
        assert run.end() == 0, run.output()
    assert parity.differences(undisturbed, run.path) == []


def test_launcher_killed_and_run_resumed_changes_no_bit(undisturbed: Path, tmp_path: Path) -> None:
    """The store's memory goes with the launcher: what followed the checkpoint is sampled and trained again."""
    with parity.start(tmp_path) as run:
        run.wait_for("step 5, after the checkpoint of step 3", lambda: parity.committed(run, 5))
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
    with parity.resume(tmp_path) as run:
        assert run.end() == 0, run.output()
    assert parity.differences(undisturbed, run.path) == []
