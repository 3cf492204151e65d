"""Where a driver begins: what the journal says against where the workers stand. The one place that decides a reload.

Workers are trusted when they stand at the committed step, or have finished the one journaled step. Anything else
(fresh, behind, half a step taken) is reloaded from a checkpoint and replays the journaled steps; where their tasks are
gone, the scheduler takes those steps back.
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
class Standing:
    """`version`: what the workers hold; steps up to `committed` are to be replayed from there, without a commit."""

    version: int
    committed: int
    lineage: int
    checkpoint: int
    """Newest checkpoint that the scheduler knows; -1 when there is none."""
    checkpoint_now: bool
    """The stores have no room left: save `committed` as soon as the workers hold it."""


async def resume(
    scheduler: SchedulerCalls,
    workers: WorkerDispatch,
    checkpoints: Sequence[int],
    *,
    store: str,
    whole_rows: bool = False,
) -> Standing:
    """Bring workers and journal to agree. `checkpoints`: steps of those on disk, whichever were announced; `store`:
    where weights are put.

    `whole_rows`: rather replay than commit a step whose sums are gone (deterministic mode: rows are the same too).
    Raises RpcError when another driver has taken over, or nothing can be loaded.
    """
    log = structlog.get_logger("driver")
    info = await scheduler.run_info()
    state = await workers.take_over()
    if not state.dirty and state.step == info.open_step == info.committed_step + 1 and not whole_rows:
        # the step was taken, only its commit was lost with the driver: what the workers summed for its row is gone
        await scheduler.commit(info.open_step, batch_row(await scheduler.next_batch(info.open_step)))
        info = await scheduler.run_info()
    if not state.dirty and state.step == info.committed_step:
        log.info("workers go on", step=state.step)
        return _standing(state.step, info)
    usable = [step for step in checkpoints if step <= info.committed_step]
    loaded = await _load(workers, usable)
    if info.committed_step > INITIAL_STEP:  # version 0 is the model directory itself: the same bits in any life
        info = await scheduler.reloaded(loaded)
    if 0 < info.reference_step != loaded:
        await _publish_again(info.reference_step, scheduler, workers, info.lineage, store)
        await workers.load_checkpoint(loaded)
    log.info("workers loaded", step=loaded, replay=info.committed_step - loaded, lineage=info.lineage)
    return _standing(loaded, info)


async def _publish_again(
    step: int, scheduler: SchedulerCalls, workers: WorkerDispatch, lineage: int, store: str
) -> None:
    """The version that the reference stands at was lost with its store: it comes from its checkpoint, which is kept."""
    structlog.get_logger("driver").info("reference's version published again", step=step)
    await workers.load_checkpoint(step)
    await scheduler.publish(await workers.publish_weights(lineage, step, store=store))


def _standing(version: int, info: RunInfo) -> Standing:
    return Standing(version, info.committed_step, info.lineage, info.checkpoint_step, info.checkpoint_now)


async def _load(workers: WorkerDispatch, checkpoints: Sequence[int]) -> int:
    """The newest checkpoint that loads, or else the model the run began with."""
    log = structlog.get_logger("driver")
    for step in sorted(checkpoints, reverse=True):
        try:
            return (await workers.load_checkpoint(step)).step
        except RpcError as error:
            if error.code not in (ErrorCode.MISSING, ErrorCode.CONFLICT):
                raise
            log.warning("checkpoint refused, trying the one before", step=step, error=str(error))
            await workers.take_over()
    return (await workers.init_model()).step
