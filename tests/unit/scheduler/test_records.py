"""Tests, on the state machine, how tasks that have ended are kept for the recorder."""

from __future__ import annotations

from typing import Any

import pytest

from proto.messages import (
    CommitStep,
    EndedTask,
    GetRunInfo,
    NextBatch,
    Outcome,
    PutTask,
    SamplesDue,
    TakenBack,
    TakeSamples,
    TaskState,
)
from services.scheduler import run_state
from services.scheduler.ended import HOLD_S, RECORD_S
from services.scheduler.events import Configure, Fail, Recording, Tick
from services.scheduler.plan import EvalPlan
from shared.samples.text import Choice
from tests.sim.invariants import check_invariants
from tests.unit.scheduler.bench import STORE, Bench, plan

ALL = Recording(Choice(every=1, per_step=4, tasks_per_step=4), hold_tasks=4)


def bench(recording: Recording = ALL, *, at_commit: bool = False, **changes: Any) -> Bench:
    return Bench(plan(**changes), Configure(5, 3, 2, at_commit, recording)).start()


def ask(bench: Bench, *taken: EndedTask, rewinds: int = 0, final: bool = False) -> Any:
    done = [PutTask(each.task_id, each.fence) for each in taken]
    return bench.ask(TakeSamples(incarnation=5, taken=done, rewinds=rewinds, final=final), wait_s=4.0)


def due(bench: Bench, *taken: EndedTask) -> list[EndedTask]:
    answer = ask(bench, *taken, final=True)
    assert isinstance(answer, SamplesDue), answer
    return list(answer.tasks)


def test_the_tasks_of_a_committed_step_are_due_until_they_are_taken() -> None:
    b = bench()
    b.step(1)
    first = due(b)
    assert [each.task_id for each in first] == [f"train/0/{row}" for row in range(4)]
    assert {(each.state, each.step, each.samples, each.store) for each in first} == {("trained", 1, 2, STORE)}
    assert due(b) == first
    assert due(b, *first[:3]) == first[3:]
    assert due(b, first[3]) == []


def test_only_chosen_tasks_and_steps_are_due() -> None:
    choice = Choice(every=2, per_step=2, tasks_per_step=4)
    b = bench(Recording(choice, hold_tasks=4))
    b.step(1)
    assert due(b) == []
    ids = [task.task_id for task in b.step(2).batch.tasks]
    assert [each.task_id for each in due(b)] == [each for each in ids if choice.takes(each)]


def test_a_filtered_task_is_cleared_only_after_the_recorder_has_taken_it() -> None:
    b = bench(filter_limit=4)
    assert ask(b) is None
    grant = b.granted(most=1)
    b.complete(grant, reward=1.0)
    assert b.acknowledge() == set()
    answered = b.answer(b.effects, 4)
    assert isinstance(answered, SamplesDue)
    [ended] = answered.tasks
    assert (ended.state, ended.step, ended.samples) == ("filtered", 1, 2)
    assert ended.reason.startswith("filtered: all 2 rewards are 1.0")
    assert due(b, ended) == []
    assert b.acknowledge() == {(ended.task_id, 1)}
    assert b.machine.run.ledger.tasks.find(ended.task_id) is None
    check_invariants(b.machine.run)


def test_a_task_dropped_without_shards_is_not_kept_but_its_reason_is_due() -> None:
    b = bench()
    grant = b.granted(most=1)
    b.complete(grant, outcome=2, store="")
    assert b.acknowledge() == {("train/0/0", 1)}
    [ended] = due(b)
    assert (ended.state, ended.samples, ended.store) == ("dropped", 0, "")


@pytest.mark.parametrize(("evals", "state"), [((), "dropped"), ((EvalPlan("held", [0], 2, 1),), "scored")])
def test_the_text_of_a_task_that_the_rollout_dropped_is_kept_until_the_recorder_has_taken_it(
    evals: tuple[EvalPlan, ...], state: str
) -> None:
    b = bench(evals=evals)
    assert ask(b) is None
    grant = b.granted(most=1)
    b.complete(grant, outcome=Outcome.DROP, samples=0, failed=2)
    assert b.acknowledge() == set()
    answered = b.answer(b.effects, 4)
    assert isinstance(answered, SamplesDue)
    ended = answered.tasks[0]
    assert (ended.state, ended.samples, ended.store) == (state, 0, STORE)
    assert b.complete(grant, outcome=Outcome.DROP, samples=0, failed=2) == []  # the rollout repeats its request
    check_invariants(b.machine.run)
    due(b, ended)
    assert b.acknowledge() == {(ended.task_id, 1)}
    check_invariants(b.machine.run)


def test_a_task_that_has_ended_is_kept_only_for_a_limited_time() -> None:
    b = bench(filter_limit=4)
    assert ask(b) is None
    b.complete(b.granted(most=1), reward=1.0)
    b.event(Tick())
    b.event(Tick(), after_s=HOLD_S / 2)
    assert ask(b, final=True).lost == 0
    b.event(Tick(), after_s=HOLD_S / 2)
    assert b.acknowledge() == set()
    b.event(Tick(), after_s=0.2)
    assert b.acknowledge() == {("train/0/0", 1)}
    assert ask(b, final=True).lost == 1
    check_invariants(b.machine.run)


def test_the_scheduler_does_not_wait_for_a_recorder_that_is_away() -> None:
    b = bench(filter_limit=4)
    b.event(Tick(), after_s=HOLD_S + 1)
    b.complete(b.granted(most=1), reward=1.0)
    b.event(Tick(), after_s=0.1)
    assert b.acknowledge() == {("train/0/0", 1)}
    assert b.machine.run.ledger.records.lost == 1


def test_the_oldest_tasks_are_released_when_they_take_up_room_that_others_need() -> None:
    b = bench(Recording(ALL.choice, hold_tasks=1), filter_limit=4, task_bytes=120)
    assert ask(b) is None
    for _ in range(3):  # each has 50 bytes
        b.complete(b.granted(most=1), reward=1.0)
    assert b.acknowledge() == {("train/0/0", 1)}
    assert b.machine.run.ledger.records.lost == 1
    assert [each.task_id for each in due(b)] == ["train/0/1", "train/0/2"]
    check_invariants(b.machine.run)


def test_trained_tasks_collected_at_their_commit_wait_for_the_recorder() -> None:
    b = bench(at_commit=True)
    assert ask(b) is None
    b.step(1)
    assert not any(task.startswith("train/") for task, _ in b.acknowledge())
    tasks = due(b)
    assert [each.step for each in tasks] == [1, 1, 1, 1]
    due(b, *tasks)
    assert {task for task, _ in b.acknowledge()} >= {f"train/0/{row}" for row in range(4)}
    check_invariants(b.machine.run)


def test_answers_to_the_recorder_are_seconds_apart_if_no_collection_waits_for_it() -> None:
    b = bench()
    assert ask(b) is None
    b.step(1)
    answers = b.answer(b.effects, 4)
    assert isinstance(answers, SamplesDue)
    assert ask(b, *answers.tasks) is None
    waiting = b.calls
    b.step(2)
    assert b.answer(b.effects, waiting) is None
    b.event(Tick(), after_s=RECORD_S)
    assert isinstance(b.answer(b.effects, waiting), SamplesDue)


def test_a_request_from_the_recorder_expires_if_no_task_is_due() -> None:
    b = bench()
    assert ask(b) is None
    waiting = b.calls
    b.event(Tick(), after_s=4.0)
    assert isinstance(b.answer(b.effects, waiting), Fail)


def test_samples_of_rolled_back_steps_are_not_due_and_the_recorder_is_told_once_to_discard_them() -> None:
    b = bench(filter_limit=1)
    b.complete(b.granted(most=1), reward=1.0)
    b.step(1)
    b.step(2)
    run = b.machine.run
    assert due(b)[0].state == "filtered"
    for task in run.history.batches[1]:
        task.lost = True
    b.ask(GetRunInfo(driver=1, reload=True))
    answer = ask(b, final=True)
    assert answer.tasks == []
    assert answer.rewinds == [TakenBack(0, 0)]
    assert ask(b, rewinds=1, final=True).rewinds == []
    check_invariants(run)


def test_a_replayed_journal_and_a_snapshot_give_the_same_due_tasks() -> None:
    b = bench(filter_limit=4)
    assert ask(b) is None
    b.complete(b.granted(most=1), reward=1.0)
    b.step(1) if b.machine.run.ledger.window.finished else None
    again = run_state.load(b.plan, run_state.dump(b.machine.run))
    assert again.ledger.records.due == b.machine.run.ledger.records.due
    assert again.ledger.records.held_bytes == b.machine.run.ledger.records.held_bytes > 0
    other = Bench(b.plan, b.config)
    for event in b.journal[1:]:
        other.machine.replay(event)
    assert run_state.dump(other.machine.run) == run_state.dump(b.machine.run)


@pytest.mark.parametrize("step", [1])
def test_a_run_without_a_recorder_keeps_nothing(step: int) -> None:
    b = Bench(plan(filter_limit=4), Configure(5, 3, 2, False)).start()
    b.complete(b.granted(most=1), reward=1.0)
    assert b.acknowledge() == {("train/0/0", 1)}
    assert due(b) == []
    assert b.machine.run.ledger.tasks.counts[TaskState.DROPPED] == 0


def test_a_repeated_commit_does_not_record_its_step_again() -> None:
    b = bench()
    b.step(1)
    before = due(b)
    b.ask(CommitStep(driver=1, step=1, metrics={}))
    assert due(b) == before
    assert b.ask(NextBatch(driver=1, step=1)).step == 1
