"""Runs workflows on the real embedded engine, without a scheduler or a store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proto.messages import BatchMeta, LeaseGrant, TaskHandle
from services.rollout.engine import SamplingParams
from services.rollout.engines.transformers_engine import TransformersEngine
from services.rollout.sampling.prompts import PromptBuilder
from services.rollout.sampling.tasks import PreparedTasks, ReadyTask
from services.rollout.sampling.trajectory import BlockVersions, Made, SequenceTokens
from services.rollout.user_code.frames import Purpose, Setup
from services.rollout.user_code.pool import UserPool
from services.rollout.workflows.openai_endpoint import OpenAIEndpoint
from services.rollout.workflows.runner import WorkflowRunner
from shared.data import open_source
from shared.lease import Lease
from shared.model.load import load_model
from shared.model.logprobs import token_logprobs
from shared.tensors_torch import to_numpy
from shared.topology.passes import FASTEST
from tests.unit.rollout.rollout_engine import MODEL

VERSION = 7
FLOWS = "tests.unit.rollout.flows"


class Rig:
    """One engine, one endpoint and one tokenizer. `make` runs a workflow as a lease does."""

    def __init__(self, model: Path = MODEL) -> None:
        self.prompts = PromptBuilder(model, add_generation_prompt=True)
        self.engine = TransformersEngine(model=model, dtype="float32", threads=1, deterministic=False, passes=FASTEST)
        self.endpoint = OpenAIEndpoint("tiny")
        self.blocks: list[int] = []
        self.lost_processes = 0
        self.lease = Lease(
            LeaseGrant(
                lease_id=1,
                stage="rollout",
                split="train",
                lease_s=30,
                batch=BatchMeta(tasks=[]),
                group_size=1,
                block_rows=0,
            ),
            lambda: 0,
        )
        self._text = ThreadPoolExecutor(1)

    async def start(self) -> None:
        await self.engine.start()
        await self.endpoint.start()
        inner = self.engine.generate

        async def counted(prompts: Any, sampling: Any, cancel: Any) -> Any:
            self.blocks.append(len(prompts))
            return await inner(prompts, sampling, cancel)

        self.engine.generate = counted  # type: ignore[method-assign]  # counts the blocks and samples

    async def stop(self) -> None:
        await self.endpoint.stop()
        await self.engine.stop()
        self._text.shutdown(wait=False)

    async def on_text(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._text, work)

    async def make(
        self,
        workflow: str,
        *,
        params: dict[str, Any] | None = None,
        tasks: int = 2,
        samples: int = 3,
        timeout_s: float = 20.0,
        max_tokens: int = 2048,
        max_new_tokens: int = 8,
        temperature: float = 1.0,
        memory_bytes: int = 1 << 30,
        processes: int = 1,
    ) -> list[list[Made]]:
        """Run a workflow from `tests.unit.rollout.flows`, or one given by an import path, on `tasks` rows of
        builtin:addition."""
        source = open_source("builtin:addition", where="test")
        ready = [
            ReadyTask(TaskHandle(f"train/0/{at}", 1), source.row(at), self.prompts.token_ids(source.row(at)))
            for at in range(tasks)
        ]
        sampling = SamplingParams(samples, temperature, max_new_tokens, seed=3)
        path = workflow if ":" in workflow else f"{FLOWS}:{workflow}"
        pool = UserPool(Setup(Purpose.WORKFLOW, [(path, params or {})], timeout_s, memory_bytes), processes)
        runner = WorkflowRunner(
            "my:workflow",
            pool,
            self.endpoint,
            engine=self.engine,
            prompts=self.prompts,
            on_text=self.on_text,
            max_tokens=max_tokens,
        )
        await pool.start(at_once=processes)
        try:
            versions = BlockVersions(VERSION, self.engine.swaps)
            return await runner.run(self.lease, PreparedTasks(ready, [], sampling, 2), versions)
        finally:
            self.lost_processes = runner.lost_processes
            await pool.close()


@asynccontextmanager
async def rig(model: Path = MODEL) -> AsyncIterator[Rig]:
    made = Rig(model)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def run(workflow: str, **options: Any) -> tuple[list[list[Made]], list[int], int]:
    """Return the samples in the shape [tasks][samples], the sizes of the engine's blocks, and the lease's progress."""

    async def scenario() -> tuple[list[list[Made]], list[int], int]:
        async with rig() as made:
            samples = await made.make(workflow, **options)
            return samples, made.blocks, made.lease.progress

    return asyncio.run(scenario())


def logprob_error(sequence: SequenceTokens, temperature: float = 1.0) -> float:
    """Return the largest difference between a sequence's log-probs and the model's own."""
    model = load_model(str(MODEL), "float32").requires_grad_(False)
    lengths = np.array([len(sequence.token_ids)], np.int32)
    with torch.inference_mode():
        own, _ = token_logprobs(model, sequence.token_ids, lengths, sequence.loss_mask, temperature, 4096)
    return float(np.abs(to_numpy(own) - sequence.logprobs).max())


def shown(prompts: PromptBuilder, sequence: SequenceTokens) -> str:
    """Return the text of a sequence, including special tokens."""
    text: str = prompts._tokenizer.decode(sequence.token_ids.tolist())
    return text
