"""Evaluations of policy versions: tasks outside admission, each sampled with one exact version and scored when done.

A failed sample (no answer in time, a reward function or workflow that crashed) counts as a wrong answer with reward 0,
as leaderboards count missing answers. A row that never reached the policy (broken, longer than the context) says
nothing about it and is dropped. The metrics row counts both, so no failure is hidden.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from typing import Any

import numpy as np

from proto.tensors import Array
from services.scheduler.versions import Version


class Evaluation:
    """The evaluation of one set on one version.

    `scores` holds the mean reward of each row and `best` the reward of its best sample. Both are NaN for rows that are
    not scored.
    """

    def __init__(self, name: str, split: int, version: Version, rows: int, samples: int) -> None:
        self.name = name
        self.split = split
        self.version = version
        self.samples = samples
        self.scores = array("d", [math.nan]) * rows
        self.best = array("d", [math.nan]) * rows
        self.waiting: deque[int] = deque()
        """Slots of the tasks that wait for a lease."""
        self.left = rows
        """Number of tasks that are neither scored nor dropped."""
        self.dropped = 0
        self.failed = 0
        """Number of samples of scored rows that count as 0."""

    def score(self, row: int, rewards: Array, failed: int) -> None:
        """Score a row: `rewards` are those of its N scored samples, float [N]. N + `failed` is at least 1."""
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

        If any row was scored (JSON has no NaN), also the accuracy, and with k > 1 samples per row avg@k, which equals
        the accuracy, and pass@k, the mean over rows of the best of the k rewards. For rewards of 0 and 1 pass@k is the
        estimator of Chen et al. 2021 (arXiv 2107.03374) with n = k.
        """
        scored = self.rows_scored
        found = {
            f"eval/{self.name}/rows_scored": float(scored),
            f"eval/{self.name}/rows_dropped": float(self.dropped),
            f"eval/{self.name}/samples_failed": float(self.failed),
        }
        if not scored:
            return found
        found[f"eval/{self.name}/accuracy"] = self.accuracy
        if self.samples > 1:
            found[f"eval/{self.name}/avg@{self.samples}"] = self.accuracy
            found[f"eval/{self.name}/pass@{self.samples}"] = _mean(self.best)
        return found


def _mean(values: array[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    try:
        return math.fsum(known) / len(known) if known else math.nan
    except (ValueError, OverflowError):  # infinities of both signs, or a sum beyond the range of a float
        return math.nan


class Evaluations:
    """Open evaluations, oldest first, and the results of completed ones."""

    def __init__(self) -> None:
        self.open: dict[tuple[str, int], Evaluation] = {}
        self.done: dict[int, dict[str, dict[str, float]]] = {}
        """Version step -> set -> `Evaluation.metrics`."""

    def known(self, name: str, step: int) -> bool:
        return (name, step) in self.open or name in self.done.get(step, {})

    def named(self) -> set[Version]:
        return {each.version for each in self.open.values()}

    def finish(self, evaluation: Evaluation) -> None:
        step = evaluation.version[1]
        del self.open[evaluation.name, step]
        self.done.setdefault(step, {})[evaluation.name] = evaluation.metrics()

    def accuracy(self, step: int) -> dict[str, float]:
        """Return the accuracy of each set completed for version `step`; NaN where nothing was scored."""
        return {name: found.get(f"eval/{name}/accuracy", math.nan) for name, found in self.done.get(step, {}).items()}

    def row(self, step: int) -> dict[str, float]:
        """Return the part of the metrics row of version `step` that its evaluations contribute."""
        return {key: value for found in self.done.get(step, {}).values() for key, value in found.items()}

    def take_back(self, step: int) -> list[Evaluation]:
        """Remove the evaluations of versions after `step`, completed and open, and return the open ones."""
        gone = [one for one in self.open.values() if one.version[1] > step]
        for one in gone:
            del self.open[one.name, one.version[1]]
        for later in [each for each in self.done if each > step]:
            del self.done[later]
        return gone

    def dump(self) -> dict[str, Any]:
        return {
            "open": [
                [
                    *(e.name, e.split, e.version, e.samples, e.scores.tobytes(), e.best.tobytes()),
                    *(list(e.waiting), e.left, e.dropped, e.failed),
                ]
                for e in self.open.values()
            ],
            "done": [[step, results] for step, results in self.done.items()],
        }

    @classmethod
    def load(cls, data: dict[str, Any]) -> Evaluations:
        evaluations = cls()
        for name, split, version, samples, scores, best, waiting, left, dropped, failed in data["open"]:
            one = Evaluation(name, split, tuple(version), 0, samples)
            one.scores.frombytes(scores)
            one.best.frombytes(best)
            one.waiting = deque(waiting)
            one.left, one.dropped, one.failed = left, dropped, failed
            evaluations.open[name, version[1]] = one
        evaluations.done = {step: dict(results) for step, results in data["done"]}
        return evaluations
