"""The plan of a run as plain numbers: the order of rows, tasks per step, evaluations, and worst-case bytes.

The module is pure. `planning.py` builds the plan from the topology and the data sources. A `Plan` is constant within a
run, because task ids and the journal depend on it. Settings that a resumed run may change are in `events.Configure`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.scheduler.turns import SourceTurns, Weights
from shared.stages import ROLLOUT, Stage


@dataclass(frozen=True)
class EvalPlan:
    """One evaluation set: its row indices, the samples per row, and the interval `every` in versions."""

    name: str
    rows: Sequence[int]
    samples: int
    every: int


@dataclass(frozen=True)
class SourcePlan:
    """One of several sources of the training set: its usable row indices, and its weights."""

    rows: Sequence[int]
    weights: Weights = ((0, 1.0),)


@dataclass(frozen=True)
class Plan:
    """The constant part of a run. `rows` are the usable row indices of the training set. Byte counts are
    worst cases."""

    run: str
    seed: int
    tasks_per_step: int
    group_size: int
    staleness: int
    shuffle: bool
    deterministic: bool
    rows: Sequence[int]
    sources: tuple[SourcePlan, ...] = ()
    """The sources to which `rows` belong, if there are several."""
    block_tasks: int = 1
    filter_limit: int = 0
    """Maximum number of tasks per step that are dropped because their rewards are equal. 0: such tasks are trained
    on."""
    by_completion: bool = False
    """Whether a step takes the tasks that finish first instead of those admitted first."""
    evals: tuple[EvalPlan, ...] = ()
    stages: tuple[Stage, ...] = (ROLLOUT,)
    task_bytes: int = 0
    """Maximum bytes of one live training task. 0: no room is reserved."""
    overhead_bytes: int = 0
    """Maximum bytes that a store adds to the shards of a task. Accepted results do not include them."""
    unleased_token_bytes: int = 0
    """Bytes that the trainer adds per token. Accepted results do not include them."""
    replay_bytes: int = 0
    """Bytes to reserve for the additional shards of a step that is replayed."""
    record_bytes: int = 0
    """Bytes to reserve for the shards that are put into the store and kept for the recorder."""
    weight_versions: int = 3
    weight_bytes: int = 0
    """Bytes of one weight version. Room is reserved for `weight_versions` versions of this size, or of the size of the
    published version if that is larger."""
    reference_every: int = 0
    """Steps between refreshes of the reference from the policy. 0: it remains the initial model."""

    def reference_version(self, step: int) -> int:
        """Return the step of the policy version that serves as the reference for `step`, or 0 for the initial model."""
        return (step - 1) // self.reference_every * self.reference_every if self.reference_every else 0

    def version_of_model(self, stage: int, step: int) -> int:
        """Return the step of the version with which `stage` scores the tasks of `step`, or 0 for its own model."""
        return self.reference_version(step) if self.stages[stage].refreshed else 0

    @property
    def reward_stage(self) -> int:
        """The stage after which rewards exist."""
        return max(number for number, stage in enumerate(self.stages) if stage.rewards)

    def eval_rows(self, name: str) -> Sequence[int]:
        """Return the row indices of an evaluation set."""
        return next(planned.rows for planned in self.evals if planned.name == name)

    @property
    def max_live(self) -> int:
        """Maximum number of live training tasks."""
        return (self.staleness + 1) * self.tasks_per_step

    @property
    def block_rows(self) -> int:
        """Number of rows in a rollout block in deterministic mode, else 0 (any number)."""
        return self.block_tasks * self.group_size if self.deterministic else 0

    def fingerprint(self) -> str:
        """Return a digest of everything that determines the task ids, their order and the replay of a journal."""
        digest = hashlib.blake2b(digest_size=16)
        head = (
            self.seed,
            self.tasks_per_step,
            self.group_size,
            self.staleness,
            self.shuffle,
            self.deterministic,
            self.block_tasks,
            self.filter_limit,
            self.by_completion,
            [stage.name for stage in self.stages],
            [(planned.name, planned.samples, planned.every) for planned in self.evals],
            *([self.reference_every] if self.reference_every else []),
            *([[(len(source.rows), source.weights) for source in self.sources]] if self.sources else []),
        )
        digest.update(repr(head).encode())
        for rows in (self.rows, *(planned.rows for planned in self.evals)):
            digest.update(np.asarray(rows, dtype="<i8").tobytes() + b"|")
        return digest.hexdigest()


class EpochOrder:
    """The endless sequence of training rows. Each source gives every usable row once per epoch, in a different order in
    each epoch, and has epochs of its own. The sources take turns by their weights (`SourceTurns`).

    If `shuffle` is true, the order of an epoch is a permutation drawn from Philox with key (seed, epoch) and the
    source as the highest word of its counter, so it can be computed without the epochs before it.
    """

    def __init__(self, plan: Plan) -> None:
        sources = plan.sources or (SourcePlan(plan.rows),)
        if not all(len(source.rows) for source in sources):
            raise ValueError("the training set has no usable row")
        self._turns = SourceTurns([source.weights for source in sources])
        self._rows = [np.asarray(source.rows, dtype=np.int64) for source in sources]
        self._seed = plan.seed
        self._shuffle = plan.shuffle
        self._orders = [(-1, rows) for rows in self._rows]
        """For each source, the epoch that was used last, and its order."""

    def at(self, position: int) -> tuple[int, int]:
        """Return `(epoch, row index)` of the task at `position` in the run, counted from 0."""
        [place] = self.some(position, 1)
        return place

    def some(self, position: int, count: int) -> list[tuple[int, int]]:
        """Return `(epoch, row index)` of `count` tasks from `position`."""
        sources, tasks = self._turns.some(position, count)
        epochs, rows = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for source, own in enumerate(self._rows):
            places = np.flatnonzero(sources == source)
            epoch, offset = np.divmod(tasks[places], len(own))
            ends = np.flatnonzero(np.diff(epoch)) + 1
            for part in np.split(np.arange(len(places)), ends) if len(places) else ():
                rows[places[part]] = self._order(source, int(epoch[part[0]]))[offset[part]]
            epochs[places] = epoch
        return list(zip(epochs.tolist(), rows.tolist(), strict=True))

    def _order(self, source: int, epoch: int) -> npt.NDArray[np.int64]:
        if self._orders[source][0] != epoch:
            order = self._rows[source]
            if self._shuffle:
                key, counter = np.array([self._seed, epoch], np.uint64), np.array([0, 0, 0, source], np.uint64)
                order = np.random.Generator(np.random.Philox(key=key, counter=counter)).permutation(order)
            self._orders[source] = (epoch, order)
        return self._orders[source][1]


def due(plan: Plan, steps: int, version: int) -> Iterator[EvalPlan]:
    """Yield the evaluation sets that are due at version `version` in a run of `steps` steps."""
    for planned in plan.evals:
        if version % planned.every == 0 or version == steps:
            yield planned


def stage_index(plan: Plan, name: str) -> int:
    """Return the position of a stage in the plan's graph, or -1 for an unknown name."""
    return next((i for i, stage in enumerate(plan.stages) if stage.name == name), -1)
