"""Decides where a driver begins by comparing the journal with the workers' state, and reloads workers if necessary.

Workers are trusted if they are at the committed step or have finished the one journaled step. In any other state
(fresh, behind, within a step) they are reloaded from a checkpoint and replay the journaled steps. If the tasks of those
steps are gone, the scheduler takes the steps back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from proto.messages import ErrorCode, RunInfo
from services.policy_trainer.dispatch import WorkerDispatch
from services.policy_trainer.metrics import batch_row
from services.policy_trainer.scheduler_calls import SchedulerCalls
from shared.rpc.errors import RpcError

INITIAL_STEP = 0


@dataclass(frozen=True)
class ResumePoint:
    """The state in which a driver begins: the workers hold `version`, and replay up to `committed` without commits."""

    version: int
    committed: int
    lineage: int
    checkpoint: int
    """Newest checkpoint that the scheduler knows, or -1 if there is none."""
    checkpoint_now: bool
    """Whether `committed` has to be saved as soon as the workers hold it, because the stores have no room left."""


async def resume(
    scheduler: SchedulerCalls,
    workers: WorkerDispatch,
    checkpoints: Sequence[int],
    *,
    store: str,
    whole_rows: bool = False,
) -> ResumePoint:
    """Bring the workers into agreement with the journal.

    `checkpoints` are the steps of all checkpoints on disk, announced or not. Weights are put into `store`. With
    `whole_rows`, a step whose sums are gone is replayed instead of committed (deterministic mode: rows are the same
    too). Raises RpcError if another driver has taken over or nothing can be loaded.
    """
    log = structlog.get_logger("driver")
    info = await scheduler.run_info()
    state = await workers.take_over()
    if not state.dirty and state.step == info.open_step == info.committed_step + 1 and not whole_rows:
        # The workers took the step, but the driver died before its commit, so the sums for its row are lost.
        await scheduler.commit(info.open_step, batch_row(await scheduler.next_batch(info.open_step)))
        info = await scheduler.run_info()
    if not state.dirty and state.step == info.committed_step:
        log.info("workers continue", step=state.step)
        return _resume_point(state.step, info)
    usable = [step for step in checkpoints if step <= info.committed_step]
    loaded = await _load(workers, usable)
    if info.committed_step > INITIAL_STEP:  # version 0 is the model directory and has the same bits in every life
        info = await scheduler.reloaded(loaded)
    if 0 < info.reference_step != loaded:
        await _publish_again(info.reference_step, scheduler, workers, info.lineage, store)
        await workers.load_checkpoint(loaded)
    log.info("workers loaded", step=loaded, replay=info.committed_step - loaded, lineage=info.lineage)
    return _resume_point(loaded, info)


async def _publish_again(
    step: int, scheduler: SchedulerCalls, workers: WorkerDispatch, lineage: int, store: str
) -> None:
    """Publish the reference's version, which was lost with its store, from its checkpoint, which is kept."""
    structlog.get_logger("driver").info("reference's version published again", step=step)
    await workers.load_checkpoint(step)
    await scheduler.publish(await workers.publish_weights(lineage, step, store=store))


def _resume_point(version: int, info: RunInfo) -> ResumePoint:
    return ResumePoint(version, info.committed_step, info.lineage, info.checkpoint_step, info.checkpoint_now)


async def _load(workers: WorkerDispatch, checkpoints: Sequence[int]) -> int:
    """Load the newest intact checkpoint, or else the initial model, and return its step."""
    log = structlog.get_logger("driver")
    for step in sorted(checkpoints, reverse=True):
        try:
            return (await workers.load_checkpoint(step)).step
        except RpcError as error:
            if error.code not in (ErrorCode.MISSING, ErrorCode.CONFLICT):
                raise
            log.warning("checkpoint refused, trying the previous one", step=step, error=str(error))
            await workers.take_over()
    return (await workers.init_model()).step
