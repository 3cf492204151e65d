"""Reads the shards of the driver's calls, ahead of their turn where possible, and keeps those that were streamed until
the step ends: a store on another host sends each of them once per step.

Shards in stores on this host are mapped again by every call, because mapping costs little and mappings that were kept
would pin their files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from proto.messages import WorkerRequest
from proto.tensors import Array
from services.policy_trainer.worker import samples
from services.policy_trainer.worker.samples import Reads
from shared.batch import Batch
from shared.dataplane.client import DataClient
from shared.rpc.errors import AWAY, RpcError

FETCH_S = 60.0
"""Maximum duration of one attempt to fetch shards, in seconds."""
AGAIN_S = 0.25
MAX_PREFETCHED = 2
"""Maximum number of mini-batches whose shards are fetched ahead. The shards are mapped and cost only address space."""


class BatchReader:
    """The shards of the current step and of queued calls. Use this object only on the event loop of `data`."""

    def __init__(self, data: DataClient, *, patience_s: float, on_wait: Callable[[str, float], None]) -> None:
        """`patience_s` limits how long a store may be unavailable, because other ranks are waiting as well. `on_wait`
        receives the cause of each failed attempt and its duration in seconds."""
        self._data = data
        self._shards = StepShards(data)
        self._patience_s = patience_s
        self._on_wait = on_wait
        self._prefetched: dict[int, asyncio.Task[samples.BatchTokens]] = {}
        self._refusals = 0
        """Number of times that all waiting calls have been refused."""
        self._log = structlog.get_logger("worker")

    def prefetch(self, request: WorkerRequest) -> None:
        """Begin to read the shards of a queued call."""
        if isinstance(request, Reads) and len(self._prefetched) < MAX_PREFETCHED:
            self._prefetched[request.order] = asyncio.create_task(self._read(request))

    def forget_prefetched(self) -> None:
        """Drop the shards read for queued calls and stop waiting for stores. Call this when those calls are refused."""
        self._refusals += 1
        for task in self._prefetched.values():
            task.cancel()
        self._prefetched.clear()

    def forget(self, request: WorkerRequest) -> None:
        """Drop the shards read for a call that has failed before it needed them."""
        task = self._prefetched.pop(request.order, None)
        if task is not None:
            task.cancel()

    def end_step(self) -> None:
        """Drop the step's shards. Call this when the step ends or starts again."""
        self._shards.drop()

    async def tokens(self, request: Reads) -> samples.BatchTokens:
        """Return the tokens of a call. Raises RpcError, including when a store is unavailable for `patience_s`."""
        task = self._prefetched.pop(request.order, None)
        return await (self._read(request) if task is None else task)

    async def _read(self, request: Reads) -> samples.BatchTokens:
        keys = samples.keys_of(request)
        batch = Batch(request.batch, self._data)
        stored = samples.stored_keys(batch, keys)
        local = await self._fetched(batch, list(stored.values()))
        columns = {key: local[name] for key, name in stored.items()}
        await asyncio.to_thread(samples.check, batch.tasks, columns)
        return await asyncio.to_thread(samples.join, columns)

    async def _fetched(self, batch: Batch, keys: list[str]) -> Batch:
        loop, refusals = asyncio.get_running_loop(), self._refusals
        until = loop.time() + self._patience_s
        while True:
            asked_at = loop.time()
            try:
                return await self._shards.fetch(batch, keys, deadline_s=min(FETCH_S, until - loop.time()))
            except RpcError as error:
                if error.code not in AWAY or until - loop.time() <= AGAIN_S or refusals != self._refusals:
                    raise
                self._log.warning("shards: trying again", code=error.code, error=str(error))
                self._on_wait(str(error), loop.time() - asked_at)
                await asyncio.sleep(AGAIN_S)  # only paces the retries


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
