"""When a store restarts without its data, unfinished tasks are sampled again, and the run returns to its checkpoint."""

from __future__ import annotations

from proto.messages import (
    CheckpointSaved,
    CommitStep,
    FinishRun,
    GetRunInfo,
    Heartbeat,
    NextBatch,
    Register,
    StepBatch,
)
from services.scheduler import run_state
from services.scheduler.events import Configure, Tell, WriteRow
from services.scheduler.plan import EvalPlan
from services.scheduler.run_state import RunState
from tests.unit.scheduler.bench import Bench, ids, plan


def register(bench: Bench, data_id: str, incarnation: int) -> None:
    bench.ask(
        Register(
            service="batch-store",
            instance=0,
            incarnation=incarnation,
            pid=1,
            host="h",
            endpoint="",
            limit_bytes=1 << 30,
            data_id=data_id,
        )
    )


def started() -> Bench:
    bench = Bench()
    register(bench, "a", 1)
    bench.ask(GetRunInfo(driver=1))
    bench.publish(0)
    return bench


def test_a_restart_with_the_same_data_loses_nothing() -> None:
    bench = started()
    bench.step(1)
    grant = bench.granted()
    bench.complete(grant)
    register(bench, "a", 2)
    assert bench.machine.run.history.committed_step == 1
    assert bench.counts()["READY"] == 4


def test_unfinished_tasks_whose_data_is_lost_are_sampled_again_under_a_higher_fence() -> None:
    bench = started()
    grant = bench.granted()
    bench.complete(grant)
    assert bench.counts()["READY"] == 4
    register(bench, "b", 2)
    assert bench.counts()["READY"] == 0
    bench.ask(GetRunInfo(driver=1))
    bench.publish_again(0)
    again = bench.granted()
    assert ids(again) == ids(grant)
    assert {task.fence for task in again.batch.tasks} == {2}


def test_after_a_loss_of_data_the_run_returns_to_the_checkpoint_and_trains_the_same_tasks_again() -> None:
    bench = started()
    first = bench.step(1)
    bench.ask(CheckpointSaved(driver=1, step=1, kept=[1]))
    lost = bench.step(2)
    register(bench, "b", 2)
    info = bench.ask(GetRunInfo(driver=1))
    assert (info.committed_step, info.open_step, info.checkpoint_step) == (1, 0, 1)
    bench.publish_again(1)
    batch = bench.step(2)
    assert [task.task_id for task in batch.batch.tasks] == [task.task_id for task in lost.batch.tasks]
    fences = {task.task_id: task.fence for task in lost.batch.tasks}
    assert all(task.fence > fences[task.task_id] for task in batch.batch.tasks)
    assert not {task.task_id for task in first.batch.tasks} & {task.task_id for task in batch.batch.tasks}


def test_an_open_step_whose_shards_are_lost_is_abandoned() -> None:
    bench = started()
    assert bench.ask(NextBatch(driver=1, step=1)) is None
    held = bench.calls
    bench.complete(bench.granted())
    assert isinstance(bench.answer(bench.effects, held), StepBatch)
    register(bench, "b", 2)
    assert bench.ask(GetRunInfo(driver=1)).open_step == 0
    assert bench.ask(CommitStep(driver=1, step=1, metrics={})).code == "conflict"


def test_replaying_a_loss_of_data_gives_the_same_state() -> None:
    bench = started()
    bench.step(1)
    register(bench, "b", 2)
    bench.ask(GetRunInfo(driver=1))
    bench.publish_again(0)
    bench.step(1)
    copy = RunState(bench.plan)
    for event in bench.journal:
        copy.apply(event)
    assert copy.history.committed_step == bench.machine.run.history.committed_step == 1
    assert run_state.dump(copy) == run_state.dump(bench.machine.run)


def test_a_driver_that_does_not_resume_after_the_loss_is_refused() -> None:
    bench = started()
    bench.step(1)
    register(bench, "b", 2)
    assert bench.ask(CheckpointSaved(driver=1, step=1, kept=[1])).code == "conflict"
    assert bench.ask(GetRunInfo(driver=1)).checkpoint_step == -1


def test_an_evaluation_that_can_no_longer_be_scored_has_no_result_and_does_not_delay_rows() -> None:
    bench = Bench(plan=plan(evals=(EvalPlan("test", range(2), 1, 1),)))
    register(bench, "a", 1)
    bench.ask(GetRunInfo(driver=1))
    bench.publish(0)
    bench.ask(Heartbeat(service="rollout", instance=0, incarnation=7, state="READY"))
    while (grant := bench.granted()).split != "train":  # The evaluation is leased and never completed.
        pass
    bench.complete(grant)
    assert isinstance(bench.ask(NextBatch(driver=1, step=1)), StepBatch)
    bench.ask(CommitStep(driver=1, step=1, metrics={}))
    bench.ask(CheckpointSaved(driver=1, step=1, kept=[1]))
    register(bench, "b", 2)
    (told,) = [effect.values for effect in bench.effects if isinstance(effect, Tell) and effect.topic == "eval"]
    assert "eval/held/accuracy" not in told
    assert 0 in [effect.step for effect in bench.effects if isinstance(effect, WriteRow)]


def test_a_finished_run_continues_with_more_steps() -> None:
    bench = started()
    bench.step(1)
    bench.ask(FinishRun(driver=1))
    bench.machine.run.apply(Configure(9, 3, 2, False))
    assert not bench.ask(GetRunInfo(driver=1)).stopping
