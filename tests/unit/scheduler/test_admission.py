"""Tests admission: the admitted tasks, their order, and the versions with which they are sampled."""

from __future__ import annotations

from proto.messages import (
    CommitStep,
    LeaseGrant,
    NextBatch,
    Outcome,
    StepBatch,
)
from services.scheduler.events import (
    Configure,
)
from services.scheduler.plan import EpochOrder
from tests.unit.scheduler.bench import Bench, ids, plan


def test_live_tasks_never_exceed_the_bound() -> None:
    bench = Bench().start()
    leased = []
    while isinstance(grant := bench.lease(), LeaseGrant):
        leased += ids(grant)
    assert len(leased) == 2 * 4
    assert bench.machine.run.ledger.window.live == 8


def test_the_tasks_of_a_step_in_training_are_live_until_it_is_committed() -> None:
    bench = Bench().start()
    bench.complete(bench.granted())
    assert isinstance(bench.ask(NextBatch(driver=1, step=1)), StepBatch)
    assert bench.machine.run.ledger.window.live == 4
    bench.ask(CommitStep(driver=1, step=1, metrics={}))
    assert bench.machine.run.ledger.window.live == 8


def test_a_lease_names_the_oldest_version_with_which_its_step_may_be_sampled() -> None:
    bench = Bench(plan(staleness=1)).start()
    first, second = bench.granted(), bench.granted()
    assert (first.min_step, second.min_step) == (0, 0)
    bench.complete(first)
    bench.complete(second)
    assert isinstance(bench.ask(NextBatch(driver=1, step=1)), StepBatch)
    bench.ask(CommitStep(driver=1, step=1, metrics={}))
    assert bench.lease() is None  # Step 3 must be sampled with version 1 or later, which has not been published.
    held = bench.calls
    bench.publish(1)
    third = bench.answer(bench.effects, held)
    assert (third.min_step, third.weights.step) == (1, 1)


def test_a_lease_never_spans_two_steps() -> None:
    bench = Bench().start()
    assert [len(ids(bench.granted(most=3))) for _ in range(4)] == [3, 1, 3, 1]


def test_a_run_with_staleness_zero_continues_after_a_drop() -> None:
    bench = Bench(plan(staleness=0)).start()
    grant = bench.granted(most=4)
    bench.complete(grant, outcome=Outcome.DROP, tasks=1, final=False)
    assert bench.granted(most=4).min_step == 0


def test_deterministic_mode_requires_the_exact_version_and_fixed_blocks() -> None:
    bench = Bench(plan(deterministic=True, block_tasks=2)).start()
    for step in (1, 2):
        bench.step(step)
    grant = bench.granted(most=4)
    assert (len(ids(grant)), grant.block_rows, grant.exact) == (2, 4, True)
    assert grant.weights is not None
    assert grant.weights.step == grant.min_step == 1


def test_a_step_consumes_tasks_in_admission_order_and_waits_for_the_oldest() -> None:
    bench = Bench().start()
    late = bench.granted(most=1)
    for _ in range(2):
        bench.complete(bench.granted(most=4))
    assert bench.ask(NextBatch(driver=1, step=1)) is None
    held = bench.calls
    bench.complete(late)
    batch = bench.answer(bench.effects, held)
    assert [task.task_id for task in batch.batch.tasks] == [f"train/0/{row}" for row in range(4)]
    assert batch.scalars["length"].tolist() == [0, 1, 0, 1, 2, 3, 4, 5]


def test_lack_of_room_delays_admission_but_never_the_next_step() -> None:
    bench = Bench(plan(staleness=3, task_bytes=100, weight_bytes=100)).start(limit_bytes=900)
    assert bench.machine.run.ledger.window.live == 6  # There are 900 bytes minus 3 versions of 100 bytes.
    small = Bench(plan(staleness=3, task_bytes=100, weight_bytes=100)).start(limit_bytes=100)
    assert small.machine.run.ledger.window.live == 4


def test_a_checkpoint_is_ordered_when_trained_bytes_fill_the_store() -> None:
    config = Configure(9, 3, 2, False)
    bench = Bench(plan(task_bytes=50, weight_bytes=100), config).start(limit_bytes=300 + 8 * 50 + 500)
    assert [bench.step(step).checkpoint_now for step in (1, 2, 3)] == [False, False, True]


def test_every_epoch_has_its_own_order_of_all_usable_rows() -> None:
    order = EpochOrder(plan(rows=[0, 2, 3, 5], shuffle=True))
    places = order.some(0, 12)
    assert [epoch for epoch, _ in places] == [0] * 4 + [1] * 4 + [2] * 4
    epochs = [[row for _, row in places[first : first + 4]] for first in (0, 4, 8)]
    assert all(sorted(rows) == [0, 2, 3, 5] for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) > 1
    assert [order.at(position) for position in (4, 7)] == [places[4], places[7]]
    assert EpochOrder(plan(rows=[0, 2, 3, 5], shuffle=True)).some(7, 3) == places[7:10]
