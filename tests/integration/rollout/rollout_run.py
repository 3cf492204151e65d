"""Starts a run with real scheduler, store, rollout and reference processes, in which the test plays the driver."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import zmq

from proto.ids import new_incarnation
from proto.messages import (
    Ack,
    Canary,
    GetRunInfo,
    GetStatus,
    NextBatch,
    PublishWeights,
    RunInfo,
    Status,
    StepBatch,
    WeightsRef,
)
from proto.tensors import Array
from shared.dataplane.client import DataClient, TaskShards
from shared.model.load import load_model, named_weights
from shared.model.logprobs import token_logprobs
from shared.rpc.client import Client
from shared.rundir import RunDir, service_name
from shared.tensors_torch import to_numpy, to_torch
from shared.weights.drill import canary_tokens, perturb
from tests.integration.forks import Fork, piped
from tests.weights_refs import weights_ref

REPOSITORY = Path(__file__).parents[3]
MODEL = REPOSITORY / "launch" / "topologies" / "models" / "tiny-qwen3"
STORE = "batch-store/0"
SEED = 3
TOPOLOGY = f"""\
run: {{name: rollout-test, steps: 20}}
policy: {{model: {MODEL}, dtype: float32, passes: {{sequences: packed, head: blocks, decoder: written-out}}}}
data: {{train: {{source: "builtin:addition"}}}}
reward: {{function: "builtin:exact_match"}}
sampling: {{temperature: 1.0, max_new_tokens: 8}}
staleness: 1
algorithm:
  tasks_per_step: 8
  group_size: 4
  loss: {{anchor: rollout}}
  kl: {{coef: 0.001}}
optimizer: {{lr: 3.0e-4}}
services: {{rollout: {{block_tasks: 4}}, batch-store: {{memory: 64MiB}}}}
"""


@dataclass
class Processes:
    """Service processes of one run, all of which are stopped at the end."""

    run: RunDir
    folder: Path
    running: dict[str, Fork] = field(default_factory=dict)

    def start(self, module: str, program: str = "", *words: str) -> None:
        """Start `python -m services.<module>`, or `program` if given, in `folder`; `words` follow the run argument."""
        words = ("--run", str(self.run.path), *words)
        self.running[module] = piped(program or f"services.{module}", *words, folder=self.folder)

    def end(self, module: str, number: int = signal.SIGTERM, timeout_s: float = 20) -> tuple[int, str, float]:
        """Signal the process and wait for it; return (exit status, stderr, seconds)."""
        process = self.running.pop(module)
        started = time.monotonic()
        process.send_signal(number)
        _, errors = process.communicate(timeout=timeout_s)
        return process.returncode, errors.decode(), time.monotonic() - started

    def end_all(self) -> None:
        for process in self.running.values():
            process.kill()
            process.communicate(timeout=10)
        self.running.clear()
        self.run.remove_volatile()


class Driver:
    """Makes, for a test, the calls that a driver and its worker would make."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._clients: dict[tuple[str, int], Client] = {}
        self.incarnation = new_incarnation()
        self.data = DataClient(self.client)
        self.model = load_model(MODEL, "float32").requires_grad_(False)

    def client(self, service: str, instance: int = 0) -> Client:
        key = (service, instance)
        if key not in self._clients:
            endpoint = self._run.endpoint(service, instance)
            self._clients[key] = Client(self._context, endpoint, service_name(service, instance), self.incarnation)
        return self._clients[key]

    def close(self) -> None:
        self.data.close()
        for client in self._clients.values():
            client.close()
        self._context.destroy(linger=0)

    async def begin(self) -> RunInfo:
        return await self.client("scheduler").call(GetRunInfo(driver=self.incarnation), RunInfo, deadline_s=30)

    async def publish(self, lineage: int, step: int, *, spoil: str = "") -> WeightsRef:
        """Put and announce the model directory's weights as version `step`, with noise added to the weight `spoil`."""
        weights = {name: to_numpy(value).copy() for name, value in named_weights(self.model).items()}
        drill = self._canary({name: perturb(name, value, SEED) for name, value in weights.items()})
        put = {**weights, spoil: perturb(spoil, weights[spoil], 99)} if spoil else weights
        task_id = f"weights/{lineage}/{step}"
        (receipt,) = await self.data.put([TaskShards(task_id, 1, put)], store=STORE, deadline_s=20)
        ref = weights_ref(lineage, step, self._canary(weights), drill, drill_seed=SEED, nbytes=receipt.nbytes)
        await self.client("scheduler").call(PublishWeights(driver=self.incarnation, ref=ref), Ack, deadline_s=20)
        return ref

    async def batch(self, step: int, deadline_s: float = 60) -> StepBatch:
        request = NextBatch(driver=self.incarnation, step=step)
        return await self.client("scheduler").call(request, StepBatch, deadline_s=deadline_s)

    async def status(self) -> Status:
        return await self.client("scheduler").call(GetStatus(), Status, deadline_s=10)

    async def until(self, pid: int, state: str, deadline_s: float = 90) -> None:
        """Wait until the scheduler sees the process `pid` in `state`."""
        async with asyncio.timeout(deadline_s):
            while True:
                if (pid, state) in {(row.pid, row.state) for row in (await self.status()).services}:
                    return
                await asyncio.sleep(0.1)

    def logprobs(self, task: dict[str, Array], temperature: float = 1.0) -> Array:
        with torch.inference_mode():
            scores, _ = token_logprobs(
                self.model, task["token_ids"], task["lengths"], task["loss_mask"], temperature, 4096
            )
        return to_numpy(scores)

    def _canary(self, weights: dict[str, Array]) -> Canary:
        model = load_model(MODEL, "float32").requires_grad_(False)
        for name, parameter in named_weights(model).items():
            parameter.copy_(to_torch(weights[name]))
        tokens = canary_tokens(64, SEED)
        mask = np.ones(len(tokens), np.uint8)
        mask[0] = 0
        with torch.inference_mode():
            scores, _ = token_logprobs(model, tokens, np.array([len(tokens)], np.int32), mask, 1.0, 4096)
        return Canary(token_ids=tokens, logprobs=to_numpy(scores)[1:].copy(), tolerance=1e-4)


@asynccontextmanager
async def cluster(folder: Path, topology: str = TOPOLOGY, *store: str) -> AsyncIterator[tuple[Processes, Driver]]:
    """Create a run directory and start its scheduler and store; the test starts the other services.

    `store` is the program and arguments of a store that replaces the usual one.
    """
    run = RunDir.create(folder / "run")
    run.topology.write_text(topology)
    processes = Processes(run, folder)
    driver = Driver(run)
    try:
        processes.start("scheduler")
        processes.start("batch_store", *store)
        yield processes, driver
    finally:
        driver.close()
        processes.end_all()
