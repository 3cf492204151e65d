"""Tests that a server's process samples with versions of several models in real rollout processes."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

from proto.messages import Ack, Clear, ErrorCode, GetInventory, Inventory, PutTask, WeightsRef
from proto.tensors import Array
from services.policy_trainer.openai_app import ServedModel, openai_app
from services.policy_trainer.sampling.request import SampledPrompt, SamplingRequest
from services.policy_trainer.sampling.sampler import Sampler
from shared.dataplane.client import TaskShards
from shared.guest_server import GuestServer
from shared.model.adapter import AdapterStart
from shared.rpc.errors import RpcError
from shared.topology.lora import WITH_HEAD, Lora
from tests.integration.rollout.rollout_run import MODEL, SEED, STORE, Driver, Processes, cluster
from tests.unit.rollout.adapter_trainer import AdapterTrainer

openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RANK = 4
TOPOLOGY = f"""\
run: {{name: direct-test, seed: {SEED}}}
policy: {{model: {MODEL}, dtype: float32, passes: {{sequences: packed, head: blocks, decoder: written-out}}}}
serve: {{models: {{tiny: policy}}, max_rank: {RANK}, max_models: 2}}
services: {{batch-store: {{memory: 64MiB}}, rollout: {{instances: 2}}}}
"""
VLLM = "rollout: {instances: 2, engine: vllm, engine_args: {max_model_len: 512}}"
ENGINES = [
    "transformers",
    pytest.param(
        "vllm",
        marks=[pytest.mark.long, pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm")],
    ),
]
PROMPT = np.arange(5, 25, dtype=np.int32)


@dataclass
class Server:
    """The part of a server that samples, and versions of models that a trainer has put into the store."""

    processes: Processes
    driver: Driver
    sampler: Sampler
    versions: dict[int, WeightsRef]

    async def sample(self, version: WeightsRef | None, *, seed: int = 1, **chosen: object) -> SampledPrompt:
        return await self.sampler.sample(SamplingRequest(version, PROMPT, seed, **chosen))  # type: ignore[arg-type]


@asynccontextmanager
async def server(folder: Path, engine: str) -> AsyncIterator[Server]:
    lora = Lora(rank=RANK, alpha=float(RANK), target_modules=WITH_HEAD, export_merged=False)
    trainer = AdapterTrainer("float32", folder, AdapterStart(lora, SEED))
    topology = TOPOLOGY if engine == "transformers" else TOPOLOGY.replace("rollout: {instances: 2}", VLLM)
    async with cluster(folder, topology) as (processes, driver):
        for instance in range(2):
            processes.start(f"rollout{instance}", "services.rollout", "--instance", str(instance))
        sampler = Sampler(driver.client, driver.data, incarnation=driver.incarnation, store=STORE, engines=1)
        watching = asyncio.create_task(sampler.run())
        versions = {}
        for model, (ref, tensors) in enumerate([trainer.first, trainer.second]):
            versions[model] = await put(driver, ref, tensors)
        sampler.begin(versions[0])
        try:
            yield Server(processes, driver, sampler, versions)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def put(driver: Driver, ref: WeightsRef, tensors: dict[str, Array]) -> WeightsRef:
    await driver.data.put([TaskShards(ref.task_id, ref.fence, tensors)], store=STORE, deadline_s=60)
    return ref


def ids(result: SampledPrompt) -> list[list[int]]:
    return [each.token_ids.tolist() for each in result.sequences]


@pytest.fixture(scope="module", params=ENGINES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Any], None]]:
    """Run scenarios with one server."""
    runner, stack = asyncio.Runner(), AsyncExitStack()
    made = runner.run(stack.enter_async_context(server(tmp_path_factory.mktemp("server"), request.param)))
    try:
        yield lambda scenario: runner.run(scenario(made))
    finally:
        runner.run(stack.aclose())
        runner.close()


def test_a_server_samples_with_a_version_and_the_base_through_the_kill_of_an_engine(
    served: Callable[[Any], None],
) -> None:
    served(_through_a_kill)


async def _through_a_kill(made: Server) -> None:
    many = {"samples": 48, "max_tokens": 120, "ends": False}  # more than 64 KiB
    before = {}
    for version, step in ((None, -1), (made.versions[1], 2)):
        result = await made.sample(version, prompt_logprobs=True, top_prompt_logprobs=3, **many)
        assert [len(each.token_ids) for each in result.sequences] == [120] * 48
        assert {int(each) for sequence in result.sequences for each in sequence.versions} == {step}
        assert result.prompt_logprobs is not None
        assert result.top_ids is not None
        assert len(result.prompt_logprobs) == len(result.top_ids) == len(PROMPT)
        assert np.isnan(result.prompt_logprobs).tolist() == [True, *[False] * (len(PROMPT) - 1)]
        before[step] = ids(result)
    assert before[-1] != before[2]
    async with asyncio.timeout(120):
        while len(made.sampler._router.ready) < 2:  # the second engine was not announced, so it is looked for
            await asyncio.sleep(0.1)
    # Killed engines lose no request, and the same requests give the same tokens.
    asked = [asyncio.create_task(made.sample(version, **many)) for version in (None, made.versions[1])]
    await asyncio.sleep(0.05)
    assert all(made.sampler._router._engines[engine].load == 48 for engine in range(2))
    made.processes.end("rollout0", signal.SIGKILL)
    made.processes.start("rollout0", "services.rollout", "--instance", "0")
    again = await asyncio.gather(*asked)
    assert [ids(each) for each in again] == [before[-1], before[2]]
    # While all engines start again, a version is not refused.
    for engine in ("rollout0", "rollout1"):
        made.processes.end(engine, signal.SIGKILL)
    loading = asyncio.create_task(made.sampler.load(made.versions[1]))
    await asyncio.sleep(0)
    for instance in range(2):
        made.processes.start(f"rollout{instance}", "services.rollout", "--instance", str(instance))
    await loading
    # The shards of large results are deleted once they have been read.
    listed = await made.driver.client("batch-store").call(GetInventory(), Inventory, deadline_s=10)
    assert not [task.task_id for task in listed.tasks if task.task_id.startswith("parcel/")]


def test_openai_clients_sample_with_a_base_and_with_versions(served: Callable[[Any], None]) -> None:
    served(_openai_clients)


class Served:
    """The models of every client."""

    def __init__(self, versions: dict[str, WeightsRef | None]) -> None:
        self._versions = versions

    def names(self, request: Request) -> list[str]:
        return list(self._versions)

    def find(self, name: str, request: Request) -> ServedModel | None:
        return ServedModel(name, self._versions[name]) if name in self._versions else None


async def _openai_clients(made: Server) -> None:
    gone = structs.replace(made.versions[1], task_id="weights/9/9")
    models = Served({"tiny": None, "tinker://run/sampler_weights/a": made.versions[1], "gone": gone})
    http = GuestServer(Starlette(routes=[Mount("/v1", openai_app(made.sampler, models))]))
    await http.start()
    client = openai.AsyncOpenAI(base_url=f"http://{http.address}/v1", api_key="tml-x", max_retries=0)
    try:
        await _asked(client, made)
    finally:
        await client.close()
        await http.stop()


async def _asked(client: Any, made: Server) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny", "tinker://run/sampler_weights/a", "gone"]
    ours = "tinker://run/sampler_weights/a"
    messages = [{"role": "user", "content": "1+2="}]
    chosen = {"seed": 3, "max_tokens": 12, "temperature": 2.0, "logprobs": True, "n": 2}
    chat = await client.chat.completions.create(model=ours, messages=messages, **chosen)
    assert chat.system_fingerprint == made.versions[1].task_id
    assert chat.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in chat.choices)
    # The same request to the sampler gives the same tokens.
    prompt = await made.sampler.render({"prompt": messages, "tools": None})
    assert chat.usage.prompt_tokens == len(prompt)
    request = SamplingRequest(made.versions[1], prompt, 3, samples=2, max_tokens=12, temperature=2.0, texts=True)
    result = await made.sampler.sample(request)
    for choice, sequence in zip(chat.choices, result.sequences, strict=True):
        assert [token.token for token in choice.logprobs.content] == [f"token_id:{t}" for t in sequence.token_ids]
        assert choice.message.content == sequence.text
        assert choice.finish_reason == sequence.reason
    text = await client.completions.create(model="tiny", prompt=["1+", "2+"], seed=3, max_tokens=5, logprobs=0)
    assert text.system_fingerprint == "base"
    assert [choice.index for choice in text.choices] == [0, 1]
    assert all(len(choice.logprobs.token_logprobs) <= 5 for choice in text.choices)
    ids = (await made.sampler.render({"prompt": "1+"})).tolist()
    again = await client.completions.create(model="tiny", prompt=ids, seed=3, max_tokens=5, stop=["\n"])
    assert text.choices[0].text.startswith(again.choices[0].text)
    stream = await client.completions.create(model="tiny", prompt=ids, seed=3, max_tokens=5, stream=True)
    assert "".join([event.choices[0].text async for event in stream]) == text.choices[0].text
    stream = await client.chat.completions.create(model=ours, messages=messages, stream=True, seed=3, max_tokens=12)
    assert "".join([event.choices[0].delta.content or "" async for event in stream])
    for wrong, status in (
        ({"model": "other"}, 404),
        ({"model": "gone"}, 404),
        ({"top_p": 0.0}, 400),
        ({"presence_penalty": 0.5}, 400),
        ({"max_tokens": 600}, 400),
        ({"messages": [{"role": "user", "content": "1" * 9000}]}, 400),
        ({"messages": []}, 400),
    ):
        with pytest.raises(openai.APIStatusError) as raised:
            await client.chat.completions.create(**{"model": "tiny", "messages": messages, **wrong})
        assert raised.value.status_code == status, raised.value


def test_a_version_whose_weights_are_gone_is_an_error_of_its_own(served: Callable[[Any], None]) -> None:
    served(_with_a_version_that_is_gone)


async def _with_a_version_that_is_gone(made: Server) -> None:
    gone = made.versions[0]
    await made.sampler.unload(gone)
    store = made.driver.client("batch-store")
    await store.call(Clear(tasks=[PutTask(gone.task_id, gone.fence)]), Ack, deadline_s=10)
    with pytest.raises(RpcError, match="no longer exist") as raised:
        await made.sample(gone)
    assert raised.value.code == ErrorCode.GONE
    await made.sample(made.versions[1])
