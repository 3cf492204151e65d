"""The history of metrics: one curve per name. If a run returns to an earlier step, new rows replace the old ones."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

MAX_POINTS = 4096
"""Maximum number of points of one curve. If a curve has more, every second point of its older half is removed."""
MAX_CURVES = 512
"""Maximum number of curves. Metrics beyond this number are not kept, because rewards and workflows may define any
number of metrics."""
RECENT_STEPS = 20
"""Number of steps from which the pace of the run is computed."""
STEP = "step"
Point = tuple[float, float]
"""(step, value) of a curve."""


@dataclass(frozen=True)
class Panel:
    """Curves that are shown in one chart."""

    title: str
    names: tuple[str, ...]
    """Names of metrics, or patterns such as `eval/*/reward`."""

    def matching(self, names: Iterable[str]) -> list[str]:
        """Return the known names that belong to this panel, in the order of `names`."""
        there = sorted(names)
        matching = [name for pattern in self.names for name in there if fnmatchcase(name, pattern)]
        return list(dict.fromkeys(matching))


PANELS = (
    Panel("reward", ("reward/mean", "eval/*/reward")),
    Panel("explained variance", ("critic/explained_variance",)),
    Panel("values and returns", ("critic/value_mean", "critic/return_mean")),
    Panel("KL", ("loss/kl", "reward/kl")),
    Panel("entropy", ("policy/entropy",)),
    Panel("clip fraction", ("policy/clip_fraction", "policy/masked_fraction", "critic/clip_fraction")),
    Panel("gradient norm", ("policy/grad_norm", "critic/grad_norm")),
    Panel("length", ("rollout/length_mean",)),
    Panel("mismatch", ("rollout/logprob_mismatch", "rollout/logprob_mismatch_engine", "rollout/logprob_mismatch_lag")),
    Panel("KL of engine and trainer", ("rollout/kl", "rollout/k3_kl")),
    Panel("effective sample size", ("rollout/is_eff_sample_size", "rollout/is_capped_fraction")),
    Panel("importance weights", ("rollout/is_max", "rollout/is_mean")),
    Panel("groups with equal rewards", ("rollout/zero_variance_fraction",)),
    Panel("truncated", ("rollout/truncated_fraction",)),
    Panel("staleness", ("rollout/staleness_mean", "rollout/staleness_max")),
    Panel("tokens/s", ("throughput/tokens_per_s",)),
    Panel("seconds per step", ("time/step", "time/wait_batch", "time/forward_backward", "time/critic", "time/publish")),
    Panel("loss", ("loss/policy", "critic/loss")),
)
"""The charts that show whether a run is learning and what limits it, most important first."""


class _Curve:
    """Steps and values of one metric, in ascending order of step."""

    __slots__ = ("steps", "values")

    def __init__(self, steps: Iterable[float] = (), values: Iterable[float] = ()) -> None:
        self.steps = array("d", steps)
        self.values = array("d", values)

    def add(self, step: float, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)
        if len(self.steps) > MAX_POINTS:
            half = MAX_POINTS // 2
            for column in (self.steps, self.values):
                column[:half] = column[:half:2]

    def cut(self, step: float) -> None:
        """Remove the points of `step` and of later steps."""
        at = bisect_left(self.steps, step)
        del self.steps[at:], self.values[at:]


class Curves:
    """All curves of one run."""

    def __init__(self) -> None:
        self._curves: dict[str, _Curve] = {}
        self.last: dict[str, float] = {}
        """The newest row, without values that are not finite."""
        self.taken_back = 0
        """Number of times that rows replaced earlier rows of the same steps."""

    def add(self, row: Mapping[str, float | None]) -> None:
        """Add a row. A row for a known step replaces that step and all later steps.

        Adding the newest row again changes nothing.
        """
        values = {name: value for name, value in row.items() if value is not None and math.isfinite(value)}
        step = values.get(STEP)
        if step is None or values == self.last:
            return
        if self.last and step <= self.last[STEP]:
            self.taken_back += 1
            for curve in self._curves.values():
                curve.cut(step)
        self.last = values
        for name, value in values.items():
            if name != STEP and (name in self._curves or len(self._curves) < MAX_CURVES):
                self._curves.setdefault(name, _Curve()).add(step, value)

    @property
    def names(self) -> list[str]:
        """Names of all metrics that have had a value."""
        return sorted(name for name, curve in self._curves.items() if curve.steps)

    def points(self, name: str) -> list[Point]:
        """Return the points of a metric in ascending order of step, or [] for an unknown name."""
        curve = self._curves.get(name)
        return list(zip(curve.steps, curve.values, strict=True)) if curve is not None else []

    def step_s(self) -> float | None:
        """Return the mean duration of the latest steps in seconds, or None if there is no step yet."""
        curve = self._curves.get("time/step")
        times = curve.values[-RECENT_STEPS:] if curve is not None else []
        return sum(times) / len(times) if times else None

    def columns(self, *, points: int) -> dict[str, tuple[array[float], array[float]]]:
        """Return steps and values of each curve, thinned to at most `points` points in total."""
        share = max(points // max(len(self._curves), 1), 2)
        columns = {}
        for name, curve in self._curves.items():
            skip = max(1, math.ceil(len(curve.steps) / share))
            # Counted from the end, so that the newest point is kept.
            columns[name] = (curve.steps[::-1][::skip][::-1], curve.values[::-1][::skip][::-1])
        return columns

    @classmethod
    def of_columns(
        cls, last: Mapping[str, float], columns: Mapping[str, tuple[Iterable[float], Iterable[float]]]
    ) -> Curves:
        """Return the curves of `columns`, whose newest row is `last`."""
        curves = cls()
        curves.last = dict(last)
        curves._curves = {name: _Curve(steps, values) for name, (steps, values) in columns.items()}
        return curves
