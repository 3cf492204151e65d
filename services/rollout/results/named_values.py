"""Turns named sample values other than the reward (parts of dict rewards, workflow metrics) into columns of
completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import structlog

from proto.tensors import Array

PART, WORKFLOW = "reward/part/", "workflow/"
MOST_NAMES = 64
"""Maximum number of names per process. Each name adds a column to every later task."""
NAME_CHARS = 64


class NamedValues:
    """Collects the names seen so far, so that all leases of a process get the same columns in the same order."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._refused = False
        self._log = structlog.get_logger("rollout")

    def columns(self, samples: Sequence[Mapping[str, float]]) -> dict[str, Array]:
        """Return a float32 [samples] column per name, with NaN for samples without a finite value of that name."""
        for values in samples:
            for name in values:
                self._learn(name)
        if not samples:
            return {}
        with np.errstate(over="ignore"):
            columns = {
                name: np.array([values.get(name, np.nan) for values in samples], np.float64).astype(np.float32)
                for name in self._names
            }
        return {name: np.where(np.isfinite(column), column, np.float32(np.nan)) for name, column in columns.items()}

    def _learn(self, name: str) -> None:
        if name in self._names:
            return
        if len(self._names) < MOST_NAMES and len(name) <= NAME_CHARS:
            self._names[name] = None
        elif not self._refused:
            self._refused = True
            limits = f"{MOST_NAMES} names of at most {NAME_CHARS} characters"
            self._log.warning("a name is left out of metrics.jsonl", name=name[:NAME_CHARS], limits=limits)


def named(parts: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
    """Return one sample's values under their names in metrics.jsonl."""
    return {f"{PART}{name}": value for name, value in parts.items()} | {
        f"{WORKFLOW}{name}": value for name, value in metrics.items()
    }
