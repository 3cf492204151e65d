"""Tests a run with two stores: the clears sent to each store, and the room in each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from proto.messages import (
    Ack,
    CheckpointSaved,
    CommitStep,
    GetRunInfo,
    GetStatus,
    Heartbeat,
    HostGone,
    LeaseProgress,
    NextBatch,
    PutTask,
    StepBatch,
)
from services.scheduler import run_state
from services.scheduler.events import (
    Asked,
    Checked,
    CheckShards,
    ClearDone,
    Configure,
    Listed,
    SendClear,
    ShardClaim,
    StopClear,
    Tick,
)
from services.scheduler.planning import make_plan
from services.scheduler.registry import ABSENT_S, GONE_S
from services.scheduler.run_state import RunState
from shared.stages import REFERENCE, ROLLOUT
from shared.topology import load
from tests.sim.invariants import check_invariants
from tests.unit.scheduler.bench import LEASE_S, STORE, Bench, ids, plan
from tests.unit.shared.topology.small_topology import make, write

AWAY = "batch-store/1"
NINE = Configure(9, 3, 2, False)
AT_COMMIT = Configure(9, 3, 2, True)


@dataclass
class TwoHosts(Bench):
    """A run with two hosts. The trainer and `rollout/0` are on the home host; `rollout/1` is on a joined host with its
    own store."""

    def begin(self, home_bytes: int = 1 << 30, away_bytes: int = 1 << 30) -> TwoHosts:
        self.register("rollout", 0, 7, host_id="home")
        self.register("rollout", 1, 8, host_id="away")
        stores = [(home_bytes, "batch-store", 0, 1, "home"), (away_bytes, "batch-store", 1, 5, "away")]
        for limit, *instance, host in sorted(stores):  # The first registration admits tasks.
            self.register(*instance, limit_bytes=limit, host_id=host, data_id=f"data of {host}")
        self.ask(GetRunInfo(driver=1))
        self.publish(0)
        return self

    def beat(self, service: str, instance: int, life: int, *leases: LeaseProgress) -> list[int]:
        """Send a heartbeat; return the leases that its answer declares lost."""
        beat = Heartbeat(service=service, instance=instance, incarnation=life, state="READY", leases=list(leases))
        lost: list[int] = self.ask(beat).lost_leases
        return lost

    def acknowledges(self, store: str) -> None:
        """Acknowledge every clear that `store` has been sent so far."""
        while told := self.machine.run.shards.clears.head(store):
            self.event(ClearDone(store, len(told)))

    def sent(self) -> dict[str, list[str]]:
        """Return the tasks that each store was ordered to clear."""
        told: dict[str, list[str]] = {}
        for effect in self.effects:
            if isinstance(effect, SendClear) and effect.tracked:
                told.setdefault(effect.store, []).extend(task.task_id for task in effect.tasks)
        return told


def steps(bench: TwoHosts, store: str) -> list[bool]:
    return [bench.step(step, store).checkpoint_now for step in range(1, 10)]


# ------------------------------------------------------------------------------------------------ room


def test_a_checkpoint_is_ordered_if_one_store_is_full_even_if_the_other_is_empty() -> None:
    """A step puts 200 bytes; 400 bytes are reserved for live tasks, and 300 for weights or their copies."""
    made = plan(task_bytes=50, weight_bytes=100)
    away = steps(TwoHosts(made, NINE).begin(1 << 20, 300 + 400 + 1000), AWAY)
    # After five steps, 1000 of 1000 bytes are in use, which is more than 80 %.
    assert away == [False] * 4 + [True] * 5
    assert steps(TwoHosts(made, NINE).begin(300 + 400 + 500, 1 << 20), AWAY) == [False] * 9
    assert steps(TwoHosts(made, NINE).begin(300 + 400 + 500, 1 << 20), STORE) == [False] * 2 + [True] * 7


def test_log_probs_from_the_trainer_are_counted_in_its_own_store() -> None:
    """20 tokens per task are 80 bytes per step; the rollouts are in the other store."""
    made = plan(task_bytes=50, weight_bytes=100, unleased_token_bytes=1)
    bench = TwoHosts(made, NINE).begin(300 + 400 + 200, 1 << 20)
    assert steps(bench, AWAY) == [False, False, *[True] * 7]
    assert bench.machine.run.shards.uncovered == {AWAY: 9 * 200, STORE: 9 * 80}


def test_values_from_a_critic_on_another_host_are_counted_in_its_store() -> None:
    made = plan(task_bytes=50, weight_bytes=100, unleased_token_bytes=1)
    bench = TwoHosts(made, NINE).begin()
    bench.step(1, STORE)
    run = bench.machine.run
    assert run.shards.trainer_stores == (STORE,)
    bench.register("critic", 0, 31, host_id="away")
    assert run.shards.trainer_stores == (STORE, AWAY)
    bench.step(2, STORE)
    assert run.shards.uncovered[AWAY] == 2 * 80
    bench.ask(HostGone(host="b", incarnations=[31, 5], cause="power cut"))
    assert run.shards.trainer_stores == (STORE,)
    check_invariants(run)


def test_log_probs_from_ranks_on_two_hosts_are_counted_in_the_stores_of_both(tmp_path: Path) -> None:
    made = plan(task_bytes=50, weight_bytes=100, unleased_token_bytes=1, replay_bytes=10)
    bench = TwoHosts(made, NINE).begin()
    bench.register("policy-trainer-worker", 0, 21, host_id="home")
    bench.step(1, AWAY)
    run = bench.machine.run
    assert run.shards.uncovered == {AWAY: 200, STORE: 80}
    bench.register("policy-trainer-worker", 1, 22, host_id="away")  # From now on, this instance can put shards there.
    assert run.shards.uncovered == {AWAY: 280, STORE: 80}
    bench.step(2, STORE)
    assert run.shards.uncovered == {AWAY: 280 + 80, STORE: 80 + 280}
    check_invariants(run)
    again = run_state.load(bench.plan, run_state.dump(run))
    assert again.shards.trainer_stores == run.shards.trainer_stores == (STORE, AWAY)
    bench.ask(CheckpointSaved(driver=1, step=2, kept=[2]))
    clears = {store: {entry[0] for entry in entries if entry[2]} for store, entries in run.shards.clears.queues.items()}
    assert clears[AWAY] == clears[STORE]
    assert len(clears[AWAY]) == 8
    bench.ask(HostGone(host="b", incarnations=[22, 5], cause="power cut"))
    assert run.shards.trainer_stores == (STORE,)
    check_invariants(run)


def test_results_of_each_stage_are_counted_in_the_store_where_they_were_put() -> None:
    bench = TwoHosts(plan(overhead_bytes=3, stages=(ROLLOUT, REFERENCE))).begin()
    run = bench.machine.run
    bench.complete(bench.granted(), store=AWAY)
    first = bench.granted("reference", most=2)
    bench.complete(first, store=STORE)
    bench.complete(bench.granted("reference", most=2), store=AWAY)
    assert isinstance(bench.ask(NextBatch(driver=1, step=1)), StepBatch)
    bench.ask(CommitStep(driver=1, step=1, metrics={}))
    assert run.shards.uncovered == {AWAY: 4 * (50 + 3) + 2 * 50, STORE: 2 * (50 + 3)}
    assert run.shards.uncovered_bytes == 4 * 53 + 2 * 50 + 2 * 53
    bench.ask(CheckpointSaved(driver=1, step=1, kept=[1]))
    assert run.shards.uncovered == {}
    told = bench.sent()
    assert len(told[AWAY]) == len(told[STORE]) == 4
    assert run_state.dump(run_state.load(bench.plan, run_state.dump(run))) == run_state.dump(run)


def test_a_task_is_admitted_only_if_every_store_could_hold_it() -> None:
    made = plan(staleness=3, task_bytes=100, weight_bytes=100)
    assert TwoHosts(made).begin(900, 1 << 20).machine.run.ledger.window.live == 6
    assert TwoHosts(made).begin(1 << 20, 800).machine.run.ledger.window.live == 5
    assert TwoHosts(made).begin(1 << 20, 1 << 20).machine.run.ledger.window.live == 16


# ------------------------------------------------------------------------------------------------ clears


def test_a_clear_is_sent_to_the_stores_that_hold_the_task_and_waits_only_for_them() -> None:
    bench = TwoHosts(config=AT_COMMIT).begin()
    home = {task.task_id for task in bench.step(1, STORE).batch.tasks}
    copies = {"weights/0/0"}
    assert {store: set(tasks) for store, tasks in bench.sent().items()} == {STORE: home, AWAY: copies}
    bench.acknowledges(STORE)
    assert bench.counts()["COLLECTED"] == 4
    bench.step(2, AWAY)  # The trainer's log-probs might be in the home store.
    bench.acknowledges(AWAY)
    assert bench.counts()["COLLECTED"] == 4
    bench.acknowledges(STORE)
    assert (bench.counts()["COLLECTED"], bench.counts()["TRAINED"]) == (8, 0)


def test_a_lost_attempt_is_cleared_in_the_store_of_its_holder() -> None:
    bench = TwoHosts().begin()
    here, there = bench.granted(most=2), bench.granted(most=2, instance=1, life=8)
    bench.event(Tick(), after_s=LEASE_S + 1)
    told = bench.sent()
    assert told[AWAY] == ids(there)
    assert sorted(told[STORE]) == sorted(ids(here) + ids(there))  # The trainer's store is always asked.
    # An instance that later restarted had put the shards into the store that was not told to clear them.
    late = PutTask(ids(here)[0], 1)
    [sent] = [
        effect for effect in bench.event(Listed(AWAY, [late])) if isinstance(effect, SendClear) and not effect.tracked
    ]
    assert sent.tasks == [late]


def test_shards_of_an_instance_that_restarts_on_another_host_are_cleared_in_its_former_store() -> None:
    bench = TwoHosts().begin()
    there = bench.granted(most=2, instance=1, life=8)
    bench.register("rollout", 1, 9, host_id="home")
    assert bench.sent()[AWAY] == ids(there)


def test_a_store_that_never_answers_does_not_delay_the_others() -> None:
    bench = TwoHosts(config=AT_COMMIT).begin()
    for step in range(1, 9):
        assert isinstance(bench.step(step, STORE), StepBatch)
        bench.acknowledges(STORE)
    assert bench.counts()["COLLECTED"] == 32
    assert len(bench.machine.run.shards.clears.queues[STORE]) == 0
    assert [task for task, _, _ in bench.machine.run.shards.clears.queues[AWAY]] == [f"weights/0/{i}" for i in range(8)]
    assert len(list(bench.machine.run.ledger.tasks)) == bench.machine.run.ledger.window.live


# ------------------------------------------------------------------------------------------------ gone for good


def quiet(bench: TwoHosts, *, alive: tuple[tuple[str, int, int], ...] = (("batch-store", 0, 1),)) -> None:
    """Let time pass until a silent store is declared gone, while the instances in `alive` send heartbeats."""
    for _ in range(5):
        bench.now += GONE_S / 4
        for service, instance, life in alive:
            bench.ask(Heartbeat(service=service, instance=instance, incarnation=life, state="READY"))
        bench.event(Tick())


def replays_alike(bench: TwoHosts) -> bool:
    copy = RunState(bench.plan)
    for event in bench.journal:
        copy.apply(event)
    return run_state.dump(copy) == run_state.dump(bench.machine.run)


def test_a_joined_store_that_is_silent_for_a_long_time_loses_its_queue_of_clears_and_its_limit() -> None:
    bench = TwoHosts(config=AT_COMMIT).begin(away_bytes=1 << 20)
    bench.step(1, AWAY)
    bench.acknowledges(STORE)
    assert bench.counts()["COLLECTED"] == 0
    quiet(bench)
    assert bench.counts()["COLLECTED"] == 4
    assert bench.machine.run.shards.limit_bytes == 1 << 30
    assert list(bench.machine.run.shards.clears.queues) == [STORE]
    assert [effect.store for effect in bench.effects if isinstance(effect, StopClear)] == [AWAY]
    assert bench.event(ClearDone(AWAY, 4)) == []  # This acknowledges the message that was in transit.
    assert [row.service for row in bench.ask(GetStatus()).services].count("batch-store") == 1
    bench.step(2, STORE)
    assert replays_alike(bench)


def test_the_trainers_store_is_waited_for_indefinitely() -> None:
    bench = TwoHosts().begin()
    quiet(bench, alive=(("batch-store", 1, 5),))
    assert list(bench.machine.run.shards.clears.queues) == [STORE, AWAY]


def test_a_silent_store_that_the_topology_places_is_declared_gone_and_its_tasks_are_sampled_again(
    tmp_path: Path,
) -> None:
    places = ["placement.hosts={b: {}}", "services.rollout.host=b", "transport.listen=10.0.0.1"]
    places += ["algorithm.kl=null", "data.eval={}"]
    made, _ = make_plan(load(write(make(tmp_path)), places), tmp_path)
    bench = TwoHosts(made).begin()
    grant = bench.granted(most=1, instance=1, life=8)
    bench.complete(grant, store=AWAY, life=8)
    quiet(bench)
    assert list(bench.machine.run.shards.clears.queues) == [STORE]
    again = bench.granted(most=1)
    assert [(task.task_id, task.fence) for task in again.batch.tasks] == [(name, 2) for name in ids(grant)]


def test_unfinished_tasks_of_a_store_declared_gone_are_sampled_again_and_other_tasks_are_kept() -> None:
    bench = TwoHosts(plan(stages=(ROLLOUT, REFERENCE))).begin()
    here = bench.granted(most=2)
    bench.complete(here, store=STORE)
    there = bench.granted(most=2, instance=1, life=8)
    bench.complete(there, store=AWAY, life=8)
    reading = bench.granted("reference", most=1)
    bench.complete(reading, store=AWAY)  # The task's rollout is in the home store.
    quiet(bench)
    again = bench.granted(most=4)
    assert [(task.task_id, task.fence) for task in again.batch.tasks] == [
        (name, 2) for name in [ids(here)[0], *ids(there)]
    ]
    assert bench.granted("reference", most=4).batch.tasks[0].task_id == ids(here)[1]
    assert bench.machine.run.history.committed_step == 0
    assert replays_alike(bench)


def test_leases_on_the_host_of_a_store_declared_gone_are_reassigned_although_their_holder_is_alive() -> None:
    bench = TwoHosts().begin()
    here = bench.granted(most=2)
    there = bench.granted(most=2, instance=1, life=8)
    for progress in range(1, 10):  # The worker's put never succeeds, and each attempt counts as progress.
        bench.now += GONE_S / 8
        bench.beat("batch-store", 0, 1)
        bench.beat("rollout", 0, 7, LeaseProgress(here.lease_id, progress))
        lost = bench.beat("rollout", 1, 8, LeaseProgress(there.lease_id, progress))
        bench.event(Tick())
    assert not lost
    assert bench.beat("rollout", 1, 8, LeaseProgress(there.lease_id, 10)) == [there.lease_id]
    again = bench.granted(most=4)
    assert [(task.task_id, task.fence) for task in again.batch.tasks] == [(name, 2) for name in ids(there)]
    assert replays_alike(bench)


def test_a_host_with_another_store_keeps_its_leases() -> None:
    bench = TwoHosts().begin()
    bench.register("batch-store", 2, 9, limit_bytes=1 << 30, host_id="away", data_id="second of away")
    there = bench.granted(most=2, instance=1, life=8)
    for progress in range(1, 10):
        bench.now += GONE_S / 8
        for instance, life in ((0, 1), (2, 9)):
            bench.beat("batch-store", instance, life)
        lost = bench.beat("rollout", 1, 8, LeaseProgress(there.lease_id, progress))
        bench.event(Tick())
    assert not lost
    assert list(bench.machine.run.shards.clears.queues) == [STORE, "batch-store/2"]
    assert bench.machine.run.ledger.leases.get(there.lease_id) is not None


def test_a_result_in_a_store_declared_gone_is_computed_again() -> None:
    bench = TwoHosts().begin()
    quiet(bench)
    grant = bench.granted(instance=1, life=8)
    bench.complete(grant, store=AWAY, life=8)
    again = bench.granted()
    assert ids(again) == ids(grant)
    assert {task.fence for task in again.batch.tasks} == {2}


def test_a_checkpoint_is_ordered_for_trained_tasks_of_a_store_declared_gone_and_the_run_continues() -> None:
    bench = TwoHosts(config=NINE).begin()
    bench.step(1, AWAY)
    quiet(bench)
    assert bench.ask(GetRunInfo(driver=1)).checkpoint_now
    assert bench.step(2).checkpoint_now
    bench.ask(CheckpointSaved(driver=1, step=2, kept=[2]))
    assert not bench.step(3).checkpoint_now
    info = bench.ask(GetRunInfo(driver=1, reload=True, loaded_step=2))
    assert (info.committed_step, info.lineage) == (3, 1)  # Step 3 can be replayed.
    assert replays_alike(bench)


def test_a_trainer_that_reloads_before_the_ordered_checkpoint_is_saved_rewinds_the_run() -> None:
    bench = TwoHosts(config=NINE).begin()
    bench.step(1)
    bench.ask(CheckpointSaved(driver=1, step=1, kept=[1]))
    undone = [task.task_id for step in (2, 3) for task in bench.step(step, AWAY).batch.tasks]
    quiet(bench)
    assert bench.ask(GetRunInfo(driver=1, reload=True, loaded_step=1)).committed_step == 1
    bench.publish_again(1)
    assert [task.task_id for step in (2, 3) for task in bench.step(step).batch.tasks] == undone
    assert bench.machine.run.shards.uncovered.keys() == {STORE}
    assert replays_alike(bench)


def test_an_open_step_that_reads_from_a_store_declared_gone_is_abandoned() -> None:
    bench = TwoHosts().begin()
    bench.complete(bench.granted(), store=AWAY)
    assert isinstance(bench.ask(NextBatch(driver=1, step=1)), StepBatch)
    quiet(bench)
    assert bench.ask(CommitStep(driver=1, step=1, metrics={})).code == "conflict"
    info = bench.ask(GetRunInfo(driver=2))
    assert (info.committed_step, info.open_step) == (0, 0)
    assert replays_alike(bench)


def test_a_store_that_comes_back_late_is_reconciled_without_pending_clears() -> None:
    bench = TwoHosts(config=AT_COMMIT).begin()
    [old, *_] = bench.step(1, AWAY).batch.tasks
    quiet(bench)
    bench.acknowledges(STORE)
    bench.register("batch-store", 1, 6, limit_bytes=1 << 30, host_id="away", data_id="data of away")
    assert len(bench.machine.run.shards.clears.queues[AWAY]) == 0
    strays = bench.event(Listed(AWAY, [PutTask(old.task_id, old.fence)]))
    assert [effect.tasks for effect in strays if isinstance(effect, SendClear)] == [[PutTask(old.task_id, old.fence)]]
    bench.step(2, AWAY)
    assert bench.machine.run.history.committed_step == 2
    assert replays_alike(bench)


def test_a_store_declared_gone_that_comes_back_without_needed_shards_rewinds_the_run() -> None:
    bench = TwoHosts(config=NINE).begin()
    bench.step(1, AWAY)
    quiet(bench)
    bench.register("batch-store", 1, 6, limit_bytes=1 << 30, host_id="away", data_id="other")
    assert bench.ask(GetRunInfo(driver=2)).committed_step == 0
    assert replays_alike(bench)


def come_back_empty(bench: TwoHosts) -> None:
    bench.register("batch-store", 1, 6, limit_bytes=1 << 30, host_id="away", data_id="other")


def test_the_return_of_an_unused_store_without_data_does_not_undo_steps() -> None:
    bench = TwoHosts(config=NINE).begin()
    bench.step(1)
    waits = bench.granted()
    bench.complete(waits)
    come_back_empty(bench)
    assert ids(waits) == [task.task_id for task in bench.step(2).batch.tasks]  # The driver continues, too.
    assert bench.machine.run.history.lineage == 0
    assert replays_alike(bench)


def test_unfinished_tasks_of_a_store_that_comes_back_empty_are_sampled_again_without_a_rewind() -> None:
    bench = TwoHosts(config=NINE).begin()
    bench.step(1)
    finished = bench.granted(most=2)
    bench.complete(finished, store=AWAY)
    there, here = bench.granted(most=1, instance=1, life=8), bench.granted(most=1)
    come_back_empty(bench)
    # The task was put before the loss.
    assert [refusal.code for refusal in bench.complete(there, store=AWAY, life=8)] == ["collected"]
    assert bench.complete(here) == []
    again = bench.granted(most=4)
    assert [(task.task_id, task.fence) for task in again.batch.tasks] == [
        (name, 2) for name in [*ids(finished), *ids(there)]
    ]
    assert bench.machine.run.history.committed_step == 1
    assert replays_alike(bench)


def test_a_store_that_comes_back_without_the_shards_of_a_step_rewinds_the_run() -> None:
    bench = TwoHosts(config=NINE).begin()
    bench.step(1, AWAY)
    come_back_empty(bench)
    assert bench.ask(GetRunInfo(driver=2)).committed_step == 0
    assert replays_alike(bench)


def test_the_leases_of_a_lost_host_are_reassigned_and_its_store_is_declared_gone_at_once() -> None:
    bench = TwoHosts(config=AT_COMMIT).begin()
    bench.step(1, AWAY)
    there = bench.granted(most=2, instance=1, life=8)
    here = bench.granted(most=2)
    bench.granted(most=4)
    assert bench.lease(instance=1, life=8) is None  # The call is deferred, because no task is left.
    waiting = bench.calls
    effects = bench.event(Asked(99, HostGone(host="b", incarnations=[5, 8], cause="test"), bench.now + 5))
    assert isinstance(bench.answer(effects, 99), Ack)
    assert bench.answer(effects, waiting).code == "lost"
    assert list(bench.machine.run.shards.clears.queues) == [STORE]
    again = bench.granted(most=4)
    assert [(task.task_id, task.fence) for task in again.batch.tasks] == [(name, 2) for name in ids(there)]
    assert bench.machine.run.ledger.leases.get(here.lease_id) is not None
    assert replays_alike(bench)


def test_a_store_that_returns_after_its_host_was_lost_is_not_registered_again() -> None:
    bench = TwoHosts(config=NINE).begin()
    bench.step(1)
    assert isinstance(bench.ask(HostGone(host="b", incarnations=[5, 8], cause="test")), Ack)
    again = bench.register("batch-store", 1, 5, limit_bytes=1 << 30, host_id="away", data_id="data of away")
    assert again.code == "lost"
    assert list(bench.machine.run.shards.clears.queues) == [STORE]
    bench.register("batch-store", 2, 6, limit_bytes=1 << 30, host_id="away", data_id="other")
    assert list(bench.machine.run.shards.clears.queues) == [STORE, "batch-store/2"]
    assert replays_alike(bench)


def test_the_leases_of_a_lost_process_are_reassigned_although_a_store_on_its_host_is_alive() -> None:
    bench = TwoHosts().begin()
    there = bench.granted(most=2, instance=1, life=8)
    assert isinstance(bench.ask(HostGone(host="b", incarnations=[8], cause="test")), Ack)
    assert list(bench.machine.run.shards.clears.queues) == [STORE, AWAY]
    assert bench.machine.run.ledger.leases.get(there.lease_id) is None
    assert [(task.task_id, task.fence) for task in bench.granted(most=2).batch.tasks] == [
        (name, 2) for name in ids(there)
    ]
    assert replays_alike(bench)


def test_a_repeated_report_of_a_lost_host_or_a_report_of_an_unknown_incarnation_changes_nothing() -> None:
    bench = TwoHosts().begin()
    assert isinstance(bench.ask(HostGone(host="b", incarnations=[5, 8], cause="test")), Ack)
    before = len(bench.journal)
    for lives in ([5, 8], [99]):
        assert isinstance(bench.ask(HostGone(host="b", incarnations=lives, cause="test")), Ack)
        assert len(bench.journal) == before


def test_a_process_whose_end_was_not_observed_counts_as_ended_after_another_registration_or_a_long_silence() -> None:
    bench = TwoHosts().begin()
    bench.now += GONE_S
    assert not bench.machine.is_over("rollout", 1, 8, bench.now)
    assert bench.machine.is_over("rollout", 1, 8, bench.now + 1)
    bench.beat("rollout", 1, 8)
    assert not bench.machine.is_over("rollout", 1, 8, bench.now + 1)
    bench.register("rollout", 1, 9)
    assert bench.machine.is_over("rollout", 1, 8, bench.now)
    assert not bench.machine.is_over("rollout", 1, 9, bench.now)


# ------------------------------------------------------------------------------------------------ relay


def upstream_of(bench: TwoHosts, instance: int, life: int) -> list[str]:
    beat = Heartbeat(service="batch-store", instance=instance, incarnation=life, state="READY")
    found: list[str] = bench.ask(beat).upstream
    return found


def test_stores_copy_weights_from_earlier_stores_on_other_hosts_unless_those_stores_are_silent() -> None:
    bench = TwoHosts().begin()
    for number in (2, 3, 4):
        bench.register("batch-store", number, 10 + number, limit_bytes=1 << 30, host_id=f"host {number}")
    bench.register("batch-store", 5, 15, limit_bytes=1 << 30, host_id="home")
    bench.register("batch-store", 6, 16, limit_bytes=1 << 30, host_id="host 6")
    assert upstream_of(bench, 0, 1) == upstream_of(bench, 5, 15) == []
    assert upstream_of(bench, 1, 5) == []
    assert upstream_of(bench, 2, 12) == ["batch-store/1"]
    assert upstream_of(bench, 6, 16) == ["batch-store/4", "batch-store/3"]
    bench.now += ABSENT_S
    for number, life in ((2, 12), (3, 13)):
        upstream_of(bench, number, life)
    assert upstream_of(bench, 6, 16) == ["batch-store/3", "batch-store/2"]


def test_a_version_is_cleared_with_its_copies() -> None:
    bench = TwoHosts(config=AT_COMMIT).begin()
    bench.step(1, STORE)
    for store in (STORE, AWAY):
        assert ("weights/0/0", 1, False) in bench.machine.run.shards.clears.queues[store]


def test_copies_of_a_version_that_its_store_has_lost_are_cleared() -> None:
    bench = TwoHosts().begin()
    bench.event(Checked(CheckShards(STORE, [ShardClaim(PutTask("weights/0/0", 1))]), {}))
    assert bench.sent()[AWAY] == ["weights/0/0"]
