"""Takes leases from the version they need to completed shards: prepare, sample, finish. Must never sample with
weights older than a lease allows.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from proto.messages import LeaseGrant, WeightsRef
from proto.tensors import Array
from services.rollout.assemble import Assembled, assemble, with_receipt
from services.rollout.engine import Engine, Generation, GenerationCancelled
from services.rollout.prompts import messages_of
from services.rollout.rewards.load import RewardFunction
from services.rollout.rewards.scoring import Score, score_block
from services.rollout.tasks import PreparedTasks, TaskSets
from services.rollout.weights_sync import Version, WeightsSync, weights_meta
from shared.actor.service import Service
from shared.dataplane.client import DataClient, TaskShards
from shared.lease import Lease, LeaseBook, LeaseLost
from shared.pipeline import LeasePipeline
from shared.sample import Sample
from shared.stages import ROLLOUT, TRAIN

DATA_CALL_S = 30.0


class OnText(Protocol):
    """Runs blocking work on the thread of rows and tokenizer."""

    def __call__(self, work: Callable[[], Any]) -> Awaitable[Any]: ...


@dataclass(frozen=True)
class _Prepared:
    """Prompts of a lease; `weights` are mapped already when its version has to be loaded."""

    tasks: PreparedTasks
    weights: dict[str, Array] | None


@dataclass(frozen=True)
class _Sampled:
    generations: list[list[Generation]]
    version: int
    seconds: float


class RolloutWorker:
    """Belongs to the service's loop, which it never blocks."""

    def __init__(
        self,
        service: Service,
        *,
        engine: Engine,
        sync: WeightsSync,
        tasks: TaskSets,
        rewards: Sequence[RewardFunction],
        reward_timeout_s: float,
        data: DataClient,
        store: str,
        block_tasks: int,
        on_text: OnText,
    ) -> None:
        """`store`: where shards go (`batch-store/0`); `block_tasks`: the most tasks of a lease."""
        self._service = service
        self._engine = engine
        self._sync = sync
        self._tasks = tasks
        self._rewards = rewards
        self._reward_timeout_s = reward_timeout_s
        self._data = data
        self._store = store
        self._on_text = on_text
        self.leases = LeaseBook(service, ROLLOUT.name, lambda: engine.progress)
        self._pipeline: LeasePipeline[_Prepared, _Sampled] = LeasePipeline(
            self.leases,
            acquire=lambda: self.leases.acquire(block_tasks, lambda: (self.holds.lineage, self.holds.step)),
            prepare=self._prepare,
            compute=self._sample,
            finish=self._finish,
        )

    @property
    def holds(self) -> Version:
        """The version that the engine has been proved to hold."""
        return self._sync.holds

    async def run(self) -> None:
        """Work until cancelled."""
        await self._pipeline.run()

    async def drain(self) -> None:
        """Stop sampling, finish what is sampled if that is quick, hand the rest back."""
        await self._pipeline.drain()

    async def _prepare(self, lease: Lease) -> _Prepared:
        """Map the weights if they will be needed, build the prompts."""
        grant = lease.grant
        ref, weights = grant.weights, None
        if ref is not None and self._sync.needs(ref, exact=grant.exact):
            weights = await self._map(lease, ref)
        tasks: PreparedTasks = await self._on_text(lambda: self._tasks.prepare(grant))
        return _Prepared(tasks, weights)

    async def _sample(self, lease: Lease, prepared: _Prepared) -> _Sampled | None:
        """Load the version if need be and generate. None: the lease was handed back."""
        grant = lease.grant
        ref = grant.weights
        if ref is not None and self._sync.needs(ref, exact=grant.exact):
            # Not mapped: the engine held this version when the lease was prepared, and has left it since.
            await self._sync.load(ref, prepared.weights or await self._map(lease, ref))
        held = self.holds.step
        if held < grant.min_step or (grant.exact and held != grant.min_step):
            await self.leases.hand_back(lease, f"the engine holds version {held}, {_needed(grant)}")
            return None
        lease.check()
        started = time.perf_counter()
        generations: list[list[Generation]] = []
        if prepared.tasks.ready:
            prompts = [task.prompt() for task in prepared.tasks.ready]
            try:
                generations = await self._engine.generate(prompts, prepared.tasks.sampling, lease.cancel)
            except GenerationCancelled as error:
                raise LeaseLost(str(error)) from None
        return _Sampled(generations, held, time.perf_counter() - started)

    async def _map(self, lease: Lease, ref: WeightsRef) -> dict[str, Array]:
        meta = weights_meta(ref)
        found = await self.leases.persist(lease, "weights", lambda: self._data.fetch(meta, (), deadline_s=DATA_CALL_S))
        return found[0]

    async def _finish(self, lease: Lease, prepared: _Prepared, sampled: _Sampled) -> None:
        """Score, put, complete."""
        tasks = prepared.tasks
        samples = await self._samples(tasks, sampled.generations)
        scores = await score_block(samples, self._rewards, self._reward_timeout_s, lease.advance)
        block = assemble(
            tasks.ready, sampled.generations, scores, version=sampled.version, min_survivors=tasks.min_survivors
        )
        results = []
        if block.results:
            puts = [
                TaskShards(result.task_id, result.fence, shards)
                for result, shards in zip(block.results, block.shards, strict=True)
            ]
            receipts = await self.leases.persist(
                lease, "put", lambda: self._data.put(puts, store=self._store, deadline_s=DATA_CALL_S)
            )
            results = [with_receipt(*pair) for pair in zip(block.results, receipts, strict=True)]
        await self.leases.complete(lease, [*results, *block.dropped, *tasks.dropped], block.scalars)
        self._tell(lease.grant.split, tasks, sampled, block, scores)

    async def _samples(self, tasks: PreparedTasks, generations: list[list[Generation]]) -> list[list[Sample]]:
        ids = [[each.token_ids.tolist() for each in group] for group in generations]
        texts: list[list[str]] = await self._on_text(
            lambda: [self._tasks.texts(group, tasks.sampling) for group in ids]
        )
        return [
            [
                Sample(
                    task_id=task.handle.task_id,
                    row=task.row,
                    messages=messages_of(task.row, text),
                    completion=text,
                    token_ids=token_ids,
                    finish_reason=each.finish_reason,
                )
                for each, token_ids, text in zip(group, group_ids, group_texts, strict=True)
            ]
            for task, group, group_ids, group_texts in zip(tasks.ready, generations, ids, texts, strict=True)
        ]

    def _tell(
        self,
        split: str,
        tasks: PreparedTasks,
        sampled: _Sampled,
        block: Assembled,
        scores: Sequence[Sequence[Score]],
    ) -> None:
        dropped = [*block.dropped, *tasks.dropped]
        for result in dropped:
            self._service.log.warning("task dropped", task_id=result.task_id, reason=result.reason)
        flat = [score for group in scores for score in group]
        failures = [score.failure for score in flat if score.value is None]
        if failures:
            self._service.log.warning("samples failed", count=len(failures), first=failures[0])
        rewards, lengths = block.scalars["reward"], block.scalars["length"]
        values: dict[str, float | str] = {
            "version": sampled.version,
            "tasks": len(block.results),
            "samples": len(rewards),
            "samples_failed": len(failures),
            "dropped": len(dropped),
            "generate_s": sampled.seconds,
            "tokens_per_s": float(lengths.sum()) / max(sampled.seconds, 1e-9),
        }
        if len(rewards):
            values["reward_mean"] = float(rewards.mean())
            values["length_mean"] = float(lengths.mean())
        for part in sorted({name for score in flat for name in score.parts}):
            values[f"reward/{part}"] = float(np.mean([score.parts[part] for score in flat if part in score.parts]))
        self._service.telemetry.emit("rollout" if split == TRAIN else f"rollout/{split}", values)
        self._service.telemetry.emit("engine", dict(self._engine.stats()))


def _needed(grant: LeaseGrant) -> str:
    exactly = "exactly" if grant.exact else "at least"
    return f"the lease needs {exactly} {grant.min_step} and names no weights to load"
