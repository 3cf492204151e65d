"""Tests that the promises about a task hold for any order of leases, losses, results, commits and acknowledgements."""

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
    PutTask,
    Register,
    StepBatch,
    TaskResult,
)
from services.scheduler import run_state
from services.scheduler.events import (
    Answer,
    Asked,
    Checked,
    CheckShards,
    ClearDone,
    Configure,
    DiscardRows,
    Durable,
    Effect,
    Persist,
    SendClear,
    ShardClaim,
    StopClear,
    TailLost,
    Tell,
    Tick,
    WriteRow,
)
from services.scheduler.plan import EpochOrder, Plan
from services.scheduler.registry import GONE_S
from services.scheduler.state import Scheduler
from shared.stages import REFERENCE, REWARD_MODEL, ROLLOUT, TEACHER
from shared.topology.capacity import live_versions
from tests.property import scheduler_view as view
from tests.weights_refs import weights_ref

CANARY = Canary(token_ids=np.zeros(2, np.int32), logprobs=np.zeros(1, np.float32), tolerance=1e-4)
ACTIONS = (
    *("lease", "reference", "finish", "finish", "train", "clear", "step", "step") * 2,
    *(
        "retry",
        "drop",
        "late",
        "silence",
        "reborn",
        "away_joins",
        "away_is_gone",
        "reload",
        "fall_back",
        "store_is_lost",
        "end_is_lost",
        "damage",
    ),
)
WORKER = 1000
HOME, AWAY = "batch-store/0", "batch-store/1"


class Model:
    """A model that drives the machine with random events and checks every promise after each event."""

    def __init__(self, staleness: int, seed: int, *, by_completion: bool, collect_at_commit: bool) -> None:
        self.chance = random.Random(seed)
        self.plan = Plan(
            run="model",
            seed=seed,
            tasks_per_step=3,
            group_size=2,
            staleness=staleness,
            by_completion=by_completion,
            shuffle=True,
            deterministic=False,
            rows=range(7),
            stages=(ROLLOUT, REFERENCE, TEACHER, REWARD_MODEL),
        )
        self.machine = Scheduler(self.plan, lease_s=5.0, incarnation=1)
        self.journal: list[Durable] = []
        self.now = 0.0
        self.life = WORKER
        self.grants: list[tuple[LeaseGrant, int]] = []
        self.fences: dict[str, int] = {}
        self.trained: list[str] = []
        self.dropped: set[str] = set()
        """Training tasks that will never be trained."""
        self.rows: list[tuple[int, int]] = []
        """Step of each row in the journal, and the number of the commit that wrote the row."""
        self.makings = 0
        """Number of commits so far. The row of a step names the commit that wrote it."""
        self.sampled: dict[str, int] = {}
        self.saved: list[int] = []
        """Steps with checkpoints that the trainer can load."""
        self.lineage = 0
        self.clears: list[SendClear] = []
        self.away = False
        """Whether another host, which has its own store, is part of the run."""
        self.config = Configure(1000, 50, 2, collect_at_commit)
        self.data_id = ""
        """Data id of the first store."""
        self.take(self.machine.begin(self.config, 0.0))
        self.register("batch-store", 1)
        self.register("rollout", self.life)
        self.ask(GetRunInfo(driver=1))
        self.publish(0)

    def take(self, effects: list[Effect]) -> Any:
        view.validate(self.machine.run)
        self.journal += [effect.event for effect in effects if isinstance(effect, Persist)]
        for effect in effects:
            if isinstance(effect, SendClear):
                self.clears.append(effect)
            elif isinstance(effect, StopClear):
                self.clears = [each for each in self.clears if each.store != effect.store]
            elif isinstance(effect, Tell) and effect.topic == "scheduler/dropped":
                self.dropped.add(str(effect.values["task"]))
            elif isinstance(effect, DiscardRows):
                self.rows = [row for row in self.rows if row[0] <= effect.step]
            elif isinstance(effect, WriteRow):
                self.rows.append((effect.step, int(effect.row["making"])))
        return next((effect.body for effect in effects if isinstance(effect, Answer) and effect.ref == "call"), None)

    def ask(self, request: Any) -> Any:
        answer = self.take(self.machine.handle(Asked("call", request, self.now), self.now))
        self.take(self.machine.handle(Tick(), self.now))  # No event is delayed in this model.
        return answer

    def register(self, service: str, life: int, instance: int = 0, data_id: str = "") -> None:
        self.ask(
            Register(
                service=service,
                instance=instance,
                incarnation=life,
                pid=1,
                host="h",
                endpoint="",
                limit_bytes=1 << 30,
                data_id=data_id,
            )
        )

    def publish(self, step: int, *, spare: int = 0) -> None:
        """Publish a version. `spare` is the number of versions of the former lineage for which `weight_versions` leaves
        room.
        """
        written = 1  # The shards are put into the store before the version is published.
        assert len(self.machine.run.history.versions.refs) + written <= live_versions(self.plan.staleness) + spare
        ref = weights_ref(self.lineage, step, CANARY, store=HOME)
        self.ask(PublishWeights(driver=1, ref=ref))

    def lease(self, stage: str = "rollout") -> None:
        request = LeaseRequest(
            stage=stage, service="rollout", instance=0, incarnation=self.life, max_tasks=self.chance.randint(1, 4)
        )
        grant = self.ask(request)
        if grant is None:
            return
        self.grants.append((grant, self.life))
        for task in grant.batch.tasks:
            last = self.fences.get(task.task_id, 0)
            assert task.fence > last if stage == "rollout" else task.fence == last
            self.fences[task.task_id] = task.fence
            if stage == "rollout":
                assert grant.weights is not None
                self.sampled[task.task_id] = grant.weights.step

    def reference(self) -> None:
        self.lease("reference")
        self.lease("teacher")
        self.lease("reward-model")

    def end(self, outcome: int, *, keep: bool = False) -> None:
        if not self.grants:
            return
        at = self.chance.randrange(len(self.grants))
        grant, life = self.grants[at] if keep else self.grants.pop(at)
        count = 2 if grant.stage == "rollout" else 0
        results = [
            TaskResult(
                task.task_id, task.fence, outcome, self.chance.choice([HOME, AWAY][: 1 + self.away]), 1, count, 1, 1
            )
            for task in grant.batch.tasks
        ]
        total = count * len(results) if outcome == Outcome.DONE else 0
        scalars = {}
        if grant.weights is not None:
            scalars = {
                "reward": np.ones(total, np.float32),
                "version_min": np.full(total, grant.weights.step, np.int32),
                "version_max": np.full(total, grant.weights.step, np.int32),
            }
        reply = self.ask(
            Complete(lease_id=grant.lease_id, stage=grant.stage, incarnation=life, results=results, scalars=scalars)
        )
        current = {task.task_id for task in grant.batch.tasks if self.fences[task.task_id] == task.fence}
        refused = {refusal.task_id for refusal in reply.refused}
        assert refused >= {task.task_id for task in grant.batch.tasks} - current

    def finish(self) -> None:
        self.end(Outcome.DONE)

    def retry(self) -> None:
        self.end(Outcome.RETRY)

    def drop(self) -> None:
        self.end(Outcome.DROP)

    def late(self) -> None:
        self.end(Outcome.DONE, keep=True)

    def silence(self) -> None:
        self.now += 6.0
        self.take(self.machine.handle(Tick(), self.now))
        assert not len(self.machine.run.ledger.leases)

    def reborn(self) -> None:
        self.life += 1
        self.register("rollout", self.life)
        assert not len(self.machine.run.ledger.leases)

    def away_joins(self) -> None:
        self.life += 1
        self.register("batch-store", self.life, 1)
        self.away = True

    def away_is_gone(self) -> None:
        """Lose the other host, permanently or until `away_joins`.

        No task waits for that host afterwards, and no waiting task has data only on it.
        """
        self.now += GONE_S + 1
        self.take(self.machine.handle(Tick(), self.now))
        self.away = False
        run = self.machine.run
        assert list(run.shards.clears.queues) == [HOME]
        while any(run.shards.clears.queues.values()):
            told = len(run.shards.clears.head(HOME))
            self.clears = []
            self.take(self.machine.handle(ClearDone(HOME, told), self.now))
        assert not view.waits_for_clears(run)

    def train(self) -> None:
        step = self.machine.run.history.committed_step + 1
        batch = self.ask(NextBatch(driver=1, step=step))
        if not isinstance(batch, StepBatch):
            return
        for task in batch.batch.tasks:
            assert self.away or {batch.batch.stores[store] for store in task.stores} == {HOME}
            assert 0 <= step - 1 - self.sampled[task.task_id] <= self.plan.staleness
            assert task.fence == self.fences[task.task_id]
        if self.chance.random() < 0.3:
            self.damage()
            if self.chance.random() < 0.7:  # In this case a reader has found the loss, so the driver resumes.
                self.ask(GetRunInfo(driver=1))
                if self.machine.run.history.batched_step < step:
                    return
        self.trained += [task.task_id for task in batch.batch.tasks]
        assert len(self.trained) == len(set(self.trained)) == step * self.plan.tasks_per_step
        self.makings += 1
        self.ask(CommitStep(driver=1, step=step, metrics={"making": float(self.makings)}))
        self.publish(step)
        assert self.rows[-1] == (step, self.makings)
        if self.chance.random() < 0.5:
            self.saved = [*self.saved, step][-2:]
            self.ask(CheckpointSaved(driver=1, step=step, kept=self.saved))

    def reload(self) -> None:
        """Lose the trainer's weights.

        The trainer loads the newest checkpoint and replays, or trains the same tasks again.
        """
        self.load(self.saved[-1] if self.saved else 0)

    def fall_back(self) -> None:
        """Reload while the newest checkpoint is damaged, unless it is the only one."""
        if len(self.saved) > 1:
            self.saved.pop()
            self.load(self.saved[-1])

    def store_is_lost(self) -> None:
        """Lose the memory of the first store's host, or kill and resume the whole run."""
        self.life += 1
        before = self.machine.run.ledger.window.tail
        self.data_id = f"{self.life}"
        self.register("batch-store", self.life, data_id=self.data_id)
        run = self.machine.run
        assert run.ledger.window.head >= before  # All waiting tasks have new admission numbers.
        assert run.history.committed_step == max(run.history.checkpoint_step, 0)
        self.reload()

    def end_is_lost(self) -> None:
        """Kill the scheduler as a power cut would, so that its last events are lost.

        Stores and workers still have the effects of these events.
        """
        del self.journal[len(self.journal) - self.chance.randrange(min(len(self.journal), 40)) :]
        self.machine, rows, self.dropped = view.replayed(self.plan, self.journal)
        run = self.machine.run
        makings = {step: int(row["making"]) for step, row in rows.items()}
        agreed = min((step - 1 for step, making in self.rows if makings.get(step, making) != making), default=1000)
        fence, reached = max(self.fences.values(), default=1), max((step for step, _ in self.rows), default=0)
        lost = TailLost(min(agreed, run.history.committed_step), reached, fence, self.lineage)
        kept = [row for row in self.rows if row[0] in makings]
        self.rows = kept + [each for each in makings.items() if each[0] not in dict(kept)]
        self.clears = []
        self.take(self.machine.begin(self.config, self.now, lost))
        assert run.history.committed_step <= agreed
        self.away = ("batch-store", 1) in run.shards.registry
        self.life += 1
        self.register("batch-store", self.life, data_id=self.data_id)
        self.register("rollout", self.life)
        self.saved = [step for step in self.saved if step <= run.history.committed_step]
        self.reload()
        if not self.saved:  # No task is in the weights, and dropped tasks might also have been sampled again.
            self.dropped -= {*view.live_ids(run), *view.taken_back_ids(run)}

    def damage(self) -> None:
        """Lose shards of some tasks in any state."""
        run = self.machine.run
        tasks = [PutTask(task.task_id, task.fence) for task in run.ledger.tasks]
        lost = self.chance.sample(tasks, min(len(tasks), self.chance.randint(1, 3)))
        order = CheckShards(self.chance.choice([HOME, AWAY]), [ShardClaim(each) for each in lost])
        failures = {task.task_id: task.failures for task in run.ledger.tasks}
        self.take(self.machine.handle(Checked(order, {}), self.now))
        assert all(task.failures == failures[task.task_id] for task in run.ledger.tasks if task.task_id in failures)

    def load(self, loaded: int) -> None:
        info = self.ask(GetRunInfo(driver=1, reload=True, loaded_step=loaded))
        assert loaded <= info.committed_step
        del self.trained[info.committed_step * self.plan.tasks_per_step :]
        self.lineage = info.lineage
        # Like the driver, this publishes no version of a step that is replayed.
        self.publish(info.committed_step, spare=1)

    def step(self) -> None:
        """Take all actions that lead to a trained step if nothing goes wrong."""
        for _ in range(2):
            self.lease()
            self.finish()
            self.reference()
            self.finish()
        self.train()

    def clear(self) -> None:
        if self.clears:
            sent = self.clears.pop(0)
            self.take(self.machine.handle(ClearDone(sent.store, len(sent.tasks)), self.now))

    def check(self) -> None:
        run = self.machine.run
        self.check_no_task_is_left_out()
        assert [step for step, _ in self.rows] == list(range(1, run.history.committed_step + 1))
        assert run.ledger.window.live <= self.plan.max_live

    def check_no_task_is_left_out(self) -> None:
        """Check that every admitted task is in the weights, dropped for a recorded reason, or still to be trained,
        and that tasks are trained in the order of the plan."""
        run, order = self.machine.run, EpochOrder(self.plan)
        every = [make_task_id("train", *order.at(position)) for position in range(run.ledger.position)]
        live = set(view.live_ids(run))
        open_ = set(view.batch_ids(run, run.history.committed_step + 1))
        waiting = set(view.taken_back_ids(run))
        kept = [set(self.trained), self.dropped, live, open_, waiting]
        assert set(every) == set().union(*kept)
        assert len(every) == sum(map(len, kept))
        if not self.plan.by_completion:
            assert self.trained == [name for name in every if name in set(self.trained)]


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(ACTIONS), min_size=20, max_size=150),
    st.integers(0, 4),
    st.integers(0, 1000),
    st.booleans(),
    st.booleans(),
)
def test_every_history_keeps_the_promises_and_replays_to_the_same_state(
    actions: list[str], staleness: int, seed: int, by_completion: bool, collect_at_commit: bool
) -> None:
    model = Model(staleness, seed, by_completion=by_completion, collect_at_commit=collect_at_commit)
    for action in actions:
        getattr(model, action)()
        model.check()
    replayed = Scheduler(model.plan, lease_s=5.0, incarnation=2)
    for event in model.journal:
        replayed.replay(event)
    packed = run_state.dump(model.machine.run)
    assert run_state.dump(replayed.run) == packed
    assert run_state.dump(run_state.load(model.plan, packed)) == packed
