"""Compares, for `bench_train`, the driver's CPU seconds in a training step with those of its 8 workers.

Also measures, in the driver's process, the CPU seconds that it takes to verify the checksums of the step's shards: the
difference between the first read of a batch and the second one, which skips the verification. Every rank reads only its
own part.

The workers are real processes (backend torch, dp 8) on the quickstart's model. With only 0.8M parameters, a token is
very cheap; with a model that needs eight ranks, the driver's share is lower. The batch is put before the measurement
starts.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from proto.messages import BatchMeta, BatchPart, LossSpec, TaskHandle
from proto.tensors import Array
from shared.batch import Batch
from shared.dataplane.client import TaskShards
from shared.ranks.layout import Layout
from shared.rundir import RunDir
from shared.stages import ROLLOUT
from tests.integration.policy_trainer.test_trainer_worker import Bench, bench_of
from tests.integration.policy_trainer.trainer_group import WorkerGroup, driver_of, group_of
from tests.integration.store_process import REPOSITORY, STORE
from tests.unit.policy_trainer.training import adamw

RANKS, TASKS, GROUP, PROMPT, LONGEST = 8, 64, 8, 16, 200
STEPS = 3
LOSS = LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.2, anchor="rollout", temperature=1.0)


def run_directory(folder: Path) -> RunDir:
    made = RunDir.create(folder / "run")
    made.topology.write_text(
        "run: {name: driver-share, steps: 9}\n"
        f"policy: {{model: {REPOSITORY}/launch/topologies/models/tiny-qwen3, dtype: float32}}\n"
        'data: {train: {source: "builtin:addition"}}\n'
        'reward: {function: "builtin:exact_match"}\n'
        f"sampling: {{max_new_tokens: {LONGEST}}}\n"
        f"algorithm: {{tasks_per_step: {TASKS}, group_size: {GROUP}}}\n"
        "optimizer: {name: adamw, lr: 1.0e-4}\n"
        "services: {batch-store: {memory: 512MiB}}\n"
    )
    return made


async def batch(bench: Bench, step: int) -> Batch:
    """Put TASKS groups of GROUP answers of 1 to LONGEST tokens into the store."""
    rng = np.random.default_rng(step)
    handles, tasks = [], []
    for index in range(TASKS):
        prompt = rng.integers(4, 14, size=PROMPT)
        answers = [rng.integers(4, 14, size=rng.integers(1, LONGEST + 1)) for _ in range(GROUP)]
        ids = np.concatenate([np.concatenate([prompt, answer]) for answer in answers]).astype(np.int32)
        mask = np.concatenate([[0] * PROMPT + [1] * len(answer) for answer in answers]).astype(np.uint8)
        shards: dict[str, Array] = {
            "token_ids": ids,
            "lengths": np.array([PROMPT + len(answer) for answer in answers], np.int32),
            "sample_index": np.arange(GROUP, dtype=np.int32),
            "loss_mask": mask,
            "rollout_logprobs": np.where(mask, -2.0, 0.0).astype(np.float32),
            "versions": np.where(mask, step - 1, -1).astype(np.int32),
        }
        task_id = f"train/{step}/{index}"
        tasks.append(TaskShards(task_id, 1, {key: shards[key] for key in ROLLOUT.makes}))
        handles.append(TaskHandle(task_id, 1, GROUP, len(ids), 0, [0]))
    await bench.data.put(tasks, store=STORE, deadline_s=60)
    meta = BatchMeta(tasks=handles, parts=[BatchPart(ROLLOUT.name, list(ROLLOUT.makes))], stores=[STORE])
    advantages = rng.normal(size=TASKS * GROUP).astype(np.float32)
    weights = np.full(TASKS * GROUP, 1e-5, np.float32)
    return Batch(meta).with_scalars({"advantages": advantages, "weights": weights})


async def verify_s(bench: Bench, batch: Batch) -> float:
    """Return the CPU seconds by which the first read of a batch by this process exceeds the second."""
    spent = []
    for _ in range(2):
        before = time.process_time()
        await bench.data.fetch(batch.meta, ROLLOUT.makes, deadline_s=60)
        spent.append(time.process_time() - before)
    return spent[0] - spent[1]


def cpu_s(group: WorkerGroup) -> float:
    used = [psutil.Process(process.pid).cpu_times() for process in group.processes]
    return float(sum(each.user + each.system for each in used))


async def measure(run: RunDir, group: WorkerGroup) -> dict[str, float]:
    """Return the CPU seconds of the driver's calls and of the workers over STEPS steps. One unmeasured step precedes
    these.
    """
    async with bench_of(run) as bench:
        workers = await driver_of(bench, Layout(RANKS), 5)
        await workers.init_model()
        batches = [await batch(bench, step) for step in range(1, STEPS + 2)]
        verified = sum([await verify_s(bench, each) for each in batches[1:]])
        driver = theirs = 0.0
        for step, each in enumerate(batches):
            before, group_before = time.process_time(), cpu_s(group)
            await asyncio.gather(workers.forward_backward(each, LOSS), workers.optim_step(adamw()))
            if step:
                driver += time.process_time() - before
                theirs += cpu_s(group) - group_before
    return {
        "driver_s": driver / STEPS,
        "workers_s": theirs / STEPS,
        "share": driver / (driver + theirs),
        "verify_s": verified / STEPS,
        "verify_share": verified / theirs,
    }


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="bench-driver-") as name:
        run = run_directory(Path(name))
        try:
            with group_of(run, RANKS) as group:
                print(json.dumps(asyncio.run(measure(run, group))))
        finally:
            run.remove_volatile()


if __name__ == "__main__":
    main()
