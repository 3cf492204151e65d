"""Tests garbage collection by task id between a real scheduler and a real store. Kills neither lose nor repeat a
collection."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from proto.messages import (
    Ack,
    Clear,
    ErrorCode,
    EvalsDone,
    FinishRun,
    GetInventory,
    Inventory,
    LeaseGrant,
    Outcome,
    PutTask,
    TaskResult,
    WaitEvals,
)
from services.policy_trainer.scheduler_calls import SchedulerCalls
from shared.dataplane.client import TaskShards
from shared.rpc.errors import RpcError
from tests.integration.store_scheduler import (
    PUT_S,
    STORE,
    TASKS_PER_STEP,
    Actor,
    DriverActor,
    bench_of,
    make_run,
    rollout_shards,
)

STORE_ROOM = "memory: 64MiB"


async def held(actor: Actor) -> set[tuple[str, int]]:
    """Return (task, fence) of every task with shards in the store, except weights."""
    page: Inventory = await actor.ask(GetInventory(), Inventory, service="batch-store")
    assert page.cursor == 0
    return {(task.task_id, task.fence) for task in page.tasks if not task.task_id.startswith("weights/")}


async def until_held(actor: Actor, condition: Callable[[set[tuple[str, int]]], bool]) -> set[tuple[str, int]]:
    async with asyncio.timeout(30):
        while not condition(found := await held(actor)):
            await asyncio.sleep(0.05)
    return found


async def until_collected(driver: DriverActor, tasks: int) -> dict[str, int]:
    """Wait until the scheduler, which learns of clears later than the store, counts `tasks` collected tasks."""
    async with asyncio.timeout(20):
        while (counts := await driver.counts())["COLLECTED"] != tasks:
            await asyncio.sleep(0.05)
    return counts


def names(grant: LeaseGrant) -> set[str]:
    return {task.task_id for task in grant.batch.tasks}


async def granted(actor: Actor) -> LeaseGrant:
    grant = await actor.lease(wait_s=10.0)
    assert grant is not None
    return grant


def test_evaluated_dropped_failed_and_trained_tasks_are_all_collected_and_counted_exactly(tmp_path: Path) -> None:
    run = make_run(tmp_path, store=STORE_ROOM, steps=2, evaluate=True, gc="commit")

    async def main() -> None:
        async with bench_of(run) as bench:
            driver = await bench.driver()
            await driver.publish(0)
            rollout = await bench.actor("rollout")
            reference = await bench.actor("reference")
            evaluation = await granted(rollout)
            assert evaluation.split == "held"
            await rollout.complete(evaluation, await rollout.make(evaluation))
            while (grant := await granted(rollout)).split == "held":
                await rollout.complete(grant, await rollout.make(grant))
            # One task of this block is dropped after its shards have been put into the store; the other is retried.
            dropped, failed = grant.batch.tasks
            await rollout.make(grant)
            results = [
                TaskResult(dropped.task_id, dropped.fence, Outcome.DROP, reason="a bad row"),
                TaskResult(failed.task_id, failed.fence, Outcome.RETRY, reason="try again"),
            ]
            await rollout.complete(grant, results)
            await until_held(driver, lambda left: not left)
            for step in (1, 2):
                await rollout.work()
                await reference.work()
                batch = await driver.train(step)
                assert (failed.task_id, 2) in {(task.task_id, task.fence) for task in batch.batch.tasks} or step == 2
            await rollout.work()  # This is the last version's evaluation.
            await driver.ask(WaitEvals(driver=driver.life, step=2), EvalsDone)
            await driver.ask(FinishRun(driver=driver.life), Ack)
            await until_held(driver, lambda left: not left)
            gc.collect()
            counts = await driver.counts()
            assert counts["COLLECTED"] == 2 * TASKS_PER_STEP + 2 * 3 + 1
            assert sum(number for state, number in counts.items() if state != "COLLECTED") == 0
            async with asyncio.timeout(20):
                while (now := await driver.stats()).tasks > 1:
                    await asyncio.sleep(0.05)
            assert (now.shards, now.files, now.zombie_bytes, now.bytes - now.spare_bytes) == (1, 1, 0, 4096)

    asyncio.run(main())


def test_filtered_tasks_are_collected_at_once_and_their_replacements_once_they_are_trained(tmp_path: Path) -> None:
    run = make_run(tmp_path, store=STORE_ROOM, steps=1, gc="commit", filter_zero_variance=True)

    async def main() -> None:
        async with bench_of(run) as bench:
            driver = await bench.driver()
            await driver.publish(0)
            rollout = await bench.actor("rollout")
            reference = await bench.actor("reference")
            grant = await granted(rollout)
            results = await rollout.make(grant)
            filtered = {(task.task_id, task.fence) for task in grant.batch.tasks}
            assert await held(driver) == filtered
            ack = await rollout.complete(grant, results)  # Every sample of a group has the same reward.
            assert ack.refused == []
            await until_held(driver, lambda left: not left)
            await until_collected(driver, len(filtered))
            with pytest.raises(RpcError) as caught:
                await rollout.make(grant)
            assert caught.value.code == ErrorCode.COLLECTED
            rollout.spread = True
            assert await rollout.work() == TASKS_PER_STEP
            assert await reference.work() == TASKS_PER_STEP
            batch = await driver.train(1)
            assert not {(task.task_id, task.fence) for task in batch.batch.tasks} & filtered
            await driver.ask(FinishRun(driver=driver.life), Ack)
            await until_held(driver, lambda left: not left)
            gc.collect()
            counts = await until_collected(driver, TASKS_PER_STEP + len(filtered))
            assert sum(number for state, number in counts.items() if state != "COLLECTED") == 0
            assert (await driver.stats()).zombie_bytes == 0

    asyncio.run(main())


def test_a_clear_is_repeated_until_a_dead_store_has_returned_and_carried_it_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, store=STORE_ROOM, steps=2, gc="commit")

    async def main() -> None:
        async with bench_of(run) as bench:
            driver = await bench.driver()
            await driver.publish(0)
            rollout = await bench.actor("rollout")
            reference = await bench.actor("reference")
            await rollout.work()
            await reference.work()
            before = await held(driver)
            # The scheduler dies after the commit, and the store dies before it can clear; both restart.
            batch = await driver.train(1)
            bench.store.kill()
            bench.scheduler.kill()
            bench.scheduler.start()
            trained = {(task.task_id, task.fence) for task in batch.batch.tasks}
            assert trained < before
            bench.store.start()
            left = await until_held(driver, lambda now: not now & trained)
            assert left == before - trained
            late = [
                TaskShards(task.task_id, task.fence, {"late": rollout_shards(task)["lengths"]})
                for task in batch.batch.tasks
            ]
            with pytest.raises(RpcError) as caught:
                await rollout.data.put(late, store=STORE, deadline_s=PUT_S)
            assert caught.value.code == ErrorCode.COLLECTED
            assert set(caught.value.names) == {task_id for task_id, _ in trained}
            # A clear may be repeated any number of times.
            again = Clear(tasks=[PutTask(*each) for each in trained])
            was = await driver.stats()
            for _ in range(2):
                await driver.ask(again, Ack, service="batch-store")
            now = await driver.stats()
            assert (now.clears, now.tombstones, now.shards) == (was.clears, was.tombstones, was.shards)

    asyncio.run(main())


def test_shards_of_a_killed_worker_are_collected_and_its_late_puts_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, store=STORE_ROOM)

    async def main() -> None:
        async with bench_of(run) as bench:
            driver = await bench.driver()
            await driver.publish(0)
            first = await bench.actor("rollout")
            grant = await granted(first)
            results = await first.make(grant)  # The put is sealed, but the tasks are never completed.
            assert {name for name, _ in await held(driver)} == names(grant)
            # A new incarnation of the instance ends the lease of the old one at once.
            second = await bench.actor("rollout")
            again = await granted(second)
            assert names(again) == names(grant)
            assert {task.fence for task in again.batch.tasks} == {2}
            await until_held(driver, lambda now: not now)
            with pytest.raises(RpcError) as caught:
                await first.make(grant)
            assert caught.value.code == ErrorCode.COLLECTED
            ack = await first.complete(grant, results)
            assert {refusal.code for refusal in ack.refused} == {ErrorCode.COLLECTED}
            await second.complete(again, await second.make(again))
            assert await held(driver) == {(name, 2) for name in names(grant)}

    asyncio.run(main())


def test_reconciliation_removes_shards_that_the_scheduler_does_not_know(tmp_path: Path) -> None:
    run = make_run(tmp_path, store=STORE_ROOM)

    async def main() -> None:
        async with bench_of(run) as bench:
            driver = await bench.driver()
            await driver.publish(0)
            rollout = await bench.actor("rollout")
            grant = await granted(rollout)
            await rollout.complete(grant, await rollout.make(grant))
            shard = rollout_shards(grant.batch.tasks[0])["lengths"]
            orphans = [TaskShards(f"train/9/{i}", 1, {"lengths": shard}) for i in range(3)]
            await rollout.data.put(orphans, store=STORE, deadline_s=PUT_S)
            bench.store.kill()
            bench.store.start()  # The store registers again and is reconciled at once.
            left = await until_held(driver, lambda now: len(now) == len(grant.batch.tasks))
            assert {name for name, _ in left} == names(grant)
            with pytest.raises(RpcError) as caught:
                await rollout.data.put(orphans, store=STORE, deadline_s=PUT_S)
            assert caught.value.code == ErrorCode.COLLECTED

    asyncio.run(main())


def test_shards_that_a_server_holds_outlive_restarts_until_they_are_released(tmp_path: Path) -> None:
    run = make_run(tmp_path, store=STORE_ROOM)

    async def main() -> None:
        async with bench_of(run) as bench:
            driver = await bench.driver()
            server = SchedulerCalls(driver.client("scheduler"), driver.life)
            await server.hold("api", 3, 5, 2)
            tasks = [TaskShards(f"api/{model}/5", 1, {"token_ids": np.arange(9, dtype=np.int32)}) for model in (3, 4)]
            await driver.data.put(tasks, store=STORE, deadline_s=PUT_S)
            bench.store.kill()
            bench.scheduler.kill()
            bench.scheduler.start()
            bench.store.start()  # which lists what it holds
            assert await until_held(driver, lambda now: ("api/4/5", 1) not in now) == {("api/3/5", 1)}
            await server.release("api", 3, 5, 2)
            await until_held(driver, lambda now: not now)
            with pytest.raises(RpcError) as caught:
                await driver.data.put(tasks[:1], store=STORE, deadline_s=PUT_S)
            assert caught.value.code == ErrorCode.COLLECTED
            await server.release("api", 3, 5, 2)

    asyncio.run(main())
