"""Keeps the snapshots of one rank. A rank that cannot keep one continues to train without snapshots."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import structlog

from proto.errors import WireError
from proto.messages import ErrorCode, HeldSnapshot
from services.policy_trainer.worker.snapshots import Snapshots
from shared.rpc.errors import RpcError

if TYPE_CHECKING:
    from torch import Tensor


class SnapshotKeeper:
    """The snapshots of one rank, or none. All methods except `held` block, and none is called from two threads at
    once."""

    def __init__(self, snapshots: Snapshots | None) -> None:
        """`snapshots` is None if the topology asks for none."""
        self._snapshots = snapshots

    def held(self) -> list[HeldSnapshot]:
        """Return the snapshots that this rank can load."""
        return self._snapshots.held() if self._snapshots is not None else []

    def read(self, lineage: int, step: int) -> dict[str, Tensor]:
        """Verify a snapshot and return its tensors. Raises RpcError: missing if there is no such snapshot, or conflict
        if it is damaged."""
        if self._snapshots is None:
            raise RpcError(ErrorCode.MISSING, f"snapshot of step {step}: this rank keeps no snapshots")
        return self._snapshots.read(lineage, step)

    def take(self, lineage: int, step: int, state: Callable[[], Mapping[str, Tensor]]) -> float:
        """Keep a snapshot of the state after `step`, which `state` returns. If that fails, stop keeping snapshots.

        Return the processor time that this took, in seconds.
        """
        if self._snapshots is None:
            return 0.0
        began = time.thread_time()
        try:
            self._snapshots.take(lineage, step, state())
        except (OSError, WireError) as error:
            log = structlog.get_logger("worker")
            log.warning("snapshots turned off, so a killed trainer returns to its checkpoint", error=str(error))
            self._snapshots.remove()
            self._snapshots = None
        return time.thread_time() - began

    def keep_only(self, lineage: int, step: int) -> None:
        """Discard all snapshots except that of `step` under `lineage`, if there is one."""
        if self._snapshots is not None:
            self._snapshots.keep_only(lineage, step)
