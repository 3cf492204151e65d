"""Where a driver begins: what the journal says against where the workers stand. The one place that decides a reload.

Workers are trusted when they stand at the committed step, or have finished the one journaled step. Anything else
(fresh, behind, half a step taken) is reloaded from a checkpoint and replays the journaled steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from proto.messages import ErrorCode
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


async def resume(scheduler: SchedulerCalls, workers: WorkerDispatch, checkpoints: Sequence[int]) -> Standing:
    """Bring workers and journal to agree. `checkpoints`: steps of those on disk, whichever were announced.

    Raises RpcError when another driver has taken over, or nothing can be loaded.
    """
    log = structlog.get_logger("driver")
    info = await scheduler.run_info()
    state = await workers.take_over()
    committed, lineage = info.committed_step, info.lineage
    if not state.dirty and state.step == info.open_step == committed + 1:
        # the step was taken, only its commit was lost with the driver: what the workers summed for its row is gone
        await scheduler.commit(info.open_step, batch_row(await scheduler.next_batch(info.open_step)))
        committed = info.open_step
    if not state.dirty and state.step == committed:
        log.info("workers go on", step=committed)
        return Standing(committed, committed, lineage, info.checkpoint_step)
    loaded = await _load(workers, [step for step in checkpoints if step <= committed])
    if committed > INITIAL_STEP:  # version 0 is the model directory itself: the same bits in any life
        lineage = (await scheduler.run_info(reload=True)).lineage
    log.info("workers loaded", step=loaded, replay=committed - loaded, lineage=lineage)
    return Standing(loaded, committed, lineage, info.checkpoint_step)


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
