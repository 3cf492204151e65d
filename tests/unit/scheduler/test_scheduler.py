"""The life cycle of tasks on the state machine alone: no socket, no clock, no file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from proto.messages import (
    BatchMeta,
    Canary,
    CheckpointSaved,
    CommitStep,
    Complete,
    ErrorCode,
    GetRunInfo,
    GetStatus,
    Heartbeat,
    LeaseGrant,
    LeaseProgress,
    LeaseRequest,
    NextBatch,
    Outcome,
    PublishWeights,
    PutTask,
    Refusal,
    Register,
    StepBatch,
    TaskHandle,
    TaskResult,
    WaitEvals,
    WeightsRef,
)
from services.scheduler import snapshot
from services.scheduler.attempts import FAILURE
from services.scheduler.events import (
    Answer,
    Asked,
    ClearDone,
    Configure,
    Durable,
    Effect,
    Event,
    Fail,
    Listed,
    Persist,
    SaveEval,
    SaveStep,
    SendClear,
    Tick,
    WriteRow,
)
from services.scheduler.plan import EpochOrder, EvalPlan, Plan
from services.scheduler.run_state import RunState
from services.scheduler.state import Scheduler
from services.scheduler.steps import HOPELESS_TASKS
from shared.stages import train_graph
from shared.topology.capacity import live_versions

LEASE_S = 10.0
STORE = "batch-store/0"
CANARY = Canary(token_ids=np.zeros(2, np.int32), logprobs=np.zeros(1, np.float32), tolerance=1e-4)


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "run": "test",
        "seed": 3,
        "tasks_per_step": 4,
        "group_size": 2,
        "staleness": 1,
        "shuffle": False,
        "deterministic": False,
        "rows": range(100),
        "block_tasks": 2,
    }
    return Plan(**{**values, **changes})


@dataclass
class Bench:
    """A state machine with its own clock, which keeps all effects and the journal."""

    plan: Plan = field(default_factory=plan)
    config: Configure = field(default_factory=lambda: Configure(5, 3, 2, False))
    now: float = 0.0
    journal: list[Durable] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    calls: int = 0
    lineage: int = 0

    def __post_init__(self) -> None:
        self.machine = Scheduler(self.plan, lease_s=LEASE_S, incarnation=99)
        self._keep(self.machine.begin(self.config, self.now))

    def _keep(self, effects: Sequence[Effect]) -> list[Effect]:
        self.journal += [effect.event for effect in effects if isinstance(effect, Persist)]
        self.effects += effects
        return list(effects)

    def event(self, event: Event, *, after_s: float = 0.0) -> list[Effect]:
        self.now += after_s
        return self._keep(self.machine.handle(event, self.now))

    def ask(self, request: Any, *, wait_s: float = 5.0) -> Any:
        """Return the reply, a Fail, or None while the call is held back."""
        self.calls += 1
        asked = Asked(self.calls, request, self.now + wait_s, (1, self.calls))
        return self.answer(self.event(asked), self.calls)

    @staticmethod
    def answer(effects: Sequence[Effect], ref: int) -> Any:
        for effect in effects:
            if isinstance(effect, Answer) and effect.ref == ref:
                return effect.body
            if isinstance(effect, Fail) and effect.ref == ref:
                return effect
        return None

    def start(self, **register: Any) -> Bench:
        self.register("batch-store", 0, 1, limit_bytes=register.get("limit_bytes", 1 << 30))
        self.ask(GetRunInfo(driver=1))
        self.publish(0)
        return self

    def register(
        self, service: str, instance: int, incarnation: int, limit_bytes: int = 0, host_id: str = "", data_id: str = ""
    ) -> Any:
        return self.ask(
            Register(
                service=service,
                instance=instance,
                incarnation=incarnation,
                pid=1,
                host="h",
                endpoint="",
                limit_bytes=limit_bytes,
                host_id=host_id,
                data_id=data_id,
            )
        )

    def publish(self, step: int, fence: int = 1) -> Any:
        ref = WeightsRef(
            lineage=self.lineage,
            step=step,
            task_id=f"weights/{self.lineage}/{step}",
            fence=fence,
            store=STORE,
            nbytes=100,
            canary=CANARY,
            drill=CANARY,
            drill_seed=0,
        )
        return self.ask(PublishWeights(driver=1, ref=ref))

    def publish_again(self, step: int) -> Any:
        """Publish a step under the newest lineage of the scheduler."""
        self.lineage = self.machine.run.lineage
        return self.publish(step)

    def lease(self, stage: str = "rollout", most: int = 4, instance: int = 0, life: int = 7) -> Any:
        return self.ask(LeaseRequest(stage=stage, service=stage, instance=instance, incarnation=life, max_tasks=most))

    def granted(self, stage: str = "rollout", most: int = 4, instance: int = 0, life: int = 7) -> LeaseGrant:
        grant = self.lease(stage, most, instance, life)
        assert isinstance(grant, LeaseGrant), grant
        return grant

    def complete(
        self,
        grant: LeaseGrant,
        *,
        outcome: int = Outcome.DONE,
        content: int = 5,
        reward: float | Sequence[float] = 1.0,
        samples: int = 2,
        failed: int = 0,
        life: int = 7,
        tasks: int | None = None,
        final: bool = True,
        store: str = STORE,
    ) -> list[Refusal]:
        rollout = grant.stage == "rollout"
        results = [
            TaskResult(
                task.task_id,
                task.fence,
                outcome,
                store,
                content,
                samples if rollout else 0,
                20,
                50,
                samples_failed=failed,
            )
            for task in grant.batch.tasks[:tasks]
        ]
        total = samples * len(results) if outcome == Outcome.DONE else 0
        rewards = np.full(total, 1, np.float32) * np.float32(reward)
        scalars = {"reward": rewards, "length": np.arange(total, dtype=np.int32)}
        if grant.weights is not None:
            versions = np.full(total, grant.weights.step, np.int32)
            scalars |= {"version_min": versions, "version_max": versions}
        reply = self.ask(
            Complete(
                lease_id=grant.lease_id,
                stage=grant.stage,
                incarnation=life,
                results=results,
                scalars=scalars if rollout else {},
                final=final,
            )
        )
        return list(reply.refused)

    def step(self, step: int, store: str = STORE) -> StepBatch:
        """Roll out what the step needs into `store`, batch and commit it, publish its version."""
        batch = self.ask(NextBatch(driver=1, step=step))
        ref = self.calls
        while batch is None:
            grant = self.granted()
            self.complete(grant, store=store)
            batch = self.answer(self.effects, ref)
        assert isinstance(batch, StepBatch), batch
        self.ask(CommitStep(driver=1, step=step, metrics={"loss/policy": 1.0}))
        self.publish(step)
        return batch

    def counts(self) -> dict[str, int]:
        return dict(self.ask(GetStatus()).tasks)

    def acknowledge(self) -> set[tuple[str, int]]:
        """Have the store acknowledge everything it was told to clear, and return that."""
        done: set[tuple[str, int]] = set()
        seen = 0
        while seen < len(self.effects):
            effect = self.effects[seen]
            seen += 1
            if isinstance(effect, SendClear) and effect.tracked:
                self.effects.remove(effect)
                seen -= 1
                done |= {(task.task_id, task.fence) for task in effect.tasks}
                self.event(ClearDone(effect.store, len(effect.tasks)))
        return done


def ids(grant: LeaseGrant) -> list[str]:
    return [task.task_id for task in grant.batch.tasks]


# ------------------------------------------------------------------------------------------------ fences, leases


def test_a_repeated_result_is_a_no_op_and_other_content_a_conflict() -> None:
    bench = Bench().start()
    grant = bench.granted()
    assert bench.complete(grant, content=5) == []
    before = snapshot.dump(bench.machine.run)
    assert bench.complete(grant, content=5) == []
    assert {refusal.code for refusal in bench.complete(grant, content=6)} == {ErrorCode.CONFLICT}
    assert snapshot.dump(bench.machine.run) == before


def test_a_lost_lease_raises_the_fence_tombstones_the_old_one_and_refuses_the_late_result() -> None:
    bench = Bench().start()
    grant = bench.granted()
    bench.event(Tick(), after_s=LEASE_S + 1)
    assert bench.acknowledge() == {(task, 1) for task in ids(grant)}
    again = bench.granted(life=8, instance=1)
    assert ids(again) == ids(grant)
    assert {task.fence for task in again.batch.tasks} == {2}
    assert {refusal.code for refusal in bench.complete(grant)} == {ErrorCode.COLLECTED}
    assert bench.complete(again, life=8) == []


def test_a_result_counts_only_under_the_lease_that_holds_its_task() -> None:
    bench = Bench().start()
    mine, other = bench.granted(), bench.granted(instance=1)
    stolen = msgspec.structs.replace(mine, lease_id=other.lease_id)
    assert {refusal.code for refusal in bench.complete(stolen, content=6, final=False)} == {ErrorCode.LOST}
    assert bench.counts()["LEASED"] == len(ids(mine)) + len(ids(other))
    assert bench.complete(mine, content=5) == []
    assert bench.complete(other) == []


def test_a_result_of_an_earlier_incarnation_of_the_holder_is_refused() -> None:
    bench = Bench().start()
    grant = bench.granted(life=8)
    assert {refusal.code for refusal in bench.complete(grant, life=7)} == {ErrorCode.LOST}
    assert bench.counts()["LEASED"] == len(ids(grant))
    assert bench.complete(grant, life=8) == []


def test_a_result_counts_only_for_the_stage_of_its_lease() -> None:
    bench = Bench(plan(stages=train_graph(with_reference=True))).start()
    rollout = bench.granted()
    forged = msgspec.structs.replace(rollout, stage="reference")
    assert {refusal.code for refusal in bench.complete(forged, final=False)} == {ErrorCode.LOST}
    assert bench.complete(rollout) == []
    assert bench.counts()["ROLLED_OUT"] == len(ids(rollout))


def test_a_fence_that_was_never_granted_is_a_conflict() -> None:
    bench = Bench().start()
    grant = bench.granted(most=1)
    result = TaskResult(ids(grant)[0], 9, Outcome.DONE, STORE, 1, 0, 0, 0)
    reply = bench.ask(Complete(lease_id=grant.lease_id, stage="rollout", incarnation=7, results=[result], final=False))
    assert [refusal.code for refusal in reply.refused] == [ErrorCode.CONFLICT]


def test_only_progress_renews_a_lease() -> None:
    bench = Bench().start()
    bench.register("rollout", 0, 7)
    moving, stuck = bench.granted(most=1), bench.granted(most=1)
    for beat in range(1, 8):
        bench.event(Tick(), after_s=LEASE_S / 4)
        leases = [LeaseProgress(moving.lease_id, beat), LeaseProgress(stuck.lease_id, 1)]
        ack = bench.ask(Heartbeat(service="rollout", instance=0, incarnation=7, state="READY", leases=leases))
    assert list(ack.lost_leases) == [stuck.lease_id]


def test_a_new_incarnation_frees_the_leases_of_the_old_one_and_answers_its_held_back_call() -> None:
    bench = Bench().start()
    bench.register("rollout", 0, 7)
    first, second = bench.granted(), bench.granted()
    assert bench.lease() is None
    held = bench.calls
    bench.register("rollout", 0, 8)
    failed = bench.answer(bench.effects, held)
    assert isinstance(failed, Fail)
    assert failed.code == ErrorCode.LOST
    assert ids(bench.granted(life=8)) == ids(first)
    assert ids(bench.granted(life=8)) == ids(second)


@pytest.mark.parametrize("untouched", [True, False])
def test_leases_handed_back_count_as_attempts_unless_their_tasks_are_untouched(untouched: bool) -> None:
    bench = Bench().start()
    for _ in range(3 * FAILURE):
        grant = bench.granted(most=1)
        assert ids(grant) == ["train/0/0"]
        bench.ask(Complete(lease_id=grant.lease_id, stage="rollout", incarnation=7, results=[], untouched=untouched))
    assert (ids(bench.granted(most=1)) == ["train/0/0"]) == untouched


@pytest.mark.parametrize("untouched", [True, False])
def test_expired_leases_count_as_attempts_unless_their_tasks_are_untouched(untouched: bool) -> None:
    bench = Bench().start()
    bench.register("rollout", 0, 7)
    for _ in range(3):
        grant = bench.granted(most=1)
        assert ids(grant) == ["train/0/0"]
        leases = [LeaseProgress(grant.lease_id, 1, untouched)]
        bench.ask(Heartbeat(service="rollout", instance=0, incarnation=7, state="READY", leases=leases))
        bench.event(Tick(), after_s=LEASE_S + 1)
    assert (ids(bench.granted(most=1)) == ["train/0/0"]) == untouched
    replayed = Scheduler(bench.plan, lease_s=LEASE_S, incarnation=100)
    for event in bench.journal:
        replayed.replay(event)
    assert snapshot.dump(replayed.run) == snapshot.dump(bench.machine.run)


def test_a_task_is_dropped_after_its_attempts_and_the_next_step_continues_without_it() -> None:
    bench = Bench().start()
    for attempt in range(3):
        grant = bench.granted(most=1)
        assert (ids(grant), grant.batch.tasks[0].fence) == (["train/0/0"], attempt + 1)
        bench.complete(grant, outcome=Outcome.RETRY)
    batch = bench.step(1)
    assert [task.task_id for task in batch.batch.tasks] == [f"train/0/{row}" for row in (1, 2, 3, 4)]
    assert batch.dropped == 1
    assert ("train/0/0", 3) in bench.acknowledge()


def test_a_run_whose_tasks_are_all_dropped_ends_and_continues_when_it_is_resumed() -> None:
    bench = Bench().start()
    assert bench.ask(NextBatch(driver=1, step=1)) is None
    waiting = bench.calls
    for _ in range(HOPELESS_TASKS - 1):
        bench.complete(bench.granted(most=1), outcome=Outcome.DROP)
    assert bench.answer(bench.effects, waiting) is None
    grant = bench.granted(most=1)
    bench.complete(grant, outcome=Outcome.DROP)
    told = bench.answer(bench.effects, waiting)
    assert isinstance(told, Fail)
    assert f"step 1: {HOPELESS_TASKS} tasks in a row were dropped, the last was {ids(grant)[-1]}: " in told.message
    resumed = Bench(journal=list(bench.journal))
    for event in bench.journal:
        resumed.machine.replay(event)
    resumed.machine.begin(resumed.config, resumed.now)
    assert len(resumed.step(1).batch.tasks) == 4


def test_one_surviving_sample_drops_a_train_task() -> None:
    bench = Bench().start()
    grant = bench.granted(most=1)
    assert bench.complete(grant, samples=1) == []
    assert bench.counts()["DROPPED"] == 1
    bench.acknowledge()
    assert (bench.counts()["DROPPED"], bench.counts()["COLLECTED"]) == (0, 1)


def test_tasks_left_out_of_a_final_completion_are_leased_again() -> None:
    bench = Bench().start()
    grant = bench.granted(most=4)
    bench.complete(grant, tasks=1)
    assert ids(bench.granted(most=3)) == ids(grant)[1:]


def test_a_retried_request_gets_the_same_grant() -> None:
    bench = Bench().start()
    request = LeaseRequest(stage="rollout", service="rollout", instance=0, incarnation=7, max_tasks=2)
    first = bench.answer(bench.event(Asked("a", request, 5.0, (7, 41))), "a")  # type: ignore[arg-type]
    again = bench.answer(bench.event(Asked("b", request, 5.0, (7, 41))), "b")  # type: ignore[arg-type]
    other = bench.answer(bench.event(Asked("c", request, 5.0, (7, 42))), "c")  # type: ignore[arg-type]
    assert (again.lease_id, ids(again)) == (first.lease_id, ids(first))
    assert other.lease_id != first.lease_id


def test_scalars_that_do_not_match_the_samples_change_nothing() -> None:
    bench = Bench().start()
    grant = bench.granted(most=1)
    before = snapshot.dump(bench.machine.run)
    result = TaskResult(ids(grant)[0], 1, Outcome.DONE, STORE, 1, 2, 0, 0)
    bad = {"reward": np.zeros(3, np.float32)}
    reply = bench.ask(Complete(lease_id=grant.lease_id, stage="rollout", incarnation=7, results=[result], scalars=bad))
    assert isinstance(reply, Fail)
    assert reply.code == ErrorCode.BAD_REQUEST
    assert snapshot.dump(bench.machine.run) == before


# ------------------------------------------------------------------------------------------------ stages


def test_a_reference_lease_carries_the_handles_of_accepted_rollouts_only() -> None:
    bench = Bench(plan(stages=train_graph(with_reference=True))).start()
    assert bench.lease("reference") is None
    held = bench.calls
    rollout = bench.granted(most=2)
    bench.complete(rollout, tasks=1, final=False)
    grant = bench.answer(bench.effects, held)
    assert ids(grant) == ids(rollout)[:1]
    assert [part.stage for part in grant.batch.parts] == ["rollout"]
    assert grant.batch.stores == [STORE]
    assert grant.batch.tasks[0].stores == [0]
    assert bench.counts()["ROLLED_OUT"] == 1
    bench.complete(grant)
    assert bench.counts()["READY"] == 1


def test_a_lost_reference_lease_sends_the_task_back_to_the_start() -> None:
    bench = Bench(plan(stages=train_graph(with_reference=True))).start()
    rollout = bench.granted(most=1)
    bench.complete(rollout)
    bench.granted("reference")
    bench.event(Tick(), after_s=LEASE_S + 1)
    assert bench.lease("reference") is None
    again = bench.granted(most=1)
    assert (ids(again), again.batch.tasks[0].fence) == (ids(rollout), 2)


# ------------------------------------------------------------------------------------------------ admission


def test_live_tasks_never_exceed_the_bound() -> None:
    bench = Bench().start()
    leased = []
    while isinstance(grant := bench.lease(), LeaseGrant):
        leased += ids(grant)
    assert len(leased) == 2 * 4
    assert bench.machine.run.window.live == 8


def test_the_tasks_of_a_step_in_training_are_live_until_it_is_committed() -> None:
    bench = Bench().start()
    bench.complete(bench.granted())
    assert isinstance(bench.ask(NextBatch(driver=1, step=1)), StepBatch)
    assert bench.machine.run.window.live == 4
    bench.ask(CommitStep(driver=1, step=1, metrics={}))
    assert bench.machine.run.window.live == 8


def test_a_lease_names_the_oldest_version_its_step_may_be_sampled_with() -> None:
    bench = Bench(plan(staleness=1)).start()
    first, second = bench.granted(), bench.granted()
    assert (first.min_step, second.min_step) == (0, 0)
    bench.complete(first)
    bench.complete(second)
    assert isinstance(bench.ask(NextBatch(driver=1, step=1)), StepBatch)
    bench.ask(CommitStep(driver=1, step=1, metrics={}))
    assert bench.lease() is None  # step 3 must be sampled with version 1 or later, which is not published
    held = bench.calls
    bench.publish(1)
    third = bench.answer(bench.effects, held)
    assert (third.min_step, third.weights.step) == (1, 1)


def test_a_lease_never_spans_two_steps() -> None:
    bench = Bench().start()
    assert [len(ids(bench.granted(most=3))) for _ in range(4)] == [3, 1, 3, 1]


def test_staleness_zero_continues_after_a_drop() -> None:
    bench = Bench(plan(staleness=0)).start()
    grant = bench.granted(most=4)
    bench.complete(grant, outcome=Outcome.DROP, tasks=1, final=False)
    assert bench.granted(most=4).min_step == 0


def test_deterministic_mode_asks_for_exactly_the_version_and_keeps_fixed_blocks() -> None:
    bench = Bench(plan(deterministic=True, block_tasks=2)).start()
    for step in (1, 2):
        bench.step(step)
    grant = bench.granted(most=4)
    assert (len(ids(grant)), grant.block_rows, grant.exact) == (2, 4, True)
    assert grant.weights is not None
    assert grant.weights.step == grant.min_step == 1


def test_a_step_consumes_in_admission_order_and_waits_for_the_oldest() -> None:
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
    assert bench.machine.run.window.live == 6  # 900 - 3 versions of 100 bytes
    small = Bench(plan(staleness=3, task_bytes=100, weight_bytes=100)).start(limit_bytes=100)
    assert small.machine.run.window.live == 4


def test_trained_bytes_that_fill_the_store_order_a_checkpoint() -> None:
    config = Configure(9, 3, 2, False)
    bench = Bench(plan(task_bytes=50, weight_bytes=100), config).start(limit_bytes=300 + 8 * 50 + 500)
    assert [bench.step(step).checkpoint_now for step in (1, 2, 3)] == [False, False, True]


def test_every_epoch_has_its_own_order_of_all_usable_rows() -> None:
    order = EpochOrder(plan(rows=[0, 2, 3, 5], shuffle=True))
    epochs = [order.some(start, 9) for start in (0, 4, 8)]  # never rows of two epochs at once
    assert all(sorted(rows) == [0, 2, 3, 5] for _, rows in epochs)
    assert [epoch for epoch, _ in epochs] == [0, 1, 2]
    assert len({tuple(rows) for _, rows in epochs}) > 1
    assert [order.at(position) for position in (4, 7)] == [(1, epochs[1][1][0]), (1, epochs[1][1][3])]
    assert EpochOrder(plan(rows=[0, 2, 3, 5], shuffle=True)).some(9, 2) == (2, epochs[2][1][1:3])


# ------------------------------------------------------------------------------------------------ the driver


def test_asking_for_a_batch_again_gives_the_same_and_out_of_order_is_a_conflict() -> None:
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


def test_a_commit_is_carried_out_once() -> None:
    bench = Bench().start()
    bench.step(1)
    before = snapshot.dump(bench.machine.run)
    bench.ask(CommitStep(driver=1, step=1, metrics={"loss/policy": 9.0}))
    assert snapshot.dump(bench.machine.run) == before
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
    assert bench.lease() is None  # tasks of step 5 wait for the first version of the new lineage


# ------------------------------------------------------------------------------------------------ collection


def test_trained_tasks_wait_for_the_oldest_kept_checkpoint() -> None:
    bench = Bench().start()
    batches = {step: bench.step(step) for step in (1, 2, 3, 4)}
    bench.acknowledge()
    bench.ask(CheckpointSaved(driver=1, step=2, kept=[2]))
    assert {task for task, _ in bench.acknowledge()} == {
        task.task_id for step in (1, 2) for task in batches[step].batch.tasks
    }
    bench.ask(CheckpointSaved(driver=1, step=4, kept=[2, 4]))
    assert bench.acknowledge() == set()
    assert bench.counts()["TRAINED"] == 8


def test_reconciliation_clears_only_shards_that_no_peer_may_read() -> None:
    bench = Bench().start()
    leased, done = bench.granted(most=1), bench.granted(most=1)
    bench.complete(done)
    lost = bench.granted(most=1)
    bench.complete(lost, outcome=Outcome.RETRY)
    held = [
        PutTask(ids(leased)[0], 1),
        PutTask(ids(done)[0], 1),
        PutTask(ids(lost)[0], 1),
        PutTask("train/0/77", 1),
        PutTask("weights/0/0", 1),
        PutTask("weights/0/1", 1),  # put and about to be published
    ]
    cleared = [
        effect for effect in bench.event(Listed(STORE, held)) if isinstance(effect, SendClear) and not effect.tracked
    ]
    assert [each.tasks for each in cleared] == [[PutTask(ids(lost)[0], 1), PutTask("train/0/77", 1)]]


def test_a_version_is_collected_when_no_lease_and_no_evaluation_names_it() -> None:
    bench = Bench().start()
    grant = bench.granted()
    old = bench.granted(most=1)
    bench.complete(grant)
    bench.step(1)
    assert ("weights/0/0", 1) not in bench.acknowledge()
    bench.complete(old)
    assert ("weights/0/0", 1) in bench.acknowledge()
    assert bench.machine.run.versions.newest == (0, 1)


def test_slow_leases_keep_no_more_versions_alive_than_the_staleness_allows() -> None:
    """Steps 1 to 4 are trained. One task of each of the steps 5 to 9 never ends, each leased under another version."""
    bench = Bench(plan(staleness=4, tasks_per_step=2), Configure(20, 3, 2, False)).start()
    slow: list[LeaseGrant] = []
    for newest in range(5):
        grants = [bench.granted(most=1) for _ in range(2 if newest else 10)]
        slow.append(grants[-1])
        for grant in grants[:-1]:
            bench.complete(grant)
        if newest < 4:
            bench.step(newest + 1)
    assert [grant.weights.step for grant in slow if grant.weights is not None] == [0, 1, 2, 3, 4]
    assert bench.ask(NextBatch(driver=1, step=5)) is None
    assert len(bench.machine.run.versions) == live_versions(4) == 5
    bench.complete(slow[0])
    bench.ask(CommitStep(driver=1, step=5, metrics={}))
    assert len(bench.machine.run.versions) + 1 == 5  # version 5 is being written


# ------------------------------------------------------------------------------------------------ evaluations, rows


def evaluated() -> Plan:
    return plan(evals=(EvalPlan("held", rows=[0, 1, 4], samples=1, every=2),))


def test_evaluations_come_first_with_exactly_their_version_and_outside_admission() -> None:
    bench = Bench(evaluated()).start()
    grant = bench.granted(most=8)
    assert ids(grant) == ["held/0/0", "held/0/1", "held/0/4"]
    assert (grant.split, grant.exact, grant.group_size, grant.weights and grant.weights.step) == ("held", True, 1, 0)
    assert bench.machine.run.window.live == 8
    assert bench.complete(grant, samples=1, reward=0.5) == []
    assert bench.acknowledge() == {(task, 1) for task in ids(grant)}
    assert bench.ask(WaitEvals(driver=1, step=0)).accuracy == {"held": 0.5}
    assert [(e.version, e.accuracy) for e in bench.effects if isinstance(e, SaveEval)] == [(0, 0.5)]


def test_rows_are_written_in_step_order_and_wait_for_their_evaluation() -> None:
    bench = Bench(evaluated(), Configure(3, 3, 2, False)).start()
    held = bench.granted(most=8)
    for _ in range(2):
        bench.complete(bench.granted())
    for step in (1, 2):
        assert isinstance(bench.ask(NextBatch(driver=1, step=step)), StepBatch)
        bench.ask(CommitStep(driver=1, step=step, metrics={"loss/policy": float(step)}))
    rows = [effect for effect in bench.effects if isinstance(effect, WriteRow)]
    assert rows == []
    bench.complete(held, samples=1)
    rows = [effect for effect in bench.effects if isinstance(effect, WriteRow)]
    assert [row.step for row in rows] == [0, 1]  # row 2 waits for version 2's evaluation
    assert rows[0].row["eval/held/accuracy"] == 1.0


def test_the_driver_waits_for_earlier_evaluations_too_because_rows_are_written_in_order() -> None:
    bench = Bench(evaluated(), Configure(2, 3, 2, False)).start()
    first = bench.granted(most=8)
    for _ in range(2):
        bench.complete(bench.granted())
    for step in (1, 2):
        bench.step(step)
    last = bench.granted(most=8)
    assert (first.weights and first.weights.step, last.weights and last.weights.step) == (0, 2)
    bench.complete(last, samples=1)
    assert bench.ask(WaitEvals(driver=1, step=2)) is None
    bench.complete(first, samples=1)
    assert bench.ask(WaitEvals(driver=1, step=2)).accuracy == {"held": 1.0}
    assert [row.step for row in bench.effects if isinstance(row, WriteRow)] == [0, 1, 2]


def test_several_samples_a_row_give_their_mean_and_the_best_of_them() -> None:
    """Rows [1, 0, 0, 0], [0, 0, 0, 0] and [1, 1, 0, 0] have a mean of 0.25, and two of three rows are solved."""
    bench = Bench(plan(evals=(EvalPlan("held", rows=[0, 1, 4], samples=4, every=2),))).start()
    grant = bench.granted(most=8)
    bench.complete(grant, samples=4, reward=[1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0])
    (row,) = [effect.row for effect in bench.effects if isinstance(effect, WriteRow)]
    assert row["eval/held/accuracy"] == row["eval/held/avg@4"] == 0.25
    assert row["eval/held/pass@4"] == pytest.approx(2 / 3)
    assert [row[f"eval/held/{name}"] for name in ("rows_scored", "rows_dropped", "samples_failed")] == [3, 0, 0]


def test_samples_of_an_evaluation_that_failed_are_wrong_answers_and_counted() -> None:
    """Rows of four samples: one solved and three failed, all failed, and a row that could not be asked at all."""
    bench = Bench(plan(evals=(EvalPlan("held", rows=[0, 1, 4], samples=4, every=2),))).start()
    grant = bench.granted(most=8)
    first, second, third = grant.batch.tasks

    def ends(task: TaskHandle, **how: Any) -> None:
        alone = msgspec.structs.replace(grant, batch=BatchMeta(tasks=[task]))
        assert bench.complete(alone, final=task is third, **how) == []

    ends(first, samples=1, failed=3, reward=1.0)
    ends(second, outcome=Outcome.DROP, samples=0, failed=4)
    ends(third, outcome=Outcome.DROP, samples=0)
    (row,) = [effect.row for effect in bench.effects if isinstance(effect, WriteRow)]
    assert row["eval/held/accuracy"] == row["eval/held/avg@4"] == 0.25 / 2
    assert row["eval/held/pass@4"] == 0.5
    assert [row[f"eval/held/{name}"] for name in ("rows_scored", "rows_dropped", "samples_failed")] == [2, 1, 7]
    assert [(e.accuracy, e.samples, e.dropped) for e in bench.effects if isinstance(e, SaveEval)] == [(0.125, 2, 1)]


def test_a_held_back_call_is_answered_before_its_deadline() -> None:
    bench = Bench(plan()).start()
    bench.register("rollout", 0, 7)
    while isinstance(bench.lease(), LeaseGrant):
        pass
    held = bench.calls
    effects = bench.event(Tick(), after_s=4.6)
    failed = bench.answer(effects, held)
    assert isinstance(failed, Fail)
    assert failed.code == ErrorCode.NOT_READY


# ------------------------------------------------------------------------------------------------ replay


def played() -> Bench:
    """Return a run whose history has drops, losses, retries, evaluations, checkpoints and a reload."""
    bench = Bench(
        plan(
            stages=train_graph(with_reference=True),
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


def test_replay_gives_the_same_state() -> None:
    bench = played()
    replayed = Scheduler(bench.plan, lease_s=LEASE_S, incarnation=100)
    for event in bench.journal:
        replayed.replay(event)
    assert snapshot.dump(replayed.run) == snapshot.dump(bench.machine.run)
    assert bench.machine.run.committed_step == 3


@pytest.mark.parametrize("part", [0.2, 0.5, 0.9])
def test_replay_continues_from_a_snapshot(part: float) -> None:
    bench = played()
    cut = int(len(bench.journal) * part)
    run = RunState(bench.plan)
    for event in bench.journal[:cut]:
        run.apply(event)
    run = snapshot.load(bench.plan, snapshot.dump(run))
    for event in bench.journal[cut:]:
        run.apply(event)
    assert snapshot.dump(run) == snapshot.dump(bench.machine.run)


def test_leases_get_a_fresh_term_after_a_restart() -> None:
    bench = Bench().start()
    grant = bench.granted()
    again = Scheduler(bench.plan, lease_s=LEASE_S, incarnation=100)
    for event in bench.journal:
        again.replay(event)
    again.begin(bench.config, 1000.0)
    assert not any(isinstance(effect, Persist) for effect in again.handle(Tick(), 1000.0 + LEASE_S - 1))
    assert any(isinstance(effect, Persist) for effect in again.handle(Tick(), 1000.0 + LEASE_S + 1))
    assert {task.fence for task in grant.batch.tasks} == {1}
