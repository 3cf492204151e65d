"""Publishes weights and saves checkpoints while the next step is under way.

A failure in the background interrupts callers that wait here, so that none waits for weights that will never arrive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from services.policy_trainer.best import BestCheckpoint
from services.policy_trainer.checkpoints import Checkpoints
from services.policy_trainer.metrics import StepMetrics
from services.policy_trainer.resume import ResumePoint
from services.policy_trainer.scheduler_calls import SchedulerCalls
from services.policy_trainer.trained_models import TrainedModels
from shared.topology import TRAINER_STORE, Topology

T = TypeVar("T")


class Publisher:
    """Runs a driver life's background work under one lineage: at most one publication and one checkpoint at a time."""

    def __init__(
        self,
        topology: Topology,
        scheduler: SchedulerCalls,
        workers: TrainedModels,
        resumed: ResumePoint,
        checkpoints: Checkpoints,
        *,
        on_stop: Callable[[int], None] = lambda step: None,
        best: BestCheckpoint | None = None,
    ) -> None:
        """`checkpoints` deletes those that need not be kept. `on_stop` is called with the step that is being saved
        because the run is stopping. `best` keeps the best checkpoint, if one is to be kept."""
        publishes = topology.policy_model.publishes
        self._scheduler = scheduler
        self._workers = workers
        self._every = topology.checkpoint.every
        self._lineage = resumed.lineage
        self._newest_checkpoint = resumed.checkpoint
        self._last_step = topology.run.last_step
        self._earlier = publishes.earlier if publishes is not None else 0
        """Number of earlier versions to publish again before the first one. In deterministic mode, lost tasks are
        sampled again with the version that first sampled them."""
        self._on_stop = on_stop
        self._best = best
        self._checkpoints = checkpoints
        self._publishing: asyncio.Task[float] | None = None
        self._saving: asyncio.Task[float] | None = None

    def begin(self, version: int, *, checkpoint_now: bool = False) -> None:
        """Publish `version`, and save it if a checkpoint is due (or the scheduler needs one to make room).

        The workers must hold `version` when this is called.
        """
        self._publishing = asyncio.create_task(self._publish(version))
        evaluated = self._best is not None and self._best.is_evaluated(version)
        due = version % self._every == 0 or version == self._last_step or evaluated
        if version and (due or checkpoint_now) and version > self._newest_checkpoint:
            self._newest_checkpoint = version
            self._saving = asyncio.create_task(self._save(version, after=self._saving))
            if self._best is not None and evaluated:
                self._best.add(version, self._saving)

    async def collect(self, metrics: StepMetrics) -> None:
        """Wait for the current publication, but not for a checkpoint, and record how long finished work took."""
        if self._publishing is not None:
            metrics.publish_s = await self._publishing
            self._publishing = None
        if self._saving is not None and self._saving.done():
            metrics.checkpoint_s = await self._saving
            self._saving = None

    async def watch(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. If background work fails first, raise its exception."""
        task = asyncio.create_task(work)
        try:
            waiting = {task, *self._background()}
            while not task.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for background in done - {task}:
                    background.result()
            return task.result()
        finally:
            task.cancel()

    async def settle(self) -> None:
        """Wait for the pending publication, checkpoint and choice of the best checkpoint."""
        await asyncio.gather(*self._background())

    async def stop(self, version: int) -> None:
        """End the run early at `version`, which the workers hold. Return once the scheduler knows of that version's
        checkpoint."""
        if version > max(self._newest_checkpoint, 0):
            self._newest_checkpoint = version
            self._saving = asyncio.create_task(self._save(version, after=self._saving, at_stop=True))
        if self._saving is not None:
            if not self._saving.done():
                self._on_stop(self._newest_checkpoint)
            await self._saving

    async def cancel(self) -> None:
        """Cancel the background work."""
        tasks = self._background()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _background(self) -> list[asyncio.Task[Any]]:
        deciding = self._best.deciding if self._best is not None else None
        return [task for task in (self._publishing, self._saving, deciding) if task is not None]

    async def _publish(self, version: int) -> float:
        began = time.perf_counter()
        first, self._earlier = max(0, version - self._earlier), 0
        # Request all versions before the next step's calls: if one of those calls is refused, so are all later ones.
        versions = range(first, version + 1)
        asked = [self._workers.publish_weights(self._lineage, step, store=TRAINER_STORE) for step in versions]
        for ref in await asyncio.gather(*asked):
            await self._scheduler.publish(ref)
        return time.perf_counter() - began

    async def _save(self, version: int, *, after: asyncio.Task[float] | None, at_stop: bool = False) -> float:
        began = time.perf_counter()
        await self._workers.save_checkpoint(version, at_stop=at_stop)
        if after is not None:
            await after
        keep = self._best.keep if self._best is not None else ()
        kept = await asyncio.to_thread(self._checkpoints.prune, version, keep)
        await self._scheduler.checkpoint_saved(version, kept, at_stop=at_stop)
        return time.perf_counter() - began
