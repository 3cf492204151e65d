"""Which finished tasks a step may take: the oldest ones in order, or with `consume: completion` the first finished, as
far as their oldest token is not too old. Pure. Must never drop a task that another service holds.

In admission order leases alone bound the staleness (their oldest version follows from the step). In order of
completion a task may be overtaken, so every finished task is checked before each step that it might go into.
"""

from __future__ import annotations

import numpy as np

from proto.messages import DropReason, ErrorCode
from proto.tensors import Array
from services.scheduler import scalars
from services.scheduler.granting import Granting
from shared.rpc.errors import RpcError

HOPELESS_STEPS, HOPELESS_TASKS = 10, 256
"""So many steps' tasks, and no fewer tasks, dropped in a row: putting others in their place leads nowhere."""


class Freshness(Granting):
    """What `complete` and `form_batch` need to know of it."""

    def takeable(self) -> int:
        """How many tasks the next step could take."""
        if self.plan.deterministic:
            return self.plan.tasks_per_step if self._step_is_settled(self.batched_step + 1) else 0
        return self.window.ready_anywhere if self.plan.by_completion else self.window.ready

    def check_hope(self) -> None:
        """Raises RpcError(bad_data) when the next step waits for tasks and all that come are dropped.

        Not in deterministic mode, where nothing takes the place of a dropped task: its steps are short of it.
        """
        most = max(HOPELESS_STEPS * self.plan.tasks_per_step, HOPELESS_TASKS)
        if self.dropped_in_a_row < most or self.plan.deterministic or self.takeable() >= self.plan.tasks_per_step:
            return
        raise RpcError(
            ErrorCode.BAD_DATA,
            f"step {self.batched_step + 1}: {self.dropped_in_a_row} tasks in a row were dropped, the last was "
            f"{self.last_drop}; mend the reward function, the workflow or the data, then resume",
        )

    def take(self) -> list[int]:
        """Remove the next step's tasks from the window; needs as many `takeable`."""
        if self.plan.by_completion:
            return self.window.take_completed(self.plan.tasks_per_step)
        if self.plan.deterministic:
            return self.window.take_through((self.batched_step + 1) * self.plan.tasks_per_step)
        return self.window.take(self.plan.tasks_per_step)

    def drop_if_stale(self, slot: int) -> bool:
        """Before a task is ready: whether it was dropped, because the next step may not train on it any more."""
        if not self.plan.by_completion:
            return False
        self.checked += 1
        oldest = self._oldest_version(slot)
        staleness = self.batched_step - oldest
        if staleness <= self.plan.staleness:
            return False
        self.stale += 1
        text = f"oldest token of version {oldest}: {staleness} behind, staleness is {self.plan.staleness}"
        self._drop(slot, DropReason.STALE, text)
        return True

    def drop_stale(self) -> None:
        """After a step was batched: finished tasks that the step after it may not train on."""
        if not self.plan.by_completion:
            return
        for admission in self.window.ready_members():
            slot = self.window.slot(admission)
            self.window.mark_unready(admission)
            if not self.drop_if_stale(slot):
                self.window.mark_ready(admission)

    def _oldest_version(self, slot: int) -> int:
        """Of the task's tokens; too old for any step when its result does not tell."""
        versions = self._versions(slot, "version_min")
        return int(versions.min()) if len(versions) else -1 - self.plan.staleness

    def _versions(self, slot: int, column: str) -> Array:
        """int32 [samples] of an accepted rollout; [0] when its result does not tell."""
        data = self.tasks.scalars[slot] or b"\0\0"
        layout = self.layouts[int.from_bytes(data[:2], "little")] if self.layouts else ()
        versions = scalars.column(layout, column, self.tasks.samples[slot], data[2:])
        return np.zeros(0, np.int32) if versions is None else versions
