"""Which samples belong to which task and mini-batch; metadata only, no data moves."""

from __future__ import annotations

import msgspec
import numpy as np

from proto.messages import BatchMeta
from proto.tensors import Array

ADVANTAGES, WEIGHTS = "advantages", "weights"
"""Scalars of a batch that `forward_backward` reads."""


def group_of_sample(batch: BatchMeta) -> Array:
    """int64 [samples]: which task of the batch, counted from 0, each sample belongs to."""
    return np.repeat(np.arange(len(batch.tasks)), [task.samples for task in batch.tasks])


def split(batch: BatchMeta, tasks: int) -> list[tuple[BatchMeta, slice]]:
    """Mini-batches of `tasks` tasks in order (the last may be smaller), each with its range of samples."""
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
    """`batch` with what a loss needs to know of each sample; both float32 [samples]."""
    return msgspec.structs.replace(batch, scalars=batch.scalars | {ADVANTAGES: advantages, WEIGHTS: weights})
