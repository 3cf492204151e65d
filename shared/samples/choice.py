"""Chooses the tasks whose samples are recorded. Every process computes the choice on its own, without negotiation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import xxhash

from shared.stages import TRAIN

if TYPE_CHECKING:
    from shared.topology import Topology


class Choice(msgspec.Struct, frozen=True):
    """Chooses all evaluation tasks and a fraction of the training tasks. Whether a task is chosen depends only on its
    id.

    Of the `tasks_per_step` tasks of a step, about `per_step` are thus chosen.
    """

    every: int
    per_step: int
    tasks_per_step: int

    @classmethod
    def of(cls, topology: Topology) -> Choice | None:
        """Return the choice for a topology, or None if no samples are recorded."""
        samples = topology.services.monitor.samples
        if samples is None:
            return None
        return cls(samples.every, samples.per_step, topology.algorithm.tasks_per_step)

    def takes(self, task_id: str) -> bool:
        """Return whether the samples of a task can be recorded.

        If so, the rollout also puts their text into the store.
        """
        if not task_id.startswith(f"{TRAIN}/"):
            return True
        return xxhash.xxh3_64_intdigest(task_id.encode()) % self.tasks_per_step < self.per_step

    def takes_step(self, step: int) -> bool:
        """Return whether the samples of a training step are recorded."""
        return step % self.every == 0
