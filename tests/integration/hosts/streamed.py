"""Blocks of shards that are put, streamed and compared in tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from proto.messages import (
    Ack,
    BatchMeta,
    BatchPart,
    Clear,
    PutTask,
    TaskHandle,
)
from shared.dataplane.client import DataClient, TaskShards
from tests.integration.store_process import STORE, Peer, peer_of
from tests.integration.stream_line import TcpLine, TcpStoreProcess

MEMORY = 192 << 20


Body = Callable[[Peer], Coroutine[Any, Any, None]]


def with_peer(store: TcpStoreProcess, body: Body, limit_s: float = 60) -> None:
    async def main() -> None:
        async with asyncio.timeout(limit_s), peer_of(store.run) as peer:
            await body(peer)

    asyncio.run(main())


def block(first: int, count: int, size: int = 1000) -> list[TaskShards]:
    rng = np.random.default_rng(first)
    return [
        TaskShards(
            f"train/0/{i}", 1, {"a": rng.integers(0, 1 << 30, size, np.int32), "b": rng.standard_normal((2, size))}
        )
        for i in range(first, first + count)
    ]


def meta_of(tasks: Sequence[TaskShards]) -> BatchMeta:
    handles = [TaskHandle(task.task_id, task.fence, stores=[0]) for task in tasks]
    return BatchMeta(tasks=handles, parts=[BatchPart("s", list(tasks[0].shards))], stores=[STORE])


def assert_same(found: Sequence[dict[str, Any]], tasks: Sequence[TaskShards], keys: Sequence[str] = ()) -> None:
    assert len(found) == len(tasks)
    for arrays, task in zip(found, tasks, strict=True):
        assert list(arrays) == list(keys or task.shards)
        for key, array in arrays.items():
            expected = task.shards[key]
            assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
            assert array.tobytes() == expected.tobytes(), f"{task.task_id}#{key}"


async def fetch(data: DataClient, tasks: Sequence[TaskShards], deadline_s: float = 30) -> list[dict[str, Any]]:
    return await data.fetch(meta_of(tasks), list(tasks[0].shards), deadline_s=deadline_s)


async def until(condition: Callable[[], bool], what: str, limit_s: float = 20) -> None:
    try:
        async with asyncio.timeout(limit_s):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {limit_s} s: {what}") from None


async def clear(peer: Peer, tasks: Sequence[TaskShards]) -> None:
    await peer.store.call(Clear(tasks=[PutTask(task.task_id, task.fence) for task in tasks]), Ack, deadline_s=10)


def slowed(store: TcpStoreProcess, bytes_per_s: float) -> TcpLine:
    """Start `store` behind a link that carries at most `bytes_per_s`."""
    line = TcpLine(store.port, bytes_per_s)
    store.advertised = f"tcp://127.0.0.1:{line.port}"
    store.start()
    return line
