"""Provides tests with an engine that holds one version of the weights, and with the parts that load newer versions into
it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from proto.messages import BatchMeta, LeaseGrant, TaskHandle
from services.rollout.results.finish import LeaseResults
from services.rollout.rewards.pool import RewardPool
from services.rollout.sampling.answers import AnswerSampler, PartialJournal
from services.rollout.sampling.tasks import PreparedTasks, ReadyTask
from services.rollout.sampling.trajectory import BlockVersions, Completion
from services.rollout.weights.source import WeightsSource
from services.rollout.weights.sync import WeightsSync
from services.rollout.weights.versions import EngineVersions
from services.rollout.worker import RolloutWorker
from shared.actor.telemetry import TelemetrySender
from shared.colocation.turns import OwnDevices
from shared.lease import Lease, LeaseBook
from shared.topology.reward import RewardRetry
from tests.unit.rollout.rollout_engine import sampling
from tests.unit.rollout.told_engine import ToldEngine, ToldWeights, ref_of, weights_of

FIRST = 4


NEW_TOKENS, SAMPLES, TEMPERATURE = 8, 2, 1.0


NOTED, FRESH = "train/0/0", "train/0/1"


class Rig:
    """An engine that holds version FIRST, and the parts that load newer versions into it."""

    def __init__(self, engine: ToldEngine | None = None) -> None:
        self.engine = engine or ToldEngine()
        self.sync = WeightsSync(self.engine, "rollout/0", lambda topic, values: None)
        self.told: list[str] = []
        service = SimpleNamespace(telemetry=TelemetrySender("rollout", 0, 1))
        self.leases = LeaseBook(service, "rollout", lambda: self.engine.progress)  # type: ignore[arg-type]
        self.versions = EngineVersions(
            self.leases,
            engine=self.engine,
            sync=self.sync,
            source=WeightsSource(ToldWeights(), emit=lambda topic, values: None),  # type: ignore[arg-type]
            turns=OwnDevices(),
            emit=lambda topic, values: self.told.append(topic),
        )
        self.running = asyncio.create_task(self.versions.run())

    async def swapped(self, step: int) -> None:
        """Swap the engine to version `step`."""
        before = len(self.told)
        self.versions.announce(ref_of(step))
        while len(self.told) == before:
            await asyncio.sleep(0)
        assert self.sync.holds.step == step

    async def swapped_to(self, step: int) -> None:
        while self.sync.holds.step != step or self.engine.is_held:
            await asyncio.sleep(0)

    def begin(self, *, exact: bool) -> BlockVersions:
        """Register a lease that is being sampled with the engine's version."""
        return self.versions._begin(exact=exact)

    def end(self, versions: BlockVersions) -> None:
        self.versions._end(versions)

    async def sample(self, journal: PartialJournal, ids: list[str]) -> dict[str, list[Completion]]:
        sampler = AnswerSampler(self.engine, journal)
        versions = self.begin(exact=False)
        groups = await sampler.sample(lease(ids), tasks(ids), versions)
        self.end(versions)
        return dict(zip(ids, groups, strict=True))


@asynccontextmanager
async def rig(engine: ToldEngine | None = None) -> AsyncIterator[Rig]:
    made = Rig(engine)
    await made.sync.load(ref_of(FIRST), weights_of(FIRST))
    try:
        yield made
    finally:
        made.running.cancel()
        await asyncio.gather(made.running, return_exceptions=True)


def lease(ids: list[str], *, exact: bool = False) -> Lease:
    grant = LeaseGrant(
        lease_id=1,
        stage="rollout",
        split="train",
        lease_s=30,
        batch=BatchMeta(tasks=[TaskHandle(each, 1) for each in ids]),
        min_step=FIRST if exact else 0,
        exact=exact,
        group_size=SAMPLES,
        block_rows=0,
    )
    return Lease(grant, lambda: 0)


def tasks(ids: list[str]) -> PreparedTasks:
    ready = [ReadyTask(TaskHandle(each, 1), {}, [1, 2, 3]) for each in ids]
    return PreparedTasks(ready, [], sampling(SAMPLES, TEMPERATURE, NEW_TOKENS), 2)


def note(folder: Path, task_id: str, versions: list[int]) -> None:
    """Write a note to the journal as an earlier incarnation would."""
    ids = np.array(versions, np.int32)
    answer = Completion(ids, np.full(len(ids), -1.0, np.float32), ids, "")
    journal = PartialJournal(folder, 1e9)
    journal.note({task_id: [answer] * SAMPLES}, 0, TEMPERATURE)
    journal.close()


def versions_of(answers: dict[str, list[Completion]]) -> dict[str, list[int]]:
    """Return the token versions by task, after checking that each equals the version encoded in the token."""
    for group in answers.values():
        for each in group:
            assert each.versions.tolist() == each.token_ids.tolist()
            assert each.finish_reason == "length"
    return {task_id: group[0].versions.tolist() for task_id, group in answers.items()}


def rewards() -> RewardPool:
    return RewardPool(
        [], timeout_s=10, memory_bytes=1 << 30, processes=1, retry=RewardRetry(), emit=lambda topic, values: None
    )


def worker_of(made: Rig, *, workflow: Any = None, source: Any = None, prepare: Any = None) -> RolloutWorker:
    service: Any = SimpleNamespace(telemetry=TelemetrySender("rollout", 0, 1))
    if source is not None:
        made.versions._source = source
    results = LeaseResults(
        service,
        made.leases,
        rewards=rewards(),
        texts=None,  # type: ignore[arg-type]
        data=None,  # type: ignore[arg-type]
        store="batch-store/0",
        filters=False,
    )
    return RolloutWorker(
        service,
        made.leases,
        engine=made.engine,
        versions=made.versions,
        prepare=prepare,
        answers=AnswerSampler(made.engine, None),
        workflow=workflow,
        results=results,
        block_tasks=1,
    )


def lease_of(step: int) -> Lease:
    made = lease([FRESH])
    grant = msgspec.structs.replace(made.grant, weights=ref_of(step), min_step=step)
    return Lease(grant, lambda: 0)
