"""Tests, on the state machine, which policy version the scheduler includes in each lease when the reference is
refreshed."""

from __future__ import annotations

from proto.messages import CheckpointSaved, CommitStep, GetRunInfo, NextBatch, StepBatch
from services.scheduler.events import Configure
from shared.stages import REFERENCE, ROLLOUT
from tests.unit.scheduler.bench import Bench, ids, plan

EVERY = 2


def bench(steps: int = 9) -> Bench:
    """Return a run of four tasks per step, scored by a reference that is refreshed after every second step."""
    made = Bench(plan(stages=(ROLLOUT, REFERENCE), reference_every=EVERY), Configure(steps, 3, 2, False))
    return made.start()


def roll_out(made: Bench) -> None:
    made.complete(made.granted())


def score(made: Bench, most: int = 4) -> int:
    """Score a block; return the step of the version that scored it, or 0 for the first model."""
    grant = made.granted("reference", most)
    assert made.complete(grant) == []
    return grant.weights.step if grant.weights is not None else 0


def train(made: Bench, step: int) -> None:
    batch = made.ask(NextBatch(driver=1, step=step))
    assert isinstance(batch, StepBatch), batch
    made.ask(CommitStep(driver=1, step=step, metrics={}))
    made.publish(step)


def test_all_tasks_of_a_step_are_scored_by_the_version_of_its_refresh() -> None:
    made = bench()
    found = []
    for step in range(1, 6):
        roll_out(made)
        found.append(score(made))
        train(made, step)
    assert found == [0, 0, 2, 2, 4]


def test_a_task_of_the_step_after_a_refresh_waits_for_its_version_and_no_block_spans_two_versions() -> None:
    made = bench()
    roll_out(made)
    score(made)
    train(made, 1)
    roll_out(made)  # These tasks belong to step 2.
    roll_out(made)  # These tasks belong to step 3, one version ahead.
    grant = made.granted("reference", most=100)
    assert len(ids(grant)) == 4  # The block contains only tasks of step 2.
    assert grant.weights is None
    made.complete(grant)
    assert made.lease("reference", most=100) is None
    held = made.calls
    train(made, 2)
    answer = made.answer(made.effects, held)  # The answer comes as soon as the version is published.
    assert answer.weights.step == EVERY
    assert len(ids(answer)) == 4


def test_the_version_of_the_reference_is_kept_while_those_of_the_policy_are_collected() -> None:
    made = bench()
    for step in range(1, 6):
        roll_out(made)
        score(made)
        train(made, step)
    run = made.machine.run
    assert run.versions.at_step(4) is not None
    assert run.versions.at_step(3) is None
    # Until a checkpoint covers the steps, a rewind to the first step may need the older refresh again.
    assert run.versions.at_step(2) is not None
    made.ask(CheckpointSaved(driver=1, step=5, kept=[5]))
    roll_out(made)
    score(made)
    train(made, 6)
    assert run.versions.at_step(2) is None
    assert run.versions.at_step(4) is not None


def test_after_a_return_to_a_step_before_the_refresh_the_first_model_scores_again() -> None:
    made = Bench(
        plan(stages=(ROLLOUT, REFERENCE), reference_every=EVERY), Configure(9, 3, 2, True)
    ).start()  # With collection at each commit, no step can be replayed.
    for step in (1, 2):
        roll_out(made)
        score(made)
        train(made, step)
        made.ask(CheckpointSaved(driver=1, step=1, kept=[1]))
    roll_out(made)
    assert score(made) == EVERY
    info = made.ask(GetRunInfo(driver=1, reload=True, loaded_step=1))
    assert info.committed_step == 1
    made.publish_again(1)
    roll_out(made)  # The fence is new, because the scores made with the later version were collected with their shards.
    assert score(made) == 0
    train(made, 2)
    roll_out(made)
    assert score(made) == EVERY


def test_a_version_lost_with_its_store_is_requested_from_its_checkpoint() -> None:
    made = bench()
    for step in (1, 2, 3):
        roll_out(made)
        score(made)
        train(made, step)
        made.ask(CheckpointSaved(driver=1, step=step, kept=[step]))
    made.machine.run.versions.forget("batch-store/0")
    info = made.ask(GetRunInfo(driver=1, reload=True, loaded_step=3))
    assert (info.committed_step, info.reference_step) == (3, EVERY)
    made.publish_again(EVERY)
    made.publish_again(3)
    assert made.ask(GetRunInfo(driver=1)).reference_step == 0
    roll_out(made)
    assert score(made) == EVERY
