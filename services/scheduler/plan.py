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

from shared.stages import ROLLOUT, Stage


@dataclass(frozen=True)
class EvalPlan:
    """One evaluation set: its row indices, the samples per row, and the interval `every` in versions."""

    name: str
    rows: Sequence[int]
    samples: int
    every: int


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
        )
        digest.update(repr(head).encode())
        for rows in (self.rows, *(planned.rows for planned in self.evals)):
            digest.update(np.asarray(rows, dtype="<i8").tobytes() + b"|")
        return digest.hexdigest()


class EpochOrder:
    """The endless sequence of training rows: every usable row once per epoch, in a different order in each epoch.

    If `shuffle` is true, the order of an epoch is a permutation drawn from Philox with key (seed, epoch), so it can be
    computed without the epochs before it.
    """

    def __init__(self, plan: Plan) -> None:
        if not len(plan.rows):
            raise ValueError("the training set has no usable row")
        self._rows: npt.NDArray[np.int64] = np.asarray(plan.rows, dtype=np.int64)
        self._seed = plan.seed
        self._shuffle = plan.shuffle
        self._epoch = -1
        self._order = self._rows

    def at(self, position: int) -> tuple[int, int]:
        """Return `(epoch, row index)` of the task at `position` in the run, counted from 0."""
        epoch, [row] = self.some(position, 1)
        return epoch, row

    def some(self, position: int, most: int) -> tuple[int, list[int]]:
        """Return the epoch and the row indices of up to `most` tasks from `position`, all from one epoch."""
        epoch, offset = divmod(position, len(self._rows))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._rows
            if self._shuffle:
                key = np.array([self._seed, epoch], dtype=np.uint64)
                self._order = np.random.Generator(np.random.Philox(key=key)).permutation(self._rows)
        rows: list[int] = self._order[offset : offset + most].tolist()
        return epoch, rows


def due(plan: Plan, steps: int, version: int) -> Iterator[EvalPlan]:
    """Yield the evaluation sets that are due at version `version` in a run of `steps` steps."""
    for planned in plan.evals:
        if version % planned.every == 0 or version == steps:
            yield planned


def stage_index(plan: Plan, name: str) -> int:
    """Return the position of a stage in the plan's graph, or -1 for an unknown name."""
    return next((i for i, stage in enumerate(plan.stages) if stage.name == name), -1)
