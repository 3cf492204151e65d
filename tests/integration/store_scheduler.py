"""A real store and a real scheduler with workers and a driver that put real shards into the store, without a model or
torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from safetensors.numpy import save_file

from proto.ids import new_incarnation
from proto.messages import (
    Ack,
    Canary,
    CheckpointSaved,
    CommitStep,
    Complete,
    CompleteAck,
    ErrorCode,
    GetRunInfo,
    GetStatus,
    GetStoreStats,
    LeaseGrant,
    LeaseRequest,
    NextBatch,
    Outcome,
    PublishWeights,
    Register,
    Registered,
    RunInfo,
    Status,
    StepBatch,
    StoreStats,
    TaskHandle,
    TaskResult,
)
from shared.dataplane.client import DataClient, TaskShards
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, service_name
from tests.weights_refs import weights_ref

STORE = "batch-store/0"
REPOSITORY = Path(__file__).parents[2]
CALL_S = 20.0
PUT_S = 30.0
GROUP = 4
TASKS_PER_STEP = 4
PROMPT, NEW = 1000, 1000
SAMPLE_TOKENS = PROMPT + NEW
"""Tokens per sample: the maximum that the topology allows."""
CANARY = Canary(token_ids=np.zeros(2, np.int32), logprobs=np.zeros(1, np.float32), tolerance=1e-4)
TOPOLOGY = """\
run: {{name: room, steps: {steps}, seed: 7}}
policy: {{model: {model}, dtype: float32}}
data:
  train: {{source: "builtin:addition", max_prompt_tokens: {prompt}}}
{evaluation}
reward: {{function: "builtin:exact_match"}}
sampling: {{max_new_tokens: {new}}}
staleness: 1
consume: {consume}
algorithm:
  {{tasks_per_step: {tasks}, group_size: {group}, num_iterations: 2, kl: {{coef: 0.001}},
    loss: {{anchor: proximal}}{filter}}}
optimizer: {{lr: 1.0e-3}}
lease: {{lease_s: 2}}
checkpoint: {{every: 1000}}
gc: {{after: {gc}}}
services: {{batch-store: {{{store}}}, rollout: {{block_tasks: 2}}}}
monitor: {{samples: {samples}}}
"""


def make_run(
    folder: Path,
    *,
    store: str,
    steps: int = 4,
    evaluate: bool = False,
    gc: str = "checkpoint",
    filter_zero_variance: bool = False,
    samples: str = "null",
    consume: str = "order",
) -> RunDir:
    """Make a run directory; `store` is the batch-store section of its topology, `samples` that of the recorder."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    save_file({"w": np.zeros((4, 4), np.float32)}, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    run = RunDir.create(folder / "run")
    evaluation = '  eval: {held: {source: "builtin:addition?split=test", every: 2, rows: 3}}' if evaluate else ""
    run.topology.write_text(
        TOPOLOGY.format(
            steps=steps,
            model=model,
            prompt=PROMPT,
            new=NEW,
            tasks=TASKS_PER_STEP,
            group=GROUP,
            store=store,
            evaluation=evaluation,
            gc=gc,
            samples=samples,
            consume=consume,
            filter=", filter_zero_variance: {max_refill: 3}" if filter_zero_variance else "",
        )
    )
    return run


@dataclass
class Process:
    """Process of one service, which can be killed and started again."""

    run: RunDir
    module: str
    arguments: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", self.module, "--run", str(self.run.path), *self.arguments]
        self.process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)


def ask_again(error: RpcError) -> None:
    """Return normally if a long poll found nothing, so that the caller repeats it; raise any other refusal."""
    if error.code not in (ErrorCode.NOT_READY, ErrorCode.DEADLINE):
        raise error


def rollout_shards(task: TaskHandle) -> dict[str, Any]:
    """Return the shards of the longest possible rollout; `rollout_logprobs` identifies the attempt."""
    tokens = GROUP * SAMPLE_TOKENS
    return {
        "token_ids": np.full(tokens, hash(task.task_id) & 0xFFFF, np.int32),
        "lengths": np.full(GROUP, SAMPLE_TOKENS, np.int32),
        "sample_index": np.arange(GROUP, dtype=np.int32),
        "loss_mask": np.ones(tokens, np.uint8),
        "rollout_logprobs": np.full(tokens, task.fence, np.float32),
        "versions": np.zeros(tokens, np.int32),
    }


@dataclass
class Actor:
    """One life of a worker or driver: its incarnation, bus clients and data client."""

    run: RunDir
    context: zmq.Context[zmq.Socket[bytes]]
    service: str
    instance: int = 0
    life: int = field(default_factory=new_incarnation)
    store: str = STORE
    """Store of the actor's host, which receives the actor's puts."""
    spread: bool = False
    """Whether the rewards of a group differ; otherwise they are all 1."""

    def __post_init__(self) -> None:
        self.clients: dict[tuple[str, int], Client] = {}
        self.data = DataClient(self.client)

    def client(self, service: str, instance: int = 0) -> Client:
        key = (service, instance)
        if key not in self.clients:
            endpoint = self.run.endpoint(service, instance)
            self.clients[key] = Client(self.context, endpoint, service_name(service, instance), self.life)
        return self.clients[key]

    async def ask(self, request: Any, reply: Any, *, service: str = "scheduler", instance: int = 0) -> Any:
        while True:
            try:
                return await self.client(service, instance).call(request, reply, deadline_s=CALL_S)
            except RpcError as error:
                ask_again(error)

    async def join(self) -> None:
        request = Register(
            service=self.service, instance=self.instance, incarnation=self.life, pid=1, host="here", endpoint=""
        )
        await self.ask(request, Registered)

    async def lease(self, *, wait_s: float = 2.0, most: int = 2) -> LeaseGrant | None:
        """Lease a block; return None if there is none within `wait_s`."""
        request = LeaseRequest(
            stage=self.service, service=self.service, instance=self.instance, incarnation=self.life, max_tasks=most
        )
        try:
            grant: LeaseGrant = await self.client("scheduler").call(request, LeaseGrant, deadline_s=wait_s)
        except RpcError as error:
            ask_again(error)
            return None
        return grant

    async def make(self, grant: LeaseGrant) -> list[TaskResult]:
        """Put the stage's shards for every task of the grant into the store, and return the results of the tasks."""
        if grant.stage == "rollout":
            made = [rollout_shards(task) for task in grant.batch.tasks]
        else:
            needs = ["token_ids", "lengths", "loss_mask"]
            found = await self.data.fetch(grant.batch, needs, deadline_s=PUT_S)
            made = [{"ref_logprobs": np.zeros(len(each["token_ids"]), np.float32)} for each in found]
        shards = [
            TaskShards(task.task_id, task.fence, each) for task, each in zip(grant.batch.tasks, made, strict=True)
        ]
        receipts = await self.data.put(shards, store=self.store, deadline_s=PUT_S)
        samples = GROUP if grant.stage == "rollout" else 0
        return [
            TaskResult(
                receipt.task_id,
                receipt.fence,
                Outcome.DONE,
                self.store,
                receipt.content_hash,
                samples,
                samples * SAMPLE_TOKENS,
                receipt.nbytes,
            )
            for receipt in receipts
        ]

    async def complete(self, grant: LeaseGrant, results: list[TaskResult]) -> CompleteAck:
        samples = sum(result.samples for result in results if result.outcome == Outcome.DONE)
        rewards = np.arange(samples, dtype=np.float32) % GROUP if self.spread else np.ones(samples, np.float32)
        scalars = {"reward": rewards} if grant.stage == "rollout" else {}
        request = Complete(
            lease_id=grant.lease_id, stage=grant.stage, incarnation=self.life, results=results, scalars=scalars
        )
        ack: CompleteAck = await self.ask(request, CompleteAck)
        return ack

    async def work(self, *, wait_s: float = 2.0) -> int:
        """Lease, put and complete until no lease is granted within `wait_s`; return the number of tasks."""
        done = 0
        while (grant := await self.lease(wait_s=wait_s)) is not None:
            await self.complete(grant, await self.make(grant))
            done += len(grant.batch.tasks)
        return done

    async def stats(self, store: int = 0) -> StoreStats:
        found: StoreStats = await self.ask(GetStoreStats(), StoreStats, service="batch-store", instance=store)
        return found

    async def counts(self) -> dict[str, int]:
        status: Status = await self.ask(GetStatus(), Status)
        return dict(status.tasks)

    def close(self) -> None:
        self.data.close()
        for client in self.clients.values():
            client.close()


class DriverActor(Actor):
    """A driver that commits steps without a trainer."""

    async def begin(self) -> RunInfo:
        info: RunInfo = await self.ask(GetRunInfo(driver=self.life), RunInfo)
        return info

    async def publish(self, step: int, lineage: int = 0) -> None:
        name = f"weights/{lineage}/{step}"
        [receipt] = await self.data.put(
            [TaskShards(name, 1, {"w": np.full((4, 4), step, np.float32)})], store=STORE, deadline_s=PUT_S
        )
        ref = weights_ref(lineage, step, CANARY, nbytes=receipt.nbytes)
        await self.ask(PublishWeights(driver=self.life, ref=ref), Ack)

    async def train(self, step: int) -> StepBatch:
        """Read the whole batch, put proximal log-probs into the store, commit the step and publish a version."""
        batch: StepBatch = await self.ask(NextBatch(driver=self.life, step=step), StepBatch)
        found = await self.data.fetch(batch.batch, ["token_ids", "ref_logprobs"], deadline_s=PUT_S)
        # The step is replayed, as if a driver (incarnation 0) had died after its forward pass.
        for life in (0, self.life):
            await self.put_prox(batch, [len(each["token_ids"]) for each in found], life)
        await self.ask(CommitStep(driver=self.life, step=step, metrics={}), Ack)
        await self.publish(step)
        return batch

    async def put_prox(self, batch: StepBatch, tokens: Sequence[int], life: int) -> None:
        """Put into the store the shards that the trainer's forward pass produces in a step driven by incarnation
        `life`.
        """
        key = f"prox_logprobs:{life:x}-{batch.step}"
        shards = [
            TaskShards(task.task_id, task.fence, {key: np.full(size, life % 1000, np.float32)})
            for task, size in zip(batch.batch.tasks, tokens, strict=True)
        ]
        await self.data.put(shards, store=STORE, deadline_s=PUT_S)

    async def save(self, step: int, kept: list[int]) -> None:
        await self.ask(CheckpointSaved(driver=self.life, step=step, kept=kept), Ack)


@dataclass
class Bench:
    """Processes and actors of one test."""

    run: RunDir
    store: Process
    scheduler: Process
    context: zmq.Context[zmq.Socket[bytes]]
    actors: list[Actor] = field(default_factory=list)

    async def actor(self, service: str, instance: int = 0, *, store: str = STORE) -> Actor:
        made = Actor(self.run, self.context, service, instance, store=store)
        self.actors.append(made)
        await made.join()
        return made

    async def driver(self) -> DriverActor:
        made = DriverActor(self.run, self.context, "policy-trainer")
        self.actors.append(made)
        await made.begin()
        return made


@contextlib.asynccontextmanager
async def bench_of(
    run: RunDir, *, store: tuple[str, ...] = (), scheduler: tuple[str, ...] = ()
) -> AsyncIterator[Bench]:
    """Start both processes and wait until they are ready. `store` and `scheduler` are extra command-line arguments."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    processes = Process(run, "services.batch_store", store), Process(run, "services.scheduler", scheduler)
    bench = Bench(run, *processes, context)
    bench.scheduler.start()
    bench.store.start()
    try:
        yield bench
    finally:
        for actor in bench.actors:
            actor.close()
        bench.store.kill()
        bench.scheduler.kill()
        run.remove_volatile()
        await asyncio.to_thread(context.term)
