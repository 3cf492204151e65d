"""Evaluations of policy versions: tasks outside admission, each sampled with one exact version and scored when done.

A failed sample (no answer in time, or a crash of the reward function or workflow) counts as a wrong answer with reward
0, as leaderboards count missing answers. A row that never reached the policy (broken, longer than the context) says
nothing about the policy and is dropped. The metrics row counts failed samples and dropped rows, so no failure is
hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from proto.tensors import Array
from services.scheduler.leases import Version
from services.scheduler.tasks import Task


@dataclass
class Evaluation:
    """The evaluation of one set on one version, with `samples` samples of each row."""

    name: str
    version: Version
    samples: int
    scores: list[float]
    """Mean reward of each row, NaN until the row is scored."""
    best: list[float]
    """Reward of the best sample of each row, NaN until the row is scored."""
    left: int
    """Number of tasks that are neither scored nor dropped."""
    waiting: list[str] = field(default_factory=list)
    """Ids of the tasks that are waiting for a lease."""
    dropped: int = 0
    failed: int = 0
    """Number of failed samples in scored rows. Each counts as a reward of 0."""

    @classmethod
    def of(cls, name: str, version: Version, samples: int, waiting: list[str]) -> Evaluation:
        """Return an evaluation in which no row has been scored yet, given its tasks, one for each row."""
        rows = len(waiting)
        return cls(name, version, samples, [math.nan] * rows, [math.nan] * rows, rows, waiting)

    def score(self, row: int, rewards: Array, failed: int) -> None:
        """Score a row: `rewards` holds the rewards of its N scored samples, float [N]. N + `failed` is at least 1."""
        samples = len(rewards) + failed
        self.scores[row] = float(np.sum(rewards, dtype=np.float64)) / samples
        self.best[row] = float(np.max(rewards, initial=0.0 if failed else -math.inf))
        self.failed += failed

    @property
    def rows_scored(self) -> int:
        return sum(not math.isnan(score) for score in self.scores)

    @property
    def accuracy(self) -> float:
        """Mean score of the scored rows, summed in row order; NaN if there are none."""
        return _mean(self.scores)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this set: scored rows, dropped rows and failed samples.

        If any row was scored, the metrics include the accuracy; otherwise it would be NaN, which cannot be written as
        JSON. With k > 1 samples per row, the metrics then also include avg@k, which equals the accuracy, and pass@k,
        the mean over rows of the best of the k rewards. For rewards of 0 and 1, pass@k is the estimator of Chen et al.
        2021 (arXiv 2107.03374) with n = k.
        """
        scored = self.rows_scored
        metrics = {
            f"eval/{self.name}/rows_scored": float(scored),
            f"eval/{self.name}/rows_dropped": float(self.dropped),
            f"eval/{self.name}/samples_failed": float(self.failed),
        }
        if not scored:
            return metrics
        metrics[f"eval/{self.name}/accuracy"] = self.accuracy
        if self.samples > 1:
            metrics[f"eval/{self.name}/avg@{self.samples}"] = self.accuracy
            metrics[f"eval/{self.name}/pass@{self.samples}"] = _mean(self.best)
        return metrics


def _mean(values: Iterable[float]) -> float:
    scored = [value for value in values if not math.isnan(value)]
    try:
        return math.fsum(scored) / len(scored) if scored else math.nan
    except (ValueError, OverflowError):  # infinities of both signs, or a sum beyond the range of a float
        return math.nan


@dataclass
class Evaluations:
    """Open evaluations, oldest first, and the results of completed ones."""

    open: dict[tuple[str, int], Evaluation] = field(default_factory=dict)
    """Open evaluations by set and by the step of the version."""
    done: dict[int, dict[str, dict[str, float]]] = field(default_factory=dict)
    """`Evaluation.metrics` of each completed evaluation, by the step of the version and by set."""

    def begun(self, name: str, step: int) -> bool:
        return (name, step) in self.open or name in self.done.get(step, {})

    def versions(self) -> set[Version]:
        return {evaluation.version for evaluation in self.open.values()}

    def of(self, task: Task) -> Evaluation:
        """Return the open evaluation to which a task belongs."""
        return self.open[task.split, task.epoch]

    def accuracy(self, step: int) -> dict[str, float]:
        """Return the accuracy of each set completed for version `step`; NaN where nothing was scored."""
        return {name: row.get(f"eval/{name}/accuracy", math.nan) for name, row in self.done.get(step, {}).items()}

    def row(self, step: int) -> dict[str, float]:
        """Return the values that the evaluations of version `step` add to its metrics row."""
        return {key: value for row in self.done.get(step, {}).values() for key, value in row.items()}

    def forget(self, step: int, kept: Iterable[int]) -> None:
        """Forget the results for versions before `step`, except the initial model and those in `kept`, whose
        checkpoints exist and may be compared again."""
        needed = {0, *kept}
        self.done = {version: rows for version, rows in self.done.items() if version >= step or version in needed}

    def take_back(self, step: int) -> list[str]:
        """Remove the evaluations of versions after `step`, and return those of their tasks that are waiting for a
        lease."""
        gone = [one for one in self.open.values() if one.version[1] > step]
        self.open = {key: one for key, one in self.open.items() if one.version[1] <= step}
        self.done = {version: rows for version, rows in self.done.items() if version <= step}
        return [task_id for one in gone for task_id in one.waiting]
