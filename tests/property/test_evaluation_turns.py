"""Evaluations and training share the engines. Checks that for any number of evaluations and any speed of the trainer,
generation for training continues, every evaluation completes, and engines seldom switch between versions.
"""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.messages import (
    CommitStep,
    Complete,
    Heartbeat,
    LeaseGrant,
    LeaseRequest,
    NextBatch,
    Outcome,
    StepBatch,
    TaskResult,
)
from services.scheduler import run_state
from services.scheduler.events import Configure, Tick
from services.scheduler.plan import EvalPlan
from services.scheduler.run_state import RunState
from tests.property import scheduler_view as view
from tests.unit.scheduler.bench import STORE, Bench, plan

BLOCK, BLOCKS_A_STEP = 2, 3
TRAIN = "train"


class Engine:
    """An engine that holds its current lease and the next one, and that loads weights as
    `services.rollout.weights.sync` does."""

    def __init__(self, bench: Bench, instance: int) -> None:
        self.bench = bench
        self.instance = instance
        self.holds = (0, -1)
        self.grants: deque[LeaseGrant] = deque()
        self.loads: list[int] = []
        """Steps of the versions that the engine loaded, in order."""

    @property
    def request(self) -> LeaseRequest:
        lineage, step = self.holds
        return LeaseRequest(
            stage="rollout",
            service="rollout",
            instance=self.instance,
            incarnation=7,
            max_tasks=BLOCK,
            holds_lineage=lineage,
            holds_step=step,
        )

    def ask(self) -> LeaseGrant | None:
        grant = self.bench.ask(self.request, wait_s=0.0)
        if not isinstance(grant, LeaseGrant):
            self.bench.event(Tick())
            return None
        self.grants.append(grant)
        self._begin()
        return grant

    def end(self) -> None:
        """Complete the lease that is being sampled."""
        grant = self.grants.popleft()
        samples = grant.group_size
        results = [
            TaskResult(task.task_id, task.fence, Outcome.DONE, STORE, 5, samples, 1, 1) for task in grant.batch.tasks
        ]
        total = samples * len(results)
        versions = np.full(total, self.holds[1], np.int32)
        scalars: dict[str, Any] = {"reward": np.ones(total, np.float32)}
        scalars |= {"version_min": versions, "version_max": versions}
        request = Complete(lease_id=grant.lease_id, stage="rollout", incarnation=7, results=results, scalars=scalars)
        assert self.bench.ask(request).refused == []
        self._begin()

    def _begin(self) -> None:
        if not self.grants or (ref := self.grants[0].weights) is None:
            return
        wanted = (ref.lineage, ref.step)
        if self.holds != wanted if self.grants[0].exact else self.holds < wanted:
            self.holds = wanted
            self.loads.append(ref.step)


class Run:
    """Engines that work at random paces, and a trainer that takes each step as soon as it can, or some time later."""

    def __init__(self, *, engines: int, staleness: int, rows: int, every: int, seed: int, lazy: float) -> None:
        made = plan(
            tasks_per_step=BLOCK * BLOCKS_A_STEP,
            block_tasks=BLOCK,
            staleness=staleness,
            evals=(EvalPlan("held", range(rows), 2, every),),
        )
        self.bench = Bench(made, Configure(1000, 3, 2, False)).start()
        self.chance = random.Random(seed)
        self.lazy = lazy
        self.engines = [Engine(self.bench, instance) for instance in range(engines)]
        self.paces = [self.chance.choice([1, 1, 4]) for _ in self.engines]
        self.trained_in_a_row = 0
        """Number of consecutive leases for training while an evaluation waited."""
        self.measured_in_a_row = 0
        """Number of consecutive leases for the evaluation while training waited."""

    @property
    def state(self) -> RunState:
        return self.bench.machine.run

    def measured(self) -> set[int]:
        """Return the steps of the versions that have tasks waiting for evaluation."""
        return {one.version[1] for one in self.state.history.evaluations.open.values() if one.waiting}

    def go(self) -> None:
        view.validate(self.state)
        [engine] = self.chance.choices(self.engines, self.paces)
        if len(engine.grants) == 2 or (engine.grants and self.chance.random() < 0.5):
            engine.end()
        else:
            measures = bool(self.measured())
            trains = view.could_train(self.state, engine.request)
            grant = engine.ask()
            if grant is not None and grant.split == TRAIN:
                self.measured_in_a_row = 0
                self.trained_in_a_row += measures
            elif grant is not None:
                self.trained_in_a_row = 0
                self.measured_in_a_row += trains
        if self.chance.random() >= self.lazy:
            self.train()

    def train(self) -> None:
        step = self.state.history.committed_step + 1
        batch = self.bench.ask(NextBatch(driver=1, step=step), wait_s=0.0)
        if isinstance(batch, StepBatch):
            assert 0 <= step - 1 - int(batch.scalars["version_min"].min()) <= self.bench.plan.staleness
            self.bench.ask(CommitStep(driver=1, step=step, metrics={}))
            self.bench.publish(step)
        else:
            self.bench.event(Tick())


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 1000), st.sampled_from([0.0, 0.5, 0.95]))
def test_evaluation_and_training_wait_for_at_most_one_step_of_leases_and_old_weights_reload_at_most_once_a_step(
    engines: int, staleness: int, seed: int, lazy: float
) -> None:
    run = Run(engines=engines, staleness=staleness, rows=120, every=1000, seed=seed, lazy=lazy)
    turns = 0
    while run.measured():
        run.go()
        assert max(run.trained_in_a_row, run.measured_in_a_row) <= BLOCKS_A_STEP
        turns += 1
        assert turns < 2000
    for engine in run.engines:
        back = sum(later < earlier for earlier, later in pairwise(engine.loads))
        assert back <= run.state.history.committed_step + 1
    copy = RunState(run.bench.plan)
    for event in run.bench.journal:
        copy.apply(event)
    assert run_state.dump(copy) == run_state.dump(run.state)


def test_an_engine_samples_with_the_evaluated_version_as_long_as_the_step_allows() -> None:
    """Version 1 is published when the first step is trained. Version 1 is not needed until version 0 is too old for a
    step."""
    run = Run(engines=1, staleness=1, rows=300, every=1000, seed=0, lazy=1.0)
    [engine] = run.engines
    splits: list[str] = []
    while run.state.history.committed_step < 2:
        grant = engine.ask()
        assert grant is not None
        splits.append(grant.split)
        engine.end()
        run.train()
    assert splits == ["held", TRAIN] * (2 * BLOCKS_A_STEP)
    assert engine.loads == [0]


def test_the_number_of_waiting_evaluations_is_bounded_even_if_every_version_is_evaluated() -> None:
    """Every version is evaluated, on more rows than a step has. While two versions wait, no training lease is
    granted."""
    run = Run(engines=2, staleness=1, rows=60, every=1, seed=0, lazy=0.0)
    for _ in range(600):
        before = run.measured()
        leased = run.trained_in_a_row
        run.go()
        assert len(before) < 2 or run.trained_in_a_row <= leased
        assert len(run.measured()) <= 2 + run.bench.plan.staleness  # Existing samples are trained on first.
    assert run.state.history.committed_step > 5


def test_an_engine_that_is_about_to_evaluate_is_not_offered_newer_weights() -> None:
    run = Run(engines=1, staleness=1, rows=8, every=1000, seed=0, lazy=1.0)
    [engine] = run.engines
    run.bench.register("rollout", 0, 7)
    while run.state.history.committed_step < 1:
        engine.ask()
        engine.end()
        run.train()
    grants = [engine.ask() for _ in range(2)]
    beat = Heartbeat(service="rollout", instance=0, incarnation=7, state="READY", holds_lineage=0, holds_step=0)
    assert {grant.split for grant in grants if grant} == {TRAIN, "held"}
    assert run.bench.ask(beat).weights is None
    engine.end()
    engine.end()
    assert run.bench.ask(beat).weights.step == 1
