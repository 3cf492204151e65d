"""If a store has lost shards, it confirms the loss, and the tasks are sampled again, which does not count as an
attempt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from proto.messages import (
    Ack,
    CheckpointSaved,
    CommitStep,
    ErrorCode,
    GetRunInfo,
    LeaseGrant,
    NextBatch,
    Outcome,
    PutTask,
    ReportShards,
    StepBatch,
    TaskHandle,
)
from services.scheduler import audits, run_state
from services.scheduler.events import Checked, CheckShards, Effect, Fail, Listed, RequestInventory, Tick, WriteRow
from services.scheduler.plan import EvalPlan
from services.scheduler.run_state import RunState
from shared.stages import REFERENCE, ROLLOUT
from tests.unit.scheduler.bench import STORE, Bench, ids, plan

CONTENT = 5
"""Content hash of all results of `Bench.complete`."""


def named(tasks: Sequence[TaskHandle]) -> list[PutTask]:
    return [PutTask(task.task_id, task.fence) for task in tasks]


def ordered(effects: Sequence[Effect]) -> list[CheckShards]:
    return [effect for effect in effects if isinstance(effect, CheckShards)]


def intact(order: CheckShards, *lost: str) -> dict[tuple[str, int], list[int]]:
    """Return the answer of a store that has all claimed shards except those of the tasks in `lost`."""
    claims = [claim for claim in order.claims if claim.task.task_id not in lost]
    return {(claim.task.task_id, claim.task.fence): list(claim.hashes) for claim in claims}


def report(bench: Bench, tasks: Sequence[PutTask], *lost: str) -> Any:
    """Report tasks to a scheduler whose store has lost the tasks in `lost`. Return the answer."""
    answer = bench.ask(ReportShards(store=STORE, tasks=list(tasks)))
    call = bench.calls
    if answer is not None:
        return answer
    [order] = ordered(bench.effects[-1:])
    return bench.answer(bench.event(Checked(order, intact(order, *lost))), call)


def replays_alike(bench: Bench) -> bool:
    copy = RunState(bench.plan)
    for event in bench.journal:
        copy.apply(event)
    packed = run_state.dump(bench.machine.run)
    return run_state.dump(copy) == packed == run_state.dump(run_state.load(bench.plan, packed))


def fences(batch: StepBatch | LeaseGrant) -> dict[str, int]:
    return {task.task_id: task.fence for task in batch.batch.tasks}


def test_a_ready_task_whose_shards_are_lost_is_sampled_again_without_counting_an_attempt() -> None:
    bench = Bench().start()
    grant = bench.granted()
    bench.complete(grant)
    lost = ids(grant)[1]
    for fence in range(1, 8):  # This exceeds the allowed number of failed attempts.
        assert isinstance(report(bench, [PutTask(lost, fence)], lost), Ack)
        again = bench.granted()
        assert fences(again) == {lost: fence + 1}
        bench.complete(again)
    assert bench.machine.run.ledger.tasks[lost].failures == 0
    assert bench.counts()["READY"] == 4
    assert replays_alike(bench)


def test_a_report_that_the_store_does_not_confirm_changes_nothing() -> None:
    bench = Bench().start()
    grant = bench.granted()
    bench.complete(grant)
    before = run_state.dump(bench.machine.run)
    assert isinstance(report(bench, named(grant.batch.tasks)), Ack)
    assert run_state.dump(bench.machine.run) == before


def test_a_report_is_answered_once_the_store_has_checked_its_shards_and_fails_if_the_store_is_away() -> None:
    bench = Bench().start()
    bench.complete(grant := bench.granted())
    assert bench.ask(ReportShards(store=STORE, tasks=named(grant.batch.tasks))) is None
    [order] = ordered(bench.effects)
    answer = bench.answer(bench.event(Checked(order, None)), bench.calls)
    assert isinstance(answer, Fail)
    assert answer.code == ErrorCode.NOT_READY
    assert bench.counts()["READY"] == 4


@pytest.mark.parametrize("entry", [PutTask("train/9/9", 1), PutTask("train/0/0", 9), PutTask("weights/7/7", 1)])
def test_a_report_about_outdated_shards_is_answered_at_once(entry: PutTask) -> None:
    bench = Bench().start()
    bench.complete(bench.granted())
    assert isinstance(bench.ask(ReportShards(store=STORE, tasks=[entry])), Ack)
    assert ordered(bench.effects) == []


def test_a_version_is_not_lost_because_of_a_report_about_a_store_that_does_not_hold_it() -> None:
    bench = Bench().start()
    bench.register("batch-store", 1, 1, limit_bytes=1 << 30)
    assert isinstance(bench.ask(ReportShards(store="batch-store/1", tasks=[PutTask("weights/0/0", 1)])), Ack)
    assert ordered(bench.effects) == []


def test_a_report_with_a_malformed_name_is_refused() -> None:
    bench = Bench().start()
    assert bench.ask(ReportShards(store=STORE, tasks=[PutTask("nonsense", 1)])).code == ErrorCode.BAD_REQUEST


def test_a_task_under_a_live_lease_is_not_affected_by_a_loss() -> None:
    bench = Bench().start()
    grant = bench.granted()
    assert isinstance(report(bench, named(grant.batch.tasks), *ids(grant)), Ack)
    assert bench.complete(grant) == []


def test_a_task_whose_reference_result_is_lost_is_sampled_again() -> None:
    bench = Bench(plan(stages=(ROLLOUT, REFERENCE))).start()
    bench.complete(bench.granted())
    scored = bench.granted("reference")
    bench.complete(scored)
    lost = ids(scored)[0]
    report(bench, [PutTask(lost, 1)], lost)
    assert fences(bench.granted()) == {lost: 2}
    assert replays_alike(bench)


def test_a_reference_lease_loses_the_task_whose_rollout_is_lost() -> None:
    bench = Bench(plan(stages=(ROLLOUT, REFERENCE))).start()
    bench.complete(bench.granted())
    reading = bench.granted("reference")
    lost, *others = ids(reading)
    report(bench, [PutTask(lost, 1)], lost)
    refused = bench.complete(reading)
    assert [(each.task_id, each.code) for each in refused] == [(lost, ErrorCode.COLLECTED)]
    assert bench.counts()["READY"] == len(others)
    assert bench.machine.run.ledger.tasks[lost].failures == 0


# ------------------------------------------------------------------------------------------------ the open step


def test_an_open_step_is_served_again_with_the_same_tasks_in_the_same_order() -> None:
    bench = Bench().start()
    bench.complete(bench.granted())
    first = bench.ask(NextBatch(driver=1, step=1))
    lost = first.batch.tasks[2].task_id
    report(bench, named(first.batch.tasks[2:3]), lost)
    assert bench.ask(GetRunInfo(driver=1)).open_step == 0
    assert bench.ask(NextBatch(driver=1, step=1)) is None
    waits = bench.calls
    bench.complete(again := bench.granted())
    assert fences(again) == {lost: 2}
    batch = bench.answer(bench.effects, waits)
    assert ids(batch) == ids(first)
    assert fences(batch) == fences(first) | {lost: 2}
    bench.ask(CommitStep(driver=1, step=1, metrics={}))
    assert bench.counts()["TRAINED"] == 4
    assert replays_alike(bench)


def test_a_driver_that_read_the_shards_before_they_were_lost_commits_the_step() -> None:
    bench = Bench().start()
    bench.complete(bench.granted())
    first = bench.ask(NextBatch(driver=1, step=1))
    report(bench, named(first.batch.tasks), ids(first)[0])
    assert isinstance(bench.ask(CommitStep(driver=1, step=1, metrics={})), Ack)
    assert bench.ask(GetRunInfo(driver=1)).committed_step == 1
    assert bench.counts()["TRAINED"] == 4


def test_one_report_reveals_all_damage_to_its_step() -> None:
    bench = Bench().start()
    bench.complete(bench.granted())
    first = bench.ask(NextBatch(driver=1, step=1))
    report(bench, named(first.batch.tasks[:1]), *ids(first)[:3])
    bench.ask(GetRunInfo(driver=1))
    assert ids(bench.granted()) == ids(first)[:3]


def test_a_reopened_step_takes_the_next_task_in_place_of_one_that_was_dropped_in_the_meantime() -> None:
    bench = Bench(plan(staleness=1)).start()
    bench.complete(bench.granted())
    bench.complete(bench.granted())
    first = bench.ask(NextBatch(driver=1, step=1))
    report(bench, named(first.batch.tasks[:1]), ids(first)[0])
    bench.ask(GetRunInfo(driver=1))
    again = bench.granted(most=1)
    assert ids(again) == ids(first)[:1]
    bench.complete(again, outcome=Outcome.DROP)
    batch = bench.ask(NextBatch(driver=1, step=1))
    assert ids(batch)[:3] == ids(first)[1:]
    assert sum(batch.drops.values()) == 1
    assert replays_alike(bench)


def test_deterministic_mode_samples_the_whole_block_again_with_the_version_of_its_step() -> None:
    bench = Bench(plan(deterministic=True, block_tasks=2)).start()
    blocks = [bench.granted() for _ in range(2)]
    for each in blocks:
        bench.complete(each)
    bench.ask(NextBatch(driver=1, step=1))
    lost = ids(blocks[1])[1]
    report(bench, [PutTask(lost, 1)], lost)
    bench.ask(GetRunInfo(driver=1))
    assert bench.ask(NextBatch(driver=1, step=1)) is None
    waits = bench.calls
    again = bench.granted()
    assert ids(again) == ids(blocks[1])
    assert again.weights is not None
    assert again.weights.step == 0
    bench.complete(again)
    assert ids(bench.answer(bench.effects, waits)) == [*ids(blocks[0]), *ids(blocks[1])]
    assert replays_alike(bench)


# ------------------------------------------------------------------------------------------------ trained steps


def test_if_a_shard_of_a_trained_task_is_lost_a_checkpoint_is_ordered_and_the_run_continues() -> None:
    bench = Bench().start()
    first = bench.step(1)
    report(bench, named(first.batch.tasks[:1]), ids(first)[0])
    assert bench.ask(GetRunInfo(driver=1)).checkpoint_now
    assert bench.step(2).checkpoint_now
    bench.ask(CheckpointSaved(driver=1, step=2, kept=[2]))
    assert not bench.step(3).checkpoint_now
    assert replays_alike(bench)


def test_a_trainer_that_needs_the_lost_shard_for_a_replay_returns_to_its_checkpoint() -> None:
    bench = Bench().start()
    bench.step(1)
    bench.ask(CheckpointSaved(driver=1, step=1, kept=[1]))
    undone = bench.step(2)
    report(bench, named(undone.batch.tasks[:1]), ids(undone)[0])
    assert bench.ask(GetRunInfo(driver=1, reload=True, loaded_step=1)).committed_step == 1
    bench.publish_again(1)
    again = bench.step(2)
    assert ids(again) == ids(undone)
    assert all(fence > 1 for fence in fences(again).values())
    assert replays_alike(bench)


# ------------------------------------------------------------------------------------------------ weights


def test_a_lost_version_makes_the_driver_resume_and_publish_the_version_again() -> None:
    bench = Bench().start()
    assert bench.ask(NextBatch(driver=1, step=1)) is None
    waits = bench.calls
    report(bench, [PutTask("weights/0/0", 1)], "weights/0/0")
    assert bench.answer(bench.effects, waits).code == ErrorCode.MISSING
    assert bench.lease() is None
    bench.ask(GetRunInfo(driver=1))
    assert bench.ask(NextBatch(driver=1, step=1)) is None
    bench.publish(0, fence=2)
    assert bench.granted().weights is not None
    assert replays_alike(bench)


def test_an_evaluation_of_a_lost_version_that_is_not_published_again_does_not_delay_rows() -> None:
    bench = Bench(plan(evals=(EvalPlan("test", range(3), 1, 1),))).start()
    measured = bench.granted(most=1)
    assert measured.split == "test"
    bench.complete(bench.granted(most=4, instance=1))
    while bench.machine.run.history.committed_step < 1:
        if bench.ask(NextBatch(driver=1, step=1)) is None:
            bench.complete(bench.granted(most=4, instance=1), samples=2)
        else:
            bench.ask(CommitStep(driver=1, step=1, metrics={}))
    bench.publish(1)
    report(bench, [PutTask("weights/0/0", 1)], "weights/0/0")
    bench.ask(GetRunInfo(driver=1))
    bench.publish(1)
    assert [effect.step for effect in bench.effects if isinstance(effect, WriteRow)] == [0]
    assert {each.code for each in bench.complete(measured, samples=1)} == {ErrorCode.COLLECTED}
    assert replays_alike(bench)


# ------------------------------------------------------------------------------------------------ inventories


def inventory(bench: Bench, *entries: tuple[str, int, int]) -> list[Effect]:
    """Send an inventory of `entries` (task id, fence, content hash) and the first version, in pages of one entry."""
    pages = [*entries, ("weights/0/0", 1, 77)]
    effects: list[Effect] = []
    for at, (task_id, fence, content) in enumerate(pages):
        page = Listed(STORE, [PutTask(task_id, fence)], [[content]], first=at == 0, last=at == len(pages) - 1)
        effects += bench.event(page)
    return effects


def test_an_inventory_reveals_missing_shards_and_the_store_is_asked_about_them_again() -> None:
    bench = Bench().start()
    bench.complete(grant := bench.granted())
    one, two, three, four = ids(grant)
    [order] = ordered(inventory(bench, (one, 1, CONTENT), (three, 1, CONTENT), (four, 1, CONTENT + 1)))
    assert [(claim.task.task_id, claim.hashes) for claim in order.claims] == [(two, (CONTENT,)), (four, (CONTENT,))]
    effects = bench.event(Checked(order, intact(order, two)))  # The other task's shards arrived during the inventory.
    assert RequestInventory(STORE) in effects
    assert fences(bench.granted()) == {two: 2}


def test_a_complete_inventory_causes_no_request() -> None:
    bench = Bench().start()
    bench.complete(grant := bench.granted())
    assert ordered(inventory(bench, *((name, 1, CONTENT) for name in ids(grant)))) == []


def test_an_inventory_without_the_newest_version_reveals_that_it_is_missing() -> None:
    bench = Bench().start()
    [order] = ordered(bench.event(Listed(STORE, [], first=True, last=True)))
    assert [claim.task for claim in order.claims] == [PutTask("weights/0/0", 1)]


def test_a_large_inventory_is_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "AUDITED_AT_ONCE", 3)
    bench = Bench().start()
    bench.complete(grant := bench.granted())
    assert ordered(inventory(bench)) == []
    found = [order for _ in range(3) for order in ordered(bench.event(Tick()))]
    assert [claim.task.task_id for order in found for claim in order.claims] == ids(grant)
