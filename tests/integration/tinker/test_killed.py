"""A client of a real cluster samples and trains while each process that its work passes through is killed. It notices
pauses only, and its adapter has the same bits as that of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from services.policy_trainer.tinker import protobuf
from tests.integration.tinker.client import FORM, Client, datum
from tests.integration.tinker.served import serving
from tests.integration.whole_cluster import Cluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

KILLED = ("rollout", "policy-trainer-worker", "policy-trainer", "batch-store", "scheduler")
STEPS = 2 * len(KILLED) + 1
PROMPTS, SAMPLES = 4, 4


@pytest.mark.parametrize("rank", [8, 0], ids=["an adapter", "all weights"])
def test_kills_in_the_middle_change_no_bit(rank: int, tmp_path: Path) -> None:
    undisturbed, disturbed = (run(tmp_path / name, rank, killed) for name, killed in (("a", ()), ("b", KILLED)))
    assert disturbed == undisturbed
    assert any(name.endswith("model.safetensors") for name in undisturbed)


def run(folder: Path, rank: int, killed: tuple[str, ...]) -> dict[str, bytes]:
    """Train in a cluster of its own, with a kill after every second step. Return the files of the last checkpoint."""
    folder.mkdir()
    settings = ("run.deterministic=true", f"serve.full_training={'false' if rank else 'true'}")
    with serving(folder, *settings, limit_s=280) as served:
        asyncio.run(train(served.client(), served.cluster, rank, killed))
    (saved,) = served.cluster.path.glob("models/*/weights/final")
    return {file.name: file.read_bytes() for file in saved.glob("*.safetensors")}


async def train(client: Client, one: Cluster, rank: int, killed: tuple[str, ...]) -> None:
    await client.begin(rank=rank, seed=3)
    numbers = np.random.default_rng(0)
    for step in range(STEPS):
        body = {"model_id": client.model, "seq_id": client.next_seq(), "sampling_session_seq_id": step}
        saved = await client.result(await client.post("save_weights_for_sampler", body))
        prompts = [[1, *map(int, numbers.integers(3, 60, 5))] for _ in range(PROMPTS)]
        if step % 2 and step // 2 < len(killed):
            alive = partial(one.pid, killed[step // 2])
            pid = await asyncio.to_thread(one.wait_for, "the process is READY", alive)
            asyncio.get_running_loop().call_later(0.05, os.kill, pid, signal.SIGKILL)
        session = saved["sampling_session_id"]
        groups = await asyncio.gather(*(sampled(client, session, at, one) for at, one in enumerate(prompts)))
        await client.step([one for group in groups for one in group], "importance_sampling", lr=2e-3)
    await client.save("final")
    await client.close()


async def sampled(client: Client, session: str, seq: int, prompt: list[int]) -> list[bytes]:
    """Return data with the advantages of a group of samples, whose reward is the number of their odd tokens."""
    body = {
        "sampling_session_id": session,
        "seq_id": seq,
        "num_samples": SAMPLES,
        "prompt": {"chunks": [{"tokens": prompt, "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 8},
    }
    future = await client.post("asample", body)
    answer = await client.send("retrieve_future", {"request_id": future["request_id"]})
    assert answer.headers["content-type"] == FORM, answer.text[:300]
    message = protobuf.parse("SampleResponse", answer.content)
    samples = [(np.frombuffer(one.tokens, "<i4"), np.frombuffer(one.logprobs, "<f4")) for one in message.sequences]
    rewards = np.array([float((tokens % 2).sum()) for tokens, _ in samples])
    data = []
    for (tokens, logprobs), advantage in zip(samples, rewards - rewards.mean(), strict=True):
        before = np.zeros(len(prompt) - 1)
        inputs = {
            "target_tokens": np.concatenate([before.astype(int), tokens]),
            "logprobs": np.concatenate([before, logprobs]),
            "advantages": np.concatenate([before, np.full(len(tokens), advantage)]),
        }
        data.append(datum([*prompt, *tokens], **inputs))
    return data
