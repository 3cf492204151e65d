"""Clients train all weights of the model on a real cluster, in turns (test_killed.py: and through kills)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from services.policy_trainer.tinker import protobuf
from tests.integration.tinker.client import MODEL, Client, Failed, datum, logprobs
from tests.integration.tinker.served import Served, serving
from tests.tinker_recipes import TINY

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 4
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = ("serve.full_training=true", "serve.max_models=2", "run.deterministic=true")
    with serving(tmp_path_factory.mktemp("full"), *settings, limit_s=500) as one:
        yield one


def saved(served: Served, path: str) -> Path:
    """Return the folder of a checkpoint, whose name is used once."""
    _, _, kind_and_name = path.removeprefix("tinker://").partition("/")
    (folder,) = (served.cluster.path / "models").glob(f"*/{kind_and_name}")
    return folder


async def begun(served: Served) -> Client:
    client = served.client()
    await client.begin(rank=0)
    return client


async def trained(served: Served, seed: int, name: str) -> tuple[Client, Path]:
    """Train a model and save it."""
    client, numbers = await begun(served), np.random.default_rng(seed)
    for _ in range(STEPS):
        data = [datum(numbers.integers(3, 60, int(numbers.integers(4, 20)))) for _ in range(6)]
        await client.result(await client.forward_backward(data[:3]))
        await client.step(data[3:], lr=1e-2)
    return client, saved(served, await client.save(name))


async def greedy(client: Client, sampler: str) -> list[int]:
    """Return 12 tokens of saved weights, or of the base if `sampler` is empty."""
    which = {"model_path": sampler} if sampler else {"base_model": MODEL}
    body = {"session_id": client.session, "sampling_session_seq_id": len(sampler), **which}
    session = await client.post("create_sampling_session", body)
    future = await client.post(
        "asample",
        {
            "sampling_session_id": session["sampling_session_id"],
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
            "sampling_params": {"max_tokens": 12, "temperature": 0.0, "stop": []},
        },
    )
    message = protobuf.parse("SampleResponse", await client.result(future))
    return np.frombuffer(message.sequences[0].tokens, "<i4").tolist()


def of(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def greedy_of(model: torch.nn.Module) -> list[int]:
    ids = list(PROMPT)
    for _ in range(12):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def test_models_in_turns_end_with_the_bits_that_each_has_alone(served: Served) -> None:
    async def scenario() -> None:
        alone = [(await trained(served, seed, f"alone-{seed}")) for seed in (1, 2)]
        together = await asyncio.gather(*(trained(served, seed, f"together-{seed}") for seed in (1, 2)))
        for (_, one), (_, other) in zip(alone, together, strict=True):
            ours, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
            assert ours.keys() == theirs.keys()
            assert all((ours[name] == theirs[name]).all() for name in ours)
        first, second = (load_file(folder / "model.safetensors") for _, folder in alone)
        assert all((first[name] != second[name]).any() for name in first)
        for client, _ in (*alone, *together):
            await client.close()

    asyncio.run(scenario())


def test_what_is_saved_is_a_model_that_engines_and_transformers_compute_alike(served: Served) -> None:
    async def scenario() -> None:
        client, folder = await trained(served, 3, "final")
        body = {"model_id": client.model, "seq_id": client.next_seq(), "path": "sampled"}
        sampler = (await client.result(await client.post("save_weights_for_sampler", body)))["path"]
        model = of(folder)
        assert await greedy(client, sampler) == greedy_of(model)
        base = of(TINY)
        assert await greedy(client, "") == greedy_of(base)
        assert greedy_of(base) != greedy_of(model)
        data = [datum(np.arange(5, 25))]
        forward = await client.forward_backward(data, forward_only=True)
        (given,) = logprobs(await client.result(forward))
        with torch.no_grad():
            ids = torch.arange(5, 25)
            ours = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
        assert np.abs(given - ours).max() <= 1e-5
        # Its optimizer goes on where it was: the same step from the checkpoint and from the model itself.
        path = f"tinker://{client.model}/weights/final"
        other = await begun(served)
        load = {"model_id": other.model, "seq_id": other.next_seq(), "path": path, "optimizer": True}
        await other.result(await other.post("load_weights", load))
        ends = []
        for one, name in ((client, "went-on"), (other, "loaded")):
            await one.step(data)
            ends.append(load_file(saved(served, await one.save(name)) / "model.safetensors"))
            await one.close()
        assert all((ends[0][name] == ends[1][name]).all() for name in ends[0])

    asyncio.run(scenario())


def test_an_adapter_is_refused(served: Served) -> None:
    async def scenario() -> None:
        client = served.client()
        with pytest.raises(Failed, match="this server trains all weights; ask for rank 0"):
            await client.begin(rank=8)
        await client.close()

    asyncio.run(scenario())
