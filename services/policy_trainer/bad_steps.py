"""Decides what happens if the data of an update is bad: stop the run, or skip the update and continue.

Every skipped update is logged, and a run whose steps no longer contain any update is stopped.
"""

from __future__ import annotations

from typing import Literal

import structlog

from proto.messages import ErrorCode
from shared.rpc.errors import RpcError

MAX_IN_A_ROW = 10
"""Number of consecutive steps without an update after which the run stops, because weights or rewards are permanently
broken."""
_SHOWN_TASKS = 64


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
