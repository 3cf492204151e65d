"""Tests that the memory of a store and of a reader of its streams does not grow over many steps, whether or not the
streams are encrypted."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import psutil
import pytest

from proto.messages import Ack, BatchMeta, BatchPart, Clear, GetStoreStats, PutTask, StoreStats, TaskHandle
from shared.dataplane.client import TaskShards
from tests.integration.store_process import STORE, Peer, peer_of
from tests.integration.stream_line import TcpStoreProcess, remote

MEMORY = 64 << 20
CALL_S = 3.0
"""Deadline of a request in seconds. Replies are kept for retries until 5 s after the deadline, so with a longer
deadline, none would expire during the test.
"""
TASKS = 8
FETCHES = 2
"""Number of fetches of each task."""
WARM_STEPS = 40
"""Number of steps during which streams, copies and kept replies may still allocate memory for the first time."""
GROWTH_BYTES = {"reader": 24 << 20, "store": 8 << 20}
"""Maximum growth after the warm-up. Each step moves 8 MB and adds 8 tombstones to the store, up to 8,192."""


async def clear(peer: Peer, tasks: list[TaskShards]) -> None:
    await peer.store.call(Clear(tasks=[PutTask(task.task_id, task.fence) for task in tasks]), Ack, deadline_s=CALL_S)


@pytest.mark.parametrize(
    ("steps", "plain"),
    [(100, False), pytest.param(1000, False, marks=pytest.mark.long), pytest.param(1000, True, marks=pytest.mark.long)],
)
def test_memory_of_a_store_and_of_a_reader_of_its_streams_does_not_grow(
    store: TcpStoreProcess, steps: int, plain: bool
) -> None:
    values = np.random.default_rng(1).standard_normal(64 * 1024)
    sizes: list[list[int]] = []

    async def main() -> None:
        async with peer_of(store.run) as peer:
            assert store.process is not None
            processes = [psutil.Process(), psutil.Process(store.process.pid)]
            data = remote(peer, plain=plain)
            for step in range(steps):
                tasks = [
                    TaskShards(f"train/{step}/{i}", 1, {"a": values, "b": values[: i * 100]}) for i in range(TASKS)
                ]
                await peer.data.put(tasks, store=STORE, deadline_s=CALL_S)
                handles = [TaskHandle(task.task_id, 1, stores=[0]) for task in tasks]
                meta = BatchMeta(tasks=handles, parts=[BatchPart("s", ["a", "b"])], stores=[STORE])
                for _ in range(FETCHES):
                    found = await data.fetch(meta, ["a", "b"], deadline_s=CALL_S)
                    assert found[7]["b"][-1] == found[0]["a"][699] == values[699]
                del found
                await clear(peer, tasks)
                if step >= WARM_STEPS and step % 10 == 0:
                    gc.collect()
                    sizes.append([process.memory_info().rss for process in processes])
            counts = data.streams.counts
            passed = FETCHES * steps * sum(array.nbytes for task in tasks for array in task.shards.values())
            assert passed <= counts.received_bytes < 1.01 * passed + (1 << 20)  # streamed, and only once
            assert counts.refused == 0
            now = await peer.store.call(GetStoreStats(), StoreStats, deadline_s=CALL_S)
            assert (now.shards, now.files) == (0, 0)
            data.close()

    store.plain = plain
    store.start()
    asyncio.run(main())
    for (name, limit), mine in zip(GROWTH_BYTES.items(), zip(*sizes, strict=True), strict=True):
        assert max(mine) - mine[0] < limit, f"{name}: {[each >> 10 for each in mine]} KiB every 10 steps"
