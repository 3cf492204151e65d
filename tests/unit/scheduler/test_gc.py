"""With collection at commit, a reload returns to the newest checkpoint, and every task still counts at most once."""

from __future__ import annotations

from proto.messages import CheckpointSaved, CommitStep, GetRunInfo, LeaseGrant, NextBatch, RunInfo, StepBatch, WaitEvals
from services.scheduler import run_state
from services.scheduler.events import Configure, SaveStep, WriteRow
from services.scheduler.plan import EvalPlan
from services.scheduler.run_state import RunState
from services.scheduler.steps import rewind
from tests.unit.scheduler.bench import Bench, ids, plan

AT_COMMIT = Configure(5, 3, 2, True)


def names(batch: StepBatch) -> list[str]:
    return [task.task_id for task in batch.batch.tasks]


def trained(bench: Bench, step: int) -> list[str]:
    return names(bench.step(step))


def reload(bench: Bench, loaded: int) -> RunInfo:
    """Have the trainer lose its weights and load the checkpoint of step `loaded`."""
    info = bench.ask(GetRunInfo(driver=1, reload=True, loaded_step=loaded))
    assert isinstance(info, RunInfo)
    bench.lineage = info.lineage
    return info


def test_steps_after_the_checkpoint_are_trained_again_on_the_same_tasks() -> None:
    bench = Bench(config=AT_COMMIT).start()
    first = trained(bench, 1)
    bench.ask(CheckpointSaved(driver=1, step=1, kept=[1]))
    undone = trained(bench, 2) + trained(bench, 3)
    reload(bench, 1)
    assert bench.machine.run.history.committed_step == 1
    bench.publish(1)
    again = [trained(bench, step) for step in (2, 3, 4, 5)]
    history = first + [name for step in again for name in step]
    assert len(history) == len(set(history)) == 5 * 4  # The weights contain each task once.
    # The tasks are trained again although they were collected, because their weights are lost.
    assert again[0] + again[1] == undone
    saved = [effect for effect in bench.effects if isinstance(effect, SaveStep) and effect.state == "BATCHED"]
    assert {effect.step: effect.task_ids for effect in saved} == dict(enumerate([first, *again], 1))


def open_step(bench: Bench, step: int) -> StepBatch:
    while not isinstance(batch := bench.ask(NextBatch(driver=1, step=step)), StepBatch):
        bench.complete(bench.granted())
    return batch


def test_an_open_step_is_replayed_if_no_earlier_step_was_lost() -> None:
    bench = Bench(config=AT_COMMIT).start()
    trained(bench, 1)
    bench.ask(CheckpointSaved(driver=1, step=1, kept=[1]))
    batch = open_step(bench, 2)
    info = reload(bench, 1)
    assert (info.committed_step, info.open_step) == (1, 2)
    bench.publish(1)
    assert trained(bench, 2) == names(batch)


def test_an_open_step_is_abandoned_if_earlier_steps_are_undone() -> None:
    bench = Bench(config=AT_COMMIT).start()
    first = trained(bench, 1)
    bench.ask(CheckpointSaved(driver=1, step=1, kept=[1]))
    undone = trained(bench, 2)
    batch = open_step(bench, 3)
    info = reload(bench, 1)
    assert (info.committed_step, info.open_step) == (1, 0)
    bench.publish(1)
    assert trained(bench, 2) + trained(bench, 3) == undone + names(batch)
    assert not set(first) & {*undone, *names(batch)}


def test_the_run_returns_to_the_loaded_checkpoint_rather_than_the_newest_announced() -> None:
    bench = Bench(config=AT_COMMIT).start()
    for step in (1, 2, 3):
        trained(bench, step)
        bench.ask(CheckpointSaved(driver=1, step=step, kept=[max(step - 1, 1), step]))
    info = reload(bench, 2)  # The checkpoint of step 3 was refused.
    assert (info.committed_step, info.checkpoint_step) == (2, 2)
    bench.publish(2)
    trained(bench, 3)
    trained(bench, 4)
    info = reload(bench, 4)  # The checkpoint was saved, but the driver died before announcing it.
    assert (info.committed_step, info.checkpoint_step) == (4, 2)
    info = reload(bench, 0)
    assert (info.committed_step, info.checkpoint_step) == (0, -1)


def test_waiting_tasks_with_tokens_from_an_undone_version_are_sampled_again() -> None:
    bench = Bench(plan(staleness=2), AT_COMMIT).start()
    trained(bench, 1)
    bench.ask(CheckpointSaved(driver=1, step=1, kept=[1]))
    undone, older = bench.granted(), bench.granted()
    bench.complete(older)
    bench.complete(undone)
    assert trained(bench, 2) == ids(undone)
    newer = bench.granted()
    bench.complete(newer)
    assert bench.counts()["READY"] == 8
    reload(bench, 1)
    # Older tasks are sampled again, too, because reopened tasks precede them.
    assert bench.counts().get("READY", 0) == 0
    bench.publish(1)
    assert trained(bench, 2) == ids(undone)
    for former in (older, newer):
        again = bench.granted()
        assert [task.task_id for task in again.batch.tasks] == ids(former)
        assert all(task.fence > 1 for task in again.batch.tasks)


def test_a_block_that_might_have_tokens_newer_than_its_leases_version_is_lost_in_a_rewind() -> None:
    """Engines swap weights during a block."""
    bench = Bench(plan(staleness=2), AT_COMMIT).start()
    trained(bench, 1)
    bench.ask(CheckpointSaved(driver=1, step=1, kept=[1]))
    first, under_way = bench.granted(), bench.granted()
    bench.complete(first)
    trained(bench, 2)
    reload(bench, 1)
    assert {refusal.code for refusal in bench.complete(under_way)} == {"collected"}


def test_an_engine_that_holds_an_undone_version_gets_the_exact_version_of_its_lease() -> None:
    """The engine holds version 2 of lineage 0, which looks newer than version 1 of that lineage."""
    bench = Bench(plan(evals=(EvalPlan("held", rows=[0], samples=1, every=1),)), AT_COMMIT).start()
    held: list[LeaseGrant] = []
    for step in (1, 2):
        while (grant := bench.granted()).split != "train":
            held.append(grant)  # The lease is never completed, which keeps versions 0 and 1 alive.
        bench.complete(grant)
        assert isinstance(bench.ask(NextBatch(driver=1, step=step)), StepBatch)
        bench.ask(CommitStep(driver=1, step=step, metrics={}))
        bench.ask(CheckpointSaved(driver=1, step=1, kept=[1]))
        bench.publish(step)
    reload(bench, 1)
    grant = bench.granted()
    assert grant.weights is not None
    assert (grant.split, grant.weights.lineage, grant.min_step, grant.exact) == ("train", 0, 1, True)
    bench.publish(1)
    bench.complete(grant)
    while (grant := bench.granted()).split != "train":
        pass
    assert (grant.weights and grant.weights.lineage, grant.exact) == (1, False)


def test_a_checkpoint_of_undone_steps_does_not_collect_tasks() -> None:
    bench = Bench().start()
    for step in (1, 2, 3):
        trained(bench, step)
    bench.ask(CheckpointSaved(driver=1, step=2, kept=[1, 2]))
    assert reload(bench, 0).committed_step == 0  # Step 1 was collected.
    bench.publish(0)
    trained(bench, 1)
    bench.ask(CheckpointSaved(driver=1, step=1, kept=[1, 2]))
    assert bench.machine.run.history.checkpoint_step == 1


def test_journaled_steps_are_replayed_from_any_checkpoint_whose_next_step_is_in_the_journal() -> None:
    bench = Bench().start()
    batches = [trained(bench, step) for step in (1, 2, 3)]
    bench.ask(CheckpointSaved(driver=1, step=2, kept=[1, 2]))
    info = reload(bench, 1)
    assert (info.committed_step, info.checkpoint_step) == (3, 2)
    assert [names(bench.ask(NextBatch(driver=1, step=step))) for step in (2, 3)] == batches[1:]


def test_a_restarted_driver_learns_that_a_checkpoint_was_ordered() -> None:
    config = Configure(9, 3, 2, False)
    bench = Bench(plan(task_bytes=50, weight_bytes=100), config).start(limit_bytes=300 + 8 * 50 + 500)
    told = [bench.step(step).checkpoint_now for step in (1, 2, 3)]
    assert told == [False, False, True]
    assert bench.ask(GetRunInfo(driver=2)).checkpoint_now
    bench.ask(CheckpointSaved(driver=2, step=3, kept=[3]))
    assert not bench.ask(GetRunInfo(driver=2)).checkpoint_now


def test_no_bytes_are_counted_as_uncovered_after_a_rewind() -> None:
    bench = Bench(config=AT_COMMIT).start()
    trained(bench, 1)
    bench.ask(CheckpointSaved(driver=1, step=1, kept=[1]))
    trained(bench, 2)
    reload(bench, 1)
    assert bench.machine.run.shards.uncovered_bytes == 0


def test_uncovered_bytes_are_those_of_trained_tasks_that_wait_for_a_checkpoint() -> None:
    bench = Bench().start()
    trained(bench, 1)
    trained(bench, 2)
    run = bench.machine.run
    tasks = [task for step in (1, 2) for task in run.history.batches[step]]
    assert run.shards.uncovered_bytes == run.shards.held_by(tasks).total() > 0
    rewind(run.ledger, 1)  # The loss of a store does the same and undoes step 2.
    assert run.shards.uncovered_bytes == run.shards.held_by(run.history.batches[1]).total()


def test_the_row_of_an_undone_step_that_waits_for_an_evaluation_is_never_written() -> None:
    """Step 3 is rolled back while its row waits for the evaluation of version 2. Then this evaluation completes."""
    bench = Bench(plan(evals=(EvalPlan("held", rows=[0], samples=1, every=2),)), AT_COMMIT).start()

    def train(step: int, loss: float) -> None:
        assert isinstance(bench.ask(NextBatch(driver=1, step=step)), StepBatch)
        bench.ask(CommitStep(driver=1, step=step, metrics={"loss/policy": loss}))
        bench.publish(step)

    def roll_out() -> LeaseGrant:
        while (grant := bench.granted()).split != "train":
            held.append(grant)
        return grant

    held: list[LeaseGrant] = []
    for step in (1, 2, 3):
        bench.complete(roll_out())
        train(step, 0.25)
        if step == 2:
            bench.ask(CheckpointSaved(driver=1, step=2, kept=[2]))
    assert reload(bench, 2).committed_step == 2
    bench.publish(2)
    while held:
        bench.complete(held.pop(0), samples=1)
    bench.complete(roll_out())
    while held:
        bench.complete(held.pop(0), samples=1)
    rows = {effect.step: effect.row for effect in bench.effects if isinstance(effect, WriteRow)}
    assert sorted(rows) == [0, 1, 2]
    train(3, 0.5)
    rows = {effect.step: effect.row for effect in bench.effects if isinstance(effect, WriteRow)}
    assert rows[3]["loss/policy"] == 0.5


def test_the_evaluation_of_an_undone_version_is_repeated_without_mixing_old_and_new_scores() -> None:
    """The evaluation of version 2 is partly scored, and the evaluation of version 4 is complete, when both versions are
    undone."""
    made = plan(evals=(EvalPlan("held", rows=range(6), samples=1, every=2),))
    bench = Bench(made, Configure(5, 3, 2, True)).start()

    def train(step: int) -> None:
        while not isinstance(bench.ask(NextBatch(driver=1, step=step)), StepBatch):
            grant = bench.granted(most=8)
            if grant.split == "train":
                bench.complete(grant)
            else:
                held.append(grant)
        bench.ask(CommitStep(driver=1, step=step, metrics={}))
        bench.publish(step)

    def evaluation(most: int) -> LeaseGrant:
        while (grant := bench.granted(most=most)).split == "train":
            bench.complete(grant)
        return grant

    held: list[LeaseGrant] = []
    bench.complete(evaluation(8), samples=1)  # This evaluation is of version 0, which is not undone.
    train(1)
    bench.ask(CheckpointSaved(driver=1, step=1, kept=[1]))
    train(2)
    bench.complete(evaluation(1), samples=1, reward=1.0)
    held.append(evaluation(1))
    train(3)
    train(4)
    done = evaluation(8)
    assert [task.task_id for task in done.batch.tasks] == [f"held/4/{row}" for row in range(6)]
    bench.complete(done, samples=1, reward=1.0)
    assert bench.machine.run.history.evaluations.done[4]["held"]["eval/held/accuracy"] == 1.0
    assert bench.ask(WaitEvals(driver=1, step=4)) is None, "the evaluation of version 2 is not done"
    assert reload(bench, 1).committed_step == 1
    bench.publish(1)
    assert held
    while held:
        late = held.pop()
        assert len(bench.complete(late, samples=1, reward=1.0)) == len(late.batch.tasks)
    for step in (2, 3, 4):
        train(step)
        if step % 2 == 0:
            again = evaluation(8)
            assert [task.task_id for task in again.batch.tasks] == [f"held/{step}/{row}" for row in range(6)]
            assert again.weights is not None
            assert (again.weights.lineage, again.weights.step) == (1, step)
            # The fences are above the cleared ones, so no store refuses these puts as late ones.
            cleared = dict(bench.acknowledge())
            assert all(task.fence > cleared.get(task.task_id, 0) for task in again.batch.tasks)
            bench.complete(again, samples=1, reward=0.0)
            assert bench.ask(WaitEvals(driver=1, step=step)).accuracy == {"held": 0.0}
    assert not held
    rows = {effect.step: effect.row for effect in bench.effects if isinstance(effect, WriteRow)}
    assert rows[2]["eval/held/accuracy"] == 0.0
    bench.acknowledge()
    assert not bench.machine.run.history.evaluations.open
    copy = RunState(bench.plan)
    for event in bench.journal:
        copy.apply(event)
    assert run_state.dump(copy) == run_state.dump(bench.machine.run)


def test_an_evaluation_overtaken_by_a_replay_ends_on_the_version_it_began_with() -> None:
    bench = Bench(plan(evals=(EvalPlan("held", rows=range(6), samples=1, every=2),)), Configure(5, 3, 2, False)).start()
    begun = bench.granted(most=1)
    assert begun.split == "held"
    bench.complete(begun, samples=1)
    assert reload(bench, 0).lineage == 1
    bench.publish(0)
    while (rest := bench.granted(most=8)).split == "train":
        bench.complete(rest)
    assert rest.weights is not None
    assert (rest.weights.lineage, rest.weights.step) == (0, 0)
    bench.complete(rest, samples=1)
    assert bench.ask(WaitEvals(driver=1, step=0)).accuracy == {"held": 1.0}
    assert bench.granted().weights.lineage == 1  # type: ignore[union-attr]
