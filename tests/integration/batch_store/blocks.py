"""Blocks of shards that tests put, fetch and clear in a store process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from proto.messages import (
    Ack,
    BatchMeta,
    BatchPart,
    Clear,
    GetStoreStats,
    PutTask,
    StoreStats,
    TaskHandle,
)
from proto.tensors import Array
from shared.dataplane.client import Receipt, TaskShards
from shared.rundir import RunDir
from tests.integration.store_process import STORE, Peer

CALL_S = 10.0


MEMORY = 16 << 20


def block(first: int, count: int, size: int = 100, fence: int = 1) -> list[TaskShards]:
    return [
        TaskShards(f"train/0/{i}", fence, {"a": np.full(size, i, np.int32), "b": np.full((2, size), -i, np.float64)})
        for i in range(first, first + count)
    ]


def meta_of(tasks: Sequence[TaskShards], keys: Sequence[str] = ("a", "b")) -> BatchMeta:
    handles = [TaskHandle(task.task_id, task.fence, stores=[0]) for task in tasks]
    return BatchMeta(tasks=handles, parts=[BatchPart("s", list(keys))], stores=[STORE])


def named(tasks: Sequence[TaskShards]) -> list[PutTask]:
    return [PutTask(task.task_id, task.fence) for task in tasks]


async def clear(peer: Peer, tasks: Sequence[TaskShards]) -> None:
    await peer.store.call(Clear(tasks=named(tasks)), Ack, deadline_s=CALL_S)


async def stats(peer: Peer) -> StoreStats:
    return await peer.store.call(GetStoreStats(), StoreStats, deadline_s=CALL_S)


async def put(peer: Peer, tasks: Sequence[TaskShards], deadline_s: float = CALL_S) -> list[Receipt]:
    return await peer.data.put(tasks, store=STORE, deadline_s=deadline_s)


async def fetch(peer: Peer, tasks: Sequence[TaskShards], keys: Sequence[str] = ("a", "b")) -> list[dict[str, Array]]:
    return await peer.data.fetch(meta_of(tasks, keys), keys, deadline_s=CALL_S)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


def files(run: RunDir, ending: str) -> list[Path]:
    return sorted((run.shm / "batch-store-0").glob(f"*.{ending}"))


def descriptor_target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
