"""Checks deterministic mode: a block always has the same tasks and the same version, and a step always has the same
blocks, whatever is lost and whenever it is lost."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.ids import make_task_id
from proto.messages import (
    Canary,
    CheckpointSaved,
    CommitStep,
    Complete,
    GetRunInfo,
    LeaseGrant,
    LeaseRequest,
    NextBatch,
    Outcome,
    PublishWeights,
    Register,
    RunInfo,
    StepBatch,
    TaskResult,
)
from services.scheduler import run_state
from services.scheduler.events import (
    Answer,
    Asked,
    ClearDone,
    Configure,
    Durable,
    Effect,
    Persist,
    SendClear,
    TailLost,
    Tick,
    WriteRow,
)
from services.scheduler.plan import EpochOrder, EvalPlan, Plan
from services.scheduler.state import Scheduler
from shared.stages import REFERENCE, ROLLOUT, TEACHER
from tests.property import scheduler_view as view
from tests.weights_refs import weights_ref

CANARY = Canary(token_ids=np.zeros(2, np.int32), logprobs=np.zeros(1, np.float32), tolerance=1e-4)
STORE = "batch-store/0"
TASKS, BLOCK, PART, EVAL_BLOCK = 6, 3, 2, 3
WORKERS = (ROLLOUT.name, ROLLOUT.name, REFERENCE.name, TEACHER.name)
HURTS = ("silence", "reborn", "missing", "late", "new_driver", "reload", "lose_store", "lose_end")
WORK = ("lease", "finish", "finish", "train", "clear")
ROUND = 25
LAST = 1000
EMPTY_STEP = 3
"""Step whose tasks all fail."""


class Run:
    """A machine with two engines, a reference, a teacher and a driver. Rows 2 and 5, and the rows of EMPTY_STEP, can
    never be sampled."""

    def __init__(self, staleness: int, seed: int, *, collect_at_commit: bool) -> None:
        self.chance = random.Random(seed)
        self.plan = Plan(
            run="fixed",
            seed=seed,
            tasks_per_step=TASKS,
            group_size=2,
            staleness=staleness,
            shuffle=True,
            deterministic=True,
            rows=range(20),
            block_tasks=BLOCK,
            evals=(EvalPlan(name="held", rows=[1, 4, 6, 8, 9], samples=2, every=2),),
            stages=(ROLLOUT, REFERENCE, TEACHER),
        )
        self.order = EpochOrder(self.plan)
        self.machine = Scheduler(self.plan, lease_s=5.0, incarnation=1)
        self.journal: list[Durable] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.now, self.driver, self.life, self.data = 0.0, 0, 100, 0
        self.lives = [0] * len(WORKERS)
        self.grants: list[tuple[LeaseGrant, int]] = []
        self.clears: list[SendClear] = []
        self.tombstones: dict[str, int] = {}
        """Highest tombstoned fence of each task. The store refuses puts at or below this fence."""
        self.checkpoints: list[int] = []
        self.holds = 0
        """Version that the trainer's workers hold."""
        self.config = Configure(LAST, 100, 2, collect_at_commit)
        self.take(self.machine.begin(self.config, 0.0))
        self.lose_store()
        for worker in range(len(WORKERS)):
            self.reborn(worker)

    # ---- talking to the machine

    def take(self, effects: list[Effect]) -> Any:
        view.validate(self.machine.run)
        self.journal += [effect.event for effect in effects if isinstance(effect, Persist)]
        self.clears += [effect for effect in effects if isinstance(effect, SendClear)]
        self.rows += [(effect.step, effect.row) for effect in effects if isinstance(effect, WriteRow)]
        return next((effect.body for effect in effects if isinstance(effect, Answer) and effect.ref == "call"), None)

    def ask(self, request: Any) -> Any:
        answer = self.take(self.machine.handle(Asked("call", request, self.now), self.now))
        self.take(self.machine.handle(Tick(), self.now))  # No event is delayed here.
        return answer

    def register(self, service: str, instance: int, life: int, data_id: str = "") -> None:
        self.ask(
            Register(
                service=service,
                instance=instance,
                incarnation=life,
                pid=1,
                host="h",
                endpoint="",
                limit_bytes=1 << 40,
                data_id=data_id,
            )
        )

    # ---- invariants

    def task_ids(self, first: int, end: int) -> list[str]:
        """Return those tasks with admission numbers from `first` up to `end` whose rows can be sampled."""
        places = [self.order.at(each) for each in range(first, end) if each // TASKS != EMPTY_STEP - 1]
        return [make_task_id("train", *place) for place in places if place[1] not in (2, 5)]

    def admission(self, task_id: str) -> int:
        return next(each for each in range(10_000) if make_task_id("train", *self.order.at(each)) == task_id)

    def check(self, grant: LeaseGrant) -> None:
        ids = [task.task_id for task in grant.batch.tasks]
        if grant.split == "held":
            rows = [int(task_id.rsplit("/", 1)[1]) for task_id in ids]
            assert rows in ([1, 4, 6], [8, 9])
            assert grant.weights is not None
            assert grant.exact
            assert {task_id.split("/")[1] for task_id in ids} == {str(grant.weights.step)}
            return
        first = self.admission(ids[0]) // BLOCK * BLOCK
        if grant.stage == ROLLOUT.name:
            everything = [make_task_id("train", *self.order.at(each)) for each in range(first, first + BLOCK)]
            # Only the first lease of a row shows that the row cannot be sampled.
            assert ids in (everything, self.task_ids(first, first + BLOCK))
            assert grant.weights is not None
            assert grant.weights.step == grant.min_step == max(0, first // TASKS - self.plan.staleness)
            assert grant.exact
            assert grant.block_rows == BLOCK * 2
        else:
            assert ids in (self.task_ids(first, first + PART), self.task_ids(first + PART, first + BLOCK))

    # ---- work

    def work(self) -> None:
        for _ in range(self.chance.randint(1, ROUND)):
            getattr(self, self.chance.choice(WORK))()

    def lease(self) -> None:
        worker = self.chance.randrange(len(WORKERS))
        most = BLOCK if WORKERS[worker] == ROLLOUT.name else PART
        request = LeaseRequest(
            stage=WORKERS[worker],
            service=WORKERS[worker],
            instance=worker,
            incarnation=self.lives[worker],
            max_tasks=most,
        )
        grant = self.ask(request)
        if grant is not None:
            self.check(grant)
            self.grants.append((grant, self.lives[worker]))

    def finish(self, *, keep: bool = False, missing: int = 0) -> None:
        """Complete a lease. `missing` is the number of the lease's tasks whose shards a frozen model cannot find."""
        chosen = [each for each in self.grants if not missing or each[0].stage != ROLLOUT.name]
        if not chosen:
            return
        grant, life = self.chance.choice(chosen)
        if not keep:
            self.grants.remove((grant, life))
        results = []
        for place, task in enumerate(grant.batch.tasks):
            fails = grant.split == "train" and not self.task_ids(at := self.admission(task.task_id), at + 1)
            outcome = Outcome.DROP if fails else Outcome.DONE
            if place < missing:
                outcome = Outcome.RETRY
            samples = 2 if outcome == Outcome.DONE and grant.stage == ROLLOUT.name else 0
            results.append(TaskResult(task.task_id, task.fence, outcome, STORE, 1, samples, 1, 1))
        results = results[:missing] if missing else results
        values = np.array([row for each in results for row in [int(each.task_id.rsplit("/", 1)[1])] * each.samples])
        reply = self.ask(
            Complete(
                lease_id=grant.lease_id,
                stage=grant.stage,
                incarnation=life,
                results=results,
                scalars={"reward": values.astype(np.float32)} if grant.stage == ROLLOUT.name else {},
            )
        )
        refused = {each.task_id for each in reply.refused}
        for each in results:  # The fences of accepted shards must have been above the tombstones.
            if each.task_id not in refused and each.outcome == Outcome.DONE and not keep:
                assert each.fence > self.tombstones.get(each.task_id, 0)

    def train(self) -> None:
        step = self.holds + 1
        batch = self.ask(NextBatch(driver=self.driver, step=step))
        if not isinstance(batch, StepBatch):
            return
        ids = [task.task_id for task in batch.batch.tasks]
        assert ids == self.task_ids((step - 1) * TASKS, step * TASKS)
        assert batch.dropped == TASKS - len(ids)
        run = self.machine.run
        new = step > run.history.committed_step
        self.ask(CommitStep(driver=self.driver, step=step, metrics={"ids": float(hash(tuple(ids)) % 1000)}))
        self.holds = step
        if new:
            self.publish(step)
        if new and step % 3 == 0:
            self.checkpoints = [*self.checkpoints, step][-2:]
            self.ask(CheckpointSaved(driver=self.driver, step=step, kept=self.checkpoints))

    def publish(self, step: int) -> None:
        lineage = self.machine.run.history.lineage
        ref = weights_ref(lineage, step, CANARY)
        self.ask(PublishWeights(driver=self.driver, ref=ref))

    def clear(self) -> None:
        if self.clears:
            sent = self.clears.pop(0)
            for task in sent.tasks:
                self.tombstones[task.task_id] = max(self.tombstones.get(task.task_id, 0), task.fence)
            if sent.tracked:
                self.take(self.machine.handle(ClearDone(sent.store, len(sent.tasks)), self.now))

    # ---- disturbances

    def silence(self) -> None:
        self.now += 6.0
        self.take(self.machine.handle(Tick(), self.now))

    def reborn(self, worker: int | None = None) -> None:
        worker = self.chance.randrange(len(WORKERS)) if worker is None else worker
        self.life += 1
        self.lives[worker] = self.life
        self.register(WORKERS[worker], worker, self.life)

    def missing(self) -> None:
        self.finish(missing=self.chance.randint(1, PART))

    def late(self) -> None:
        self.finish(keep=True)

    def new_driver(self) -> None:
        """Start a new driver. The workers keep their position, and the versions that they hold are published again."""
        self.driver += 1
        info: RunInfo = self.ask(GetRunInfo(driver=self.driver))
        self.checkpoints = [step for step in self.checkpoints if step <= info.committed_step]
        if self.holds != info.committed_step:
            self.reload()
        else:
            self.resume(info.committed_step)

    def reload(self) -> None:
        """Lose the workers. Sometimes the newest checkpoint, or every checkpoint, is damaged."""
        known = [0, *self.checkpoints]
        self.holds = self.chance.choices([known[-1], known[-2 % len(known)], 0], [7, 2, 1])[0]
        self.checkpoints = [step for step in self.checkpoints if step <= self.holds]
        info: RunInfo = self.ask(GetRunInfo(driver=self.driver, reload=True, loaded_step=self.holds))
        while self.holds < info.committed_step:
            before = self.holds
            self.train()
            assert self.holds == before + 1  # A replayed step is ready at once.
        self.resume(info.committed_step)

    def resume(self, version: int) -> None:
        for step in range(max(0, version - self.plan.staleness), version + 1):
            self.publish(step)

    def lose_store(self) -> None:
        self.data += 1
        self.tombstones.clear()
        self.register("batch-store", 0, 1000 + self.data, f"data-{self.data}")
        self.new_driver()

    def lose_end(self) -> None:
        """Kill the scheduler as a power cut would, so that its last events are lost.

        The store still has the effects of these events.
        """
        fence = self.machine.run.ledger.highest_fence
        lineage, reached = self.machine.run.history.lineage, self.machine.run.history.committed_step
        del self.journal[len(self.journal) - self.chance.randrange(min(len(self.journal), 40)) :]
        self.machine, rows, _ = view.replayed(self.plan, self.journal)
        self.rows = [row for row in self.rows if row[0] in rows]
        self.clears = []
        lost = TailLost(self.machine.run.history.committed_step, reached, fence, lineage)
        self.take(self.machine.begin(self.config, self.now, lost))
        self.register("batch-store", 0, 1000 + self.data, f"data-{self.data}")
        for worker in range(len(WORKERS)):
            self.reborn(worker)
        self.new_driver()


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from((*["work"] * 12, *HURTS)), min_size=10, max_size=60),
    st.integers(0, 2),
    st.integers(0, 1000),
    st.booleans(),
)
def test_blocks_versions_and_steps_are_the_same_after_any_history(
    actions: list[str], staleness: int, seed: int, collect_at_commit: bool
) -> None:
    run = Run(staleness, seed, collect_at_commit=collect_at_commit)
    for action in actions:
        getattr(run, action)()
    reached = run.holds + 2
    for _ in range(3000):  # Without further disturbances the run makes progress, whatever happened before.
        if run.holds >= reached:
            break
        for work in WORK:
            getattr(run, work)()
    assert run.holds >= reached
    assert [step for step, _ in run.rows] == list(range(len(run.rows)))
    assert all("eval/held/reward" in row for step, row in run.rows if step % 2 == 0)
    replayed = Scheduler(run.plan, lease_s=5.0, incarnation=2)
    for event in run.journal:
        replayed.replay(event)
    packed = run_state.dump(run.machine.run)
    assert run_state.dump(replayed.run) == packed
    assert run_state.dump(run_state.load(run.plan, packed)) == packed
