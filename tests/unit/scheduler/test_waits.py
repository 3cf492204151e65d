"""Tests what the scheduler reports about the waits in a run."""

from __future__ import annotations

from proto.messages import CheckpointSaved, CommitStep, Heartbeat, NextBatch, StepBatch, Trouble, WaitKind, WaitRow
from tests.unit.scheduler.bench import LEASE_S, STORE, Bench, plan


def waits(bench: Bench, kind: WaitKind) -> list[WaitRow]:
    return [row for row in bench.machine.waits(bench.now) if row.kind == kind]


def test_waits_of_a_step_list_its_tasks_by_holder_and_stage_with_the_time_since_the_first_request() -> None:
    bench = Bench(plan=plan(block_tasks=2)).start()
    bench.register("rollout", 1, 7)
    bench.granted(most=1, instance=1)
    bench.ask(NextBatch(driver=1, step=1), wait_s=2.0)
    bench.now += 3.0
    bench.ask(NextBatch(driver=1, step=1), wait_s=2.0)
    leased, waiting = waits(bench, WaitKind.STEP)
    assert (leased.of, waiting.of) == ("rollout/1", "rollout")
    assert leased.what == "step 1 is waiting for 1 of 4 tasks that are leased to rollout/1 for rollout (train/0/0)"
    assert waiting.what.startswith("step 1 is waiting for 3 of 4 tasks that no rollout has leased for rollout")
    assert leased.since_s == waiting.since_s == 3.0


def test_no_step_waits_once_the_driver_has_its_batch() -> None:
    bench = Bench().start()
    bench.ask(NextBatch(driver=1, step=1))
    bench.now += 3.0
    while waits(bench, WaitKind.STEP):
        bench.complete(bench.granted())
    assert isinstance(bench.ask(NextBatch(driver=1, step=1)), StepBatch)
    bench.ask(CommitStep(driver=1, step=1, metrics={}))
    bench.ask(NextBatch(driver=1, step=2))
    assert {row.since_s for row in waits(bench, WaitKind.STEP)} <= {0.0}


def test_the_wait_for_a_lease_without_progress_names_its_holder_and_limit() -> None:
    bench = Bench().start()
    bench.register("rollout", 0, 7)
    bench.granted()
    bench.now += 4.0
    [row] = waits(bench, WaitKind.LEASE)
    assert (row.of, row.since_s, row.limit_s) == ("rollout/0", 4.0, LEASE_S)


def test_unacknowledged_clears_and_problems_are_reported_as_waits() -> None:
    bench = Bench().start()
    bench.register("rollout", 0, 7)
    for step in (1, 2):
        while not isinstance(bench.ask(NextBatch(driver=1, step=step)), StepBatch):
            bench.complete(bench.granted())
        bench.ask(CommitStep(driver=1, step=step, metrics={}))
    bench.ask(CheckpointSaved(driver=1, step=2, kept=[2]))
    bench.now += 6.0
    [clear] = waits(bench, WaitKind.CLEAR)
    assert (clear.of, clear.since_s) == (STORE, 6.0)
    beat = Heartbeat(
        service="rollout", instance=0, incarnation=7, state="READY", troubles=[Trouble("judge", "it is away")]
    )
    bench.ask(beat)
    [outage] = waits(bench, WaitKind.OUTAGE)
    assert (outage.what, outage.of) == ("nothing is leased: it is away", "rollout/0")


def test_low_room_is_reported_with_the_number_of_tasks_that_fit() -> None:
    bench = Bench(plan=plan(task_bytes=1000, weight_bytes=10, staleness=1)).start(limit_bytes=5200)
    [row] = waits(bench, WaitKind.ROOM)  # Three versions of 100 bytes are set aside.
    assert row.what.startswith("the stores have room for 4 of the 8 tasks that may be live")
    assert waits(Bench(plan=plan(task_bytes=10)).start(), WaitKind.ROOM) == []
