"""A store that holds four shards in memory and eight on disk, and helpers that query it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from proto.messages import (
    Ack,
    BatchMeta,
    BatchPart,
    Clear,
    GetStoreStats,
    Locate,
    Located,
    PutTask,
    StoreStats,
    TaskHandle,
)
from shared.dataplane.client import TaskShards
from shared.rundir import RunDir
from tests.integration.store_process import STORE, Peer, StoreProcess, peer_of

MIB = 1 << 20


MEMORY = 8 * MIB


SPILL = 16 * MIB


SHARD = 2 * MIB - 4096
"""Number of elements in a shard. Including its header and table, a file with one shard is exactly 2 MiB."""


@asynccontextmanager
async def served(run: RunDir) -> AsyncIterator[tuple[StoreProcess, Peer]]:
    store = StoreProcess(run)
    store.start()
    try:
        async with peer_of(run) as peer:
            yield store, peer
    finally:
        if store.process is not None and store.process.poll() is None:
            store.kill()
        run.remove_volatile()


def shard(number: int, *, split: str = "train", nbytes: int = SHARD) -> TaskShards:
    values = np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)
    return TaskShards(f"{split}/0/{number}", 1, {"a": values})


def meta_of(tasks: list[TaskShards]) -> BatchMeta:
    handles = [TaskHandle(task.task_id, task.fence, stores=[0]) for task in tasks]
    return BatchMeta(tasks=handles, parts=[BatchPart("s", ["a"])], stores=[STORE])


async def check(peer: Peer, tasks: list[TaskShards]) -> None:
    found = await peer.data.fetch(meta_of(tasks), ["a"], deadline_s=30)
    for task, arrays in zip(tasks, found, strict=True):
        assert np.array_equal(arrays["a"], task.shards["a"]), task.task_id


async def put(peer: Peer, task: TaskShards, deadline_s: float = 30) -> None:
    await peer.data.put([task], store=STORE, deadline_s=deadline_s)


async def clear(peer: Peer, tasks: list[TaskShards]) -> None:
    await peer.store.call(Clear(tasks=[PutTask(task.task_id, 1) for task in tasks]), Ack, deadline_s=30)


async def stats(peer: Peer) -> StoreStats:
    return await peer.store.call(GetStoreStats(), StoreStats, deadline_s=10)


async def places(peer: Peer, tasks: list[TaskShards]) -> list[str]:
    """Return `memory` or `disk` for each task."""
    request = Locate(tasks=[PutTask(task.task_id, 1) for task in tasks])
    located = await peer.store.call(request, Located, deadline_s=10)
    files = [located.files[first] for [first] in located.places]
    return ["disk" if "/spill/" in path else "memory" for path in files]
