"""Holds the loaded model of a rank, with what is derived from its weights."""

from __future__ import annotations

from dataclasses import dataclass

from services.policy_trainer.worker.backend import Backend
from services.policy_trainer.worker.weights.publish import Canaries, EarlierVersions


@dataclass(frozen=True)
class Loaded:
    """The parts of a loaded model. Use them only on the compute thread."""

    backend: Backend
    canaries: Canaries
    earlier: EarlierVersions
    deterministic: bool

    def record(self, step: int) -> None:
        """Keep this version in deterministic mode. Every rank calls this as part of a collective."""
        if self.deterministic:
            self.earlier.record(step, self.backend.published(), self.canaries.current())
