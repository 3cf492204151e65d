"""The work that `bench_data` and `against_data_peers` measure: tasks with regular and ragged arrays in a store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import xxhash

from proto.messages import Ack, BatchMeta, BatchPart, Clear, PutTask, TaskHandle
from proto.tensors import Array
from shared.dataplane.client import TaskShards
from shared.rundir import RunDir
from tests.integration.store_process import STORE, Peer, StoreProcess, make_run, peer_of

BLOCK_TASKS = 64
Work = tuple[list[TaskShards], list[str]]
"""Tasks and the keys of their shards."""
Rows = list[dict[str, float]]
"""For each round, the duration of each measured operation in seconds, by name."""
digest = xxhash.xxh3_64_intdigest


def regular(size: int) -> Work:
    keys = [f"key_{index}" for index in range(9)]
    rows = np.random.default_rng(0).standard_normal((1024, len(keys), 8192), dtype=np.float32)
    shards = [dict(zip(keys, row, strict=True)) for row in rows]
    return [TaskShards(f"train/0/{i}", 1, shards[i % len(shards)]) for i in range(len(shards) * size)], keys


def ragged(size: int) -> Work:
    """Return ragged tasks shaped like RL data: int32, float32 and uint8 per token."""
    lengths = np.random.default_rng(1).integers(500, 4000, 8192)
    dtypes = (np.int32, np.float32, np.uint8)
    keys = [f"key_{index}" for index in range(6)]
    shards = [
        {key: np.full(int(n), i % 200, dtypes[j % 3]) for j, key in enumerate(keys)} for i, n in enumerate(lengths)
    ]
    return [TaskShards(f"train/1/{i}", 1, shards[i % len(shards)]) for i in range(len(shards) * size)], keys


def nbytes_of(tasks: list[TaskShards]) -> int:
    return sum(array.nbytes for task in tasks for array in task.shards.values())


def meta_of(tasks: list[TaskShards], keys: list[str]) -> BatchMeta:
    handles = [TaskHandle(task.task_id, task.fence, stores=[0]) for task in tasks]
    return BatchMeta(tasks=handles, parts=[BatchPart("bench", keys)], stores=[STORE])


def read(tasks: list[dict[str, Array]]) -> None:
    """Read every byte, slice by slice."""
    for task in tasks:
        for array in task.values():
            digest(array)


async def put_blocks(peer: Peer, tasks: list[TaskShards]) -> None:
    """Put lease blocks, two at a time, as a rollout service does."""
    room = asyncio.Semaphore(2)

    async def put(first: int) -> None:
        async with room:
            await peer.data.put(tasks[first : first + BLOCK_TASKS], store=STORE, deadline_s=60)

    await asyncio.gather(*(put(first) for first in range(0, len(tasks), BLOCK_TASKS)))


async def timed_fetch(peer: Peer, work: Work) -> float:
    tasks, keys = work
    meta = meta_of(tasks, keys)
    began = time.perf_counter()
    read(await peer.data.fetch(meta, keys, deadline_s=60))
    return time.perf_counter() - began


async def clear(peer: Peer, tasks: list[TaskShards]) -> None:
    for first in range(0, len(tasks), 1000):
        gone = [PutTask(task.task_id, task.fence) for task in tasks[first : first + 1000]]
        await peer.store.call(Clear(tasks=gone), Ack, deadline_s=60)


@asynccontextmanager
async def fresh_store(folder: Path, nbytes: int) -> AsyncIterator[tuple[RunDir, Peer]]:
    """Start a store with room for three times `nbytes`; yield its run and a client."""
    folder.mkdir()
    run = make_run(folder, memory=3 * nbytes)
    store = StoreProcess(run)
    store.start()
    try:
        async with peer_of(run) as peer:
            yield run, peer
    finally:
        store.stop()
        run.remove_volatile()
