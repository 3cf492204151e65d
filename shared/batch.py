"""`Batch`: a set of tasks, their keys, and the stores that hold them, with explicit transfers.

A `Batch` is REMOTE (a handle: ids, sizes, stores), LOCAL (it holds its arrays) or EMPTY (no tasks). Only `fetch` moves
data. Handles are cheap to split and join, and are sent as `BatchMeta`. All operations but `union_` return a new batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from enum import Enum

import msgspec
import numpy as np

from proto.messages import BatchMeta, BatchPart, ErrorCode, TaskHandle, WeightsRef
from proto.tensors import Array
from shared.dataplane.client import DataClient
from shared.rpc.errors import RpcError

FETCH_S = 60.0

Data = tuple[dict[str, Array], ...]


def weights_meta(ref: WeightsRef) -> BatchMeta:
    """Return the weights of `ref` as a batch of one task."""
    handle = TaskHandle(task_id=ref.task_id, fence=ref.fence, nbytes=ref.nbytes, stores=[0])
    return BatchMeta(tasks=[handle], stores=[ref.store])


class BatchStatus(Enum):
    """Where the data of a batch is."""

    LOCAL = "local"
    REMOTE = "remote"
    EMPTY = "empty"


class Batch:
    """Tasks in a fixed order, each with shards under the same keys."""

    def __init__(self, meta: BatchMeta, client: DataClient | None = None, data: Data | None = None) -> None:
        """`client` is needed only to fetch. `data` holds one dict of arrays per task, all with the same keys.

        Raises ValueError if a task occurs twice, or `data` does not match `meta`.
        """
        if len({task.task_id for task in meta.tasks}) != len(meta.tasks):
            raise ValueError(f"batch of {len(meta.tasks)} tasks: a task comes twice")
        if data is not None and len(data) != len(meta.tasks):
            raise ValueError(f"batch of {len(meta.tasks)} tasks: data of {len(data)}")
        self._meta = meta
        self._client = client
        self._data = data

    @classmethod
    def from_meta(cls, meta: BatchMeta, client: DataClient) -> Batch:
        """Return the batch that a message describes."""
        return cls(meta, client)

    # ---- properties

    @property
    def meta(self) -> BatchMeta:
        """The wire form. Callers must not change it."""
        return self._meta

    @property
    def status(self) -> BatchStatus:
        if not self._meta.tasks:
            return BatchStatus.EMPTY
        return BatchStatus.REMOTE if self._data is None else BatchStatus.LOCAL

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that every task has, in the stores when REMOTE and in this batch when LOCAL."""
        if self._data:
            return tuple(self._data[0])
        return tuple(key for part in self._meta.parts for key in part.keys)

    @property
    def task_ids(self) -> tuple[str, ...]:
        return tuple(task.task_id for task in self._meta.tasks)

    @property
    def samples(self) -> int:
        """Number of samples of all tasks."""
        return sum(task.samples for task in self._meta.tasks)

    @property
    def tokens(self) -> int:
        """Number of tokens of all tasks, including prompts."""
        return sum(task.tokens for task in self._meta.tasks)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays when LOCAL. When REMOTE, bytes of all shards with which the tasks were made."""
        if self._data is not None:
            return sum(array.nbytes for arrays in self._data for array in arrays.values())
        return sum(task.nbytes for task in self._meta.tasks)

    def __len__(self) -> int:
        """Number of tasks."""
        return len(self._meta.tasks)

    def __repr__(self) -> str:
        return (
            f"Batch({self.status.name}, {len(self)} tasks, {self.samples} samples, {self.tokens} tokens, "
            f"{len(self) * len(self.keys)} shards, {self.nbytes} bytes, keys=[{', '.join(self.keys)}])"
        )

    def __getitem__(self, key: str) -> list[Array]:
        """Return the arrays under `key`, one per task. An EMPTY batch returns an empty list.

        Raises RuntimeError if they were not fetched, and KeyError if there is no such key.
        """
        if not self._meta.tasks:
            return []
        if self._data is None:
            raise RuntimeError(f"batch is REMOTE: `local = await batch.fetch([{key!r}])` first, then local[{key!r}]")
        if key not in self._data[0]:
            raise KeyError(f"{key}: this batch holds {', '.join(self.keys)}; name the key when fetching")
        return [arrays[key] for arrays in self._data]

    # ---- moving data

    async def fetch(self, keys: Sequence[str] | None = None, *, deadline_s: float = FETCH_S) -> Batch:
        """Return a LOCAL batch with `keys` (default: all). This batch does not change.

        Arrays are private copy-on-write views, so writing to them has no effect elsewhere. Keys that this batch holds
        are not fetched again. Raises RpcError (missing, which names the shards; collected) and DeadlineExceeded.
        """
        wanted = tuple(self.keys if keys is None else keys)
        if not self._meta.tasks:
            return self.select(wanted) if keys is not None else self
        here = set(self._data[0]) if self._data else set()
        absent = [key for key in wanted if key not in here]
        local = self._data or tuple({} for _ in self._meta.tasks)
        if absent:
            if self._client is None:
                raise RpcError(ErrorCode.BAD_REQUEST, f"batch without a data client cannot fetch {', '.join(absent)}")
            found = await self._client.fetch(self._meta, absent, deadline_s=deadline_s)
            local = tuple(mine | theirs for mine, theirs in zip(local, found, strict=True))
        return Batch(self._meta, self._client, tuple({key: arrays[key] for key in wanted} for arrays in local))

    # ---- splitting

    def select(self, keys: Sequence[str]) -> Batch:
        """Return the same tasks with only `keys`. Raises KeyError that names unknown keys."""
        unknown = [key for key in keys if key not in self.keys]
        if unknown and self._meta.tasks:
            raise KeyError(f"{', '.join(unknown)}: this batch has {', '.join(self.keys)}")
        data = None if self._data is None else tuple({key: arrays[key] for key in keys} for arrays in self._data)
        return Batch(_with_keys(self._meta, set(keys)), self._client, data)

    def take(self, indices: Sequence[int]) -> Batch:
        """Return the tasks at `indices`, in that order, each with the scalars of its samples."""
        tasks = [self._meta.tasks[index] for index in indices]
        meta = msgspec.structs.replace(self._meta, tasks=tasks, scalars=_scalars_of(self._meta, indices))
        data = None if self._data is None else tuple(self._data[index] for index in indices)
        return Batch(meta, self._client, data)

    def chunk_indices(self, count: int) -> list[list[int]]:
        """Return the task indices, ascending, of `count` chunks with balanced tokens. Each task is in exactly one.

        Longest processing time first (Graham 1969): the next longest task goes to the chunk with the fewest tokens,
        among equals to the one with the fewest tasks. Raises ValueError for a count below 1.
        """
        if count < 1:
            raise ValueError(f"chunk({count}): at least 1")
        lightest = [(0, 0, chunk) for chunk in range(count)]
        chunks: list[list[int]] = [[] for _ in range(count)]
        longest_first = sorted(range(len(self)), key=lambda index: (-self._meta.tasks[index].tokens, index))
        for index in longest_first:
            tokens, tasks, chunk = lightest[0]
            heapq.heapreplace(lightest, (tokens + self._meta.tasks[index].tokens, tasks + 1, chunk))
            chunks[chunk].append(index)
        return [sorted(chunk) for chunk in chunks]

    def chunk(self, count: int) -> list[Batch]:
        """Return the `count` batches of `chunk_indices`. Some are EMPTY if there are fewer tasks."""
        return [self.take(indices) for indices in self.chunk_indices(count)]

    # ---- joining

    @classmethod
    def concat(cls, batches: Sequence[Batch]) -> Batch:
        """Return the tasks of all batches in order. EMPTY batches are skipped.

        The result is LOCAL if all batches are. Raises ValueError if their parts differ or a task occurs twice.
        """
        full = [batch for batch in batches if len(batch)]
        if not full:
            return batches[0] if batches else cls(BatchMeta(tasks=[]))
        stores = list(dict.fromkeys(store for batch in full for store in batch.meta.stores))
        parts = full[0].meta.parts
        tasks: list[TaskHandle] = []
        for batch in full:
            order = _part_order(parts, batch.meta.parts)
            number = [stores.index(store) for store in batch.meta.stores]
            tasks.extend(
                msgspec.structs.replace(task, stores=[number[task.stores[part]] for part in order])
                for task in batch.meta.tasks
            )
        data: Data | None = None
        if all(batch._data is not None for batch in full):
            if len({frozenset(batch.keys) for batch in full}) != 1:
                raise ValueError("concat: the batches hold different keys; select the same ones first")
            data = tuple(arrays for batch in full for arrays in batch._data or ())
        names = {frozenset(batch.meta.scalars) for batch in full}
        if len(names) != 1:
            raise ValueError("concat: the batches have different scalars of their samples")
        scalars = {name: np.concatenate([batch.meta.scalars[name] for batch in full]) for name in full[0].meta.scalars}
        meta = BatchMeta(tasks=tasks, parts=list(parts), stores=stores, scalars=scalars)
        return cls(meta, full[0]._client, data)

    def union(self, other: Batch) -> Batch:
        """Return the same tasks with the keys and scalars of both batches, in this batch's order.

        Each part of `other` must be new or equal to one of this batch. This batch's value wins if both have a scalar.
        The result is LOCAL if both are. Raises ValueError if tasks or fences differ, or parts overlap only partially.
        """
        meta, data = _union(self, other)
        return Batch(meta, self._client or other._client, data)

    def union_(self, other: Batch) -> Batch:
        """Do `union` in place, and return this batch."""
        self._meta, self._data = _union(self, other)
        self._client = self._client or other._client
        return self


def _with_keys(meta: BatchMeta, keys: set[str]) -> BatchMeta:
    kept = [part for part in range(len(meta.parts)) if keys & set(meta.parts[part].keys)]
    parts = [BatchPart(meta.parts[part].stage, [key for key in meta.parts[part].keys if key in keys]) for part in kept]
    tasks = [msgspec.structs.replace(task, stores=[task.stores[part] for part in kept]) for task in meta.tasks]
    return BatchMeta(tasks=tasks, parts=parts, stores=list(meta.stores), scalars=meta.scalars)


def _scalars_of(meta: BatchMeta, indices: Sequence[int]) -> dict[str, Array]:
    """Return the scalars of the samples of the tasks at `indices`, in that order."""
    if not meta.scalars:
        return {}
    counts = np.array([task.samples for task in meta.tasks], dtype=np.int64)
    first = np.cumsum(counts) - counts
    chosen = [np.arange(first[index], first[index] + counts[index]) for index in indices]
    samples = np.concatenate(chosen) if chosen else np.zeros(0, np.int64)
    return {name: values[samples] for name, values in meta.scalars.items()}


def _part_order(parts: Sequence[BatchPart], others: Sequence[BatchPart]) -> list[int]:
    """Return the position of each of `parts` in `others`, which must hold the same parts in any order."""
    place = {frozenset(part.keys): number for number, part in enumerate(others)}
    order = [place.get(frozenset(part.keys), -1) for part in parts]
    if -1 in order or len(others) != len(parts):
        mine, theirs = ([list(part.keys) for part in each] for each in (parts, others))
        raise ValueError(f"concat: parts {mine} and {theirs} differ; select the same keys first")
    return order


def _union(batch: Batch, other: Batch) -> tuple[BatchMeta, Data | None]:
    mine, theirs = batch.meta, other.meta
    at = {(task.task_id, task.fence): index for index, task in enumerate(theirs.tasks)}
    order = [at.get((task.task_id, task.fence), -1) for task in mine.tasks]
    if -1 in order or len(theirs.tasks) != len(mine.tasks):
        strange = next((t.task_id for t, index in zip(mine.tasks, order, strict=True) if index < 0), "more tasks")
        raise ValueError(
            f"union of {len(mine.tasks)} and {len(theirs.tasks)} tasks: must be the same under the same fences "
            f"(first difference: {strange})"
        )
    known = {key for part in mine.parts for key in part.keys}
    fresh = [number for number, part in enumerate(theirs.parts) if not known & set(part.keys)]
    same = {frozenset(part.keys) for part in mine.parts}
    for number, part in enumerate(theirs.parts):
        if number not in fresh and frozenset(part.keys) not in same:
            raise ValueError(
                f"union: {', '.join(sorted(known & set(part.keys)))} on both sides, but the parts differ; select first"
            )
    stores = list(dict.fromkeys((*mine.stores, *theirs.stores)))
    of_mine, of_theirs = ([stores.index(store) for store in each.stores] for each in (mine, theirs))
    tasks: list[TaskHandle] = []
    for task, index in zip(mine.tasks, order, strict=True):
        twin = theirs.tasks[index]
        tasks.append(
            msgspec.structs.replace(
                task,
                samples=task.samples or twin.samples,
                tokens=task.tokens or twin.tokens,
                nbytes=task.nbytes + (twin.nbytes if fresh else 0),
                stores=[*(of_mine[store] for store in task.stores), *(of_theirs[twin.stores[part]] for part in fresh)],
            )
        )
    meta = BatchMeta(
        tasks=tasks,
        parts=[*mine.parts, *(theirs.parts[part] for part in fresh)],
        stores=stores,
        scalars=_scalars_of(theirs, order) | mine.scalars,
    )
    data: Data | None = None
    if batch._data is not None and other._data is not None:
        data = tuple(
            arrays | {key: array for key, array in other._data[index].items() if key not in arrays}
            for arrays, index in zip(batch._data, order, strict=True)
        )
    return meta, data
