"""Keeps the rows of metrics.jsonl as detectors see them: the first values and the latest values of each metric.

The size of the history does not grow with the run.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

FIRST = 10
"""Number of values, starting with the first, that are kept as a metric's initial level."""
LAST = 64
"""Number of latest values of a metric that are kept."""
EVALUATIONS = 64
"""Number of latest evaluations of a set that are kept."""
MAX_NAMES = 500
"""Maximum number of metrics. Users may choose many names; metrics beyond the maximum are not watched."""
MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution, divided by its median absolute deviation."""
EVAL = "eval/"
MEANS = ("reward", "accuracy")
"""Names of the mean reward of an evaluation, the preferred one first. Rows of earlier releases have only the last."""


@dataclass(frozen=True)
class SetResult:
    """The result of one evaluation of a set."""

    step: int
    score: float
    """Mean reward."""
    rows: float
    """Number of rows that were scored."""
    reward: float | None
    """Median training reward of the latest `FIRST` steps, or None if there have been fewer."""


class RowHistory:
    """The first and the latest values of every metric, over the rows that contain the metric."""

    def __init__(self) -> None:
        self.step = 0
        self.rows = 0
        """Number of training rows."""
        self.not_finite: list[str] = []
        """Names of the metrics that are NaN or infinite in the newest row."""
        self.evaluations: dict[str, deque[SetResult]] = {}
        self._first: dict[str, list[float]] = {}
        self._last: dict[str, deque[float]] = {}

    def add(self, row: Mapping[str, float | None]) -> None:
        """Add the next row. A value of None stands for NaN or infinity, which JSON cannot represent."""
        step = row.get("step")
        self.step = int(step) if step is not None else self.step
        if "time/step" in row:
            self.rows += 1
            self.not_finite = [name for name, value in row.items() if value is None]
            for name, value in row.items():
                if value is not None:
                    self._add(name, float(value))
        for name, value in row.items():
            evaluated, _, kind = name.removeprefix(EVAL).partition("/")
            preferred = next((mean for mean in MEANS if f"{EVAL}{evaluated}/{mean}" in row), "")
            if name.startswith(EVAL) and kind == preferred and value is not None:
                self._add_evaluation(evaluated, value, row)

    def _add(self, name: str, value: float) -> None:
        last = self._last.get(name)
        if last is None:
            if len(self._last) >= MAX_NAMES:
                return
            last = self._last[name] = deque(maxlen=LAST)
            self._first[name] = []
        last.append(value)
        if len(self._first[name]) < FIRST:
            self._first[name].append(value)

    def _add_evaluation(self, name: str, value: float, row: Mapping[str, float | None]) -> None:
        if name not in self.evaluations and len(self.evaluations) >= MAX_NAMES:
            return
        rewards = self.last("reward/mean", FIRST)
        reward = median(rewards) if rewards else None
        result = SetResult(self.step, value, row.get(f"{EVAL}{name}/rows_scored") or 1.0, reward)
        self.evaluations.setdefault(name, deque(maxlen=EVALUATIONS)).append(result)

    def names(self, prefix: str) -> list[str]:
        """Return the names of the metrics with this prefix."""
        return [name for name in self._last if name.startswith(prefix)]

    def first(self, name: str) -> list[float]:
        """Return the first `FIRST` values of a metric, or all of them if there are fewer."""
        return self._first.get(name, [])

    def last(self, name: str, count: int) -> list[float]:
        """Return the latest `count` values of a metric, oldest first, or [] if the metric has fewer."""
        values = self._last.get(name)
        return list(values)[-count:] if values is not None and len(values) >= count else []


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def noise(values: list[float]) -> float:
    """Return a robust standard deviation of a series around its trend, computed from the differences between
    neighbours.

    The difference between two independent values has twice the variance of either.
    """
    steps = [abs(b - a) for a, b in itertools.pairwise(values)]
    return MAD_TO_SIGMA * statistics.median(steps) / 2**0.5 if steps else 0.0


def error_of_median(values: list[float], count: int) -> float:
    """Return the standard error of the median of `count` values that have the same noise as `values`."""
    return 1.2533 * noise(values) / math.sqrt(count)
