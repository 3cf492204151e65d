"""What a run is going to do, as plain numbers: which rows in which order, how many a step, what is evaluated when.

Pure: the server fills it from the topology and the data sources (`planning.py`). What is in `Plan` never changes
within a run, because task ids and the journal depend on it; what a resumed run may change is in `events.Configure`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared.stages import Stage, train_graph


@dataclass(frozen=True)
class EvalPlan:
    """One evaluation set: `rows` are the indices that are asked, `samples` each, at every `every`-th version."""

    name: str
    rows: Sequence[int]
    samples: int
    every: int


@dataclass(frozen=True)
class Plan:
    """The fixed part of a run. `rows`: usable row indices of the training set; bytes are worst cases."""

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
    """Most tasks whose rewards are all equal that are dropped a step; 0: they are trained on."""
    by_completion: bool = False
    """A step takes the tasks that are finished first, not those admitted first."""
    evals: tuple[EvalPlan, ...] = ()
    stages: tuple[Stage, ...] = field(default_factory=lambda: train_graph(with_reference=False))
    task_bytes: int = 0
    """Room that one live train task may need at worst; 0: not reserved."""
    overhead_bytes: int = 0
    """What the store adds to a task's shards at worst ..."""
    unleased_token_bytes: int = 0
    """... and what the trainer adds for each token: no accepted result tells of these."""
    replay_bytes: int = 0
    """Room to keep free for what a step that is replayed holds besides."""
    weight_versions: int = 3
    weight_bytes: int = 0
    """Room to keep free for `weight_versions` versions of this size (of the published one, when that is larger)."""
    reference_every: int = 0
    """Steps between refreshes of the reference from the policy; 0: it stays the model the run began with."""

    placed_stores: int = 1
    """Stores that the topology places, from instance 0 on: they are started again for ever. Others have joined."""

    def reference_version(self, step: int) -> int:
        """The step of the policy version that all tasks of `step` are scored by; 0: the model the run began with."""
        return (step - 1) // self.reference_every * self.reference_every if self.reference_every else 0

    @property
    def max_live(self) -> int:
        """Admission: live train tasks stay at or below this."""
        return (self.staleness + 1) * self.tasks_per_step

    @property
    def block_rows(self) -> int:
        """Rows of a rollout block in deterministic mode; 0 for any."""
        return self.block_tasks * self.group_size if self.deterministic else 0

    def fingerprint(self) -> str:
        """Digest of everything that task ids, their order and the replay of a journal depend on."""
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
            [(each.name, each.samples, each.every) for each in self.evals],
            *([self.reference_every] if self.reference_every else []),
        )
        digest.update(repr(head).encode())
        for rows in (self.rows, *(each.rows for each in self.evals)):
            digest.update(np.asarray(rows, dtype="<i8").tobytes() + b"|")
        return digest.hexdigest()


class EpochOrder:
    """The endless sequence of training rows: every usable row once an epoch, in an order of its own.

    The order of an epoch is a permutation drawn from Philox with key (seed, epoch), so that it can be found again
    without the epochs before it.
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
        """`(epoch, row index)` of the `position`-th task of the run, from 0."""
        epoch, [row] = self.some(position, 1)
        return epoch, row

    def some(self, position: int, most: int) -> tuple[int, list[int]]:
        """Epoch and row indices of the tasks from the `position`-th on: up to `most`, of one epoch."""
        epoch, offset = divmod(position, len(self._rows))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._permuted(epoch)
        rows: list[int] = self._order[offset : offset + most].tolist()
        return epoch, rows

    def _permuted(self, epoch: int) -> npt.NDArray[np.int64]:
        rows = self._rows
        if self._shuffle:
            key = np.array([self._seed, epoch], dtype=np.uint64)
            rows = np.random.Generator(np.random.Philox(key=key)).permutation(rows)
        return rows


def due(plan: Plan, steps: int, version: int) -> Iterator[EvalPlan]:
    """The evaluation sets that version `version` of a run of `steps` steps is measured on."""
    for each in plan.evals:
        if version % each.every == 0 or version == steps:
            yield each


def stage_index(plan: Plan, name: str) -> int:
    """Position of a stage in the plan's graph, -1 for a name that is not in it."""
    return next((i for i, stage in enumerate(plan.stages) if stage.name == name), -1)
