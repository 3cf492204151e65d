"""Replaying the journal restores the state."""

from __future__ import annotations

import pytest

from proto.messages import (
    CheckpointSaved,
    CommitStep,
    GetRunInfo,
    LeaseGrant,
    NextBatch,
    Outcome,
)
from services.scheduler import run_state
from services.scheduler.events import (
    Configure,
    Persist,
    Tick,
)
from services.scheduler.plan import EvalPlan
from services.scheduler.run_state import RunState
from services.scheduler.state import Scheduler
from shared.stages import REFERENCE, ROLLOUT
from tests.unit.scheduler.bench import LEASE_S, Bench, plan


def played() -> Bench:
    """Return a run whose history has drops, losses, retries, evaluations, checkpoints and a reload."""
    bench = Bench(
        plan(
            stages=(ROLLOUT, REFERENCE),
            shuffle=True,
            evals=(EvalPlan("held", rows=[0, 1], samples=1, every=2),),
        ),
        Configure(8, 2, 2, False),
    ).start()
    bench.complete(bench.granted(), samples=1)
    bench.register("rollout", 0, 7)
    bench.granted(most=1)
    bench.register("rollout", 0, 8)
    for step in (1, 2, 3):
        assert bench.ask(NextBatch(driver=1, step=step), wait_s=1e6) is None
        held = bench.calls
        outcome = Outcome.RETRY
        while bench.answer(bench.effects, held) is None:
            grant = bench.lease(life=8)
            if isinstance(grant, LeaseGrant):
                samples = grant.group_size
                bench.complete(grant, life=8, outcome=outcome, samples=samples)
                outcome = Outcome.DONE
            reference = bench.lease("reference")
            if isinstance(reference, LeaseGrant):
                bench.complete(reference)
            bench.event(Tick(), after_s=20.0)
        bench.ask(CommitStep(driver=1, step=step, metrics={"loss/policy": 0.1}))
        bench.publish(step)
        bench.ask(CheckpointSaved(driver=1, step=step, kept=[max(step - 1, 1), step]))
        if step == 2:
            bench.acknowledge()
    bench.ask(GetRunInfo(driver=1, reload=True))
    return bench


def test_replay_restores_the_same_state() -> None:
    bench = played()
    replayed = Scheduler(bench.plan, lease_s=LEASE_S, incarnation=100)
    for event in bench.journal:
        replayed.replay(event)
    assert run_state.dump(replayed.run) == run_state.dump(bench.machine.run)
    assert bench.machine.run.history.committed_step == 3


@pytest.mark.parametrize("part", [0.2, 0.5, 0.9])
def test_replay_continues_from_a_snapshot(part: float) -> None:
    bench = played()
    cut = int(len(bench.journal) * part)
    run = RunState(bench.plan)
    for event in bench.journal[:cut]:
        run.apply(event)
    run = run_state.load(bench.plan, run_state.dump(run))
    for event in bench.journal[cut:]:
        run.apply(event)
    assert run_state.dump(run) == run_state.dump(bench.machine.run)


def test_leases_get_their_full_time_again_after_a_restart() -> None:
    bench = Bench().start()
    grant = bench.granted()
    again = Scheduler(bench.plan, lease_s=LEASE_S, incarnation=100)
    for event in bench.journal:
        again.replay(event)
    again.begin(bench.config, 1000.0)
    assert not any(isinstance(effect, Persist) for effect in again.handle(Tick(), 1000.0 + LEASE_S - 1))
    assert any(isinstance(effect, Persist) for effect in again.handle(Tick(), 1000.0 + LEASE_S + 1))
    assert {task.fence for task in grant.batch.tasks} == {1}
