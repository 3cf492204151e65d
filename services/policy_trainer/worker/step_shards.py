"""Keeps the shards of the current step, so that its calls share one fetch: a store on another host sends them once."""

from __future__ import annotations

import asyncio

from proto.messages import BatchMeta, TaskHandle
from proto.tensors import Array
from shared.dataplane.client import DataClient


class StepShards:
    """Belongs to the event loop of its client. Callers must not write to the arrays."""

    def __init__(self, data: DataClient) -> None:
        self._data = data
        self._kept: dict[tuple[str, int], dict[str, Array]] = {}
        """By task and fence."""
        self._fetching = asyncio.Lock()

    def drop(self) -> None:
        """Keep nothing: the step has ended, or begins again."""
        self._kept = {}

    async def fetch(self, batch: BatchMeta, keys: list[str], *, deadline_s: float) -> list[dict[str, Array]]:
        """Return the shards `keys` of every task of `batch`. Raises RpcError as `DataClient.fetch` does."""
        async with self._fetching:  # a call that is prepared ahead often wants what the one before it fetches
            kept = self._kept
            lacking: dict[tuple[str, ...], list[TaskHandle]] = {}
            for task in batch.tasks:
                mine = kept.get((task.task_id, task.fence), {})
                absent = tuple(key for key in keys if key not in mine)
                if absent:
                    lacking.setdefault(absent, []).append(task)
            for absent, tasks in lacking.items():
                part = BatchMeta(tasks=tasks, parts=batch.parts, stores=batch.stores)
                for task, arrays in zip(
                    tasks, await self._data.fetch(part, absent, deadline_s=deadline_s), strict=True
                ):
                    kept.setdefault((task.task_id, task.fence), {}).update(arrays)
        found = [kept[task.task_id, task.fence] for task in batch.tasks]
        return [{key: arrays[key] for key in keys} for arrays in found]
