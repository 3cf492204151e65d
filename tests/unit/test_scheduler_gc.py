"""Collection at commit: a reload goes back to the newest checkpoint, and every task still counts once at most."""

from __future__ import annotations

from proto.messages import CheckpointSaved, GetRunInfo, NextBatch, StepBatch
from services.scheduler.events import Configure, SaveStep
from tests.unit.test_scheduler import Bench

AT_COMMIT = Configure(5, 3, 2, True)


def names(batch: StepBatch) -> list[str]:
    return [task.task_id for task in batch.batch.tasks]


def trained(bench: Bench, step: int) -> list[str]:
    return names(bench.step(step))


def reload(bench: Bench) -> None:
    """The trainer lost its weights and loaded the newest checkpoint."""
    info = bench.ask(GetRunInfo(driver=1, reload=True))
    bench.lineage = info.lineage


def test_steps_after_the_checkpoint_are_trained_again_on_other_tasks() -> None:
    bench = Bench(config=AT_COMMIT).start()
    first = trained(bench, 1)
    bench.ask(CheckpointSaved(driver=1, step=1, kept=[1]))
    undone = trained(bench, 2) + trained(bench, 3)
    reload(bench)
    assert bench.machine.core.committed_step == 1
    bench.publish(1)
    again = [trained(bench, step) for step in (2, 3, 4, 5)]
    history = first + [name for step in again for name in step]
    assert len(history) == len(set(history)) == 5 * 4  # what the weights are made of: each task once
    assert not set(history) & set(undone)  # the weights of these are gone, and so are they
    saved = [effect for effect in bench.effects if isinstance(effect, SaveStep) and effect.state == "BATCHED"]
    assert {effect.step: effect.task_ids for effect in saved} == dict(enumerate([first, *again], 1))


def test_an_open_step_of_the_lost_weights_is_given_up_too() -> None:
    bench = Bench(config=AT_COMMIT).start()
    first = trained(bench, 1)
    bench.ask(CheckpointSaved(driver=1, step=1, kept=[1]))
    while not isinstance(batch := bench.ask(NextBatch(driver=1, step=2)), StepBatch):
        bench.complete(bench.granted())
    reload(bench)
    bench.publish(1)
    assert not set(trained(bench, 2)) & {*names(batch), *first}


def test_nothing_is_counted_as_uncovered_after_a_rewind() -> None:
    bench = Bench(config=AT_COMMIT).start()
    trained(bench, 1)
    bench.ask(CheckpointSaved(driver=1, step=1, kept=[1]))
    trained(bench, 2)
    reload(bench)
    assert bench.machine.core.uncovered_bytes == 0


def test_uncovered_bytes_are_those_of_trained_tasks_that_wait_for_a_checkpoint() -> None:
    bench = Bench().start()
    trained(bench, 1)
    trained(bench, 2)
    core = bench.machine.core
    slots = [slot for step in (1, 2) for slot in core.batches[step]]
    assert core.uncovered_bytes == sum(map(core.held_bytes, slots)) > 0
    core._rewind(1)  # as after the loss of a store: step 2 is undone
    assert core.uncovered_bytes == sum(map(core.held_bytes, core.batches[1]))
