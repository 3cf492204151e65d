"""Keeps the streamed shards of the current step, so that a store on another host sends each of them once per step.

Shards in stores on this host are mapped again by every call, because mapping costs little and mappings that were kept
would pin their files.
"""

from __future__ import annotations

import asyncio

from proto.tensors import Array
from shared.batch import Batch
from shared.dataplane.client import DataClient


class StepShards:
    """The shards of the current step. Use this object only on the event loop of `data`. Callers must not write to the
    arrays."""

    def __init__(self, data: DataClient) -> None:
        self._data = data
        self._kept: dict[tuple[str, int], dict[str, Array]] = {}
        """For each (task id, fence), the arrays by key."""
        self._fetching = asyncio.Lock()

    def drop(self) -> None:
        """Forget all shards. Call it when the step ends or starts again."""
        self._kept = {}

    async def fetch(self, batch: Batch, keys: list[str], *, deadline_s: float) -> Batch:
        """Return a LOCAL batch with `keys`, like `Batch.fetch`. Raises the same errors."""
        async with self._fetching:  # a call prepared in advance often needs shards that the previous call is fetching
            kept = self._kept
            shards = [dict(kept.get((task.task_id, task.fence), {})) for task in batch.tasks]
            lacking: dict[tuple[str, ...], list[int]] = {}
            for at, arrays in enumerate(shards):
                absent = tuple(key for key in keys if key not in arrays)
                if absent:
                    lacking.setdefault(absent, []).append(at)
            for absent, places in lacking.items():
                fetched = await batch.take(places).fetch(absent, deadline_s=deadline_s)
                for key in absent:
                    for at, array in zip(places, fetched[key], strict=True):
                        shards[at][key] = array
            if any(map(self._data.is_streamed, batch.meta.stores)):
                for task, arrays in zip(batch.tasks, shards, strict=True):
                    kept.setdefault((task.task_id, task.fence), {}).update(arrays)
        return Batch(batch.meta, data=[{key: arrays[key] for key in keys} for arrays in shards])
