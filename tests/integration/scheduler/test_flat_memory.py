"""Runs a scheduler and a store for a thousand steps without a model, and checks that neither process grows once the run
is under way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from proto.messages import (
    Ack,
    CommitStep,
    GetInventory,
    Inventory,
    LeaseGrant,
    NextBatch,
    Outcome,
    StepBatch,
    TaskResult,
)
from shared.dataplane.client import TaskShards
from tests.integration import store_scheduler
from tests.integration.store_scheduler import GROUP, STORE, TASKS_PER_STEP, Actor, Process, bench_of, make_run

STEPS = 1000
CALL_S = 1.0
"""Deadline of a request in seconds. Replies are kept for retries until 5 s after the deadline, so with a longer
deadline none would expire during the run."""
MEASURE_FROM = 600
"""Step by which the allocators and most caches have reached their final size."""
GROWTH_BYTES = 2 << 20
"""Maximum growth afterwards: less than 2 kB per task. SQLite's page cache and the tombstones have not yet reached their
final size."""


def resident_bytes(process: Process) -> int:
    assert process.process is not None
    return int(psutil.Process(process.process.pid).memory_info().rss)


def shards_of(stage: str, size: int) -> dict[str, Any]:
    if stage == "reference":
        return {"ref_logprobs": np.zeros(GROUP * size, np.float32)}
    tokens = GROUP * size
    return {
        "token_ids": np.zeros(tokens, np.int32),
        "lengths": np.full(GROUP, size, np.int32),
        "sample_index": np.arange(GROUP, dtype=np.int32),
        "loss_mask": np.ones(tokens, np.uint8),
        "rollout_logprobs": np.zeros(tokens, np.float32),
        "versions": np.zeros(tokens, np.int32),
    }


async def work(actor: Actor, step: int) -> None:
    """Carry out one stage of a step's tasks; in every eighth step, first abandon an attempt after its put."""
    for attempt in range(2 if step % 8 == 0 and actor.service == "rollout" else 1, 0, -1):
        while (grant := await actor.lease(wait_s=CALL_S, most=TASKS_PER_STEP)) is None:
            pass
        await result(actor, grant, step, given_up=attempt > 1)


async def result(actor: Actor, grant: LeaseGrant, step: int, *, given_up: bool) -> None:
    made = [TaskShards(task.task_id, task.fence, shards_of(grant.stage, 20 + step % 50)) for task in grant.batch.tasks]
    receipts = await actor.data.put(made, store=STORE, deadline_s=CALL_S)
    samples = GROUP if grant.stage == "rollout" else 0
    results = [
        TaskResult(each.task_id, each.fence, Outcome.RETRY, reason="given up")
        if given_up
        else TaskResult(
            each.task_id, each.fence, Outcome.DONE, STORE, each.content_hash, samples, samples * 20, each.nbytes
        )
        for each in receipts
    ]
    await actor.complete(grant, results)


def test_scheduler_and_store_do_not_grow_over_a_thousand_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CALL_S", "PUT_S"):
        monkeypatch.setattr(store_scheduler, name, CALL_S)
    run = make_run(tmp_path, store="memory: 64MiB", steps=STEPS)
    sizes: list[tuple[int, int]] = []

    async def main() -> None:
        async with bench_of(run) as bench:
            driver = await bench.driver()
            await driver.publish(0)
            rollout, reference = await bench.actor("rollout"), await bench.actor("reference")
            held = 0
            for step in range(1, STEPS + 1):
                await work(rollout, step)
                await work(reference, step)
                batch: StepBatch = await driver.ask(NextBatch(driver=driver.life, step=step), StepBatch)
                await driver.put_prox(batch, [20] * TASKS_PER_STEP, driver.life)
                await driver.ask(CommitStep(driver=driver.life, step=step, metrics={"loss/policy": 0.1}), Ack)
                await driver.publish(step)
                if step % 5 == 0:
                    await driver.save(step, [max(step - 5, 1), step])
                if step % 50 == 0:
                    held = max(held, (await driver.stats()).bytes)
                    sizes.append((resident_bytes(bench.scheduler), resident_bytes(bench.store)))
            # The last ten steps and up to two versions wait for a checkpoint.
            page: Inventory = await driver.ask(GetInventory(), Inventory, service="batch-store")
            assert len(page.tasks) <= 10 * TASKS_PER_STEP + 3
            assert held < 4 << 20

    asyncio.run(main())
    steady = sizes[MEASURE_FROM // 50 :]
    for name, mine in zip(("scheduler", "batch-store"), zip(*steady, strict=True), strict=True):
        assert mine[-1] - mine[0] < GROWTH_BYTES, f"{name}: {[each >> 10 for each in mine]} KiB every 50 steps"
