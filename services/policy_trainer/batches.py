"""Assignment of samples to tasks and mini-batches. Works on metadata only; no data moves."""

from __future__ import annotations

import msgspec
import numpy as np

from proto.messages import BatchMeta
from proto.tensors import Array

ADVANTAGES, WEIGHTS = "advantages", "weights"
"""Names of the batch scalars that `forward_backward` reads."""


def group_of_sample(batch: BatchMeta) -> Array:
    """Return int64 [samples]: the index, counted from 0, of each sample's task in the batch."""
    return np.repeat(np.arange(len(batch.tasks)), [task.samples for task in batch.tasks])


def split(batch: BatchMeta, tasks: int) -> list[tuple[BatchMeta, slice]]:
    """Return mini-batches of `tasks` tasks in order (the last may be smaller), each with its range of samples."""
    parts: list[tuple[BatchMeta, slice]] = []
    first = 0
    for begin in range(0, len(batch.tasks), tasks):
        chosen = batch.tasks[begin : begin + tasks]
        samples = slice(first, first + sum(task.samples for task in chosen))
        scalars = {name: values[samples] for name, values in batch.scalars.items()}
        parts.append((BatchMeta(tasks=chosen, parts=batch.parts, stores=batch.stores, scalars=scalars), samples))
        first = samples.stop
    return parts


def weighed(batch: BatchMeta, advantages: Array, weights: Array) -> BatchMeta:
    """Return `batch` with the per-sample `advantages` and `weights` of the loss added, both float32 [samples]."""
    return msgspec.structs.replace(batch, scalars=batch.scalars | {ADVANTAGES: advantages, WEIGHTS: weights})
