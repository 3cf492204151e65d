"""Evaluations of policy versions: tasks outside admission, each sampled with one exact version and scored when done.

A failed sample (no answer in time, or a crash of the reward function or workflow) counts as a wrong answer with reward
0, as leaderboards count missing answers. A row that never reached the policy (broken, longer than the context) says
nothing about the policy and is dropped. The metrics row counts failed samples and dropped rows, so no failure is
hidden.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from proto.tensors import Array
from services.scheduler.events import SaveEval, Tell, WriteRow
from services.scheduler.leases import Version
from services.scheduler.plan import due
from services.scheduler.tasks import Task

if TYPE_CHECKING:
    from services.scheduler.run_state import RunState


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
    def of(cls, name: str, version: Version, rows: int, samples: int) -> Evaluation:
        """Return an evaluation in which no row has been scored yet."""
        return cls(name, version, samples, [math.nan] * rows, [math.nan] * rows, rows)

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


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    try:
        return math.fsum(known) / len(known) if known else math.nan
    except (ValueError, OverflowError):  # infinities of both signs, or a sum beyond the range of a float
        return math.nan


@dataclass
class Evaluations:
    """Open evaluations, oldest first, and the results of completed ones."""

    open: dict[tuple[str, int], Evaluation] = field(default_factory=dict)
    """Open evaluations by set and by the step of the version."""
    done: dict[int, dict[str, dict[str, float]]] = field(default_factory=dict)
    """`Evaluation.metrics` of each completed evaluation, by the step of the version and by set."""

    def known(self, name: str, step: int) -> bool:
        return (name, step) in self.open or name in self.done.get(step, {})

    def versions(self) -> set[Version]:
        return {each.version for each in self.open.values()}

    def of(self, task: Task) -> Evaluation:
        """Return the open evaluation to which a task belongs."""
        return self.open[task.split, task.epoch]

    def accuracy(self, step: int) -> dict[str, float]:
        """Return the accuracy of each set completed for version `step`; NaN where nothing was scored."""
        return {name: found.get(f"eval/{name}/accuracy", math.nan) for name, found in self.done.get(step, {}).items()}

    def row(self, step: int) -> dict[str, float]:
        """Return the values that the evaluations of version `step` add to its metrics row."""
        return {key: value for found in self.done.get(step, {}).values() for key, value in found.items()}

    def forget(self, step: int, kept: Iterable[int]) -> None:
        """Forget the results for versions before `step`, except the initial model and those in `kept`, whose
        checkpoints exist and may be compared again."""
        needed = {0, *kept}
        self.done = {each: results for each, results in self.done.items() if each >= step or each in needed}

    def take_back(self, step: int) -> list[str]:
        """Remove the evaluations of versions after `step`, and return those of their tasks that are waiting for a
        lease."""
        gone = [one for one in self.open.values() if one.version[1] > step]
        self.open = {key: one for key, one in self.open.items() if one.version[1] <= step}
        self.done = {each: results for each, results in self.done.items() if each <= step}
        return [task_id for one in gone for task_id in one.waiting]


def score(run: RunState, task: Task, rewards: Array, failed: int) -> None:
    """Score an evaluation task. `rewards` holds the rewards of the task's scored samples."""
    one = run.evaluations.of(task)
    one.score(bisect_left(_rows(run, one), task.row), rewards, failed)
    end_task(run, one)


def next_rows(run: RunState, one: Evaluation, most: int) -> list[str]:
    """Find the first fixed block of `most` rows that has waiting tasks, and return these tasks in row order."""
    rows = _rows(run, one)
    place = {task_id: bisect_left(rows, int(task_id.rpartition("/")[2])) for task_id in one.waiting}
    block = min(place.values()) // most
    return sorted((each for each in place if place[each] // most == block), key=place.__getitem__)


def _rows(run: RunState, one: Evaluation) -> Sequence[int]:
    return next(each.rows for each in run.plan.evals if each.name == one.name)


def end_task(run: RunState, one: Evaluation) -> None:
    """Count a task that was scored or dropped. The last task completes the evaluation."""
    one.left -= 1
    if one.left:
        return
    step = one.version[1]
    del run.evaluations.open[one.name, step]
    run.evaluations.done.setdefault(step, {})[one.name] = one.metrics()
    if one.rows_scored:
        run.out.append(SaveEval(one.name, step, one.accuracy, one.rows_scored, one.dropped))
    run.out.append(Tell("eval", {"step": step, **one.metrics()}))
    write_rows(run)


def evaluated(run: RunState, step: int) -> dict[str, float] | None:
    """Return the accuracies of the evaluations due at version `step`, or None while some are missing."""
    done = run.evaluations.accuracy(step)
    wanted = [each.name for each in due(run.plan, run.config.steps, step)]
    return {name: done[name] for name in wanted} if all(name in done for name in wanted) else None


def write_rows(run: RunState) -> None:
    """Write metrics rows in step order, each as soon as the evaluations due at its version are complete."""
    while run.next_row in run.waiting_rows and evaluated(run, run.next_row) is not None:
        row = run.waiting_rows.pop(run.next_row)
        found = run.evaluations.row(run.next_row)
        run.out.append(WriteRow(run.next_row, {"step": 0.0, **row, **found} | {"step": float(run.next_row)}))
        run.next_row += 1
