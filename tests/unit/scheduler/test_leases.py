"""Tests leases, fences and results on the state machine alone."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from proto.messages import (
    Complete,
    ErrorCode,
    Heartbeat,
    LeaseGrant,
    LeaseProgress,
    LeaseRequest,
    NextBatch,
    Outcome,
    TaskResult,
)
from services.scheduler import run_state
from services.scheduler.events import (
    Asked,
    Fail,
    Tick,
)
from services.scheduler.ledger import FAILURE
from services.scheduler.state import Scheduler
from services.scheduler.steps import HOPELESS_TASKS
from shared.stages import REFERENCE, ROLLOUT, TEACHER
from tests.unit.scheduler.bench import LEASE_S, STORE, Bench, ids, plan


def test_a_repeated_result_is_a_no_op_and_a_different_result_is_a_conflict() -> None:
    bench = Bench().start()
    grant = bench.granted()
    assert bench.complete(grant, content=5) == []
    before = run_state.dump(bench.machine.run)
    assert bench.complete(grant, content=5) == []
    assert {refusal.code for refusal in bench.complete(grant, content=6)} == {ErrorCode.CONFLICT}
    assert run_state.dump(bench.machine.run) == before


def test_loss_of_a_lease_raises_the_fence_deletes_the_old_result_and_refuses_a_late_one() -> None:
    bench = Bench().start()
    grant = bench.granted()
    bench.event(Tick(), after_s=LEASE_S + 1)
    assert bench.acknowledge() == {(task, 1) for task in ids(grant)}
    again = bench.granted(life=8, instance=1)
    assert ids(again) == ids(grant)
    assert {task.fence for task in again.batch.tasks} == {2}
    assert {refusal.code for refusal in bench.complete(grant)} == {ErrorCode.COLLECTED}
    assert bench.complete(again, life=8) == []


def test_a_result_counts_only_under_the_lease_that_holds_its_task() -> None:
    bench = Bench().start()
    mine, other = bench.granted(), bench.granted(instance=1)
    stolen = msgspec.structs.replace(mine, lease_id=other.lease_id)
    assert {refusal.code for refusal in bench.complete(stolen, content=6, final=False)} == {ErrorCode.LOST}
    assert bench.counts()["LEASED"] == len(ids(mine)) + len(ids(other))
    assert bench.complete(mine, content=5) == []
    assert bench.complete(other) == []


def test_a_result_from_an_earlier_incarnation_of_the_holder_is_refused() -> None:
    bench = Bench().start()
    grant = bench.granted(life=8)
    assert {refusal.code for refusal in bench.complete(grant, life=7)} == {ErrorCode.LOST}
    assert bench.counts()["LEASED"] == len(ids(grant))
    assert bench.complete(grant, life=8) == []


def test_a_result_counts_only_for_the_stage_of_its_lease() -> None:
    bench = Bench(plan(stages=(ROLLOUT, REFERENCE))).start()
    rollout = bench.granted()
    forged = msgspec.structs.replace(rollout, stage="reference")
    assert {refusal.code for refusal in bench.complete(forged, final=False)} == {ErrorCode.LOST}
    assert bench.complete(rollout) == []
    assert bench.counts()["ROLLED_OUT"] == len(ids(rollout))


def test_a_fence_that_was_never_granted_is_a_conflict() -> None:
    bench = Bench().start()
    grant = bench.granted(most=1)
    result = TaskResult(ids(grant)[0], 9, Outcome.DONE, STORE, 1, 0, 0, 0)
    reply = bench.ask(Complete(lease_id=grant.lease_id, stage="rollout", incarnation=7, results=[result], final=False))
    assert [refusal.code for refusal in reply.refused] == [ErrorCode.CONFLICT]


def test_only_progress_renews_a_lease() -> None:
    bench = Bench().start()
    bench.register("rollout", 0, 7)
    moving, stuck = bench.granted(most=1), bench.granted(most=1)
    for beat in range(1, 8):
        bench.event(Tick(), after_s=LEASE_S / 4)
        leases = [LeaseProgress(moving.lease_id, beat), LeaseProgress(stuck.lease_id, 1)]
        ack = bench.ask(Heartbeat(service="rollout", instance=0, incarnation=7, state="READY", leases=leases))
    assert list(ack.lost_leases) == [stuck.lease_id]


def test_a_new_incarnation_frees_the_leases_of_the_old_one_and_ends_its_deferred_call() -> None:
    bench = Bench().start()
    bench.register("rollout", 0, 7)
    first, second = bench.granted(), bench.granted()
    assert bench.lease() is None
    held = bench.calls
    bench.register("rollout", 0, 8)
    failed = bench.answer(bench.effects, held)
    assert isinstance(failed, Fail)
    assert failed.code == ErrorCode.LOST
    assert ids(bench.granted(life=8)) == ids(first)
    assert ids(bench.granted(life=8)) == ids(second)


@pytest.mark.parametrize("untouched", [True, False])
def test_leases_handed_back_count_as_attempts_unless_their_tasks_are_untouched(untouched: bool) -> None:
    bench = Bench().start()
    for _ in range(3 * FAILURE):
        grant = bench.granted(most=1)
        assert ids(grant) == ["train/0/0"]
        bench.ask(Complete(lease_id=grant.lease_id, stage="rollout", incarnation=7, results=[], untouched=untouched))
    assert (ids(bench.granted(most=1)) == ["train/0/0"]) == untouched


@pytest.mark.parametrize("untouched", [True, False])
def test_expired_leases_count_as_attempts_unless_their_tasks_are_untouched(untouched: bool) -> None:
    bench = Bench().start()
    bench.register("rollout", 0, 7)
    for _ in range(3):
        grant = bench.granted(most=1)
        assert ids(grant) == ["train/0/0"]
        leases = [LeaseProgress(grant.lease_id, 1, untouched)]
        bench.ask(Heartbeat(service="rollout", instance=0, incarnation=7, state="READY", leases=leases))
        bench.event(Tick(), after_s=LEASE_S + 1)
    assert (ids(bench.granted(most=1)) == ["train/0/0"]) == untouched
    replayed = Scheduler(bench.plan, lease_s=LEASE_S, incarnation=100)
    for event in bench.journal:
        replayed.replay(event)
    assert run_state.dump(replayed.run) == run_state.dump(bench.machine.run)


def test_a_task_is_dropped_after_its_attempts_and_the_next_step_continues_without_it() -> None:
    bench = Bench().start()
    for attempt in range(3):
        grant = bench.granted(most=1)
        assert (ids(grant), grant.batch.tasks[0].fence) == (["train/0/0"], attempt + 1)
        bench.complete(grant, outcome=Outcome.RETRY)
    batch = bench.step(1)
    assert [task.task_id for task in batch.batch.tasks] == [f"train/0/{row}" for row in (1, 2, 3, 4)]
    assert batch.dropped == 1
    assert ("train/0/0", 3) in bench.acknowledge()


def test_a_run_whose_tasks_are_all_dropped_ends_and_continues_when_it_is_resumed() -> None:
    bench = Bench().start()
    assert bench.ask(NextBatch(driver=1, step=1)) is None
    waiting = bench.calls
    for _ in range(HOPELESS_TASKS - 1):
        bench.complete(bench.granted(most=1), outcome=Outcome.DROP)
    assert bench.answer(bench.effects, waiting) is None
    grant = bench.granted(most=1)
    bench.complete(grant, outcome=Outcome.DROP)
    told = bench.answer(bench.effects, waiting)
    assert isinstance(told, Fail)
    assert f"step 1: {HOPELESS_TASKS} tasks in a row were dropped; the last was {ids(grant)[-1]}: " in told.message
    resumed = Bench(journal=list(bench.journal))
    for event in bench.journal:
        resumed.machine.replay(event)
    resumed.machine.begin(resumed.config, resumed.now)
    assert len(resumed.step(1).batch.tasks) == 4


def test_a_training_task_with_only_one_surviving_sample_is_dropped() -> None:
    bench = Bench().start()
    grant = bench.granted(most=1)
    assert bench.complete(grant, samples=1) == []
    assert bench.counts()["DROPPED"] == 1
    bench.acknowledge()
    assert (bench.counts()["DROPPED"], bench.counts()["COLLECTED"]) == (0, 1)


def test_tasks_left_out_of_a_final_completion_are_leased_again() -> None:
    bench = Bench().start()
    grant = bench.granted(most=4)
    bench.complete(grant, tasks=1)
    assert ids(bench.granted(most=3)) == ids(grant)[1:]


def test_a_retried_request_gets_the_same_grant() -> None:
    bench = Bench().start()
    request = LeaseRequest(stage="rollout", service="rollout", instance=0, incarnation=7, max_tasks=2)
    first = bench.answer(bench.event(Asked("a", request, 5.0, (7, 41))), "a")  # type: ignore[arg-type]
    again = bench.answer(bench.event(Asked("b", request, 5.0, (7, 41))), "b")  # type: ignore[arg-type]
    other = bench.answer(bench.event(Asked("c", request, 5.0, (7, 42))), "c")  # type: ignore[arg-type]
    assert (again.lease_id, ids(again)) == (first.lease_id, ids(first))
    assert other.lease_id != first.lease_id


def test_scalars_that_do_not_match_the_samples_are_refused_and_change_nothing() -> None:
    bench = Bench().start()
    grant = bench.granted(most=1)
    before = run_state.dump(bench.machine.run)
    result = TaskResult(ids(grant)[0], 1, Outcome.DONE, STORE, 1, 2, 0, 0)
    bad = {"reward": np.zeros(3, np.float32)}
    reply = bench.ask(Complete(lease_id=grant.lease_id, stage="rollout", incarnation=7, results=[result], scalars=bad))
    assert isinstance(reply, Fail)
    assert reply.code == ErrorCode.BAD_REQUEST
    assert run_state.dump(bench.machine.run) == before


def test_a_reference_lease_carries_the_handles_of_accepted_rollouts_only() -> None:
    bench = Bench(plan(stages=(ROLLOUT, REFERENCE))).start()
    assert bench.lease("reference") is None
    held = bench.calls
    rollout = bench.granted(most=2)
    bench.complete(rollout, tasks=1, final=False)
    grant = bench.answer(bench.effects, held)
    assert ids(grant) == ids(rollout)[:1]
    assert [part.stage for part in grant.batch.parts] == ["rollout"]
    assert grant.batch.stores == [STORE]
    assert grant.batch.tasks[0].stores == [0]
    assert bench.counts()["ROLLED_OUT"] == 1
    bench.complete(grant)
    assert bench.counts()["READY"] == 1


def test_a_task_passes_the_stages_of_several_frozen_models_one_after_the_other() -> None:
    bench = Bench(plan(stages=(ROLLOUT, REFERENCE, TEACHER))).start()
    first, second = bench.granted(most=1), bench.granted(most=1)
    bench.complete(first)
    bench.complete(second)
    by_reference = bench.granted("reference", most=1)
    by_teacher = bench.granted("teacher", most=1)
    assert (ids(by_reference), ids(by_teacher)) == (
        ids(first),
        ids(second),
    )  # each model scores what the other does not
    assert bench.lease("teacher", most=1) is None
    held = bench.calls
    bench.complete(by_reference)
    then_by_teacher = bench.answer(bench.effects, held)
    assert ids(then_by_teacher) == ids(first)
    bench.complete(by_teacher)
    then_by_reference = bench.granted("reference", most=1)
    assert ids(then_by_reference) == ids(second)
    assert bench.counts()["READY"] == 0
    bench.complete(then_by_teacher)
    bench.complete(then_by_reference)
    assert bench.counts()["READY"] == 2


def test_tasks_of_a_lost_reference_lease_are_sampled_again() -> None:
    bench = Bench(plan(stages=(ROLLOUT, REFERENCE))).start()
    rollout = bench.granted(most=1)
    bench.complete(rollout)
    bench.granted("reference")
    bench.event(Tick(), after_s=LEASE_S + 1)
    assert bench.lease("reference") is None
    again = bench.granted(most=1)
    assert (ids(again), again.batch.tasks[0].fence) == (ids(rollout), 2)


def test_a_deferred_call_is_answered_before_its_deadline() -> None:
    bench = Bench(plan()).start()
    bench.register("rollout", 0, 7)
    while isinstance(bench.lease(), LeaseGrant):
        pass
    held = bench.calls
    effects = bench.event(Tick(), after_s=4.6)
    failed = bench.answer(effects, held)
    assert isinstance(failed, Fail)
    assert failed.code == ErrorCode.NOT_READY
