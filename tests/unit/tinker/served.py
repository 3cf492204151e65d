"""The whole HTTP side of a server, with workers, stores and engines that answer at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import numpy as np
import pytest
from starlette.types import ASGIApp

from proto.messages import AdamW, AdapterSpec, BatchMeta, BatchPart, ErrorCode, LossSpec, TaskHandle, WeightsRef
from proto.tensors import Array
from services.policy_trainer.sampling.request import SampledPrompt, SampledSequence, SamplingRequest
from services.policy_trainer.tinker import server as server_module
from services.policy_trainer.tinker.application import Handlers, application
from services.policy_trainer.tinker.gate import KeyGate
from services.policy_trainer.tinker.journal import FILE, ServerJournal
from services.policy_trainer.tinker.keys import ClientKeys
from services.policy_trainer.tinker.limits import KeyLimits
from services.policy_trainer.tinker.restart import restore
from services.policy_trainer.tinker.samples import SampleFutures
from services.policy_trainer.tinker.sampling import ServedBase
from services.policy_trainer.tinker.server import Server
from services.policy_trainer.tinker.state import State
from services.policy_trainer.tinker.trainer import Trainer
from services.policy_trainer.tinker.wire import ModelLimits
from shared.batch import Batch
from shared.rpc.errors import RpcError
from shared.topology.serve import Serve
from tests.unit.tinker.workers import reference

MODEL = "Qwen/Qwen3-8B-Base"
KEYS = {"one": "tml-0123456789abcdef0123", "two": "tml-abcdef0123456789abcd"}
VOCABULARY = 512
CONTEXT = 4096


@dataclass
class Stand:
    """What stands for the other processes. Log-probs are minus the target's id."""

    shards: dict[str, Mapping[str, Array]] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    updates: list[AdamW] = field(default_factory=list)
    losses: list[LossSpec] = field(default_factory=list)
    released: list[tuple[object, ...]] = field(default_factory=list)
    loaded: list[Path] = field(default_factory=list)
    on_load: Callable[[], None] = lambda: None

    # ---- the store

    async def put_data(
        self, data: object, store: str, model: int, first: int, shards: Sequence[Mapping[str, Array]]
    ) -> Batch:
        names = [f"api/{model}/{first + index}" for index in range(len(shards))]
        self.shards.update(zip(names, shards, strict=True))
        tasks = [TaskHandle(name, 1, 1, len(one["token_ids"]), 8, [0]) for name, one in zip(names, shards, strict=True)]
        return Batch(BatchMeta(tasks=tasks, parts=[BatchPart("given", list(shards[0]))], stores=[store]))

    async def logprobs_of(self, data: object, meta: BatchMeta) -> list[Array]:
        return [-self.shards[task.task_id]["target_tokens"].astype(np.float32) for task in meta.tasks]

    async def run_info(self) -> Any:
        return SimpleNamespace(drivers=1)

    async def hold(self, *what: object) -> None: ...

    async def release(self, *what: object, **how: object) -> None:
        self.released.append(what)

    # ---- the workers

    async def take_over(self, turn: int | None = None) -> dict[int, int]:
        return {}

    async def open_model(self, model: int, adapter: AdapterSpec) -> int:
        self.steps[model] = 0
        return 0

    async def load(
        self, model: int, adapter: AdapterSpec, folder: Path, *, with_optimizer: bool, step: int = -1
    ) -> int:
        self.loaded.append(folder)
        self.on_load()
        self.steps[model] = step if step >= 0 else self.steps[model] + 1
        return self.steps[model]

    async def resume(self, model: int, adapter: AdapterSpec, step: int, *, failed: str = "") -> int:
        self.steps[model] = step
        return step

    async def forward_backward(
        self, model: int, batch: Batch, loss: LossSpec, *, forward_only: bool = False, repeated: bool = False
    ) -> Any:
        self.losses.append(loss)
        tokens = float(sum(task.tokens for task in batch.tasks))
        return SimpleNamespace(sums={"loss": 2 * tokens, "tokens": tokens}, meta=None if repeated else batch.meta)

    async def optim_step(self, model: int, optimizer: AdamW) -> Any:
        self.updates.append(optimizer)
        self.steps[model] += 1
        return SimpleNamespace(grad_norm=0.5, step=self.steps[model])

    async def publish(self, model: int, *, store: str) -> WeightsRef:
        return reference("", self.steps[model])

    async def save(self, model: int, folder: Path, *, with_optimizer: bool) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text("{}")
        return SimpleNamespace(path=str(folder))

    async def close_model(self, model: int) -> None: ...


@dataclass
class Engines:
    """What stands for the engines. They sample the tokens 0, 1, 2 …"""

    samples: list[SamplingRequest] = field(default_factory=list)
    slow: asyncio.Event | None = None
    """If there is one, samples wait for it."""

    gone: bool = False
    """Whether the stores do not have the version."""

    async def sample(self, request: SamplingRequest) -> SampledPrompt:
        self.samples.append(request)
        if self.gone:
            raise RpcError(ErrorCode.GONE, "the weights no longer exist")
        if self.slow is not None:
            await self.slow.wait()
        count = request.max_tokens or 4
        one = SampledSequence(
            np.arange(count, dtype=np.int32), -np.ones(count, np.float32), np.zeros(count, np.int32), "length"
        )
        prompt = np.full(len(request.token_ids), -1.0, np.float32) if request.prompt_logprobs else None
        if prompt is not None:
            prompt[0] = np.nan
        return SampledPrompt([one] * request.samples, prompt)

    async def load(self, ref: WeightsRef) -> None: ...

    async def unload(self, ref: WeightsRef) -> None: ...

    def begin(self, ref: WeightsRef) -> None: ...


@dataclass
class Served:
    """A server that runs."""

    app: ASGIApp
    server: Server
    stand: Stand
    engines: Engines
    folder: Path
    client: httpx2.AsyncClient

    async def post(self, path: str, body: Any = None, *, status: int = 200, key: str = KEYS["one"]) -> Any:
        """Return the decoded answer to a POST, or the bytes of a message."""
        how: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body or {}}
        answer = await self.client.post(f"/api/v1/{path}", headers={"x-api-key": key}, **how)
        assert answer.status_code == status, (path, answer.status_code, answer.text[:500])
        return answer.json() if "json" in answer.headers.get("content-type", "") else answer.content

    async def result(self, future: dict[str, Any], key: str = KEYS["one"]) -> Any:
        return await self.post("retrieve_future", {"request_id": future["request_id"]}, key=key)

    async def model(self, key: str = KEYS["one"], **lora: Any) -> tuple[str, str]:
        """Open a session with a model. Return their ids."""
        session = (await self.post("create_session", {"tags": [], "sdk_version": "0"}, key=key))["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4, **lora}}
        created = await self.result(await self.post("create_model", body, key=key), key=key)
        return session, created["model_id"]


@contextlib.asynccontextmanager
async def served(
    folder: Path, monkeypatch: pytest.MonkeyPatch, shm: str = "/dev/shm/one", **keys: Any
) -> AsyncIterator[Served]:
    """Run a server in `folder`, whose journal it continues, with the stores in `shm`."""
    folder.mkdir(exist_ok=True)
    file = folder / "client.keys"
    if not file.exists():
        file.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
        file.chmod(0o600)
    stand = Stand()
    monkeypatch.setattr(server_module, "put_data", stand.put_data)
    monkeypatch.setattr(server_module, "logprobs_of", stand.logprobs_of)
    serve = Serve.model_validate({"models": {MODEL: "policy"}, **keys}, context={"folder": "/"})
    state = State(4, KeyLimits(64, 64, 1 << 26))
    journal = ServerJournal(folder / FILE)
    engines = Engines()
    others, sampler = cast(Any, stand), cast(Any, engines)
    trainer = Trainer(others, others, sampler, state.own, folder, full_training=serve.full_training)
    server = Server(state, journal, trainer, others, sampler, cast(Any, None), folder)
    samples = SampleFutures(sampler, server.write, 64)
    restore(server, samples, journal, shm)
    handlers = Handlers(server, samples, serve, ServedBase("/model", ModelLimits(VOCABULARY, CONTEXT), 0))
    app = KeyGate(application(handlers, []), ClientKeys(str(file)))
    running = asyncio.create_task(server.run())
    client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://127.0.0.1")
    try:
        yield Served(app, server, stand, engines, folder, client)
    finally:
        await client.aclose()
        await samples.close()
        if running.done():
            running.result()  # an error that ended the server
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
