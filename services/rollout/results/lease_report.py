"""Reports a finished lease to the log and the monitor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.rollout.results.assemble import Assembled
from services.rollout.rewards.score import WORKFLOW, Score
from services.rollout.sampling.tasks import PreparedTasks
from services.rollout.weights.sync import SyncReport
from services.rollout.workflows.runner import Made
from shared.actor.service import Service
from shared.stages import TRAIN


@dataclass(frozen=True)
class Sampled:
    """A lease's samples (grouped by task), the policy version at their start, and how long sampling took in seconds."""

    made: list[list[Made]]
    version: int
    seconds: float
    sync: SyncReport | None
    """The sync that brought the weights, or the last such sync if the weights changed during sampling."""


def report_lease(
    service: Service,
    split: str,
    tasks: PreparedTasks,
    sampled: Sampled,
    block: Assembled,
    scores: Sequence[Sequence[Score]],
) -> None:
    """Log dropped tasks and failed samples, and emit the lease's numbers."""
    dropped = [*block.dropped, *tasks.dropped]
    for result in dropped:
        service.log.warning("task dropped", task_id=result.task_id, reason=result.reason)
    flat = [score for group in scores for score in group]
    for task, group in zip(tasks.ready, scores, strict=True):
        lost = [score.failure for score in group if score.value is None]
        if lost:
            service.log.warning("samples failed", task_id=task.handle.task_id, count=len(lost), first=lost[0])
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
    for part in sorted({name for score in flat for name in score.parts}):
        values[f"reward/{part}"] = float(np.mean([score.parts[part] for score in flat if part in score.parts]))
    service.telemetry.emit("rollout" if split == TRAIN else f"rollout/{split}", values)


def report_workflow(service: Service, made: Sequence[Sequence[Made]], lost_processes: int) -> None:
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
    kept = [sample for sample in flat if sample.rolled.sequences]
    if kept:
        values["turns_mean"] = float(np.mean([sample.sample.turns for sample in kept]))
        values["sequences_mean"] = float(np.mean([len(sample.rolled.sequences) for sample in kept]))
    for name in sorted({name for sample in kept for name in sample.metrics}):
        values[f"metric/{name}"] = float(np.mean([sample.metrics[name] for sample in kept if name in sample.metrics]))
    service.telemetry.emit("workflow", values)
