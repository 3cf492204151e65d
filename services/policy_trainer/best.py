"""Keeps the checkpoint with the best evaluation and exports its model (`checkpoint.keep_best`).

Each version that is evaluated gets a checkpoint, because the weights are gone by the time the result is known. The
candidates are the checkpoints on disk, and their results come from the journal, so a resumed driver makes the same
choice. A mean over fewer rows, after some were dropped, ranks below a mean over more rows, because the two are not
comparable.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from pathlib import Path

import structlog

from services.policy_trainer.scheduler_calls import SchedulerCalls
from shared import checkpoint_files, model_folder
from shared.rpc.errors import RpcError
from shared.rundir import CHECKPOINT_PREFIX, RunDir
from shared.topology import Topology

Rank = tuple[float, float]
"""Number of scored rows, then the value of the metric."""


class BestCheckpoint:
    """The best checkpoint of one driver life. Of several equally good checkpoints, the first counts as the best."""

    def __init__(self, run: RunDir, topology: Topology, scheduler: SchedulerCalls, metric: str) -> None:
        """`metric` is `topology.checkpoint.keep_best`, a metric of an evaluation set."""
        self._scheduler = scheduler
        self._metric = metric
        name = metric.split("/")[1]
        self._prefix, self._every = f"eval/{name}", topology.data.eval[name].every
        self._last_step = topology.run.last_step
        self._run = run
        self._policy = topology.policy
        self.undecided: list[int] = []
        """The steps whose checkpoints have been or are being saved but have not been compared yet."""
        self._best: int | None = None
        self._rank: Rank = (0.0, -math.inf)
        self.deciding: asyncio.Task[None] | None = None
        """The newest pending decision, which waits for the previous one. Awaiting it may raise RpcError or OSError."""
        self._log = structlog.get_logger("driver")

    def is_evaluated(self, step: int) -> bool:
        """Return whether the version of `step` is evaluated and has a checkpoint. The initial model has no
        checkpoint."""
        return step > 0 and (step % self._every == 0 or step == self._last_step)

    @property
    def keep(self) -> list[int]:
        """The steps whose checkpoints must be kept: the best checkpoint, and those that may turn out to be better."""
        return sorted({*self.undecided, *([] if self._best is None else [self._best])})

    def add(self, step: int, saved: asyncio.Task[float] | None = None) -> None:
        """Once the checkpoint of `step` is saved and evaluated, compare it with the best checkpoint.

        `saved` is the task that saves the checkpoint, or None if the checkpoint is already saved.
        """
        self.undecided.append(step)
        self.deciding = asyncio.create_task(self._decide(step, saved, after=self.deciding))

    async def _decide(self, step: int, saved: asyncio.Task[float] | None, after: asyncio.Task[None] | None) -> None:
        for earlier in (after, saved):
            if earlier is not None:
                await earlier
        results = (await self._scheduler.wait_evals(step)).metrics
        rank = (results.get(f"{self._prefix}/rows_scored", 0.0), results.get(self._metric, math.nan))
        if rank[0] and self._metric not in results:
            remedy = "only rewards of 0 and 1 have an accuracy; name eval/<set>/reward, or a reward that is given"
            self._log.warning(f"checkpoint.keep_best: no {self._metric} in the evaluation: {remedy}", step=step)
        if math.isfinite(rank[1]) and rank > self._rank and await self._exported(step, results):
            self._best, self._rank = step, rank
        self.undecided.remove(step)

    async def _exported(self, step: int, results: Mapping[str, float]) -> bool:
        """Export a checkpoint's model as the best one and return True. If the checkpoint is damaged, change nothing and
        return False."""
        path = self._run.checkpoints / f"{CHECKPOINT_PREFIX}{step}"
        note = json.dumps({"step": step, "metric": self._metric, "value": results[self._metric]})

        def work() -> None:
            checkpoint_files.verify(path, only=[checkpoint_files.MODEL])
            policy, notes = self._policy, {self._run.best_note.name: note + "\n"}
            model_folder.from_checkpoint(
                path, Path(policy.model), self._run.export_best, policy.dtype, notes, lora=policy.lora
            )

        try:
            await asyncio.to_thread(work)
        except RpcError as error:
            self._log.warning("checkpoint refused as the best", step=step, error=str(error))
            return False
        self._log.info("best checkpoint", step=step, **{self._metric: results[self._metric]})
        return True
