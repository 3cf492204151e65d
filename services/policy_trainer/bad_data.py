"""Refuses a step whose per-sample values are bad, and decides what happens then: stop the run, or skip the update.

Every skipped update is logged, and a run whose steps no longer contain any update is stopped.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import structlog

from proto.messages import ErrorCode
from proto.tensors import Array
from services.policy_trainer.scheduler_calls import StepTasks
from shared.rpc.errors import RpcError
from shared.stages import REFERENCE_SCALAR

MAX_IN_A_ROW = 10
"""Number of consecutive steps without an update after which the run stops, because weights or rewards are permanently
broken."""
_SHOWN_TASKS = 64
_REMEDIES = {
    "rewards": "make the reward function return a finite number",
    "advantages": "check algorithm.advantage.name and the size of the rewards",
    "scores": "look for extreme log-probs or values, or lower optimizer.lr",
}


class BadSteps:
    """Applies `run.on_bad_step` to the bad steps of one driver incarnation."""

    def __init__(self, policy: Literal["stop", "skip"]) -> None:
        self._policy = policy
        self._in_a_row = 0
        self._log = structlog.get_logger("driver")

    def skip(self, step: int, error: RpcError) -> None:
        """Log which update is skipped and why. Raises `error` if the run must stop or the error is not BAD_DATA."""
        if error.code != ErrorCode.BAD_DATA:
            raise error
        if self._policy == "stop":
            raise RpcError(error.code, f"{error}; to skip such updates, set run.on_bad_step: skip", names=error.names)
        self._log.warning("update skipped", step=step, cause=str(error), tasks=error.names[:_SHOWN_TASKS])

    def ended(self, step: int, updates: int) -> None:
        """Record the end of a step with `updates` updates.

        Raises RpcError(bad_data) after MAX_IN_A_ROW consecutive steps without updates.
        """
        self._in_a_row = 0 if updates else self._in_a_row + 1
        if self._in_a_row >= MAX_IN_A_ROW:
            raise RpcError(
                ErrorCode.BAD_DATA,
                f"step {step}: {self._in_a_row} steps in a row were skipped as bad; the log of policy-trainer shows "
                "the causes; go back to a checkpoint from before these steps, or fix the reward, the loss or "
                "optimizer.lr",
            )


def check_batch(batch: StepTasks) -> None:
    """Check a step's batch before anything is computed from it.

    Raises RpcError: bad_data if it has no tasks (with `run.deterministic`, dropped tasks are not replaced) or a reward
    is not finite, conflict if its tasks were scored by different reference versions.
    """
    refused, scalars = f"step {batch.answer.step} refused, weights untouched", batch.tasks.scalars
    if not len(batch.tasks):
        raise RpcError(
            ErrorCode.BAD_DATA,
            f"{refused}: all {batch.answer.dropped} of its tasks were dropped, and with run.deterministic they are not "
            "replaced; the log of the rollout service shows the reasons",
        )
    check_finite(batch, "rewards", scalars["reward"])
    steps = scalars.get(REFERENCE_SCALAR)
    if steps is not None and (steps != steps[0]).any():
        names = _tasks_of(batch, steps != steps[0])
        raise RpcError(
            ErrorCode.CONFLICT,
            f"{refused}: the reference was at version {steps[0]:g}, but at a different one for {', '.join(names[:8])}",
            names=names,
        )


def check_finite(batch: StepTasks, what: Literal["rewards", "advantages", "scores"], values: Array) -> None:
    """Raise RpcError(bad_data) naming the tasks of `batch` that have a non-finite value in `values`, float [samples].

    `what` the values are selects the remedy in the message.
    """
    wrong = ~np.isfinite(values)
    if wrong.any():
        names = _tasks_of(batch, wrong)
        raise RpcError(
            ErrorCode.BAD_DATA,
            f"step {batch.answer.step} refused, weights untouched: {int(wrong.sum())} {what} are not finite, in tasks "
            f"{', '.join(names[:8])}; {_REMEDIES[what]}",
            names=names,
        )


def _tasks_of(batch: StepTasks, samples: Array) -> list[str]:
    """Return the ids of the tasks with at least one sample selected by the mask `samples`, bool [samples]."""
    return [batch.tasks.task_ids[index] for index in np.unique(batch.tasks.groups[samples])]
