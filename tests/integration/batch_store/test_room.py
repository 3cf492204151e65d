"""Tests that later stages never see BUSY in a store of exactly the required size that is full of rollouts, and that a
size one byte smaller is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from proto.messages import Complete, CompleteAck, Outcome, TaskResult
from services.rollout.results.finish import Assembled, in_files, with_receipt
from shared.dataplane.client import TaskShards
from shared.topology import TopologyError, load, weight_bytes, worst_case_bytes
from tests.integration.store_scheduler import (
    GROUP,
    NEW,
    PROMPT,
    PUT_S,
    SAMPLE_TOKENS,
    STORE,
    TASKS_PER_STEP,
    Actor,
    Process,
    bench_of,
    make_run,
    rollout_shards,
)

STEPS = 5
FULL = 0.8
"""Fraction of the limit that rollouts and references can fill. The rest is reserved for the trainer's log-probs and one
replay of them."""


def needed_bytes(folder: Path) -> int:
    """Return the memory that the topology check requires."""
    folder.mkdir()
    run = make_run(folder, store="memory: 1GiB", steps=STEPS)
    run.remove_volatile()
    topology = load(run.topology)
    return worst_case_bytes(topology, PROMPT, weight_bytes(topology.policy_model))


async def roll_out(worker: Actor) -> int:
    """Roll out tasks as the service does, with a filter that drops one task per block. Return the number of tasks that
    are left."""
    left = 0
    while (grant := await worker.lease()) is not None:
        rewards = np.ones((len(grant.batch.tasks), GROUP), np.float32)
        rewards[1:, 0] = 0
        results = [
            TaskResult(task.task_id, task.fence, Outcome.DONE, STORE, samples=GROUP, tokens=GROUP * SAMPLE_TOKENS)
            for task in grant.batch.tasks
        ]
        shards = [rollout_shards(task) for task in grant.batch.tasks]
        block = Assembled(results, shards, [], {"reward": rewards.ravel()})
        for file in in_files(block, filters=True):
            puts = [TaskShards(results[i].task_id, results[i].fence, shards[i]) for i in file]
            for i, receipt in zip(file, await worker.data.put(puts, store=STORE, deadline_s=PUT_S), strict=True):
                results[i] = with_receipt(results[i], receipt)
        request = Complete(
            lease_id=grant.lease_id, stage="rollout", incarnation=worker.life, results=results, scalars=block.scalars
        )
        ack: CompleteAck = await worker.ask(request, CompleteAck)
        assert not ack.refused
        left += len(results) - 1
    return left


async def play(folder: Path, store: str, limit: int, roll_out: Callable[[Actor], Awaitable[int]]) -> float:
    """Simulate a run whose rollouts continue until admission stops them. Return the largest fraction of `limit` in
    use."""
    fullest = 0.0
    run = make_run(folder, store=store, steps=STEPS, filter_zero_variance=roll_out is not Actor.work)
    async with bench_of(run) as bench:
        driver = await bench.driver()
        await driver.publish(0)
        rollout = await bench.actor("rollout")
        reference = await bench.actor("reference")
        saved: list[int] = []
        ordered = False
        for step in range(1, STEPS + 1):
            made = await roll_out(rollout)
            assert made or step == STEPS  # The tasks of the last step may have been rolled out earlier.
            await reference.work()
            full = await driver.stats()
            fullest = max(fullest, full.bytes / limit)
            if ordered:  # The checkpoint is saved late, so that rollouts fill the store first.
                saved.append(step - 1)
                await driver.save(step - 1, saved[-2:])
            batch = await driver.train(step)
            assert len(batch.batch.tasks) == TASKS_PER_STEP
            assert batch.scalars["reward"].shape == (TASKS_PER_STEP * GROUP,)
            ordered = batch.checkpoint_now  # Here, a checkpoint is requested only when the store runs short of room.
            now = await driver.stats()
            assert now.bytes <= limit
            assert now.busy == 0
        assert saved
    return fullest


def test_a_store_full_of_rollouts_delays_neither_reference_nor_training(tmp_path: Path) -> None:
    """Half of the rollouts are dropped at once while the others remain; replacements use the space of the dropped
    ones."""
    limit = needed_bytes(tmp_path / "check")
    assert asyncio.run(play(tmp_path, f"memory: {limit}", limit, roll_out)) > FULL


@pytest.mark.long
def test_a_full_store_two_thirds_on_disk_delays_neither_reference_nor_training(tmp_path: Path) -> None:
    limit = needed_bytes(tmp_path / "check")
    memory = limit // 3
    store = f"memory: {memory}, spill: {tmp_path / 'spill'}, spill_limit: {limit - memory}"
    assert asyncio.run(play(tmp_path, store, limit, Actor.work)) > FULL


@pytest.mark.long
def test_a_checkpoint_is_ordered_before_the_store_of_one_host_is_full(tmp_path: Path) -> None:
    """Rollouts go into one store and everything else into the trainer's store, which never becomes half full."""
    limit = needed_bytes(tmp_path / "check")
    steps = 7
    run = make_run(tmp_path, store=f"memory: {limit}", steps=steps)

    async def main() -> None:
        async with bench_of(run) as bench:
            away = Process(run, "services.batch_store", ("--instance", "1"))
            away.start()
            try:
                driver = await bench.driver()
                await driver.publish(0)
                await driver.stats(1)  # The call returns once the store answers.
                rollout = await bench.actor("rollout", store="batch-store/1")
                reference = await bench.actor("reference")
                saved: list[int] = []
                ordered = False
                fullest = [0, 0]
                for step in range(1, steps + 1):
                    await rollout.work(wait_s=0.7)
                    await reference.work(wait_s=0.7)
                    both = [await driver.stats(0), await driver.stats(1)]
                    assert [each.busy for each in both] == [0, 0]
                    fullest = [max(most, each.bytes) for most, each in zip(fullest, both, strict=True)]
                    if ordered:
                        saved.append(step - 1)
                        await driver.save(step - 1, saved[-2:])
                    ordered = (await driver.train(step)).checkpoint_now
                assert saved
                assert fullest[0] < limit / 2 < 0.6 * limit < fullest[1]
            finally:
                away.kill()

    asyncio.run(main())


def test_a_step_replayed_repeatedly_stores_its_proximal_log_probs_once(tmp_path: Path) -> None:
    limit = needed_bytes(tmp_path / "check")

    async def main() -> None:
        async with bench_of(make_run(tmp_path, store=f"memory: {limit}", steps=STEPS)) as bench:
            driver = await bench.driver()
            await driver.publish(0)
            await (await bench.actor("rollout")).work()
            await (await bench.actor("reference")).work()
            batch = await driver.train(1)
            sizes = [GROUP * (PROMPT + NEW)] * TASKS_PER_STEP
            once = await driver.stats()
            for life in range(1, 60):  # The trainer is killed at every attempt.
                await driver.put_prox(batch, sizes, life)
            now = await driver.stats()
            # Version 0 might have been collected in the meantime.
            assert (now.bytes <= once.bytes, now.shards <= once.shards, now.files <= once.files) == (True, True, True)
            assert now.busy == 0
            # 59 copies of the step's log-probs would exceed the whole store
            assert 59 * 4 * sum(sizes) > limit

    asyncio.run(main())


def test_a_memory_limit_one_byte_too_small_is_refused_and_the_message_names_a_sufficient_one(tmp_path: Path) -> None:
    limit = needed_bytes(tmp_path / "check")
    run = make_run(tmp_path, store=f"memory: {limit - 1}", steps=STEPS)
    run.remove_volatile()
    with pytest.raises(TopologyError, match=f"set at least {limit} "):
        load(run.topology)
