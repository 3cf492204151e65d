"""The driver as an actor: resumes, trains, and resumes again when a worker was lost. Touches no tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from services.policy_trainer.dispatch import WorkerDispatch, WorkersLost
from services.policy_trainer.driver import Driver, own_estimator
from services.policy_trainer.group_clients import group_dispatch
from services.policy_trainer.publisher import Publisher
from services.policy_trainer.resume import resume
from services.policy_trainer.scheduler_calls import SchedulerCalls
from shared import topology as topologies
from shared.actor.service import Service
from shared.rundir import service_name
from shared.topology import Topology

STORE = service_name("batch-store", 0)
MAX_RECOVERIES = 5
"""Times in a row that workers may be lost before one more step is committed."""


class PolicyTrainer(Service):
    """`python -m services.policy_trainer`: ends with status 0 when the run is complete."""

    NAME = "policy-trainer"

    async def start(self) -> None:
        """Find the advantage estimator, which nothing later in the run could mend."""
        own_estimator(topologies.load(self.run.topology))

    async def serve(self) -> None:
        topology = topologies.load(self.run.topology)
        scheduler = SchedulerCalls(self.scheduler, self.incarnation)
        workers = group_dispatch(topology, self.client, self.incarnation)
        lost_at, losses = -1, 0
        if (await scheduler.run_info()).stopping:
            return  # an earlier life finished the run
        while True:
            try:
                await self._train(topology, scheduler, workers)
                return
            except WorkersLost as error:
                committed = (await scheduler.run_info()).committed_step
                losses = losses + 1 if committed == lost_at else 1
                lost_at = committed
                if losses > MAX_RECOVERIES:
                    raise
                self.log.warning("workers lost, resuming", committed=committed, error=str(error))

    async def _train(self, topology: Topology, scheduler: SchedulerCalls, workers: WorkerDispatch) -> None:
        deterministic = topology.run.deterministic
        standing = await resume(scheduler, workers, list(self._checkpoints()), store=STORE, whole_rows=deterministic)
        self._put_aside(standing.committed)
        publisher = Publisher(
            scheduler,
            workers,
            checkpoint=topology.checkpoint,
            lineage=standing.lineage,
            store=STORE,
            newest_checkpoint=standing.checkpoint,
            last_step=topology.run.steps,
            earlier=topology.staleness if deterministic else 0,
            export=self.run.export,
        )
        try:
            await Driver(topology, scheduler, workers, publisher, standing, self._show).train()
        finally:
            await publisher.cancel()

    def _put_aside(self, committed: int) -> None:
        """A checkpoint is begun after its commit: one of a later step belongs to steps that were taken back."""
        for step in [each for each in self._checkpoints() if each > committed]:
            folder = self.run.checkpoints / f"step-{step}"
            with contextlib.suppress(FileNotFoundError):
                folder.rename(folder.with_name(f".{folder.name}.removed"))

    def _checkpoints(self) -> Iterator[int]:
        for folder in self.run.checkpoints.glob("step-*"):
            number = folder.name.removeprefix("step-")
            if number.isdigit():
                yield int(number)

    def _show(self, row: dict[str, float]) -> None:
        self.telemetry.emit("train", dict(row))
