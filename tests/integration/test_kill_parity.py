"""A deterministic run reproduces the same bits with other engines, after kills and when resumed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import parity_run as parity
from tests.integration.whole_cluster import Cluster

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with parity.start(folder) as run:
        assert run.end() == 0, run.output()
        assert run.rows()[-1]["step"] == parity.STEPS
        assert {row["rollout/staleness_max"] for row in run.rows()[1:]} == {1.0}
        yield run.path


def test_what_is_compared_differs_from_step_to_step(undisturbed: Path) -> None:
    rows = parity.trained_rows(undisturbed)
    assert len({row["policy/grad_norm"] for row in rows[1:]}) == parity.STEPS
    assert len(set(parity.bits(undisturbed).values())) > 2


def test_two_engines_and_every_service_killed_once_change_no_bit(undisturbed: Path, tmp_path: Path) -> None:
    """The second run has the same seed but other engines, another route of the weights, and kills."""
    kills = {2: ["rollout", "reference"], 4: ["batch-store", "scheduler"], 5: ["policy-trainer"]}
    kills |= {7: ["policy-trainer-worker", "monitor"]}
    with parity.start(tmp_path, "services.rollout.instances=2", "services.rollout.weights=gloo") as run:
        for step, services in kills.items():
            run.wait_for(f"step {step}", lambda step=step: parity.committed(run, step))
            for service in services:
                parity.kill(run, service)
        assert run.end() == 0, run.output()
    loaded = [line for line in run.log("policy-trainer") if line["event"] == "workers loaded"][-1]
    assert (loaded["source"], loaded["replay"]) == ("snapshot", 0)
    assert parity.differences(undisturbed, run.path) == []
    assert max(row["sync/sent"] for row in run.rows()[1:]) == 1.0


def test_a_worker_killed_long_after_its_checkpoint_replays_only_the_steps_after_its_snapshot(
    undisturbed: Path, tmp_path: Path
) -> None:
    with parity.start(tmp_path, "checkpoint.every=100", "checkpoint.memory_every=4") as run:
        run.wait_for("step 5", lambda: parity.committed(run, 5))
        parity.kill(run, "policy-trainer-worker")
        assert run.end() == 0, run.output()
        log = run.log("policy-trainer")
    loaded = [line for line in log if line["event"] == "workers loaded"][-1]
    assert (loaded["source"], loaded["step"] % 4, loaded["lineage"]) == ("snapshot", 0, 1)
    assert 0 < loaded["replay"] < 4
    replayed = [line["step"] for line in log if line["event"] == "replayed"]
    assert replayed == list(range(loaded["step"] + 1, loaded["step"] + 1 + loaded["replay"]))
    assert parity.differences(undisturbed, run.path) == []


@pytest.mark.timeout(600)
def test_run_stopped_and_resumed_then_launcher_killed_and_run_resumed_changes_no_bit(
    undisturbed: Path, tmp_path: Path
) -> None:
    """A stop saves an extra checkpoint of its step, and the resumed run continues exactly there. When the launcher is
    killed, the store's memory is lost and the steps after the checkpoint are sampled and trained again."""
    with parity.start(tmp_path, "checkpoint.every=100") as run:
        run.wait_for("step 1", lambda: parity.committed(run, 1))
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 1
        rows = (run.path / "metrics.jsonl").read_text()
        stopped = int(run.rows()[-1]["step"])
        assert f"stopping: saving step {stopped} (again: kill now)" in run.output()
        assert [path.name for path in (run.path / "checkpoints").glob("step-*")] == [f"step-{stopped}"]
    with parity.resume(tmp_path, "checkpoint.every=100") as run:
        run.wait_for("a step after the stop", lambda: parity.committed(run, stopped + 1))
        begun = [line for line in run.log("policy-trainer") if line["event"] == "workers loaded"]
        assert begun[-1]["step"] == stopped
        assert (run.path / "metrics.jsonl").read_text().startswith(rows)
        assert "back to step" not in run.output()
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
    with parity.resume(tmp_path) as run:
        assert run.end() == 0, run.output()
        assert "will be trained again, with the same bits" in run.output()
    assert parity.differences(undisturbed, run.path) == []
    assert not (run.path / "metrics.discarded.jsonl").exists()


# ------------------------------------------------------------------------------------------------------ longer runs


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "override", ["staleness=0", "services.policy-trainer.workers=2"], ids=["staleness 0", "two workers"]
)
def test_kills_change_no_bit_of_other_runs_either(tmp_path: Path, override: str) -> None:
    paths = []
    for name in ("undisturbed", "killed"):
        with parity.start(tmp_path / name, override) as run:
            if name == "killed":
                for step, service in ((2, "rollout"), (4, "policy-trainer-worker"), (7, "policy-trainer")):
                    run.wait_for(f"step {step}", lambda step=step: parity.committed(run, step))
                    parity.kill(run, service)
            assert run.end() == 0, run.output()
        paths.append(run.path)
    assert parity.differences(*paths) == []


SERVICES = ("rollout", "reference", "batch-store", "scheduler", "policy-trainer", "policy-trainer-worker", "monitor")
QUICKSTART = ("run.deterministic=true", "run.steps=30", "checkpoint.every=7", "services.rollout.block_tasks=32")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_random_kills_of_the_quickstart_change_no_bit(tmp_path: Path) -> None:
    """Setting PARITY_SEED to the printed number repeats the kills of a failed run."""
    seed = int(os.environ.get("PARITY_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"PARITY_SEED={seed}")
    chance = random.Random(seed)
    with parity.start(tmp_path / "undisturbed", small=QUICKSTART) as undisturbed:
        assert undisturbed.end() == 0, undisturbed.output()
    steps = sorted(chance.sample(range(29), 12))
    resumed_at = chance.choice(steps)
    with parity.start(tmp_path / "killed", small=QUICKSTART) as run:
        hurt(run, chance, [step for step in steps if step <= resumed_at])
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
    with parity.resume(tmp_path / "killed", small=QUICKSTART) as run:
        hurt(run, chance, [step for step in steps if step > resumed_at])
        assert run.end() == 0, run.output()
    assert parity.differences(undisturbed.path, run.path) == []


def hurt(run: Cluster, chance: random.Random, steps: list[int]) -> None:
    for step in steps:
        run.wait_for(f"step {step}", lambda step=step: parity.committed(run, step))
        for service in chance.sample(SERVICES, chance.choice([1, 1, 1, 2])):
            print(f"step {step}: {service}, process {parity.kill(run, service)}")
