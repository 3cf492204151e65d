"""Tests the driver's calls: batches, commits, newer drivers and reloads."""

from __future__ import annotations

from proto.messages import (
    CommitStep,
    ErrorCode,
    GetRunInfo,
    NextBatch,
)
from services.scheduler import run_state
from services.scheduler.events import (
    Fail,
    SaveStep,
)
from tests.unit.scheduler.bench import Bench


def test_a_repeated_request_for_a_batch_gets_the_same_batch_and_a_step_out_of_order_is_a_conflict() -> None:
    bench = Bench().start()
    bench.complete(bench.granted())
    first = bench.ask(NextBatch(driver=1, step=1))
    again = bench.ask(NextBatch(driver=1, step=1))
    assert again.batch == first.batch
    assert again.scalars["reward"].tolist() == first.scalars["reward"].tolist()
    for request in (NextBatch(driver=1, step=2), CommitStep(driver=1, step=2, metrics={})):
        reply = bench.ask(request)
        assert isinstance(reply, Fail)
        assert reply.code == ErrorCode.CONFLICT


def test_a_repeated_commit_is_carried_out_only_once() -> None:
    bench = Bench().start()
    bench.step(1)
    before = run_state.dump(bench.machine.run)
    bench.ask(CommitStep(driver=1, step=1, metrics={"loss/policy": 9.0}))
    assert run_state.dump(bench.machine.run) == before
    saved = [effect for effect in bench.effects if isinstance(effect, SaveStep)]
    assert [(effect.step, effect.state) for effect in saved] == [(1, "BATCHED"), (1, "TRAINED")]


def test_a_newer_driver_fences_off_the_older_one() -> None:
    bench = Bench().start()
    bench.ask(GetRunInfo(driver=2))
    for request in (NextBatch(driver=1, step=1), GetRunInfo(driver=1)):
        reply = bench.ask(request)
        assert isinstance(reply, Fail)
        assert reply.code == ErrorCode.CONFLICT


def test_a_reload_begins_a_lineage_and_replays_the_journaled_batches() -> None:
    bench = Bench().start()
    batches = [bench.step(step).batch for step in (1, 2, 3)]
    info = bench.ask(GetRunInfo(driver=1, reload=True))
    assert (info.lineage, info.committed_step, info.checkpoint_step) == (1, 3, -1)
    bench.lineage = 1
    assert [bench.ask(NextBatch(driver=1, step=step)).batch for step in (1, 2, 3)] == batches
    bench.publish(0)
    assert bench.lease() is None  # Tasks of step 5 wait for the first version of the new lineage.
