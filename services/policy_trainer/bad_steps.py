"""What becomes of an update whose data is bad: the run stops, or goes on without it. Must never let one pass unseen,
nor let a run go on that trains on nothing any more.
"""

from __future__ import annotations

from typing import Literal

import structlog

from proto.messages import ErrorCode
from shared.rpc.errors import RpcError

MAX_IN_A_ROW = 10
"""Steps without a single update, after which skipping is no remedy: the weights or the reward are broken for good."""
_SHOWN_TASKS = 64


class BadSteps:
    """The policy of one driver life (`run.on_bad_step`)."""

    def __init__(self, policy: Literal["stop", "skip"]) -> None:
        self._policy = policy
        self._in_a_row = 0
        self._log = structlog.get_logger("driver")

    def skip(self, step: int, error: RpcError) -> None:
        """Say what is skipped and why. Raises `error` when the run has to stop, or it tells of something else."""
        if error.code != ErrorCode.BAD_DATA:
            raise error
        if self._policy == "stop":
            raise RpcError(error.code, f"{error}; with run.on_bad_step: skip it is left out", names=error.names)
        self._log.warning("update skipped", step=step, cause=str(error), tasks=error.names[:_SHOWN_TASKS])

    def ended(self, step: int, updates: int) -> None:
        """Step `step` is over, with so many updates. Raises RpcError(bad_data) after MAX_IN_A_ROW steps without one."""
        self._in_a_row = 0 if updates else self._in_a_row + 1
        if self._in_a_row >= MAX_IN_A_ROW:
            raise RpcError(
                ErrorCode.BAD_DATA,
                f"step {step}: {self._in_a_row} steps in a row were skipped as bad, the causes are in the log of "
                "policy-trainer; go back to a checkpoint from before them, or mend reward, loss or optimizer.lr",
            )
