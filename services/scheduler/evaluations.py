"""Evaluations of policy versions: tasks outside admission, each sampled with one exact version and scored when done.

A failed sample (no answer in time, or a crash of the reward function or workflow) counts as a wrong answer with reward
0, as leaderboards count missing answers. A row that never reached the policy (broken, longer than the context) says
nothing about the policy and is dropped. The metrics row counts failed samples and dropped rows, so no failure is
hidden.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from proto.tensors import Array
from services.scheduler.leases import Version
from services.scheduler.tasks import Task
from shared.evaluation import ACCURACY, PART, REWARD, draws
from shared.stages import REWARD_PART


@cache
def _shares(samples: int, k: int) -> tuple[float, ...]:
    """Return the probability of each sample from the k-th lowest on to be the best of k of `samples` samples that are
    drawn without replacement."""
    total = math.comb(samples, k)
    return tuple(math.comb(lower, k - 1) / total for lower in range(k - 1, samples))


def best_of(k: int, rewards: Sequence[float]) -> float:
    """Return the expected best of `k` of the rewards, which are in ascending order: pass@k, without bias.

    With n rewards r_1 <= ... <= r_n it is the sum of r_i C(i - 1, k - 1) / C(n, k), the best of k averaged over all
    subsets. For rewards of 0 and 1, c of them 1, it is 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374,
    equation 1). With fewer than k rewards, it is the best of all.
    """
    k = min(k, len(rewards))
    return math.fsum(map(operator.mul, _shares(len(rewards), k), rewards[k - 1 :]))


@dataclass
class Evaluation:
    """The evaluation of one set on one version, with `samples` samples of each row."""

    name: str
    version: Version
    samples: int
    rows: int
    left: int
    """Number of tasks that are neither scored nor dropped."""
    values: dict[str, list[float]] = field(default_factory=dict)
    """By the last part of a metric's name, the value of each row, NaN until the row has one."""
    waiting: list[str] = field(default_factory=list)
    """Ids of the tasks that are waiting for a lease."""
    dropped: int = 0
    failed: int = 0
    """Number of failed samples in scored rows. Each counts as a reward of 0."""
    graded: bool = False
    """Whether a reward was neither 0 nor 1, so that the mean reward is no accuracy."""

    @classmethod
    def of(cls, name: str, version: Version, samples: int, waiting: list[str]) -> Evaluation:
        """Return an evaluation in which no row has been scored yet, given its tasks, one for each row."""
        return cls(name, version, samples, len(waiting), len(waiting), waiting=waiting)

    def score(self, row: int, scalars: Mapping[str, Array], failed: int) -> None:
        """Score a row: `scalars` holds the rewards of its N scored samples and their named rewards, float [N] each. N +
        `failed` is at least 1. A named reward is NaN for a sample that has none."""
        rewards = np.sort(np.append(scalars[REWARD].astype(np.float64), np.zeros(failed))).tolist()
        self.graded |= any(reward not in (0.0, 1.0) for reward in rewards)
        self._put(REWARD, row, _mean(rewards))
        for k in draws(self.samples):
            self._put(f"pass@{k}", row, best_of(k, rewards))
        for name, column in scalars.items():
            if name.startswith(REWARD_PART) and len(given := column[np.isfinite(column)]):
                self._put(f"{PART}{name.removeprefix(REWARD_PART)}", row, _mean([*given.tolist(), *[0.0] * failed]))
        self.failed += failed

    def _put(self, name: str, row: int, value: float) -> None:
        self.values.setdefault(name, [math.nan] * self.rows)[row] = value

    @property
    def rows_scored(self) -> int:
        return sum(not math.isnan(score) for score in self.values.get(REWARD, ()))

    def _complete(self, name: str) -> bool:
        """Whether every scored row has a value. Rows without a named reward count as if they were not part of the set;
        a row that an earlier release scored lacks some pass@k."""
        rows = sum(not math.isnan(value) for value in self.values[name])
        return name.startswith(PART) or rows == self.rows_scored

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this set: scored rows, dropped rows and failed samples.

        If any row was scored, the metrics include the mean reward; otherwise it would be NaN, which cannot be written
        as JSON. It is also the accuracy if every reward is 0 or 1. With n > 1 samples per row, the metrics then also
        include avg@n, which equals the mean reward, and pass@k (`best_of`) for each k of `draws`. Means over rows are
        summed in row order.
        """
        scored = self.rows_scored
        found: dict[str, float] = {
            "rows_scored": float(scored),
            "rows_dropped": float(self.dropped),
            "samples_failed": float(self.failed),
        }
        if scored:
            found |= {name: _mean(self.values[name]) for name in sorted(self.values) if self._complete(name)}
            found |= {} if self.graded else {ACCURACY: found[REWARD]}
            found |= {f"avg@{self.samples}": found[REWARD]} if self.samples > 1 else {}
        return {f"eval/{self.name}/{name}": value for name, value in found.items()}


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

    def rewards(self, step: int) -> dict[str, float]:
        """Return the mean reward of each set completed for version `step`; NaN where nothing was scored."""
        return {name: row.get(f"eval/{name}/{REWARD}", math.nan) for name, row in self.done.get(step, {}).items()}

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
