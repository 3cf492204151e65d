"""Runs the scheduler as a real process with real sockets, through a whole run and through runs in which it is sent
SIGKILL at random moments.

This file plays the other actors without torch: workers that lease and complete, a store that counts the clears sent to
it, and a driver that commits. These actors follow the protocol and retry as the real services do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from proto.ids import new_incarnation
from proto.messages import (
    Ack,
    Canary,
    CheckpointSaved,
    Clear,
    CommitStep,
    Complete,
    CompleteAck,
    ErrorCode,
    EvalsDone,
    FinishRun,
    GetInventory,
    GetRunInfo,
    GetStatus,
    Heartbeat,
    HeartbeatAck,
    Inventory,
    LeaseGrant,
    LeaseProgress,
    LeaseRequest,
    NextBatch,
    Outcome,
    PublishWeights,
    PutTask,
    Register,
    Registered,
    RunInfo,
    Status,
    StepBatch,
    TaskResult,
    WaitEvals,
)
from shared.actor.service import UNUSABLE_STATUS
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Call, Mailbox
from shared.rundir import RunDir
from tests.integration.store_scheduler import ask_again
from tests.weights_refs import weights_ref

STEPS = 6
KILL_STEPS = 150
TASKS_PER_STEP = 8
GROUP = 4
TOPOLOGY = """\
run: {{name: sched, steps: {steps}, seed: 7}}
policy: {{model: ./model}}
data:
  train: {{source: "builtin:addition", max_prompt_tokens: 8}}
  eval:
    held: {{source: "builtin:addition?split=test", every: 3, rows: 10}}
reward: {{function: "builtin:exact_match"}}
sampling: {{max_new_tokens: 8}}
algorithm:
  tasks_per_step: {tasks}
  group_size: {group}
  kl: {{coef: 0.001}}
optimizer: {{lr: 1.0e-3}}
lease: {{lease_s: 2}}
checkpoint: {{every: 2}}
"""
CANARY = Canary(token_ids=np.zeros(2, np.int32), logprobs=np.zeros(1, np.float32), tolerance=1e-4)


@pytest.fixture
def steps() -> int:
    return STEPS


@pytest.fixture
def run(tmp_path: Path, steps: int) -> Iterator[RunDir]:
    from safetensors.numpy import save_file

    model = tmp_path / "model"
    model.mkdir()
    save_file({"w": np.zeros((4, 4), np.float32)}, model / "model.safetensors")
    (model / "config.json").write_text("{}")
    made = RunDir.create(tmp_path / "run", shm_root=tmp_path / "shm")
    text = TOPOLOGY.format(steps=steps, tasks=TASKS_PER_STEP, group=GROUP).replace("./model", str(model))
    made.topology.write_text(text)
    yield made
    made.remove_volatile()


class Scheduler:
    """Scheduler process under test."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "services.scheduler", "--run", str(self._run.path)]
        self._process = subprocess.Popen(command)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(timeout=10)

    def stop(self) -> int:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=15)

    def ended(self, timeout: float) -> int:
        assert self._process is not None
        return self._process.wait(timeout=timeout)


@pytest.fixture
def scheduler(run: RunDir) -> Iterator[Scheduler]:
    process = Scheduler(run)
    process.start()
    yield process
    with contextlib.suppress(Exception):
        process.kill()


class World:
    """All actors except the scheduler."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.clients: list[Client] = []
        self.holds: set[tuple[str, int]] = set()
        self.cleared: Counter[str] = Counter()
        self.clear_came = asyncio.Event()
        self.refusals = 2
        """Number of clears that the store refuses before it accepts one."""
        self.trained: list[list[str]] = []
        self.store = Mailbox("batch-store/0", new_incarnation())
        self.store.handle(Clear, self._clear)
        self.store.handle(GetInventory, self._inventory)
        self.store.bind(self.context, run.endpoint("batch-store", 0))
        self.tasks: list[asyncio.Task[None]] = []

    def client(self) -> tuple[Client, int]:
        incarnation = new_incarnation()
        client = Client(self.context, self.run.endpoint("scheduler", 0), "scheduler/0", incarnation)
        self.clients.append(client)
        return client, incarnation

    def _clear(self, request: Clear, call: Call) -> Ack:
        if self.refusals:
            self.refusals -= 1
            raise RpcError(ErrorCode.BUSY, "batch-store/0: not now", retry_after_s=0.01)
        self.clear_came.set()
        for task in request.tasks:
            self.cleared[task.task_id] += 1
            self.holds = {held for held in self.holds if held[0] != task.task_id or held[1] > task.fence}
        return Ack()

    async def until_cleared(self, task_ids: list[str]) -> None:
        async with asyncio.timeout(20):
            while not all(self.cleared[task] for task in task_ids):
                self.clear_came.clear()
                await self.clear_came.wait()

    def _inventory(self, request: GetInventory, call: Call) -> Inventory:
        if request.tasks:
            raise RpcError(ErrorCode.BUSY, "batch-store/0: no shards are checked now", retry_after_s=0.01)
        return Inventory(tasks=[PutTask(*held) for held in sorted(self.holds)], cursor=0)

    async def join(self, service: str, instance: int, client: Client, incarnation: int) -> None:
        await client.call(
            Register(
                service=service,
                instance=instance,
                incarnation=incarnation,
                pid=1,
                host="here",
                endpoint="",
                limit_bytes=1 << 30 if service == "batch-store" else 0,
            ),
            Registered,
            deadline_s=20,
        )

    async def work(self, stage: str, instance: int) -> None:
        """Lease, put and complete tasks of `stage` indefinitely; lost tasks are leased again."""
        client, incarnation = self.client()
        await self.join(stage, instance, client, incarnation)
        while True:
            try:
                request = LeaseRequest(
                    stage=stage, service=stage, instance=instance, incarnation=incarnation, max_tasks=4
                )
                grant = await client.call(request, LeaseGrant, deadline_s=5)
                await asyncio.sleep(0.002)
                await client.call(self.result(grant, stage, incarnation), CompleteAck, deadline_s=20)
            except RpcError as error:
                ask_again(error)

    def result(self, grant: LeaseGrant, stage: str, incarnation: int) -> Complete:
        if stage == "rollout":
            assert grant.weights is not None
            assert grant.weights.step >= grant.min_step
        results = []
        for task in grant.batch.tasks:
            self.holds.add((task.task_id, task.fence))
            results.append(
                TaskResult(
                    task.task_id,
                    task.fence,
                    Outcome.DONE,
                    "batch-store/0",
                    hash((task.task_id, stage)) & 0xFFFF,
                    grant.group_size if stage == "rollout" else 0,
                    40,
                    400,
                )
            )
        samples = sum(result.samples for result in results)
        scalars = {"reward": np.ones(samples, np.float32), "length": np.full(samples, 5, np.int32)}
        return Complete(
            lease_id=grant.lease_id,
            stage=stage,
            incarnation=incarnation,
            results=results,
            scalars=scalars if stage == "rollout" else {},
        )

    async def drive(self) -> dict[str, float]:
        """As the driver, train every step, publish its version and save checkpoints. Return the last evaluation."""
        client, driver = self.client()
        info = await client.call(GetRunInfo(driver=driver), RunInfo, deadline_s=20)
        assert info.committed_step == 0
        await self.publish(client, driver, 0)
        for step in range(1, info.steps + 1):
            batch = await self.next_batch(client, driver, step)
            assert batch.scalars["reward"].shape == (TASKS_PER_STEP * GROUP,)
            self.trained.append([task.task_id for task in batch.batch.tasks])
            await client.call(CommitStep(driver=driver, step=step, metrics={"loss/policy": 0.5}), Ack, deadline_s=20)
            await self.publish(client, driver, step)
            if step % 2 == 0:
                kept = [each for each in (step - 2, step) if each > 0]
                await client.call(CheckpointSaved(driver=driver, step=step, kept=kept), Ack, deadline_s=20)
        while True:
            try:
                done = await client.call(WaitEvals(driver=driver, step=info.steps), EvalsDone, deadline_s=5)
                break
            except RpcError as error:
                ask_again(error)
        await client.call(FinishRun(driver=driver), Ack, deadline_s=20)
        return done.accuracy

    async def next_batch(self, client: Client, driver: int, step: int) -> StepBatch:
        while True:
            try:
                return await client.call(NextBatch(driver=driver, step=step), StepBatch, deadline_s=5)
            except RpcError as error:
                ask_again(error)

    async def publish(self, client: Client, driver: int, step: int) -> None:
        ref = weights_ref(0, step, CANARY, drill_seed=1, nbytes=64)
        self.holds.add((ref.task_id, 1))
        await client.call(PublishWeights(driver=driver, ref=ref), Ack, deadline_s=20)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.store.close()
        for client in self.clients:
            client.close()
        self.context.term()


@contextlib.asynccontextmanager
async def world_of(run: RunDir) -> AsyncIterator[World]:
    world = World(run)
    try:
        client, incarnation = world.client()
        await world.join("batch-store", 0, client, incarnation)
        yield world
    finally:
        await world.close()


def rows_of(run: RunDir) -> list[dict[str, float]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def steps_of(run: RunDir) -> list[tuple[int, str, list[str]]]:
    with contextlib.closing(sqlite3.connect(run.journal)) as db:
        found = db.execute("SELECT step, state, task_ids FROM steps ORDER BY step").fetchall()
    return [(step, state, json.loads(ids)) for step, state, ids in found]


def check_finished(run: RunDir, world: World) -> None:
    """Check that every row, step and task occurs once."""
    assert [row["step"] for row in rows_of(run)] == list(range(len(world.trained) + 1))
    steps = steps_of(run)
    assert [(step, state) for step, state, _ in steps] == [(step, "TRAINED") for step in range(1, len(rows_of(run)))]
    assert [ids for _, _, ids in steps] == world.trained
    ids = [task for step in world.trained for task in step]
    assert len(ids) == len(set(ids)) == len(world.trained) * TASKS_PER_STEP


async def play(run: RunDir, scheduler: Scheduler, kill_for: float, seed: int) -> int:
    """Play a whole run and kill the scheduler at random moments for `kill_for` seconds; return the number of kills."""
    chance = random.Random(seed)
    kills = 0
    async with world_of(run) as world:
        for stage, instance in (("rollout", 0), ("rollout", 1), ("reference", 0)):
            world.tasks.append(asyncio.create_task(world.work(stage, instance)))
        driver = asyncio.create_task(world.drive())
        until = time.monotonic() + kill_for
        while not driver.done() and time.monotonic() < until:
            # The wait also ends after some steps, so that the run does not finish on a fast machine before the kills.
            step, late = len(world.trained) + chance.randint(5, 25), time.monotonic() + chance.uniform(0.5, 1.6)
            while not driver.done() and len(world.trained) < step and time.monotonic() < late:
                await asyncio.wait({driver, *world.tasks}, timeout=0.005, return_when="FIRST_COMPLETED")
            if not driver.done():
                scheduler.kill()
                kills += 1
                scheduler.start()
        async with asyncio.timeout(60):
            await asyncio.wait({driver, *world.tasks}, return_when="FIRST_COMPLETED")
            for task in world.tasks:
                assert not task.done(), task.exception()
            assert (await driver) == {"held": 1.0}
        client, _ = world.client()
        oldest = [task for step in world.trained[:-2] for task in step]
        await world.until_cleared(oldest)
        status = await client.call(GetStatus(), Status, deadline_s=10)
        async with asyncio.timeout(20):  # The store must still acknowledge its clears.
            while status.tasks["TRAINED"] != 2 * TASKS_PER_STEP:
                await asyncio.sleep(0.02)
                status = await client.call(GetStatus(), Status, deadline_s=10)
        assert status.step == status.version == status.steps == len(world.trained)
        check_finished(run, world)
    return kills


def test_a_run_trains_every_task_once_and_collects_it(run: RunDir, scheduler: Scheduler) -> None:
    asyncio.run(play(run, scheduler, kill_for=0.0, seed=0))
    row = rows_of(run)[3]
    assert row["eval/held/accuracy"] == 1.0
    assert row["loss/policy"] == 0.5
    assert "eval/held/accuracy" not in rows_of(run)[2]
    assert scheduler.stop() == 0


@pytest.mark.parametrize("steps", [KILL_STEPS])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_kills_at_random_moments_neither_lose_nor_duplicate_a_task(
    run: RunDir, scheduler: Scheduler, seed: int
) -> None:
    assert asyncio.run(play(run, scheduler, kill_for=12.0, seed=seed)) >= 3


def test_a_new_incarnation_frees_the_leases_of_the_previous_one_and_a_heartbeat_reports_them_lost(
    run: RunDir, scheduler: Scheduler
) -> None:
    async def scene() -> None:
        async with world_of(run) as world:
            driving, driver = world.client()
            await driving.call(GetRunInfo(driver=driver), RunInfo, deadline_s=20)
            await world.publish(driving, driver, 0)
            grants = []
            for _ in range(2):
                client, life = world.client()
                await world.join("rollout", 0, client, life)
                request = LeaseRequest(stage="rollout", service="rollout", instance=0, incarnation=life, max_tasks=64)
                # Leases alternate between the evaluation of version 0 and training.
                while (grant := await client.call(request, LeaseGrant, deadline_s=10)).split != "held":
                    pass
                grants.append(grant)
            # The second life gets the same tasks under a higher fence.
            first, second = grants
            assert [task.task_id for task in first.batch.tasks] == [task.task_id for task in second.batch.tasks]
            assert {task.fence for task in second.batch.tasks} == {2}
            beat = Heartbeat(
                service="rollout",
                instance=0,
                incarnation=life,
                state="READY",
                leases=[LeaseProgress(first.lease_id, 5), LeaseProgress(second.lease_id, 5)],
            )
            ack = await client.call(beat, HeartbeatAck, deadline_s=10)
            assert (ack.registered, ack.lost_leases) == (True, [first.lease_id])
            await world.until_cleared([task.task_id for task in first.batch.tasks])
            assert all(world.cleared[task.task_id] == 1 for task in first.batch.tasks)

    asyncio.run(scene())


def test_a_torn_metrics_line_is_repaired_and_a_damaged_journal_is_refused(run: RunDir, scheduler: Scheduler) -> None:
    asyncio.run(play(run, scheduler, kill_for=0.0, seed=0))
    scheduler.kill()
    whole = run.metrics.read_bytes()
    run.metrics.write_bytes(whole[: whole.rstrip().rfind(b"\n") + 12])
    scheduler.start()

    async def answered() -> None:
        async with world_of(run):
            assert run.metrics.read_bytes() == whole

    asyncio.run(answered())
    scheduler.kill()
    for side in (f"{run.journal}-wal", f"{run.journal}-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(side)
    run.journal.write_bytes(b"x" * 8192)
    command = [sys.executable, "-m", "services.scheduler", "--run", str(run.path)]
    failed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert failed.returncode == UNUSABLE_STATUS
    assert failed.stderr.splitlines()[-1].startswith(f"scheduler/0: journal {run.journal}: ")
