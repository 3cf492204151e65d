"""Tests runs whose rewards a reward model makes: kills change no bit, everything that needs rewards waits for them, and
the same folder is a critic to begin with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.samples.record import FOLDER
from tests.integration import parity_run as parity
from tests.integration.tiny.harness import processes_of
from tests.integration.whole_cluster import Cluster
from tests.reward_folder import reward_folder

pytestmark = pytest.mark.timeout(400)

SHORT = ("run.steps=4", "data.eval.heldout.every=2", "data.eval.heldout.rows=16", "checkpoint.every=2",
         "monitor.samples={every: 1, per_step: 16}", *parity.REWARDED)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reward_folder(tmp_path_factory.mktemp("model") / "classifier")


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with parity.start(folder, *SHORT, f"reward.model={model}") as run:
        assert run.end() == 0, run.output()
        yield run


def test_rewards_of_steps_evaluations_and_records_are_the_weighted_sum_with_the_models_scores(
    undisturbed: Cluster,
) -> None:
    rows = undisturbed.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["reward/part/reward_model"] != 0
        summed = 0.5 * row["reward/part/reward_model"] + row["reward/part/exact_match"]
        assert row["reward/mean"] == pytest.approx(summed, abs=1e-5)
        assert row["reward/std"] > 0
    for row in (rows[1], rows[3]):
        parts = (row[f"eval/heldout/part/{name}"] for name in ("reward_model", "exact_match"))
        scored, matched = parts
        assert row["eval/heldout/reward"] == pytest.approx(0.5 * scored + matched, abs=1e-5)
        assert row["eval/heldout/rows_scored"] == 16
        assert "eval/heldout/accuracy" not in row
    records = [json.loads(line) for file in (undisturbed.path / FOLDER).rglob("*.jsonl") for line in file.open()]
    assert {record["state"] for record in records} == {"trained", "scored"}
    for record in records:
        parts = record["rewards"]
        assert record["reward"] == pytest.approx(0.5 * parts["reward_model"] + parts["exact_match"], abs=1e-5)


@pytest.mark.long
def test_kills_of_the_reward_model_change_no_bit(undisturbed: Cluster, model: Path, tmp_path: Path) -> None:
    kills = {0: ("reward-model",), 1: ("reward-model", "rollout"), 2: ("reward-model", "scheduler")}
    with parity.start(tmp_path, *SHORT, f"reward.model={model}") as run:
        for step, services in kills.items():
            run.wait_for(f"the commit of step {step}", lambda step=step: not step or parity.committed(run, step))
            for service in services:
                parity.kill(run, service)
        assert run.end() == 0, run.output()
        assert parity.differences(undisturbed.path, run.path) == []
        assert not processes_of(run.path)
        assert not run.run.shm.exists()


@pytest.mark.long
def test_a_critic_begins_with_the_head_of_a_reward_model(model: Path, tmp_path: Path) -> None:
    short = (
        "run.steps=2",
        "data.eval={}",
        "optimizer.lr=1.0e-9",
        "critic.optimizer.lr=1.0e-9",
        "critic.num_iterations=1",
    )
    means = {}
    for name, folder in (("own", None), ("reward", model)):
        (tmp_path / name).mkdir()
        given = () if folder is None else (f"critic.model={folder}",)
        with parity.start(tmp_path / name, *short, *given, small=parity.PPO) as run:
            assert run.end() == 0, run.output()
            means[name] = run.rows()[0]["critic/value_mean"]
    assert means["own"] == 0  # its head is new
    assert abs(means["reward"]) > 0.01


@pytest.mark.long
def test_a_reward_model_that_takes_turns_with_the_trainer_and_the_reference_gives_the_same_weights(
    undisturbed: Cluster, model: Path, tmp_path: Path
) -> None:
    together = "placement.colocate=[policy-trainer, reward-model, reference]"
    with parity.start(tmp_path, *SHORT, f"reward.model={model}", together) as run:
        assert run.end() == 0, run.output()
        assert parity.differences(undisturbed.path, run.path) == []
