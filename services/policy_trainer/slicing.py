"""Divides the metadata of a batch over data-parallel ranks by tokens, without splitting tasks.

The unit is the task rather than the sample: handles and fetches are per task (one mapped file range), and the samples
of a task share a prompt that a rank computes once. Splitting a group would repeat the prompt on every rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from proto.messages import BatchMeta
from proto.tensors import Array


@dataclass(frozen=True)
class Slice:
    """The tasks of one data-parallel rank in batch order, possibly none, with the scalars of their samples. `samples`
    int64 holds the positions of these samples in the whole batch."""

    batch: BatchMeta
    samples: Array
    tokens: int


def longest_first(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Return the ascending indices of `sizes` for each part. The largest size is assigned first, to the emptiest part.

    This is longest processing time first (Graham, 1969): the maximum is at most 4/3 - 1/(3 parts) times the optimum.
    It is deterministic: ties go to the lower index and the lower part.
    """
    chosen: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    order = np.argsort(-np.asarray(sizes, dtype=np.int64), kind="stable")
    for index in order.tolist():
        load, part = loads[0]
        chosen[part].append(index)
        heapq.heapreplace(loads, (load + int(sizes[index]), part))
    for each in chosen:
        each.sort()
    return chosen


def slice_batch(batch: BatchMeta, parts: int) -> list[Slice]:
    """Return one slice of `batch` for each of `parts` ranks. Every task is in exactly one slice."""
    counts = np.array([task.samples for task in batch.tasks], dtype=np.int64)
    first = np.cumsum(counts) - counts
    if parts == 1:
        groups = [list(range(len(batch.tasks)))]
    else:
        groups = longest_first([task.tokens for task in batch.tasks], parts)
    slices: list[Slice] = []
    for group in groups:
        tasks = [batch.tasks[index] for index in group]
        chosen = [np.arange(first[index], first[index] + counts[index]) for index in group]
        samples = np.concatenate(chosen) if chosen else np.zeros(0, dtype=np.int64)
        scalars = {name: values[samples] for name, values in batch.scalars.items()}
        meta = BatchMeta(tasks=tasks, parts=batch.parts, stores=batch.stores, scalars=scalars)
        slices.append(Slice(meta, samples, sum(task.tokens for task in tasks)))
    return slices


def imbalance(slices: Sequence[Slice]) -> float:
    """Return the tokens of the fullest rank divided by the mean. 1.0 is perfect, and the value without tokens."""
    total = sum(each.tokens for each in slices)
    return max(each.tokens for each in slices) * len(slices) / total if total else 1.0
