"""What a step's batch must hold before anything is computed from it. Looks at per-sample values; changes nothing."""

from __future__ import annotations

import numpy as np

from proto.messages import ErrorCode, StepBatch
from proto.tensors import Array
from services.policy_trainer import batches
from shared.rpc.errors import RpcError
from shared.stages import REFERENCE_SCALAR


def check_reference(batch: StepBatch) -> None:
    """Raises RpcError(conflict) when tasks of one step were scored by different versions of the reference."""
    steps = batch.scalars.get(REFERENCE_SCALAR)
    if steps is not None and len(steps) and (steps != steps[0]).any():
        names = _tasks_of(batch, steps != steps[0])
        raise RpcError(
            ErrorCode.CONFLICT,
            f"step {batch.step} refused, weights untouched: the reference stood at version {steps[0]:g}, at another "
            f"one for {', '.join(names[:8])}",
            names=names,
        )


def check_rewards(batch: StepBatch, rewards: Array) -> None:
    """Raises RpcError(bad_data) naming the tasks with a reward that is not finite, before anything is computed.

    `rewards` float [samples]: the batch's own, or what shaping has made of them.
    """
    wrong = ~np.isfinite(rewards)
    if wrong.any():
        names = _tasks_of(batch, wrong)
        raise RpcError(
            ErrorCode.BAD_DATA,
            f"step {batch.step} refused, weights untouched: {int(wrong.sum())} rewards are not finite, in tasks "
            f"{', '.join(names[:8])}; make the reward function return a finite number",
            names=names,
        )


def _tasks_of(batch: StepBatch, samples: Array) -> list[str]:
    """The tasks that have one of `samples`, bool [samples]."""
    groups = batches.group_of_sample(batch.batch)
    return [batch.batch.tasks[index].task_id for index in np.unique(groups[samples])]
