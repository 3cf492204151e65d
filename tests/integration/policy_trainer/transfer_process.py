"""One end of a series of weight transfers, run as a process.

`python -m tests.integration.policy_trainer.transfer_process RUN trainer|ENGINE`

Reads one JSON command per line from standard input and prints one line of JSON per event. It runs the services' code,
plus a hook that stops or kills it during a transfer.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import xxhash
import zmq
from torch import Tensor

from proto.ids import new_incarnation
from proto.messages import AskTransfer, Canary, EndTransfer, TransferOffer, WeightsRef
from proto.tensors import Array
from services.policy_trainer.worker.weights.sender import WeightsSender
from services.rollout.weights.in_flight import InFlight
from services.rollout.weights.source import ShardSource, TransferSource
from services.rollout.weights.sync import WeightsSync
from services.rollout.weights.transfer import EngineTransfers, HostMemory, TransferFailed
from shared.dataplane.client import DataClient, TaskShards
from shared.ranks.meeting import Meeting
from shared.rpc.client import Client
from shared.rpc.mailbox import Mailbox
from shared.rundir import RunDir, service_name
from shared.tensors_torch import to_torch
from shared.weights import gloo
from tests.integration.store_process import STORE
from tests.unit.rollout.told_engine import ToldEngine
from tests.weights_refs import weights_ref

DEADLINE_S = 4.0
HEARTBEAT_S = 0.2
TENSORS, ROWS = 12, 1 << 18
SIGNALS = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def digest(weights: dict[str, Array]) -> str:
    return xxhash.xxh3_64_hexdigest(b"".join(name.encode() + values.tobytes() for name, values in weights.items()))


NAMES = [*(f"layer.{i}.weight" for i in range(TENSORS)), "scalar", "none"]


def made(step: int) -> dict[str, Array]:
    """Return 48 MiB of weights unique to `step`, with all kinds of shapes."""
    chance = np.random.default_rng(step)
    weights = {f"layer.{i}.weight": chance.random((ROWS, 4), np.float32) for i in range(TENSORS)}
    return {**weights, "scalar": np.array(step, np.float32), "none": np.zeros((0, 3), np.float32)}


def hurt(how: str, after: int) -> None:
    """Send this process a signal during the next transfer, once `after` tensors have passed."""
    broadcast = gloo.GlooGroup.broadcast

    def passing(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        for number, tensor in enumerate(tensors):
            if number == after:
                say(hurt=how)
                os.kill(os.getpid(), SIGNALS[how])
            yield tensor

    def hurting(group: gloo.GlooGroup, tensors: Iterable[Tensor]) -> None:
        gloo.GlooGroup.broadcast = broadcast  # type: ignore[method-assign]
        broadcast(group, passing(tensors))

    gloo.GlooGroup.broadcast = hurting  # type: ignore[method-assign]


async def commands() -> Any:
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        if "hurt" in command:
            hurt(command["hurt"], command["after"])
        yield command


def client_of(run: RunDir, context: zmq.Context[zmq.Socket[bytes]], service: str, incarnation: int) -> Client:
    return Client(context, run.endpoint(service, 0), service_name(service, 0), incarnation)


def reference(step: int, nbytes: int = 0) -> WeightsRef:
    digests = [0] * len(NAMES)  # The engine here has no parameters to digest.
    canary = Canary(token_ids=np.zeros(2, np.int32), logprobs=np.zeros(1, np.float32), tolerance=1.0, digests=digests)
    return weights_ref(1, step, canary, drill_seed=7, nbytes=nbytes, store=STORE)


async def trainer(run: RunDir) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    incarnation = new_incarnation()
    store = client_of(run, context, "batch-store", incarnation)
    data = DataClient(lambda service, instance: store)
    sender = WeightsSender(
        run,
        data,
        route="gloo",
        device="cpu",
        deadline_s=DEADLINE_S,
        perturbed=lambda ref: {name: to_torch(values) for name, values in made(-ref.drill_seed % 1000).items()},
        emit=lambda topic, values: say(topic=topic, at=time.monotonic(), **values),
    )
    mailbox = Mailbox("policy-trainer-worker/0", incarnation)
    mailbox.handle(AskTransfer, sender.ask)
    mailbox.handle(EndTransfer, sender.end)
    mailbox.bind(context, run.endpoint("policy-trainer-worker", 0))
    say(ready=True)
    async for command in commands():
        if "publish" in command:
            step = command["publish"]
            weights = made(step)
            (receipt,) = await data.put([TaskShards(f"weights/1/{step}", 1, weights)], store=STORE, deadline_s=20)
            sender.published(reference(step, receipt.nbytes), {})
            say(published=step, digest=digest(weights))


class Sampler(ToldEngine):
    """An engine that samples indefinitely and receives weights between two steps, as vLLM does."""

    ranks = 1

    def __init__(self) -> None:
        super().__init__()
        self._memory = HostMemory()
        self.longest_s = 0.0
        """Longest time between two steps in seconds."""

    async def receive(self, offer: TransferOffer, meeting: Meeting) -> TransferOffer:
        await self.set_weights(await self._memory.receive(offer, meeting))
        return offer

    def broken_off(self, why: str) -> Exception:
        return self._memory.broken_off(why)

    def leave(self) -> None:
        self._memory.leave()

    async def base_weights(self) -> dict[str, Array]:
        return {name: np.zeros(1, np.float32) for name in NAMES}

    async def set_weights(self, weights: Mapping[str, Array]) -> None:
        self.swaps += 1

    async def score(self, token_ids: Array) -> Array:
        return np.zeros(len(token_ids) - 1, np.float32)

    async def sample(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.005)
            await self._running.wait()
            self.longest_s = max(self.longest_s, time.monotonic() - last)
            last = time.monotonic()


class UnderWay:
    """A block in progress while newer weights are announced with every heartbeat."""

    def __init__(self, transfers: EngineTransfers, data: DataClient) -> None:
        self._engine = Sampler()
        self._source = TransferSource(
            transfers, ShardSource(data), route="gloo", emit=lambda *_: None, engine=self._engine
        )
        self._sync = WeightsSync(self._engine, "rollout/0", lambda *_: None, self._source)
        self._in_flight = InFlight(self._engine, self._sync, self._source, lambda *_: None)
        self._work: list[asyncio.Task[None]] = []

    async def begin(self, step: int) -> None:
        """Begin with version `step` after it has arrived by both routes."""
        for fetch in (self._source.from_store, self._source.fetch):
            await self._sync.load(reference(step), await fetch(reference(step)))
        self._in_flight.begin(step, exact=False)
        self._work = [asyncio.create_task(self._engine.sample()), asyncio.create_task(self._in_flight.run())]

    async def go_on(self, newest: int, within_s: float) -> dict[str, Any]:
        """Wait until the block continues with `newest`; return its longest pause and the route by which that version
        arrived."""
        self._engine.longest_s = 0.0
        async with asyncio.timeout(within_s):
            while self._sync.holds.step != newest or self._engine.is_held:
                self._in_flight.announce(reference(newest))
                await asyncio.sleep(HEARTBEAT_S)
        await asyncio.sleep(HEARTBEAT_S)
        route = self._sync.last.route if self._sync.last is not None else ""
        return {"stood_still_s": self._engine.longest_s, "route": route}


async def engine(run: RunDir, instance: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    incarnation = new_incarnation()
    peer = client_of(run, context, "policy-trainer-worker", incarnation)
    transfers = EngineTransfers(run, peer, instance=instance, incarnation=incarnation, deadline_s=DEADLINE_S)
    memory = HostMemory()
    store = client_of(run, context, "batch-store", incarnation)
    under_way = UnderWay(transfers, DataClient(lambda service, number: store))
    say(ready=True)
    async for command in commands():
        if "samples_with" in command:
            await under_way.begin(command["samples_with"])
            say(samples=True)
        if "goes_on_with" in command:
            say(**await under_way.go_on(command["goes_on_with"], command["within_s"]))
        if "step" not in command:
            continue
        began = time.monotonic()
        try:
            weights = await transfers.bring(reference(command["step"]), memory, drill=command.get("drill", False))
            found = {"digest": digest(weights)}
        except TransferFailed as error:
            found = {"failed": str(error)}
        say(**found, communicator=transfers.communicator, seconds=time.monotonic() - began, at=time.monotonic())


if __name__ == "__main__":
    folder, who = sys.argv[1:]
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is reserved for the test.
    opened = RunDir.open(Path(folder))
    asyncio.run(trainer(opened) if who == "trainer" else engine(opened, int(who)))
