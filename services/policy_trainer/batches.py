"""Which samples belong to which task and mini-batch; metadata only, no data moves."""

from __future__ import annotations

import numpy as np

from proto.messages import BatchMeta
from proto.tensors import Array


def group_of_sample(batch: BatchMeta) -> Array:
    """int64 [samples]: which task of the batch, counted from 0, each sample belongs to."""
    return np.repeat(np.arange(len(batch.tasks)), [task.samples for task in batch.tasks])


def split(batch: BatchMeta, tasks: int) -> list[tuple[BatchMeta, slice]]:
    """Mini-batches of `tasks` tasks in order (the last may be smaller), each with its range of samples."""
    parts: list[tuple[BatchMeta, slice]] = []
    first = 0
    for begin in range(0, len(batch.tasks), tasks):
        chosen = batch.tasks[begin : begin + tasks]
        samples = sum(task.samples for task in chosen)
        parts.append((BatchMeta(tasks=chosen, parts=batch.parts, stores=batch.stores), slice(first, first + samples)))
        first += samples
    return parts
