"""Several clients on one real cluster: each ends as if it were alone, no future is lost, and memory does not grow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from tests.integration.tinker.client import Client, datum, logprobs
from tests.integration.tinker.served import Served, serving

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

CLIENTS, LOAD_S = 50, 120.0
GROWTH_BYTES = 32 << 20
RANKS = {4: {"train_unembed": False}, 8: {"train_mlp": False}, 32: {}}


@dataclass
class Running:
    """A cluster that serves, and the models of its clients in the order of their numbers, which begin at 2."""

    served: Served
    models: list[str] = field(default_factory=list)

    def adapter(self, client: Client, name: str) -> dict[str, np.ndarray]:
        """Return what a client has saved."""
        folder = self.served.cluster.path / "models" / str(2 + self.models.index(client.model))
        return load_file(folder / "weights" / name / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("served")
    with serving(folder, "run.deterministic=true", limit_s=500) as served:
        yield Running(served)


async def trained(running: Running, rank: int, chunks: int = 1) -> tuple[Client, list[float]]:
    """Take five steps with a model of this rank, each with its data in so many calls, and save it as `final`. Return
    also the norms of the gradients."""
    client, numbers = running.served.client(), np.random.default_rng(rank)
    await client.begin(rank=rank, seed=rank, **RANKS[rank])
    running.models.append(client.model)
    norms: list[float] = []
    for _ in range(5):
        data = [datum(numbers.integers(3, 60, int(numbers.integers(4, 20)))) for _ in range(14)]
        parts = [data[index::chunks] for index in range(chunks)] if chunks > 1 else [data]
        futures = [await client.forward_backward(part) for part in parts]
        step = await client.optim_step(lr=1e-2, weight_decay=0.01, grad_clip_norm=1.0)
        for future in futures:
            await client.result(future)
        norms.append((await client.result(step))["metrics"]["grad_norm"])
    await client.save("final")
    await client.close()
    return client, norms


def alike(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    assert any(values.any() for values in one.values())
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def test_three_clients_of_different_ranks_end_as_each_alone(running: Running) -> None:
    async def alone() -> list[Client]:
        return [(await trained(running, rank))[0] for rank in RANKS]

    async def together() -> Sequence[Client]:
        return [client for client, _ in await asyncio.gather(*(trained(running, rank) for rank in RANKS))]

    before, after = asyncio.run(alone()), asyncio.run(together())
    for one, other in zip(before, after, strict=True):
        assert alike(running.adapter(one, "final"), running.adapter(other, "final")) == 0.0


@pytest.mark.parametrize("chunks", [2, 7])
def test_data_in_several_calls_give_the_same_gradient(chunks: int, running: Running) -> None:
    (_, one), (_, other) = asyncio.run(trained(running, 8)), asyncio.run(trained(running, 8, chunks))
    assert one[0] == pytest.approx(other[0], rel=1e-5)


def test_forward_returns_the_log_probs_of_forward_backward_and_no_gradient(running: Running) -> None:
    async def work() -> None:
        client = running.served.client()
        await client.begin(rank=4, seed=1)
        running.models.append(client.model)
        data = [datum([1, 5, 9, 12, 7]), datum([1, 8, 4])]
        forward, backward, again = [
            logprobs(await client.result(await client.forward_backward(data, forward_only=only)))
            for only in (True, False, True)
        ]
        for one, two, three in zip(forward, backward, again, strict=True):
            assert np.abs(one - two).max() <= 1e-6
            assert (one == three).all()
        step = await client.result(await client.optim_step())
        once = step["metrics"]["grad_norm"]
        await client.result(await client.forward_backward(data, forward_only=True))
        assert (await client.result(await client.optim_step()))["metrics"]["grad_norm"] == 0.0
        assert once > 0
        await client.close()

    asyncio.run(work())


def test_many_clients_lose_no_future_and_memory_stays_flat(running: Running) -> None:
    pid = running.served.cluster.pid("policy-trainer")
    assert pid is not None
    server = psutil.Process(pid)

    async def one(number: int, until: float) -> int:
        client, numbers, steps = running.served.client(), np.random.default_rng(number), 0
        await client.begin(rank=4, seed=number)
        running.models.append(client.model)
        while time.monotonic() < until:
            await client.step([datum(numbers.integers(3, 60, 16)) for _ in range(4)])
            steps += 1
            body = {"model_id": client.model, "seq_id": client.next_seq(), "sampling_session_seq_id": steps}
            session = (await client.result(await client.post("save_weights_for_sampler", body)))["sampling_session_id"]
            sample = {
                "sampling_session_id": session,
                "seq_id": 0,
                "prompt": {"chunks": [{"tokens": [1, 5], "type": "encoded_text"}]},
                "sampling_params": {"max_tokens": 4},
            }
            await client.result(await client.post("asample", sample))
        await client.close()
        return steps

    async def all_of_them(duration_s: float) -> list[int]:
        until = time.monotonic() + duration_s
        return await asyncio.gather(*(one(number, until) for number in range(CLIENTS)))

    asyncio.run(all_of_them(LOAD_S / 4))
    before = server.memory_info().rss
    assert min(asyncio.run(all_of_them(LOAD_S))) >= 1
    assert server.memory_info().rss - before < GROWTH_BYTES
