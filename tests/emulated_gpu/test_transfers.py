"""Routes `nccl` and `ipc` between this process, the trainer's rank 0, and an engine with the worker of vLLM's CUDA
build (`vllm_process`): the engine proves every weight with the published digests, and no end waits for a lost one."""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import zmq
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from proto.ids import new_incarnation
from proto.messages import AskTransfer, EndTransfer, WeightsRef
from services.policy_trainer.worker.weights import channels
from services.policy_trainer.worker.weights.channels import MemoryChannel, NcclChannel, OutgoingWeights
from services.policy_trainer.worker.weights.sender import WeightsSender
from shared.actor.service import PEER_LOST_STATUS
from shared.dataplane.client import TaskShards
from shared.model.load import load_model, named_weights
from shared.rpc.mailbox import Mailbox
from shared.rundir import RunDir
from shared.tensors_torch import to_numpy
from shared.topology.services import WeightsRoute
from shared.weights.digests import digests_of
from tests.emulated_gpu.machine import ROOT
from tests.emulated_gpu.vllm_process import DEADLINE_S, DTYPE, reference
from tests.integration.store_process import STORE, StoreProcess, ending, make_run, peer_of
from tests.integration.tiny.harness import free_port

pytestmark = pytest.mark.timeout(600)
DEVICE = "cuda:0"
GPU = {"nccl": "1", "ipc": "0"}
"""The engine's GPU. The trainer's is the first."""
ANSWER_S = 140.0
MARGIN_S = 6.0
"""Maximum seconds by which a deadline may be missed on a busy machine."""
ABORT_S = 10.0
"""Seconds after the deadline in which an engine must have left the communicator, or exits (`vllm_transfer`)."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 with a tied head, and biases that vLLM fuses like the weights."""
    folder = tmp_path_factory.mktemp("model")
    config = Qwen2Config(
        hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@dataclass
class Trainer:
    """The trainer's rank 0: it publishes versions from GPU memory and sends them on request."""

    model: Path
    sender: WeightsSender
    put: Callable[[WeightsRef, dict[str, Tensor]], Awaitable[int]]
    told: asyncio.Queue[dict[str, Any]]
    weights: dict[str, Tensor] = field(default_factory=dict)
    """The live weights."""

    async def publish(self, step: int) -> WeightsRef:
        self.sender.changing()
        chance = torch.Generator().manual_seed(step)
        self.weights = {
            name: torch.randn(tensor.shape, generator=chance).to(tensor.dtype).to(DEVICE)
            for name, tensor in named_weights(load_model(self.model, DTYPE)).items()
        }
        digests = digests_of(self.weights)
        ordered = [digests[name] for name in sorted(digests)]
        nbytes = await self.put(reference(step, ordered), self.weights)
        ref = reference(step, ordered, nbytes)
        self.sender.published(ref, self.weights)
        return ref

    async def aborts(self) -> str:
        """Return why the next transfer is aborted."""
        told = await asyncio.wait_for(self.told.get(), DEADLINE_S + MARGIN_S)
        assert told["topic"] == "weights/aborted"
        return str(told["why"])


@asynccontextmanager
async def training(run: RunDir, model: Path, route: WeightsRoute) -> AsyncIterator[Trainer]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    incarnation, told = new_incarnation(), asyncio.Queue[dict[str, Any]]()

    async with peer_of(run) as peer:

        async def put(ref: WeightsRef, weights: dict[str, Tensor]) -> int:
            shards = {name: to_numpy(tensor.cpu()) for name, tensor in weights.items()}
            (receipt,) = await peer.data.put([TaskShards(ref.task_id, ref.fence, shards)], store=STORE, deadline_s=20)
            return receipt.nbytes

        sender = WeightsSender(
            run,
            peer.data,
            route=route,
            device=DEVICE,
            deadline_s=DEADLINE_S,
            perturbed=lambda ref: {},
            emit=lambda topic, values: told.put_nowait({"topic": topic, **values}),
        )
        mailbox = Mailbox("policy-trainer-worker/0", incarnation)
        mailbox.handle(AskTransfer, sender.ask)
        mailbox.handle(EndTransfer, sender.end)
        mailbox.bind(context, run.endpoint("policy-trainer-worker", 0))
        try:
            yield Trainer(model, sender, put, told)
        finally:
            sender.close()
            await mailbox.close()
            for thread in (thread for thread in threading.enumerate() if thread.name.startswith("transfer-")):
                await asyncio.to_thread(thread.join, MARGIN_S)
                assert not thread.is_alive(), "a thread of the trainer still waits for an engine"


@dataclass
class Engine:
    """The engine's process."""

    process: asyncio.subprocess.Process
    parameters: list[str]
    errors: Path
    """File with what the process writes to stderr."""

    def tell(self, ref: WeightsRef, **more: object) -> None:
        assert self.process.stdin is not None
        command = {"step": ref.step, "digests": ref.canary.digests, "nbytes": ref.nbytes, **more}
        self.process.stdin.write((json.dumps(command) + "\n").encode())

    async def hears(self) -> dict[str, Any]:
        return await heard(self.process)

    async def receives(self, ref: WeightsRef) -> dict[str, Any]:
        self.tell(ref)
        return await self.hears()

    async def proves(self, ref: WeightsRef, route: WeightsRoute) -> dict[str, Any]:
        """Receive a version by this route and prove all of its weights."""
        answer = await self.receives(ref)
        assert (answer.get("proved"), answer.get("route")) == (26, route), answer
        return answer


async def heard(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    while line := await asyncio.wait_for(process.stdout.readline(), ANSWER_S):
        if line.startswith(b"{"):
            answer: dict[str, Any] = json.loads(line)
            return answer
    raise AssertionError(f"the engine's process ended with status {await process.wait()}")


@asynccontextmanager
async def engine(run: RunDir, model: Path, route: WeightsRoute) -> AsyncIterator[Engine]:
    errors = run.path / "engine.log"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.emulated_gpu.vllm_process"),
        *(str(run.path), str(model), route, str(free_port())),
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": GPU[route]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors.open("wb"),
    )
    try:
        yield Engine(process, (await heard(process))["parameters"], errors)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    made = make_run(tmp_path, memory=1 << 28)
    with ending(StoreProcess(made)) as store:
        store.start()
        yield made


def flip(weight: Tensor) -> None:
    """Flip the lowest bit of the last element."""
    weight.view(-1)[-1:].view(torch.uint8)[:1].bitwise_xor_(1)
    torch.cuda.synchronize()


@pytest.mark.parametrize(("route", "part_bytes"), [("nccl", None), ("ipc", 20_000)])
def test_every_weight_is_proved_and_one_wrong_bit_in_any_is_found(
    run: RunDir, model: Path, route: WeightsRoute, part_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryChannel, "part_bytes", part_bytes)

    async def scenario() -> None:
        async with training(run, model, route) as trainer, engine(run, model, route) as receiver:
            ref = await trainer.publish(1)
            assert "model.layers.1.self_attn.qkv_proj.bias" in receiver.parameters
            assert not trainer.weights.keys() & {"model.layers.1.self_attn.qkv_proj.bias"}
            first = await receiver.proves(ref, route)
            began = time.monotonic()
            for name, weight in trainer.weights.items():
                flip(weight)
                wrong = (await receiver.receives(ref)).get("wrong")
                assert wrong == f"1 of 26 parameters have wrong bits: {name}"
                flip(weight)
            print(f"{route}: {(time.monotonic() - began) / 26:.3f} s for a transfer and its proof")
            second = await trainer.publish(2)
            assert await receiver.proves(second, route) == first, "the communicator is another one"
            trainer.sender.changing()  # from now on, versions are sent from the store
            for weight in trainer.weights.values():
                weight.fill_(torch.nan)
            assert await receiver.proves(second, route) == first

    asyncio.run(scenario())


@pytest.mark.parametrize("route", ["nccl", "ipc"])
def test_a_version_that_the_trainer_cannot_send_is_read_from_the_store(
    run: RunDir, model: Path, route: WeightsRoute
) -> None:
    async def scenario() -> None:
        async with engine(run, model, route) as receiver:
            async with training(run, model, route) as earlier:
                ref = await earlier.publish(1)
            async with training(run, model, route) as trainer:
                why = (await receiver.proves(ref, "shards"))["why"]
                assert "version 1 of lineage 1 was not published by this life of the trainer" in why
                await receiver.proves(await trainer.publish(2), route)

    asyncio.run(scenario())


# ---- an end that is lost


@contextmanager
def interrupted(action: Callable[[], object], after: int) -> Iterator[None]:
    """Act once, when `after` weights of a version have been sent."""
    chunks, sent = OutgoingWeights.chunks, itertools.count()

    def passing(weights: OutgoingWeights, device: str) -> Iterator[list[Tensor]]:
        for chunk in chunks(weights, device):
            if next(sent) == after:
                action()
            yield chunk

    with mock.patch.object(OutgoingWeights, "chunks", passing), mock.patch.object(channels, "CHUNK_BYTES", 1):
        yield


def test_a_transfer_that_is_aborted_at_the_deadline_is_not_taken_for_a_version(run: RunDir, model: Path) -> None:
    """vLLM's communicator, once aborted, receives nothing, without an error."""
    goes_on = threading.Event()

    async def scenario() -> None:
        async with training(run, model, "nccl") as trainer:
            async with engine(run, model, "nccl") as receiver:
                await receiver.proves(await trainer.publish(1), "nccl")
                ref, began = await trainer.publish(2), time.monotonic()
                with interrupted(goes_on.wait, after=5):
                    answer = await receiver.receives(ref)
                assert "nccl: receive: aborted after 8 s" in answer.get("lost", ""), answer
                print(f"the engine ended the transfer after {time.monotonic() - began:.1f} s")
                assert DEADLINE_S < time.monotonic() - began < DEADLINE_S + MARGIN_S
                goes_on.set()
            async with engine(run, model, "nccl") as next_life:
                await next_life.proves(ref, "nccl")

    try:
        asyncio.run(scenario())
    finally:
        goes_on.set()


def publish_and_die(run: Path, model: Path, published: Connection) -> None:
    """Be a trainer that is killed once it has sent 5 weights of a version."""

    async def scenario() -> None:
        async with training(RunDir.open(run), model, "nccl") as trainer:
            ref = await trainer.publish(1)
            published.send((ref.canary.digests, ref.nbytes))
            await asyncio.sleep(ANSWER_S)

    with interrupted(lambda: os.kill(os.getpid(), signal.SIGKILL), after=5):
        asyncio.run(scenario())


def test_a_trainer_that_is_killed_midway_leaves_its_version_in_the_store(run: RunDir, model: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    spawned = multiprocessing.get_context("spawn").Process(target=publish_and_die, args=(run.path, model, theirs))
    spawned.start()

    async def scenario() -> None:
        async with engine(run, model, "nccl") as receiver:
            ref = reference(1, *await asyncio.to_thread(ours.recv))
            began = time.monotonic()
            answer = await receiver.receives(ref)
            assert "nccl: receive: aborted after 8 s" in answer.get("lost", ""), answer
            assert time.monotonic() - began < DEADLINE_S + MARGIN_S
        assert spawned.exitcode == -signal.SIGKILL
        async with engine(run, model, "nccl") as next_life:
            assert "policy-trainer-worker/0" in (await next_life.proves(ref, "shards"))["why"]

    try:
        asyncio.run(scenario())
    finally:
        spawned.kill()
        spawned.join()


@pytest.mark.parametrize(("route", "stored"), [("nccl", False), ("nccl", True), ("ipc", False)])
def test_an_engine_that_is_killed_midway_leaves_the_sender_usable(
    run: RunDir, model: Path, route: WeightsRoute, stored: bool
) -> None:
    async def scenario() -> None:
        async with training(run, model, route) as trainer:
            ref = await trainer.publish(1)
            if stored:
                trainer.sender.changing()
            async with engine(run, model, route) as killed:
                killed.tell(ref, dies_after=7)
                assert await asyncio.wait_for(killed.process.wait(), ANSWER_S) == -signal.SIGKILL
            assert await trainer.aborts() in ("not finished within 8 s", "broadcast: not done within 8 s")
            async with engine(run, model, route) as next_life:
                await next_life.proves(ref, route)

    asyncio.run(scenario())


def test_an_engine_that_never_joins_is_given_up_at_the_deadline_and_takes_the_shards(run: RunDir, model: Path) -> None:
    async def scenario() -> None:
        async with training(run, model, "nccl") as trainer, engine(run, model, "nccl") as absent:
            ref = await trainer.publish(1)
            absent.tell(ref, only_asks=True)
            await absent.hears()
            began = time.monotonic()
            assert await trainer.aborts() in ("not finished within 8 s", "join: not done within 8 s")
            print(f"the trainer gave up after {time.monotonic() - began:.1f} s")
            assert DEADLINE_S - 2 < time.monotonic() - began < DEADLINE_S + MARGIN_S
            why = (await absent.proves(ref, "shards"))["why"]
            assert "route nccl: engine 0 did not join within 8 s; it takes the shards for" in why

    asyncio.run(scenario())


def test_an_engine_that_no_trainer_joins_exits_and_then_takes_the_shards(run: RunDir, model: Path) -> None:
    async def scenario() -> None:
        async with training(run, model, "nccl") as trainer:
            ref = await trainer.publish(1)
            async with engine(run, model, "nccl") as waiting:
                began = time.monotonic()
                waiting.tell(ref)
                assert await asyncio.wait_for(waiting.process.wait(), ANSWER_S) == PEER_LOST_STATUS
                print(f"the engine exited after {time.monotonic() - began:.1f} s")
                assert time.monotonic() - began < DEADLINE_S + ABORT_S + MARGIN_S
                assert "no trainer joined within 8 s, or" in waiting.errors.read_text()
            async with engine(run, model, "nccl") as next_life:
                await next_life.proves(ref, "shards")

    with mock.patch.object(NcclChannel, "send"):
        asyncio.run(scenario())
