"""Decides where a driver begins by comparing the journal with the workers' state, and reloads workers if necessary.

Workers are trusted if they are at the committed step or have finished the journaled step that follows it. In any other
state (fresh, behind, within a step) they are reloaded: from the newest snapshot in shared memory that all of them hold
and that the journal covers, or else from a checkpoint. They then replay the later journaled steps. If the tasks of
those steps are gone, the scheduler rolls the steps back.

A snapshot belongs to the lineage in which its step was trained. Rolling steps back always begins a new lineage, so a
snapshot of a step that was rolled back is never loaded. A snapshot of the committed step is bit-identical to the
version published under its lineage, so that lineage continues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from proto.messages import ErrorCode, RunInfo
from services.policy_trainer.metrics import batch_row
from services.policy_trainer.scheduler_calls import SchedulerCalls
from services.policy_trainer.trained_models import TrainedModels
from shared.rpc.errors import RpcError
from shared.runfiles.metrics import MetricsFollower
from shared.topology import TRAINER_STORE

INITIAL_STEP = 0


@dataclass(frozen=True)
class ResumePoint:
    """The state in which a driver begins. The workers hold `version` and replay up to `committed` without commits."""

    version: int
    committed: int
    lineage: int
    checkpoint: int
    """Newest checkpoint that the scheduler knows of, or -1 if there is none."""
    checkpoint_now: bool
    """Whether `committed` must be saved as soon as the workers hold it, because the stores have no room left."""
    waiting_rates: Mapping[str, float] = field(default_factory=dict)
    """The learning rates of committed steps that were not in `metrics.jsonl` when the scheduler was asked."""


async def resume(
    scheduler: SchedulerCalls,
    workers: TrainedModels,
    checkpoints: Sequence[int],
    *,
    rate_of: Callable[[int], float],
    whole_rows: bool = False,
    scored: bool = True,
) -> ResumePoint:
    """Bring the workers into agreement with the journal.

    `checkpoints` are the steps of all checkpoints on disk, announced or not. `rate_of` returns the learning rate that
    this life of the run uses for a step. `whole_rows` means that a step whose sums are gone is replayed instead of
    committed (in deterministic mode, which reproduces the rows as well), and `scored` that the samples have rewards.
    Raises RpcError if another driver has taken over or nothing can be loaded.
    """
    log = structlog.get_logger("driver")
    info = await scheduler.run_info()
    state = await workers.take_over(info.drivers)
    if not state.dirty and state.step == info.open_step == info.committed_step + 1 and not whole_rows:
        # The workers took the step, but the driver died before its commit, so the sums for its row are lost.
        row = batch_row((await scheduler.next_batch(info.open_step)).answer, scored=scored)
        # The workers are older than the driver, so they took the step in this life. A replay repeats its rate.
        await scheduler.commit(info.open_step, row | {"policy/lr": rate_of(info.open_step)})
        info = await scheduler.run_info()
    if not state.dirty and state.step == info.committed_step:
        log.info("workers continue", step=state.step)
        return _resume_point(state.step, info)
    loaded, source = None, "snapshot"
    if not info.reference_step:  # to publish the reference's version again would discard the snapshot
        steps = [snapshot.step for snapshot in state.snapshots if snapshot.lineage == info.lineage]
        loaded = await _load_newest(workers, steps, info, snapshot_lineage=info.lineage)
    if loaded is None:
        loaded, source = await _load_newest(workers, checkpoints, info), "checkpoint"
    if loaded is None:
        loaded = (await workers.init_model()).step
    # Version 0 comes from the model directory and is bit-identical in every life.
    same_bits = loaded == info.committed_step and (source == "snapshot" or loaded == INITIAL_STEP)
    if not same_bits:
        info = await scheduler.reloaded(loaded)
    if 0 < info.reference_step != loaded:
        # The store with the reference's version was lost, so it is published again from its checkpoint.
        log.info("reference's version published again", step=info.reference_step)
        await workers.load_checkpoint(info.reference_step)
        await scheduler.publish(await workers.publish_weights(info.lineage, info.reference_step, store=TRAINER_STORE))
        await workers.load_checkpoint(loaded)
    replay = info.committed_step - loaded
    log.info("workers loaded", source=source, step=loaded, replay=replay, lineage=info.lineage)
    return _resume_point(loaded, info)


def _resume_point(version: int, info: RunInfo) -> ResumePoint:
    return ResumePoint(
        version,
        info.committed_step,
        info.lineage,
        info.checkpoint_step,
        checkpoint_now=info.checkpoint_now,
        waiting_rates=info.waiting_rates,
    )


async def _load_newest(
    workers: TrainedModels, steps: Sequence[int], info: RunInfo, *, snapshot_lineage: int = -1
) -> int | None:
    """Load the newest intact checkpoint or snapshot of a committed step among `steps`, and return its step, if any."""
    log = structlog.get_logger("driver")
    for step in sorted((step for step in steps if step <= info.committed_step), reverse=True):
        try:
            return (await workers.load_checkpoint(step, snapshot_lineage=snapshot_lineage)).step
        except RpcError as error:
            if error.code not in (ErrorCode.MISSING, ErrorCode.CONFLICT):
                raise
            log.warning("checkpoint refused, trying the previous one", step=step, error=str(error))
            await workers.take_over()
    return None


def committed_rates(metrics: Path, resumed: ResumePoint) -> dict[int, float]:
    """Return the learning rate of each committed step that is replayed (steps without an update have none).

    The scheduler writes the rows of `metrics.jsonl` from its journal; the rates of rows that it had not written before
    it answered are those of `resumed`. A replayed step repeats its rate, even if the run was resumed with another one.
    """
    rates, follower = {int(step): rate for step, rate in resumed.waiting_rates.items()}, MetricsFollower(metrics)
    while (page := follower.poll()).more:
        rates |= {int(row["step"] or 0): rate for row in page.rows if (rate := row.get("policy/lr"))}
    return {step: rate for step, rate in rates.items() if step > resumed.version}
