"""Finishes a sampled lease: scores the samples, puts their shards into the store, completes and reports the lease."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from proto.messages import TaskResult
from proto.tensors import Array
from services.rollout.results.assemble import Assembled, NamedValues, assemble, in_files, with_receipt
from services.rollout.results.sample_texts import SampleTexts
from services.rollout.rewards.pool import RewardPool
from services.rollout.rewards.score import WORKFLOW, Score
from services.rollout.sampling.tasks import PreparedTasks
from services.rollout.sampling.trajectory import Made
from services.rollout.weights.sync import SyncReport
from shared.actor.service import Service
from shared.dataplane.client import DataClient, Receipt, TaskShards
from shared.dataplane.stream import OnProgress
from shared.lease import Lease, LeaseBook
from shared.stages import TEXT, TRAIN

DATA_CALL_S = 30.0


@dataclass(frozen=True)
class Sampled:
    """A lease's samples (grouped by task), the policy version at their start, and how long sampling took in seconds."""

    made: list[list[Made]]
    version: int
    seconds: float
    sync: SyncReport | None
    """The sync that brought the weights, or the last such sync if the weights changed during sampling."""
    lost_processes: int | None = None
    """Number of processes lost so far by the workflow that made the samples; None: they are single answers."""


class LeaseResults:
    """The results of one engine's leases. It is used only on the service's loop."""

    def __init__(
        self,
        service: Service,
        leases: LeaseBook,
        *,
        rewards: RewardPool,
        texts: SampleTexts,
        data: DataClient,
        store: str,
        filters: bool,
    ) -> None:
        """`store` is the store for shards (`batch-store/0`). `filters` says whether the scheduler drops tasks whose
        rewards are all equal."""
        self._service = service
        self._leases = leases
        self._rewards = rewards
        self._texts = texts
        self._data = data
        self._store = store
        self._filters = filters
        self._names = NamedValues()

    @property
    def may_score(self) -> asyncio.Event:
        """Event that is set while the reward functions can score."""
        return self._rewards.reachable

    async def finish(self, lease: Lease, tasks: PreparedTasks, sampled: Sampled) -> None:
        """Score the samples, put the shards into the store and complete the lease. Raises LeaseLost."""
        made = sampled.made
        if sampled.lost_processes is None:
            await self._texts.write(lease, tasks.sampling, made)
        with self._leases.part(lease, "reward"):
            scores = await self._scores(lease, made)
        block = assemble(tasks.ready, made, scores, min_survivors=tasks.min_survivors)
        dropped = [*block.dropped, *tasks.dropped]
        task_ids = [result.task_id for result in (*block.results, *dropped)]
        texts = await self._texts.recorded(lease, tasks, made, scores, task_ids)
        results = await self._put(lease, block, dropped, texts)
        of_sync = sampled.sync.scalars(len(block.scalars["reward"])) if sampled.sync is not None else {}
        scalars = block.scalars | of_sync | self._names.columns(block.named)
        await self._leases.complete(lease, results, scalars)
        self._report(lease.grant.split, tasks, sampled, block, scores)
        if sampled.lost_processes is not None:
            self._report_workflow(made, sampled.lost_processes)

    async def _scores(self, lease: Lease, made: list[list[Made]]) -> list[list[Score]]:
        """Return each sample's own score or, if it has none, the reward functions' score. Raises LeaseLost."""
        unscored = [[sample.sample for sample in group if sample.score is None] for group in made]

        def advance() -> None:
            lease.advance()
            # Whatever ends the lease in the meantime, its tasks are not to blame for a judge that does not answer.
            lease.untouched = not self._rewards.reachable.is_set()

        scored = await lease.while_held(self._rewards.score(unscored, advance))
        lease.untouched = False
        given = [iter(group) for group in scored]
        return [[sample.score or next(scores) for sample in group] for group, scores in zip(made, given, strict=True)]

    async def _put(
        self, lease: Lease, block: Assembled, dropped: list[TaskResult], texts: dict[str, Array]
    ) -> list[TaskResult]:
        """Put the shards of a block into the store, each task's text with its shards, and return the results of all
        tasks with the locations of their shards.

        The texts of dropped tasks are put separately, because a file is freed only when its last task is cleared.
        """
        results = [*block.results, *dropped]
        shards = [*block.shards, *(dict[str, Array]() for _ in dropped)]
        for result, of_task in zip(results, shards, strict=True):
            if result.task_id in texts:
                of_task[TEXT] = texts[result.task_id]
        files = in_files(block, filters=self._filters) if block.results else []
        files.append([i for i in range(len(block.results), len(results)) if shards[i]])
        for file in filter(None, files):
            puts = [TaskShards(results[i].task_id, results[i].fence, shards[i]) for i in file]

            async def attempt(_: OnProgress, puts: list[TaskShards] = puts) -> list[Receipt]:
                return await self._data.put(puts, store=self._store, deadline_s=DATA_CALL_S)

            receipts = await self._leases.persist(lease, "put", attempt, DATA_CALL_S)
            for i, receipt in zip(file, receipts, strict=True):
                results[i] = with_receipt(results[i], receipt)
        return results

    def _report(
        self,
        split: str,
        tasks: PreparedTasks,
        sampled: Sampled,
        block: Assembled,
        scores: Sequence[Sequence[Score]],
    ) -> None:
        """Log dropped tasks and failed samples, and emit the lease's numbers."""
        log = self._service.log
        dropped = [*block.dropped, *tasks.dropped]
        for result in dropped:
            log.warning("task dropped", task_id=result.task_id, reason=result.reason)
        flat = [score for group in scores for score in group]
        for task, group in zip(tasks.ready, scores, strict=True):
            lost = [score.failure for score in group if score.value is None]
            if lost:
                log.warning("samples failed", task_id=task.handle.task_id, count=len(lost), first=lost[0])
        rewards, lengths = block.scalars["reward"], block.scalars["length"]
        values: dict[str, float | str] = {
            "version": sampled.version,
            "tasks": len(block.results),
            "samples": len(rewards),
            "samples_failed": sum(score.value is None for score in flat),
            "dropped": len(dropped),
            "generate_s": sampled.seconds,
            "tokens_per_s": float(lengths.sum()) / max(sampled.seconds, 1e-9),
        }
        if len(rewards):
            values["reward_mean"] = float(rewards.mean())
            values["length_mean"] = float(lengths.mean())
        for name in sorted({name for score in flat for name in score.parts}):
            values[f"reward/{name}"] = float(np.mean([score.parts[name] for score in flat if name in score.parts]))
        self._service.telemetry.emit("rollout" if split == TRAIN else f"rollout/{split}", values)

    def _report_workflow(self, made: Sequence[Sequence[Made]], lost_processes: int) -> None:
        """Emit the numbers for a lease whose samples a workflow produced."""
        flat = [sample for group in made for sample in group]
        lost = [sample.score.failure for sample in flat if sample.score is not None and sample.score.kind == WORKFLOW]
        values: dict[str, float | str] = {
            "samples": len(flat),
            "samples_failed": len(lost),
            "total/processes_lost": lost_processes,
        }
        if lost:
            values["last_failure"] = lost[-1]
        complete = [sample for sample in flat if sample.sequences]
        if complete:
            values["turns_mean"] = float(np.mean([sample.sample.turns for sample in complete]))
            values["sequences_mean"] = float(np.mean([len(sample.sequences) for sample in complete]))
        for name in sorted({name for sample in complete for name in sample.metrics}):
            metrics = [sample.metrics[name] for sample in complete if name in sample.metrics]
            values[f"metric/{name}"] = float(np.mean(metrics))
        self._service.telemetry.emit("workflow", values)
