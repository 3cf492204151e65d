"""Tests what a client finds again after the cluster was stopped and resumed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from services.policy_trainer.tinker import protobuf
from tests.integration.tinker.client import Client, datum
from tests.integration.tinker.served import serving

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

DATA = [datum([1, 5, 9, 12, 7, 7]), datum([1, 8, 4, 30, 2])]
PROMPTS = ([1, 5, 9], [1, 8, 4, 30])


def test_models_and_what_was_saved_for_sampling_outlive_the_cluster(tmp_path: Path) -> None:
    with serving(tmp_path, "run.deterministic=true", limit_s=120) as served:
        client = served.client()
        path, before = asyncio.run(began(client))
    with serving(tmp_path, "run.deterministic=true", limit_s=120, resume=True) as served:
        client.address = served.address
        found, loss = asyncio.run(continued(client, path))
    with serving(tmp_path / "other", "run.deterministic=true", limit_s=120) as served:
        undisturbed = served.client()
        path, _ = asyncio.run(began(undisturbed))
        _, expected = asyncio.run(continued(undisturbed, path))
    assert found == before[0] != before[1]  # those of the saved weights, not those of the base
    assert loss == expected


async def began(client: Client) -> tuple[str, tuple[list[list[int]], list[list[int]]]]:
    """Take steps, and save for sampling. Return the path and greedy samples, after these steps and before them. Change
    the model after that."""
    await client.begin(rank=8, seed=3)
    body = {"model_id": client.model, "seq_id": client.next_seq(), "path": "base"}
    base = (await client.result(await client.post("save_weights_for_sampler", body)))["path"]
    for _ in range(3):
        await client.step(DATA, lr=1e-2)
    body = {"model_id": client.model, "seq_id": client.next_seq(), "path": "good"}
    path = (await client.result(await client.post("save_weights_for_sampler", body)))["path"]
    samples = await greedy(client, path, 0), await greedy(client, base, 1)
    await client.step(DATA, lr=1e-2)
    await client.close()
    return path, samples


async def continued(client: Client, path: str) -> tuple[list[list[int]], float]:
    """Return greedy samples of what was saved, and the loss of the model's next step."""
    client = Client(client.address, client.key, client.session, client.model, client.seq)  # in this loop
    samples = await greedy(client, path, 2)
    loss = await client.step(DATA, lr=1e-2)
    await client.close()
    return samples, loss


async def greedy(client: Client, path: str, number: int) -> list[list[int]]:
    opened = {"session_id": client.session, "sampling_session_seq_id": number, "model_path": path}
    sampler = (await client.post("create_sampling_session", opened))["sampling_session_id"]
    found = []
    for seq, prompt in enumerate(PROMPTS):
        body = {
            "sampling_session_id": sampler,
            "seq_id": seq,
            "prompt": {"chunks": [{"tokens": prompt, "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 12, "temperature": 0.0},
        }
        content = await client.result(await client.post("asample", body))
        (sequence,) = protobuf.parse("SampleResponse", content).sequences
        found.append(np.frombuffer(sequence.tokens, "<i4").tolist())
    return found
