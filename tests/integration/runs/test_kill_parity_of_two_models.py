"""Tests that a deterministic run with a critic gives bit-identical results in both models when processes are killed at
moments at which the two models are in different states.

To hold a moment, one model's rank is stopped at a named point while the other one continues.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.points import CRITIC, WORKER, Point, with_points
from tests.integration import parity_run as parity
from tests.integration.tiny.harness import processes_of
from tests.integration.whole_cluster import Cluster

pytestmark = pytest.mark.timeout(400)

CALLS = "services.policy_trainer.worker.calls.training"
POLICY_RANK, CRITIC_RANK = "policy-trainer-worker", "critic"
PROCESSES = {POLICY_RANK: WORKER, CRITIC_RANK: CRITIC}
RUN = (*parity.PPO, "data.eval={}", "checkpoint.keep_last=1")


@dataclass(frozen=True)
class Moment:
    """A moment of a step: the rank `ahead` has taken its last update of the step, and the rank `behind` is stopped
    within its own updates. Then `killed` are killed, and `behind` continues."""

    step: int
    ahead: str
    behind: str
    killed: Sequence[str]

    def points(self, folder: Path) -> list[Point]:
        last = {"step": self.step, "last": True}
        within = {"step": self.step, "last": False}
        name = "TrainingCalls._optim_step"
        done, stopped = (str(folder / f"{self.step}-{state}") for state in ("done", "stopped"))
        return [
            Point(PROCESSES[self.ahead], CALLS, name, "after", signal=0, fields=last, mark=done),
            Point(PROCESSES[self.behind], CALLS, name, signal=signal.SIGSTOP, fields=within, mark=stopped),
        ]

    def act(self, run: Cluster, folder: Path) -> None:
        for state in ("done", "stopped"):
            run.wait_for(f"step {self.step} {state}", (folder / f"{self.step}-{state}").exists)
        assert not parity.committed(run, self.step)
        behind = parity.process_of(run, self.behind)
        for service in self.killed:
            parity.kill(run, service)
        if self.behind not in self.killed:
            os.kill(behind, signal.SIGCONT)
        run.wait_for(f"the commit of step {self.step}", lambda: parity.committed(run, self.step))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with parity.start(tmp_path_factory.mktemp("undisturbed"), small=RUN) as run:
        assert run.end() == 0, run.output()
        yield run.path


def check(run: Cluster, undisturbed: Path) -> None:
    """Check that a run has ended with the results of `undisturbed`, trained each task once, and left nothing behind."""
    assert run.end() == 0, run.output()
    found = parity.bits(run.path)
    assert {"export/model.safetensors", "export-critic/model.safetensors"} <= found.keys()
    assert f"checkpoints/critic/step-{parity.STEPS}/optimizer.safetensors" in found
    assert parity.differences(undisturbed, run.path) == []
    assert [row["step"] for row in run.rows()] == list(range(1, parity.STEPS + 1))
    trained = [name for state, names in run.journaled_steps().values() if state == "TRAINED" for name in names]
    assert len(trained) == len(set(trained)) == 16 * parity.STEPS
    for folder in (run.run.checkpoints, run.run.checkpoints / "critic"):
        assert [path.name for path in folder.glob("*step-*")] == [f"step-{parity.STEPS}"]
    assert not processes_of(run.path)
    assert not run.run.shm.exists()
    assert not run.run.sockets.exists()


@pytest.mark.long
def test_kills_while_one_model_is_ahead_of_the_other_give_bit_identical_results(
    undisturbed: Path, tmp_path: Path
) -> None:
    """A process is killed in each of six steps: the critic while it has values that it has not stored, and within its
    updates; each model after its last update, while the other is within its own; and the driver in both cases."""
    moments = [
        Moment(4, ahead=CRITIC_RANK, behind=POLICY_RANK, killed=[CRITIC_RANK]),
        Moment(5, ahead=CRITIC_RANK, behind=POLICY_RANK, killed=["policy-trainer"]),
        Moment(6, ahead=POLICY_RANK, behind=CRITIC_RANK, killed=[POLICY_RANK]),
        Moment(7, ahead=POLICY_RANK, behind=CRITIC_RANK, killed=["policy-trainer"]),
    ]
    points = [point for moment in moments for point in moment.points(tmp_path)]
    points += kills_within(CRITIC, tmp_path)
    with parity.start(tmp_path, small=RUN, environment=with_points({}, *points)) as run:
        for moment in moments:
            moment.act(run, tmp_path)
        check(run, undisturbed)
        lost = [line for line in run.log("policy-trainer") if line["event"] == "workers lost, resuming"]
    assert len(lost) >= 4
    assert all((tmp_path / name).exists() for name in ("values", "update"))


def kills_within(process: str, folder: Path) -> list[Point]:
    """Return the points at which `process` is killed: in step 2 after its forward pass, in step 3 before its second
    update."""
    return [
        Point(process, CALLS, "put_results", nth=2, mark=str(folder / "values")),
        Point(process, CALLS, "TrainingCalls._update", nth=2, fields={"step": 3}, mark=str(folder / "update")),
    ]


@pytest.mark.long
def test_kills_of_a_policy_rank_during_its_passes_give_bit_identical_results(undisturbed: Path, tmp_path: Path) -> None:
    with parity.start(tmp_path, small=RUN, environment=with_points({}, *kills_within(WORKER, tmp_path))) as run:
        check(run, undisturbed)
    assert all((tmp_path / name).exists() for name in ("values", "update"))


@pytest.mark.long
@pytest.mark.parametrize(
    "killed",
    [
        ("batch-store",),
        ("scheduler",),
        ("batch-store", "scheduler"),
        (CRITIC_RANK, POLICY_RANK),
        (CRITIC_RANK, "policy-trainer", "rollout"),
        (POLICY_RANK, "policy-trainer", "scheduler"),
    ],
    ids=" and ".join,
)
def test_several_kills_while_one_model_is_ahead_of_the_other_give_bit_identical_results(
    killed: tuple[str, ...], undisturbed: Path, tmp_path: Path
) -> None:
    moments = [
        Moment(3, ahead=CRITIC_RANK, behind=POLICY_RANK, killed=killed),
        Moment(6, ahead=POLICY_RANK, behind=CRITIC_RANK, killed=killed),
    ]
    points = [point for moment in moments for point in moment.points(tmp_path)]
    with parity.start(tmp_path, small=RUN, environment=with_points({}, *points)) as run:
        for moment in moments:
            moment.act(run, tmp_path)
        check(run, undisturbed)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("overrides", [("checkpoint.memory_every=null",), ("services.critic.workers=2",)], ids=str)
def test_kills_with_other_settings_give_bit_identical_results(overrides: tuple[str, ...], tmp_path: Path) -> None:
    """Without snapshots, both models replay the steps after their common checkpoint."""
    small = (*RUN, *overrides)
    moment = Moment(5, ahead=CRITIC_RANK, behind=POLICY_RANK, killed=[CRITIC_RANK])
    with parity.start(tmp_path / "undisturbed", small=small) as undisturbed:
        assert undisturbed.end() == 0, undisturbed.output()
    environment = with_points({}, *moment.points(tmp_path), *kills_within(CRITIC, tmp_path))
    with parity.start(tmp_path / "killed", small=small, environment=environment) as run:
        moment.act(run, tmp_path)
        check(run, undisturbed.path)
