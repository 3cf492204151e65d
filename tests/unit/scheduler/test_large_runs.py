"""In a run with many processes, the cost of one request does not grow with the number of processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proto.messages import Heartbeat, LeaseGrant, NextBatch, PutTask, Trouble
from services.scheduler import audits, shards
from services.scheduler.events import CheckShards, Configure, Fail, Listed, Tick
from services.scheduler.planning import heartbeat_s
from services.scheduler.state import Scheduler
from services.scheduler.waiting import ANSWERED_AT_ONCE
from shared.topology import load
from tests.opcodes import opcodes
from tests.unit.scheduler.bench import STORE, Bench, plan
from tests.unit.shared.topology.small_topology import make, write

FEW, MANY = 4, 64


def large(hosts: int, tasks_per_step: int = 8, staleness: int = 100) -> Bench:
    """Return a run that has a store and a rollout on each host. Its driver is waiting for the first batch."""
    made = plan(tasks_per_step=tasks_per_step, staleness=staleness, task_bytes=1, rows=range(10_000))
    bench = Bench(made, Configure(1000, 3, 2, True)).start()
    for host in range(1, hosts + 1):
        bench.register("batch-store", host, 100 + host, limit_bytes=1 << 30, host_id=f"h{host}")
        bench.register("rollout", host, 1000 + host, host_id=f"h{host}")
    assert bench.ask(NextBatch(driver=1, step=1), wait_s=1e6) is None
    return bench


def beat(bench: Bench, host: int, *troubles: Trouble) -> Any:
    request = Heartbeat(
        service="rollout", instance=host, incarnation=1000 + host, state="READY", troubles=list(troubles)
    )
    return bench.ask(request)


def heartbeat(bench: Bench) -> None:
    beat(bench, 2)


def lease(bench: Bench) -> None:
    assert isinstance(bench.lease(instance=2, life=1002, most=1), LeaseGrant)


def complete(bench: Bench) -> None:
    bench.complete(bench.granted(instance=2, life=1002, most=1), life=1002, store="batch-store/2")


def register(bench: Bench) -> None:
    bench.register("rollout", 2, bench.calls, host_id="h2")


@pytest.mark.parametrize("work", [heartbeat, lease, complete, register])
def test_the_work_for_a_request_does_not_depend_on_the_number_of_processes(work: Callable[[Bench], None]) -> None:
    counts = []
    for hosts in (FEW, MANY):
        bench = large(hosts)
        work(bench)  # the first request of its kind fills caches
        counts.append(opcodes(lambda bench=bench: work(bench)))  # type: ignore[misc]
    few, many = counts
    assert many < 1.2 * few


def test_a_registration_does_not_examine_the_deferred_leases_of_other_processes() -> None:
    counts = []
    for waiting in (FEW, MANY):
        bench = Bench()
        for instance in range(waiting):
            assert bench.lease(instance=instance, life=100 + instance) is None
        counts.append(opcodes(lambda bench=bench: register(bench)))  # type: ignore[misc]
        assert [effect.ref for effect in bench.effects if isinstance(effect, Fail)] == [3]
    few, many = counts
    assert many < 1.2 * few


def test_a_burst_of_deferred_leases_is_answered_in_parts_so_that_other_requests_are_answered_in_between() -> None:
    waiting = ANSWERED_AT_ONCE + 50
    bench = Bench(plan(tasks_per_step=2 * waiting, rows=range(10_000)), Configure(9, 3, 2, False))
    bench.register("batch-store", 0, 1, limit_bytes=1 << 30)
    for instance in range(waiting):
        assert bench.lease(instance=instance, life=100 + instance, most=1) is None
    bench.start()
    assert len(bench.machine.run.ledger.leases) == ANSWERED_AT_ONCE
    bench.event(Tick())
    assert len(bench.machine.run.ledger.leases) == waiting


def test_inventories_of_many_stores_are_compared_in_one_pass_and_each_store_learns_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = large(MANY, 2 * MANY, staleness=1)
    made = {}
    for host in range(1, MANY + 1):
        grant = bench.granted(instance=host, life=1000 + host, most=2)
        bench.complete(grant, life=1000 + host, store=f"batch-store/{host}")
        made[f"batch-store/{host}"] = [PutTask(task.task_id, task.fence) for task in grant.batch.tasks]
    monkeypatch.setattr(audits, "AUDITED_AT_ONCE", 0)  # This simulates a long comparison since the last tick.
    bench.event(Tick())
    bench.effects.clear()
    for store, tasks in made.items():
        bench.event(Listed(store, tasks[:1], [[5]], first=True, last=True))
    assert not bench.effects
    monkeypatch.undo()
    work = opcodes(lambda: bench.event(Tick()))
    asked = {
        effect.store: [claim.task for claim in effect.claims]
        for effect in bench.effects
        if isinstance(effect, CheckShards)
    }
    assert asked == {store: tasks[1:] for store, tasks in made.items()}
    assert work < 1000 * 2 * MANY  # a pass for each store would take MANY times as much work


def test_clears_beyond_one_message_are_sent_once_the_message_is_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shards, "MAX_CLEARS", 3)
    bench = Bench(plan(tasks_per_step=8), Configure(9, 3, 2, True)).start()
    step = bench.step(1)
    sent = bench.acknowledge()
    assert {(task.task_id, task.fence) for task in step.batch.tasks} <= sent


def test_a_problem_that_ends_the_run_has_no_effect_once_its_service_withdraws_it() -> None:
    bench = large(FEW)
    ends = Trouble("rewards", "no judge", ends_run=True)
    beat(bench, 1, ends)
    assert isinstance(bench.effects[-1], Fail)
    assert "rollout/1: no judge" in bench.effects[-1].message
    beat(bench, 1)
    assert bench.ask(NextBatch(driver=1, step=1)) is None
    assert next(iter(bench.machine.run.shards.clears.queues)) == STORE


def test_stores_send_a_heartbeat_each_second_in_runs_of_any_size() -> None:
    machine = Scheduler(plan(), lease_s=30.0, incarnation=9, heartbeat_s=4.0)
    bench = Bench()
    bench.machine = machine
    assert bench.register("rollout", 0, 7).heartbeat_s == 4.0
    assert bench.register("batch-store", 0, 1).heartbeat_s == 1.0


@pytest.mark.parametrize(
    ("instances", "lease_s", "heartbeat"), [(2, 30.0, 1.0), (4000, 30.0, 2.0), (20_000, 30.0, 5.0), (20_000, 12.0, 2.0)]
)
def test_processes_of_large_runs_send_heartbeats_less_often_but_several_within_a_lease(
    instances: int, lease_s: float, heartbeat: float, tmp_path: Path
) -> None:
    settings = [
        f"services.rollout.instances={instances}",
        f"lease.lease_s={lease_s}",
        "services.batch-store.memory=9GiB",
    ]
    made = load(write(make(tmp_path)), settings)
    assert heartbeat_s(made) == pytest.approx(heartbeat, rel=0.01)
