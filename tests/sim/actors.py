"""The actors of a simulated run. The scheduler, the store, the driver and the trainer's workers are the real services;
a rollout and a reference have the production workers with a simulated engine and scorer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from proto.messages import Heartbeat, WeightsRef
from services.batch_store.server import StoreService
from services.policy_trainer.service import PolicyTrainerService
from services.policy_trainer.worker.service import CriticWorker, PolicyTrainerWorker
from services.reference.service import ReferenceWorker
from services.rollout.results.finish import LeaseResults
from services.rollout.results.sample_texts import SampleTexts
from services.rollout.sampling.answers import AnswerSampler
from services.rollout.sampling.tasks import prepare
from services.rollout.service import LeaseParts
from services.rollout.weights.source import WeightsSource
from services.rollout.weights.sync import WeightsSync
from services.rollout.weights.versions import EngineVersions
from services.rollout.worker import RolloutWorker
from services.scheduler.server import SchedulerService
from shared import topology as topologies
from shared.actor.service import Service
from shared.colocation.devices import ENGINE, NOTHING, REFERENCE, WEIGHTS, Parts
from shared.colocation.turns import OwnDevices, Turns, take_turns
from shared.dataplane.client import DataClient
from shared.lease import Lease, LeaseBook
from shared.stages import ROLLOUT, stage_named
from tests.sim.model import BEGINNING, SimEngine, SimPrompts, SimRewards, SimTasks, digest
from tests.sim.virtual import here

if TYPE_CHECKING:
    from shared.rundir import RunDir

STORE = "batch-store/0"
_REFERENCE: Parts = frozenset({REFERENCE})
KINDS: dict[str, type[Service]] = {}


class SimRollout(Service):
    """A rollout: the production worker around a simulated engine."""

    NAME: ClassVar[str] = "rollout"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        self._data = DataClient(self.client)
        self._parts: LeaseParts | None = None

    async def start(self) -> None:
        topology = topologies.load(self.run.topology)
        world = here()
        engine: Any = SimEngine(world)
        rewards: Any = SimRewards(world)
        prompts: Any = SimPrompts()
        tasks: Any = SimTasks()
        self.progress = lambda: engine.progress
        source = WeightsSource(self._data, emit=self.telemetry.emit)
        sync = WeightsSync(engine, self.name, self.telemetry.emit, source)

        async def leave(_: Parts) -> Parts:
            sync.forget()
            await engine.sleep()
            return ENGINE

        turns: Turns = take_turns(self, leave) if self.NAME in topology.colocated_services else OwnDevices()
        await turns.acquire(frozenset({WEIGHTS}))
        await engine.wake(frozenset({WEIGHTS}))
        turns.done()

        async def on_text(work: Callable[[], Any]) -> Any:
            return work()

        leases = LeaseBook(self, ROLLOUT.name, lambda: engine.progress)
        versions = EngineVersions(
            leases,
            engine=engine,
            sync=sync,
            source=source,
            turns=turns,
            emit=self.telemetry.emit,
            in_flight=not topology.run.deterministic,
        )
        texts = SampleTexts(None, prompts, ["sim:reward"], on_text)
        results = LeaseResults(
            self,
            leases,
            rewards=rewards,
            texts=texts,
            data=self._data,
            store=STORE,
            filters=False,
            per_token=topology.algorithm.advantage.per_token,
        )
        worker = RolloutWorker(
            self,
            leases,
            engine=engine,
            versions=versions,
            prepare=lambda lease: prepare(tasks, lease, on_text),
            answers=AnswerSampler(engine, None),
            workflow=None,
            results=results,
            block_tasks=topology.services.rollout.block_tasks,
        )
        self._parts = LeaseParts(worker, leases, versions)

    async def serve(self) -> None:
        assert self._parts is not None
        self.keep(self._parts.versions.run())
        await self._parts.worker.run()

    async def drain(self) -> None:
        if self._parts is not None:
            await self._parts.worker.drain()

    async def close(self) -> None:
        self._data.close()
        await super().close()

    def heartbeat(self) -> Heartbeat:
        beat = super().heartbeat()
        if self._parts is None:
            return beat
        self._parts.versions.rest()
        holds = self._parts.versions.holds
        return msgspec.structs.replace(
            beat, holds_lineage=holds.lineage, holds_step=holds.step, leases=self._parts.leases.progress()
        )

    def on_leases_lost(self, lease_ids: list[int]) -> None:
        if self._parts is not None:
            self._parts.leases.lost(lease_ids)

    def on_newer_weights(self, ref: WeightsRef) -> None:
        if self._parts is not None:
            self._parts.versions.announce(ref)


class SimScoring:
    """Replacement for `Scoring` and for its model."""

    def __init__(self) -> None:
        self.turns: Turns = OwnDevices()
        self.progress = 0

    async def lead(self, lease: Lease, leases: LeaseBook, shards: Sequence[dict[str, Any]]) -> tuple[list[Any], float]:
        await self.turns.acquire(_REFERENCE)
        here().holds(_REFERENCE)
        await here().compute()
        self.progress += 1
        return [
            (np.array([-(digest(BEGINNING, int(token)) % 4096) / 4096 for token in each["token_ids"]], np.float32),)
            for each in shards
        ], 0.0


class SimReference(Service):
    """A reference: the production worker around a simulated scorer."""

    NAME: ClassVar[str] = "reference"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        self._data = DataClient(self.client)
        scoring: Any = SimScoring()
        self.progress = lambda: scoring.progress
        self._scoring = scoring
        self._worker: ReferenceWorker | None = None

    async def start(self) -> None:
        async def leave(parts: Parts) -> Parts:
            here().holds(NOTHING)
            return parts

        (model,) = topologies.load(self.run.topology).frozen
        if model.shares_devices:
            self._scoring.turns = take_turns(self, leave)
        self._worker = ReferenceWorker(
            self, model, stage_named(model.stage).makes, self._scoring, self._data, self._scoring, STORE
        )

    async def serve(self) -> None:
        assert self._worker is not None
        await self._worker.pipeline.run()

    async def drain(self) -> None:
        if self._worker is not None:
            await self._worker.pipeline.drain()

    async def close(self) -> None:
        self._data.close()
        await super().close()

    def heartbeat(self) -> Heartbeat:
        beat = super().heartbeat()
        if self._worker is None:
            return beat
        self._worker.rest()
        return msgspec.structs.replace(beat, leases=self._worker.leases.progress())

    def on_leases_lost(self, lease_ids: list[int]) -> None:
        if self._worker is not None:
            self._worker.leases.lost(lease_ids)


KINDS |= {
    each.NAME: each
    for each in (
        SchedulerService,
        StoreService,
        PolicyTrainerService,
        PolicyTrainerWorker,
        CriticWorker,
        SimRollout,
        SimReference,
    )
}
