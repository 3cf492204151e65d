"""Tests the story of a task, which is told from a journal that the real state machine wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.viewers.story import StoryEntry, as_lines, replayed
from proto.messages import CheckpointSaved, CommitStep, NextBatch, Outcome, StepBatch
from services.scheduler import run_state
from services.scheduler.events import ClearDone, Persist, SaveStep, SendClear, Tick
from services.scheduler.journal import Journal
from services.scheduler.journal_files import reading
from services.scheduler.run_state import RunState
from shared.rpc.errors import RpcError
from tests.unit.scheduler.bench import LEASE_S, Bench

TASK = "train/0/0"


class Recording:
    """A bench whose journal is written to a file, with one second between events."""

    def __init__(self, path: Path) -> None:
        self.bench = Bench()
        self.path = path
        self.journal = Journal(path, self.bench.plan.fingerprint())
        self._written = 0
        self._at = 1000.0

    def write(self) -> None:
        """Write the effects that have accumulated since the last call."""
        for effect in self.bench.effects[self._written :]:
            if isinstance(effect, Persist):
                self._at += 1
                self.journal.append(effect.event, self._at)
            elif isinstance(effect, SaveStep):
                self.journal.save(effect, self._at)
        self._written = len(self.bench.effects)
        self.journal.commit()

    def compact(self) -> None:
        self.write()
        self.journal.write_snapshot(run_state.dump(self.bench.machine.run))

    def acknowledge_clears(self) -> None:
        for effect in [each for each in self.bench.effects if isinstance(each, SendClear) and each.tracked]:
            self.bench.event(ClearDone(effect.store, len(effect.tasks)))

    def story(self, task_id: str = TASK) -> list[StoryEntry]:
        self.write()
        with reading(self.path) as recorded:
            parts = recorded.snapshot()
            state = run_state.load(self.bench.plan, parts) if parts else RunState(self.bench.plan)
            return replayed(state, task_id, recorded)[0]


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    made = Recording(tmp_path / "journal.sqlite")
    made.bench.start()
    made.bench.register("rollout", 0, 7)
    return made


def what(story: list[StoryEntry]) -> list[str]:
    return [each.what for each in story]


def facts(story: list[StoryEntry], name: str) -> dict[str, Any]:
    return next(each.facts for each in story if each.what == name)


def step(recording: Recording, number: int) -> None:
    while not isinstance(recording.bench.ask(NextBatch(driver=1, step=number)), StepBatch):
        recording.bench.complete(recording.bench.granted())
    recording.bench.ask(CommitStep(driver=1, step=number, metrics={"time/step": 0.25}))


def test_story_of_an_uninterrupted_task_has_every_event(recording: Recording) -> None:
    step(recording, 1)
    recording.bench.ask(CheckpointSaved(driver=1, step=1, kept=[1]))
    recording.acknowledge_clears()
    story = recording.story()
    assert what(story) == [
        *("admitted", "leased for rollout", "rollout completed", "ready", "batched", "trained"),
        *("to be cleared", "cleared", "collected"),
    ]
    assert facts(story, "leased for rollout") == {
        **{"lease": 1, "fence": 1, "lineage": 0, "version": 0},
        "with_others": 3,
    }
    assert facts(story, "rollout completed")["store"] == "batch-store/0"
    assert facts(story, "rollout completed")["bytes"] == 50
    assert facts(story, "trained") == {"fence": 1, "step": 1, "step_s": 0.25}
    assert [each.service for each in story if each.what == "cleared"] == ["batch-store/0"]
    times = [each.at for each in story if each.at is not None]
    assert times == sorted(times)
    assert len(list(as_lines(story))) == len(story)


def test_story_tells_why_a_task_was_sampled_again(recording: Recording) -> None:
    recording.bench.granted()
    recording.bench.event(Tick(), after_s=LEASE_S + 1)
    recording.bench.granted()
    recording.bench.register("rollout", 0, 8)
    grant = recording.bench.granted(life=8)
    recording.bench.complete(grant, outcome=Outcome.RETRY, life=8)
    story = recording.story()
    because = [each.facts["because"] for each in story if each.what == "to be sampled again"]
    assert because[:2] == ["lease 1 of rollout/0 made no progress", "rollout/0 restarted (pid 1)"]
    assert because[2].startswith("retry: ")
    assert [each.facts["fence"] for each in story if each.what == "leased for rollout"] == [1, 2, 3]


def test_story_includes_a_refused_completion(recording: Recording) -> None:
    late = recording.bench.granted()
    recording.bench.event(Tick(), after_s=LEASE_S + 1)
    recording.bench.complete(recording.bench.granted())
    refused = recording.bench.complete(late)
    assert refused
    story = recording.story()
    assert facts(story, "rollout refused")["fence"] == 1
    assert facts(story, "rollout refused")["lease"] == late.lease_id
    assert facts(story, "rollout completed")["fence"] == 2


def test_story_of_a_dropped_task_includes_the_reason(recording: Recording) -> None:
    recording.bench.complete(recording.bench.granted(), outcome=Outcome.DROP)
    story = recording.story()
    assert "dropped" in what(story)
    assert facts(story, "dropped")["because"].startswith("drop: ")


def test_story_after_a_compaction_begins_with_the_state_in_the_snapshot(recording: Recording) -> None:
    recording.bench.complete(recording.bench.granted())
    recording.compact()
    step(recording, 1)
    story = recording.story()
    assert what(story)[0] == "known from the journal's snapshot"
    assert story[0].at is None
    assert story[0].facts["state"] == "READY"
    assert what(story)[1:] == ["batched", "trained"]


def test_story_of_a_task_that_was_collected_before_the_compaction_keeps_its_steps(recording: Recording) -> None:
    step(recording, 1)
    recording.bench.ask(CheckpointSaved(driver=1, step=1, kept=[1]))
    recording.acknowledge_clears()
    recording.compact()
    assert recording.story() == []
    with reading(recording.path) as recorded:
        assert [(number, state) for number, state, _ in recorded.steps_of(TASK)] == [(1, "TRAINED")]
        assert recorded.steps_of("train/0/4") == []
        assert recorded.steps_of("rain/0/0") == []


def test_reading_does_not_change_a_live_journal_and_reports_an_invalid_journal(
    recording: Recording, tmp_path: Path
) -> None:
    recording.write()
    with reading(recording.path) as recorded:
        before = len(list(recorded.events()))
        recording.bench.complete(recording.bench.granted())
        recording.write()  # The reader does not block the writer and sees one fixed state.
        assert len(list(recorded.events())) == before
    (tmp_path / "other").write_text("not a database" * 100)
    with pytest.raises(RpcError, match="other: cannot be read"), reading(tmp_path / "other"):
        raise AssertionError("opened")
