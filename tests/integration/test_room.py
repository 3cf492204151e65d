"""A store just large enough, full of rollouts: later stages and training never meet BUSY. One byte less is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shared.topology import TopologyError, load, weight_bytes, worst_case_bytes
from tests.integration.store_scheduler import GROUP, NEW, PROMPT, TASKS_PER_STEP, bench_of, make_run

STEPS = 5


def needed_bytes(folder: Path) -> int:
    """What the topology check says would do."""
    folder.mkdir()
    run = make_run(folder, store="memory: 1GiB", steps=STEPS)
    run.remove_volatile()
    weights = weight_bytes(str(folder / "model"), "float32")
    return worst_case_bytes(load(run.topology), PROMPT, weights)


async def play(folder: Path, store: str, limit: int) -> float:
    """A run whose rollouts always go on until admission stops them; returns the fullest the store was."""
    fullest = 0.0
    async with bench_of(make_run(folder, store=store, steps=STEPS)) as bench:
        driver = await bench.driver()
        await driver.publish(0)
        rollout = await bench.actor("rollout")
        reference = await bench.actor("reference")
        saved: list[int] = []
        for step in range(1, STEPS + 1):
            made = await rollout.work()
            full = await driver.stats()
            fullest = max(fullest, full.bytes / limit)
            assert made or step == STEPS  # the last ones were rolled out before
            await reference.work()
            batch = await driver.train(step)
            assert len(batch.batch.tasks) == TASKS_PER_STEP
            assert batch.scalars["reward"].shape == (TASKS_PER_STEP * GROUP,)
            if batch.checkpoint_now:  # nothing but room orders one here
                saved.append(step)
                await driver.save(step, saved[-2:])
            now = await driver.stats()
            assert now.bytes <= limit
            assert now.busy == 0
        assert saved
    return fullest


def test_a_store_full_of_rollouts_holds_up_neither_reference_nor_training(tmp_path: Path) -> None:
    limit = needed_bytes(tmp_path / "check")
    assert asyncio.run(play(tmp_path, f"memory: {limit}", limit)) > 0.3


def test_so_it_is_with_two_thirds_of_it_on_disk(tmp_path: Path) -> None:
    limit = needed_bytes(tmp_path / "check")
    memory = limit // 3
    store = f"memory: {memory}, spill: {tmp_path / 'spill'}, spill_limit: {limit - memory}"
    assert asyncio.run(play(tmp_path, store, limit)) > 0.3


def test_a_step_replayed_again_and_again_holds_its_proximal_log_probs_once(tmp_path: Path) -> None:
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
            for life in range(1, 60):  # a trainer that is killed at every attempt
                await driver.put_prox(batch, sizes, life)
            now = await driver.stats()
            # version 0 may go meanwhile
            assert (now.bytes <= once.bytes, now.shards <= once.shards, now.files <= once.files) == (True, True, True)
            assert now.busy == 0
            # 59 times the step's log-probs are more than the whole store
            assert 59 * 4 * sum(sizes) > limit

    asyncio.run(main())


def test_one_byte_less_is_refused_with_the_number_that_would_do(tmp_path: Path) -> None:
    limit = needed_bytes(tmp_path / "check")
    run = make_run(tmp_path, store=f"memory: {limit - 1}", steps=STEPS)
    run.remove_volatile()
    with pytest.raises(TopologyError, match=f"set at least {limit} "):
        load(run.topology)
