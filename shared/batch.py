"""Defines `Batch`: a set of tasks, their keys and scalars, and the stores that hold their shards, with explicit
transfers.

A `Batch` is REMOTE (a handle: ids, sizes, stores) or LOCAL (it also holds its arrays). Only `fetch` moves data:
splitting and joining handles does not. A handle is sent as `BatchMeta`, so a controller passes only handles. All
operations return a new batch.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec
import numpy as np
import structlog

from proto.messages import BatchMeta, BatchPart, ErrorCode, PutTask, TaskHandle, WeightsRef
from proto.tensors import Array
from shared.dataplane.client import DataClient
from shared.dataplane.stream import OnProgress, ignore_progress
from shared.rpc.errors import RpcError

FETCH_S = 60.0


def weights_meta(ref: WeightsRef, store: str = "") -> BatchMeta:
    """Return the weights of `ref`, or their copy in another store, as a batch of one task."""
    handle = TaskHandle(task_id=ref.task_id, fence=ref.fence, nbytes=ref.nbytes, stores=[0])
    return BatchMeta(tasks=[handle], stores=[store or ref.store])


async def fetch_weights(
    data: DataClient, ref: WeightsRef, store: str, *, deadline_s: float, on_progress: OnProgress = ignore_progress
) -> dict[str, Array]:
    """Return the weights of `ref` from `store`, the store on the reader's host, which fetches them from another host.

    If that store fails, or `store` is "", the weights are fetched from the store into which they were put. The other
    arguments and the errors are those of `DataClient.fetch`.
    """
    if store not in ("", ref.store):
        task = PutTask(ref.task_id, ref.fence)
        log = structlog.get_logger("weights")
        try:
            await data.hold(task, store=store, origin=ref.store, stall_s=deadline_s, on_progress=on_progress)
            (weights,) = await data.fetch(weights_meta(ref, store), (), deadline_s=deadline_s, on_progress=on_progress)
        except RpcError as error:
            log.warning("weights not relayed", task=ref.task_id, store=store, origin=ref.store, why=str(error))
            if error.code == ErrorCode.MISSING:
                with contextlib.suppress(RpcError):
                    await data.recheck(task, store=store)
        else:
            return weights
    (weights,) = await data.fetch(weights_meta(ref), (), deadline_s=deadline_s, on_progress=on_progress)
    return weights


class BatchStatus(StrEnum):
    """The location of a batch's data."""

    LOCAL = "local"
    REMOTE = "remote"
    EMPTY = "empty"


class Batch:
    """Tasks in a fixed order, each with shards under the same keys, and scalars of their samples."""

    def __init__(
        self, meta: BatchMeta, client: DataClient | None = None, data: Sequence[dict[str, Array]] | None = None
    ) -> None:
        """`client` is needed only to fetch. `data` holds one dict of arrays per task, all with the same keys.

        Raises ValueError if a task occurs twice, or `data` does not match `meta`.
        """
        if len({task.task_id for task in meta.tasks}) != len(meta.tasks):
            raise ValueError(f"batch of {len(meta.tasks)} tasks: a task occurs twice")
        if data is not None and len(data) != len(meta.tasks):
            raise ValueError(f"batch of {len(meta.tasks)} tasks: data for {len(data)}")
        self._meta = meta
        self._client = client
        self._data = data

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
    def tasks(self) -> Sequence[TaskHandle]:
        return self._meta.tasks

    @property
    def task_ids(self) -> tuple[str, ...]:
        return tuple(task.task_id for task in self._meta.tasks)

    @property
    def scalars(self) -> Mapping[str, Array]:
        """The scalars by name, each [samples], in task order."""
        return self._meta.scalars

    @property
    def groups(self) -> Array:
        """int64 [samples]: the index, counted from 0, of each sample's task in this batch."""
        return np.repeat(np.arange(len(self)), [task.samples for task in self._meta.tasks])

    @property
    def samples(self) -> int:
        """Number of samples in all tasks."""
        return sum(task.samples for task in self._meta.tasks)

    @property
    def tokens(self) -> int:
        """Number of tokens in all tasks, including prompts."""
        return sum(task.tokens for task in self._meta.tasks)

    def __len__(self) -> int:
        """Return the number of tasks."""
        return len(self._meta.tasks)

    def __repr__(self) -> str:
        return (
            f"Batch({self.status.name}, {len(self)} tasks, {self.samples} samples, {self.tokens} tokens, "
            f"keys=[{', '.join(self.keys)}])"
        )

    def __getitem__(self, key: str) -> list[Array]:
        """Return the arrays under `key`, one per task. A batch without tasks returns an empty list.

        Raises RuntimeError if the arrays have not been fetched, and KeyError if there is no such key.
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

        Arrays are private copy-on-write views, so writing to them has no effect elsewhere. Raises RpcError with code
        missing (the error names the shards) or collected, and DeadlineExceeded.
        """
        wanted = tuple(self.keys if keys is None else keys)
        if not self._meta.tasks:
            return self
        if self._client is None:
            raise RpcError(ErrorCode.BAD_REQUEST, f"batch without a data client cannot fetch {', '.join(wanted)}")
        arrays = await self._client.fetch(self._meta, wanted, deadline_s=deadline_s)
        return Batch(self._meta, self._client, arrays)

    # ---- scalars and splitting

    def with_scalars(self, scalars: Mapping[str, Array]) -> Batch:
        """Return the same tasks with exactly these scalars, each [samples]. Raises ValueError if a length differs."""
        wrong = [f"{name} {list(values.shape)}" for name, values in scalars.items() if values.shape != (self.samples,)]
        if wrong:
            raise ValueError(f"batch of {self.samples} samples: scalars {', '.join(wrong)}")
        return Batch(msgspec.structs.replace(self._meta, scalars=dict(scalars)), self._client, self._data)

    def take(self, indices: Sequence[int]) -> Batch:
        """Return a handle to the tasks at `indices`, in that order, with the scalars for their samples."""
        tasks = [self._meta.tasks[index] for index in indices]
        meta = msgspec.structs.replace(self._meta, tasks=tasks, scalars=_scalars_of(self._meta, indices))
        return Batch(meta, self._client)

    def split(self, tasks: int) -> list[Batch]:
        """Return batches of `tasks` consecutive tasks. The last may be smaller."""
        return [self.take(range(first, min(first + tasks, len(self)))) for first in range(0, len(self), tasks)]

    def chunk(self, count: int) -> list[Batch]:
        """Return `count` batches with balanced token counts, in this batch's order. Some are empty if there are fewer
        tasks than batches.

        Longest processing time first (Graham 1969): the next longest task goes to the chunk with the fewest tokens. The
        tokens of the largest chunk are at most 4/3 - 1/(3 count) times the optimum. Ties go to the lower index and the
        lower chunk, so the result is deterministic. Tasks without tokens count as one token each, so that they
        are distributed as well.

        Tasks are not divided: handles and fetches are per task, and the samples of a task share a prompt, which a rank
        computes once. Raises ValueError for a count below 1.
        """
        if count < 1:
            raise ValueError(f"chunk({count}): the count must be at least 1")
        tokens = [max(task.tokens, 1) for task in self._meta.tasks]
        lightest = [(0, chunk) for chunk in range(count)]
        chunks: list[list[int]] = [[] for _ in range(count)]
        for index in sorted(range(len(self)), key=lambda index: (-tokens[index], index)):
            load, chunk = lightest[0]
            heapq.heapreplace(lightest, (load + tokens[index], chunk))
            chunks[chunk].append(index)
        return [self.take(sorted(indices)) for indices in chunks]

    # ---- joining

    @classmethod
    def concat(cls, batches: Sequence[Batch]) -> Batch:
        """Return a handle to the tasks of all batches in order. Empty batches are skipped.

        Raises ValueError if their parts or the names of their scalars differ, or a task occurs twice.
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
                for task in batch.tasks
            )
        if len({frozenset(batch.scalars) for batch in full}) != 1:
            raise ValueError("concat: the batches have different scalars for their samples")
        scalars = {name: np.concatenate([batch.scalars[name] for batch in full]) for name in full[0].scalars}
        return cls(BatchMeta(tasks=tasks, parts=list(parts), stores=stores, scalars=scalars), full[0]._client)

    def union(self, other: Batch) -> Batch:
        """Return a handle to the same tasks with the keys and scalars of both batches, in this batch's order.

        Each part of `other` must be new or equal to a part of this batch. If both batches have a scalar of the same
        name, this batch's values are kept. Raises ValueError if tasks or fences differ, or parts overlap only
        partially.
        """
        mine, theirs = self._meta, other._meta
        order = _task_order(mine.tasks, theirs.tasks)
        fresh = _new_parts(mine.parts, theirs.parts)
        stores = list(dict.fromkeys((*mine.stores, *theirs.stores)))
        of_mine, of_theirs = ([stores.index(store) for store in meta.stores] for meta in (mine, theirs))
        tasks: list[TaskHandle] = []
        for task, index in zip(mine.tasks, order, strict=True):
            twin = theirs.tasks[index]
            tasks.append(
                msgspec.structs.replace(
                    task,
                    samples=task.samples or twin.samples,
                    tokens=task.tokens or twin.tokens,
                    nbytes=task.nbytes + (twin.nbytes if fresh else 0),
                    stores=[
                        *(of_mine[store] for store in task.stores),
                        *(of_theirs[twin.stores[part]] for part in fresh),
                    ],
                )
            )
        meta = BatchMeta(
            tasks=tasks,
            parts=[*mine.parts, *(theirs.parts[part] for part in fresh)],
            stores=stores,
            scalars=_scalars_of(theirs, order) | mine.scalars,
        )
        return Batch(meta, self._client or other._client)


def _scalars_of(meta: BatchMeta, indices: Sequence[int]) -> dict[str, Array]:
    """Return the scalars for the samples in the tasks at `indices`, in that order."""
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
        mine, theirs = ([list(part.keys) for part in side] for side in (parts, others))
        raise ValueError(f"concat: parts {mine} and {theirs} differ")
    return order


def _task_order(tasks: Sequence[TaskHandle], others: Sequence[TaskHandle]) -> list[int]:
    """Return the position of each of `tasks` in `others`, which must hold the same tasks under the same fences."""
    at = {(task.task_id, task.fence): index for index, task in enumerate(others)}
    order = [at.get((task.task_id, task.fence), -1) for task in tasks]
    if -1 in order or len(others) != len(tasks):
        strange = next((task.task_id for task, index in zip(tasks, order, strict=True) if index < 0), "more tasks")
        raise ValueError(
            f"union of {len(tasks)} and {len(others)} tasks: the tasks and fences must be the same "
            f"(first difference: {strange})"
        )
    return order


def _new_parts(parts: Sequence[BatchPart], others: Sequence[BatchPart]) -> list[int]:
    """Return the positions in `others` of parts that share no key with `parts`.

    Any other part must equal one of `parts`.
    """
    keys = {key for part in parts for key in part.keys}
    same = {frozenset(part.keys) for part in parts}
    for part in others:
        both = keys & set(part.keys)
        if both and frozenset(part.keys) not in same:
            raise ValueError(f"union: {', '.join(sorted(both))} on both sides, but the parts differ")
    return [number for number, part in enumerate(others) if not keys & set(part.keys)]
