"""Selects the finished tasks of a step: the oldest in order, or with `consume: completion` the first finished. Pure.

In admission order leases alone bound the staleness, because their oldest version follows from the step. In order of
completion a task may be overtaken by others, so the oldest token of every finished task is checked before each step
that might take it. Only finished tasks are dropped as stale, so none of them is held by another service.
"""

from __future__ import annotations

import numpy as np

from proto.messages import DropReason, ErrorCode
from proto.tensors import Array
from services.scheduler import scalars
from services.scheduler.granting import Granting
from shared.rpc.errors import RpcError

HOPELESS_STEPS, HOPELESS_TASKS = 10, 256
"""Maximum number of consecutive drops, in steps and in tasks (the larger one counts), before the run is given up."""


class Freshness(Granting):
    """Selection and staleness of finished tasks, for the verbs `complete` and `form_batch`."""

    def takeable(self) -> int:
        """Return the number of tasks that the next step could take."""
        if self.plan.deterministic:
            return self.plan.tasks_per_step if self._step_is_settled(self.batched_step + 1) else 0
        return self.window.ready_anywhere if self.plan.by_completion else self.window.ready

    def check_hope(self) -> None:
        """Raises RpcError(bad_data) if the next step waits for tasks and too many in a row were dropped.

        Deterministic mode is exempt: dropped tasks are not replaced, so its steps do not wait for others.
        """
        most = max(HOPELESS_STEPS * self.plan.tasks_per_step, HOPELESS_TASKS)
        if self.dropped_in_a_row < most or self.plan.deterministic or self.takeable() >= self.plan.tasks_per_step:
            return
        raise RpcError(
            ErrorCode.BAD_DATA,
            f"step {self.batched_step + 1}: {self.dropped_in_a_row} tasks in a row were dropped, the last was "
            f"{self.last_drop}; fix the reward function, the workflow or the data, then resume",
        )

    def take(self) -> list[int]:
        """Remove the tasks of the next step from the window and return their slots. Requires enough takeable ones."""
        if self.plan.by_completion:
            return self.window.take_completed(self.plan.tasks_per_step)
        if self.plan.deterministic:
            return self.window.take_through((self.batched_step + 1) * self.plan.tasks_per_step)
        return self.window.take(self.plan.tasks_per_step)

    def drop_if_stale(self, slot: int) -> bool:
        """Drop a finished task that is too old for the next step, and return whether it was dropped."""
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
        """Drop the finished tasks that are too old for the next step. Called after each batch."""
        if not self.plan.by_completion:
            return
        for admission in self.window.ready_members():
            slot = self.window.slot(admission)
            self.window.mark_unready(admission)
            if not self.drop_if_stale(slot):
                self.window.mark_ready(admission)

    def _oldest_version(self, slot: int) -> int:
        """Return the oldest version of the task's tokens. A result without `version_min` is too old for any step."""
        versions = self._versions(slot, "version_min")
        return int(versions.min()) if len(versions) else -1 - self.plan.staleness

    def _versions(self, slot: int, column: str) -> Array:
        """Return a version column of an accepted rollout, int32 [samples], or an empty array if the result has none."""
        data = self.tasks.scalars[slot] or b"\0\0"
        layout = self.layouts[int.from_bytes(data[:2], "little")] if self.layouts else ()
        versions = scalars.column(layout, column, self.tasks.samples[slot], data[2:])
        return np.zeros(0, np.int32) if versions is None else versions
