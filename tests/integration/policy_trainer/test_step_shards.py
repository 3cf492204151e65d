"""Tests that a worker that streams shards fetches each shard of a step in one call and reuses it in later ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from proto.messages import BatchMeta, BatchPart, ErrorCode, TaskHandle
from services.policy_trainer.worker.batch_reader import StepShards
from shared.batch import Batch
from shared.dataplane.client import TaskShards
from shared.rpc.errors import RpcError
from tests.integration.store_process import STORE, ending, make_run, peer_of
from tests.integration.stream_line import TcpStoreProcess, remote

KEYS = ["a", "b"]
SIZE = 50_000


def test_shards_of_a_step_are_streamed_once_per_step(tmp_path: Path) -> None:
    tasks = [TaskShards(f"train/0/{i}", 1, {key: np.full(SIZE, i) for key in KEYS}) for i in range(4)]
    handles = [TaskHandle(task.task_id, 1, stores=[0]) for task in tasks]

    def meta(*places: int) -> BatchMeta:
        return BatchMeta(tasks=[handles[at] for at in places], parts=[BatchPart("s", KEYS)], stores=[STORE])

    async def main() -> None:
        async with asyncio.timeout(60), peer_of(store.run) as peer:
            await peer.data.put(tasks, store=STORE, deadline_s=10)
            data = remote(peer)
            shards = StepShards(data)

            async def fetched(keys: list[str], *places: int) -> int:
                """Fetch `keys` and return the number of shards streamed."""
                before = data.streams.counts.received_bytes
                found = await shards.fetch(Batch(meta(*places), data), keys, deadline_s=10)
                assert (list(found.keys), len(found)) == (keys, len(places))
                assert [[int(each[-1]) for each in found[key]] for key in keys] == [list(places) for _ in keys]
                return round((data.streams.counts.received_bytes - before) / (8 * SIZE))

            assert await fetched(["a"], 0, 1, 2, 3) == 4
            assert await fetched(["b", "a"], 2, 1) == 2
            assert await fetched(KEYS, 1, 2) == 0
            assert await fetched(KEYS, 3, 2, 1) == 1
            shards.drop()
            both = await asyncio.gather(fetched(KEYS, 0, 1), fetched(KEYS, 1, 0))  # One call waits for the other.
            assert max(both) == 4
            absent = BatchMeta(tasks=[TaskHandle("train/0/9", 1, stores=[0])], parts=meta(0).parts, stores=[STORE])
            with pytest.raises(RpcError) as caught:
                await shards.fetch(Batch(absent, data), KEYS, deadline_s=10)
            assert caught.value.code == ErrorCode.MISSING
            assert await fetched(KEYS, 0, 1) == 0
            data.close()

    with ending(TcpStoreProcess(make_run(tmp_path, memory=64 << 20))) as store:
        store.start()
        asyncio.run(main())
