"""Checks the per-sample values of a step's batch before anything is computed from them."""

from __future__ import annotations

import numpy as np

from proto.messages import ErrorCode
from proto.tensors import Array
from services.policy_trainer.scheduler_calls import StepTasks
from shared.rpc.errors import RpcError
from shared.stages import REFERENCE_SCALAR


def check_reference(batch: StepTasks) -> None:
    """Raise RpcError(conflict) if tasks of one step were scored by different reference versions."""
    steps = batch.tasks.scalars.get(REFERENCE_SCALAR)
    if steps is not None and len(steps) and (steps != steps[0]).any():
        names = _tasks_of(batch, steps != steps[0])
        raise RpcError(
            ErrorCode.CONFLICT,
            f"step {batch.answer.step} refused, weights untouched: the reference was at version {steps[0]:g}, but at "
            f"a different one for {', '.join(names[:8])}",
            names=names,
        )


def check_tasks(batch: StepTasks) -> None:
    """Raise RpcError(bad_data) if the batch has no tasks (with `run.deterministic`, dropped tasks are not
    replaced)."""
    if not len(batch.tasks):
        raise RpcError(
            ErrorCode.BAD_DATA,
            f"step {batch.answer.step} refused, weights untouched: all {batch.answer.dropped} of its tasks were "
            "dropped, and with run.deterministic they are not replaced; the log of the rollout service shows the "
            "reasons",
        )


def check_rewards(batch: StepTasks, rewards: Array) -> None:
    """Raise RpcError(bad_data) naming the tasks with a reward that is not finite.

    `rewards` float [samples] holds the rewards of the batch, before or after shaping.
    """
    _check_finite(batch, rewards, "rewards", "make the reward function return a finite number")


def check_advantages(batch: StepTasks, advantages: Array) -> None:
    """Raise RpcError(bad_data) naming the tasks that have a non-finite value in `advantages`, float [samples]."""
    remedy = "check algorithm.advantage.name and the size of the rewards"
    _check_finite(batch, advantages, "advantages", remedy)


def _check_finite(batch: StepTasks, values: Array, what: str, remedy: str) -> None:
    wrong = ~np.isfinite(values)
    if wrong.any():
        names = _tasks_of(batch, wrong)
        raise RpcError(
            ErrorCode.BAD_DATA,
            f"step {batch.answer.step} refused, weights untouched: {int(wrong.sum())} {what} are not finite, in tasks "
            f"{', '.join(names[:8])}; {remedy}",
            names=names,
        )


def _tasks_of(batch: StepTasks, samples: Array) -> list[str]:
    """Return the ids of the tasks with at least one sample selected by the mask `samples`, bool [samples]."""
    return [batch.tasks.task_ids[index] for index in np.unique(batch.tasks.groups[samples])]
