"""Tests the recorder with a real scheduler and store.

Workers put real shards into the store, and a driver commits steps without a trainer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np

from proto.messages import (
    Ack,
    CommitStep,
    GetRunInfo,
    GetStatus,
    LeaseGrant,
    NextBatch,
    Outcome,
    RunInfo,
    Status,
    StepBatch,
    TaskResult,
)
from shared.dataplane.client import TaskShards
from shared.rundir import RunDir
from shared.samples.reader import read, steps
from shared.samples.record import SampleRecord, SampleState
from shared.samples.text import SampleText, TaskText, pack
from shared.stages import SAMPLE_ADVANTAGES, TEXT, TRAIN_LOGPROBS
from tests.integration.store_scheduler import (
    GROUP,
    PUT_S,
    SAMPLE_TOKENS,
    STORE,
    TASKS_PER_STEP,
    Actor,
    Bench,
    DriverActor,
    Process,
    bench_of,
    make_run,
    rollout_shards,
)

LIMIT_S = 90.0
SAMPLES = "{per_step: 4}"
"""With this setting, every task is chosen."""


def made(grant: LeaseGrant) -> list[dict[str, Any]]:
    """Return the shards of a lease, including the text of its samples. The samples of a task have different rewards."""
    found = []
    for task in grant.batch.tasks:
        shards = rollout_shards(task)
        texts = [SampleText(f"{task.task_id} says {n}", "stop", float(n), {"exact": float(n)}) for n in range(GROUP)]
        shards[TEXT] = pack(TaskText(f"prompt of {task.task_id}", texts, answer="42"), GROUP * SAMPLE_TOKENS)
        found.append(shards)
    return found


async def roll_out(worker: Actor, *, wait_s: float = 2.0, most: int = 2) -> None:
    """Request a lease and, if one is granted, put its shards into the store and complete it."""
    grant = await worker.lease(wait_s=wait_s, most=most)
    if grant is None:
        return
    if grant.stage != "rollout":
        await worker.complete(grant, await worker.make(grant))
        return
    puts = [
        TaskShards(each.task_id, each.fence, shards)
        for each, shards in zip(grant.batch.tasks, made(grant), strict=True)
    ]
    receipts = await worker.data.put(puts, store=STORE, deadline_s=PUT_S)
    results = [
        TaskResult(
            each.task_id, each.fence, Outcome.DONE, STORE, each.content_hash, GROUP, GROUP * SAMPLE_TOKENS, each.nbytes
        )
        for each in receipts
    ]
    await worker.complete(grant, results)


async def train(bench: Bench, driver: DriverActor, workers: list[Actor], step: int) -> StepBatch:
    """Train one step as the trainer does: put the advantages and log-probs of the samples into the store before the
    commit.
    """
    asked = asyncio.ensure_future(driver.ask(NextBatch(driver=driver.life, step=step), StepBatch))
    while not asked.done():
        for worker in workers:
            await roll_out(worker, wait_s=0.3)
    batch: StepBatch = await asked
    values = {
        SAMPLE_ADVANTAGES: np.arange(GROUP, dtype=np.float32) - 1.5,
        TRAIN_LOGPROBS: np.full(GROUP * SAMPLE_TOKENS, -0.5, np.float32),
    }
    puts = [TaskShards(task.task_id, task.fence, dict(values)) for task in batch.batch.tasks]
    await driver.data.put(puts, store=STORE, deadline_s=PUT_S)
    await driver.ask(CommitStep(driver=driver.life, step=step, metrics={"loss/policy": 1.0}), Ack)
    await driver.publish(step)
    return batch


async def until(what: str, found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not found():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)  # no event announces a new file


async def recorder_ready(worker: Actor) -> None:
    """Wait until the recorder is READY. Until it asks for them, tasks that have ended are kept only briefly."""
    async with asyncio.timeout(LIMIT_S):
        while not any(
            (row.service, row.state) == ("recorder", "READY")
            for row in (await worker.ask(GetStatus(), Status)).services
        ):
            await asyncio.sleep(0.05)  # only paces the requests


@contextlib.asynccontextmanager
async def recorded(run: RunDir) -> AsyncIterator[tuple[Bench, Process, DriverActor, list[Actor]]]:
    """Start the scheduler, the store and the recorder, and play a driver, a rollout and a reference."""
    recorder = Process(run, "services.recorder")
    async with bench_of(run) as bench:
        recorder.start()
        try:
            driver = await bench.driver()
            await driver.publish(0)
            rollout = await bench.actor("rollout")
            rollout.spread = True
            await recorder_ready(rollout)
            yield bench, recorder, driver, [rollout, await bench.actor("reference")]
        finally:
            recorder.kill()


def once(records: list[SampleRecord]) -> bool:
    """Return whether each sample of each task was recorded once."""
    return set(Counter((each.task, each.sample) for each in records).values()) == {1}


async def kills(run: RunDir) -> None:
    async with recorded(run) as (bench, recorder, driver, workers):
        first = await train(bench, driver, workers, 1)
        await until("step 1", lambda: len(read(run.path, step=1)) == GROUP * TASKS_PER_STEP)
        recorder.kill()
        second = await train(bench, driver, workers, 2)
        assert steps(run.path) == [1]
        recorder.start()
        await until("step 2", lambda: len(read(run.path, step=2)) == GROUP * TASKS_PER_STEP)
        bench.scheduler.kill()
        recorder.kill()
        bench.scheduler.start()
        recorder.start()
        await recorder_ready(workers[0])
        third = await train(bench, driver, workers, 3)
        await until("step 3", lambda: len(read(run.path, step=3)) == GROUP * TASKS_PER_STEP)
        for step, batch in ((1, first), (2, second), (3, third)):
            records = read(run.path, step=step)
            assert {each.task for each in records} == {task.task_id for task in batch.batch.tasks}
            assert once(records)
            assert {(each.state, each.step, each.lineage) for each in records} == {(SampleState.TRAINED, step, 0)}


def test_each_trained_sample_is_recorded_once_whichever_process_is_killed(tmp_path: Path) -> None:
    run = make_run(tmp_path, store="memory: 512MiB", steps=4, samples=SAMPLES)
    asyncio.run(kills(run))
    record = read(run.path, step=1)[1]
    assert record.prompt == f"prompt of {record.task}"
    assert record.completion == f"{record.task} says {record.sample}"
    assert (record.reward, record.rewards, record.answer) == (record.sample, {"exact": record.sample}, "42")
    assert record.advantage == record.sample - 1.5
    assert record.length == len(record.token_ids) == len(record.logprobs) == SAMPLE_TOKENS
    assert record.train_logprobs == [-0.5] * SAMPLE_TOKENS


async def filtered_and_scored(run: RunDir) -> None:
    async with recorded(run) as (_, _, _, workers):
        workers[0].spread = False
        deadline = time.monotonic() + LIMIT_S
        while not read(run.path) or len(read(run.path, split="eval/held")) < 3 * GROUP:
            assert time.monotonic() < deadline
            await roll_out(workers[0], wait_s=0.5)
        while (counts := await workers[0].counts()).get("DROPPED", 0) + counts.get("SCORED", 0):
            assert time.monotonic() < deadline, counts
            await asyncio.sleep(0.05)  # only paces the requests


def test_filtered_and_evaluated_samples_are_recorded_before_their_collection(tmp_path: Path) -> None:
    run = make_run(tmp_path, store="memory: 512MiB", steps=4, samples=SAMPLES, evaluate=True, filter_zero_variance=True)
    asyncio.run(filtered_and_scored(run))
    filtered = read(run.path)
    assert once(filtered)
    assert {(each.state, each.step, each.advantage) for each in filtered} == {(SampleState.FILTERED, 1, None)}
    assert filtered[0].reason.startswith(f"filtered: all {GROUP} rewards are")
    assert filtered[0].completion == f"{filtered[0].task} says 0"
    scored = read(run.path, split="eval/held")
    assert {(each.state, each.step) for each in scored} == {(SampleState.SCORED, 0)}


async def stale(run: RunDir) -> None:
    async with recorded(run) as (_, _, _, workers):
        deadline = time.monotonic() + LIMIT_S
        while not read(run.path):
            assert time.monotonic() < deadline
            for worker in workers:  # their results do not name a version, which is too old for every step
                await roll_out(worker, wait_s=0.5, most=1)


def test_the_samples_of_a_task_that_became_too_old_are_recorded(tmp_path: Path) -> None:
    run = make_run(tmp_path, store="memory: 512MiB", samples=SAMPLES, consume="completion")
    asyncio.run(stale(run))
    dropped = read(run.path)
    assert once(dropped)
    assert {(each.state, each.step, each.samples, each.advantage) for each in dropped} == {
        (SampleState.DROPPED, 1, GROUP, None)
    }
    for each in dropped:
        assert each.reason.startswith("stale: oldest token of version")
        assert (each.prompt, each.completion) == (f"prompt of {each.task}", f"{each.task} says {each.sample}")
        assert each.length == len(each.token_ids) == SAMPLE_TOKENS


async def stopped(run: RunDir) -> float:
    """Return how many seconds pass until a filtered task is collected while the recorder is stopped."""
    async with recorded(run) as (_, recorder, _, workers):
        workers[0].spread = False
        await roll_out(workers[0], most=1)
        await until("a sample", lambda: len(read(run.path)) == GROUP)
        assert recorder.process is not None
        os.kill(recorder.process.pid, signal.SIGSTOP)
        collected = (await workers[0].counts()).get("COLLECTED", 0)
        begun = time.monotonic()
        await roll_out(workers[0], most=1)
        while (await workers[0].counts()).get("COLLECTED", 0) == collected:
            assert time.monotonic() < begun + LIMIT_S
            await asyncio.sleep(0.05)  # only paces the requests
        took_s = time.monotonic() - begun
        os.kill(recorder.process.pid, signal.SIGCONT)
        while len({each.task for each in read(run.path)}) < 2:  # the scheduler waits for a recorder once it asks again
            assert time.monotonic() < begun + LIMIT_S
            await roll_out(workers[0], wait_s=0.5, most=1)
            await asyncio.sleep(1.0)  # only paces the tasks
        return took_s


def test_a_stopped_recorder_delays_collection_by_seconds_at_most_and_continues_later(tmp_path: Path) -> None:
    run = make_run(tmp_path, store="memory: 512MiB", samples=SAMPLES, filter_zero_variance=True)
    assert asyncio.run(stopped(run)) < 12
    said = [line for line in run.log_file("recorder", 0).read_text().splitlines() if "are missing" in line]
    assert len(said) == 1
    missing = json.loads(said[0])
    assert missing["event"] == (
        "samples are missing from samples/: the recorder was too slow or not running; training is not affected"
    )
    assert int(missing["tasks"]) >= 1
    assert missing["after_step"] == 1  # the step after the recorded task, which was filtered


async def rewound(run: RunDir) -> None:
    async with recorded(run) as (bench, _, driver, workers):
        for step in (1, 2):
            await train(bench, driver, workers, step)
        await until("steps", lambda: steps(run.path) == [1, 2])
        bench.store.kill()
        run.remove_shards()
        run.shm.mkdir(parents=True)
        bench.store.start()
        await driver.ask(GetRunInfo(driver=driver.life, reload=True), RunInfo)
        await until("the discard", lambda: steps(run.path) == [])


def test_samples_of_steps_that_are_rolled_back_are_set_aside(tmp_path: Path) -> None:
    run = make_run(tmp_path, store="memory: 512MiB", samples=SAMPLES)
    asyncio.run(rewound(run))
    left = sorted(path.name for path in run.path.glob("samples/discarded/*/train/*.jsonl"))
    assert left == ["1.jsonl", "2.jsonl"]
