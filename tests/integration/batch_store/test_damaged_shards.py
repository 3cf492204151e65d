"""Tests that readers on the same host detect when stored bytes of shards have changed, and that the store drops these
shards when it is asked to check them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from proto.messages import (
    Ack,
    BatchMeta,
    BatchPart,
    Clear,
    ErrorCode,
    GetInventory,
    GetStoreStats,
    Inventory,
    PutTask,
    StoreStats,
    TaskHandle,
)
from shared.dataplane.client import DataClient, TaskShards
from shared.rpc.errors import RpcError
from tests.integration.damage import flip_header, flip_shard, shards
from tests.integration.store_process import STORE, Peer, StoreProcess, ending, make_run, peer_of
from tests.integration.stream_line import TcpStoreProcess, remote

KEYS = ("a", "b")
LARGE = 3 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    with ending(StoreProcess(make_run(tmp_path, memory=96 << 20))) as process:
        process.start()
        yield process


def tasks_of(first: int, count: int, size: int = 1000) -> list[TaskShards]:
    rng = np.random.default_rng(first)
    return [
        TaskShards(f"train/0/{i}", 1, {key: rng.standard_normal(size).astype(np.float32) for key in KEYS})
        for i in range(first, first + count)
    ]


def meta_of(tasks: list[TaskShards]) -> BatchMeta:
    handles = [TaskHandle(task.task_id, task.fence, stores=[0]) for task in tasks]
    return BatchMeta(tasks=handles, parts=[BatchPart("s", list(KEYS))], stores=[STORE])


async def check(data: DataClient, tasks: list[TaskShards]) -> None:
    found = await data.fetch(meta_of(tasks), KEYS, deadline_s=30)
    for task, arrays in zip(tasks, found, strict=True):
        assert all(np.array_equal(arrays[key], task.shards[key]) for key in KEYS), task.task_id


def folder(store: StoreProcess) -> Path:
    return store.run.shm / "batch-store-0"


async def held(peer: Peer, tasks: list[TaskShards]) -> list[str]:
    """Have the store read the shards of these tasks again, and return the ids of the tasks that it still has."""
    names = [PutTask(task.task_id, task.fence) for task in tasks]
    found = await peer.store.call(GetInventory(tasks=names), Inventory, deadline_s=30)
    assert found.files == [1] * len(found.tasks) == [1] * len(found.hashes)
    return [task.task_id for task in found.tasks]


@pytest.mark.parametrize("size", [1000, LARGE])
def test_a_flipped_bit_is_detected_only_by_readers_of_its_shard(store: StoreProcess, size: int) -> None:
    tasks = tasks_of(0, 3, size)

    async def main() -> None:
        async with peer_of(store.run) as peer:
            await peer.data.put(tasks, store=STORE, deadline_s=20)
            assert flip_shard(folder(store), "b", lambda task_id: task_id == "train/0/1")
            await check(peer.data, [tasks[0], tasks[2]])
            await peer.data.fetch(meta_of(tasks), ["a"], deadline_s=20)
            for _ in range(2):
                with pytest.raises(RpcError, match="damaged shards") as caught:
                    await check(peer.data, tasks)
                assert (caught.value.code, caught.value.names) == (ErrorCode.MISSING, ["train/0/1#b"])

    asyncio.run(main())


def test_a_store_that_is_asked_to_check_drops_damaged_shards_and_serves_the_rest(store: StoreProcess) -> None:
    tasks = tasks_of(0, 3)

    async def main() -> None:
        async with peer_of(store.run) as peer:
            await peer.data.put(tasks, store=STORE, deadline_s=20)
            assert await held(peer, tasks) == [task.task_id for task in tasks]
            assert flip_shard(folder(store), "a", lambda task_id: task_id == "train/0/1")
            assert await held(peer, [tasks[0]]) == ["train/0/0"]
            assert await held(peer, tasks) == ["train/0/0", "train/0/2"]
            await check(peer.data, [tasks[0], tasks[2]])
            with pytest.raises(RpcError, match="no shards here") as caught:
                await check(peer.data, tasks)
            assert caught.value.code == ErrorCode.MISSING
            await peer.data.put([tasks[1]], store=STORE, deadline_s=20)  # The shard is recreated.
            await check(peer.data, tasks)

    asyncio.run(main())


def test_a_damaged_table_is_detected_and_the_store_drops_the_whole_file(store: StoreProcess) -> None:
    tasks, others = tasks_of(0, 3), tasks_of(3, 2)

    async def main() -> None:
        async with peer_of(store.run) as peer:
            await peer.data.put(tasks, store=STORE, deadline_s=20)
            [(file, *_), *_] = shards(folder(store))
            await peer.data.put(others, store=STORE, deadline_s=20)
            flip_header(file)
            with pytest.raises(RpcError, match="damaged shards") as caught:
                await check(peer.data, tasks)
            assert caught.value.code == ErrorCode.MISSING
            assert await held(peer, tasks[:1]) == []
            page = await peer.store.call(GetInventory(), Inventory, deadline_s=20)
            assert [task.task_id for task in page.tasks] == [task.task_id for task in others]
            stats = await peer.store.call(GetStoreStats(), StoreStats, deadline_s=20)
            assert stats.files == 1

    asyncio.run(main())


def test_the_content_of_lent_pages_is_verified_again(store: StoreProcess) -> None:
    """The process has already read and verified an earlier file in the same pages."""
    old, new = tasks_of(0, 1, LARGE), tasks_of(1, 1, LARGE)

    async def main() -> None:
        async with peer_of(store.run) as peer:
            await peer.data.put(old, store=STORE, deadline_s=20)
            await check(peer.data, old)
            await peer.store.call(Clear(tasks=[PutTask(old[0].task_id, 1)]), Ack, deadline_s=20)
            async with asyncio.timeout(20):
                while not (await peer.store.call(GetStoreStats(), StoreStats, deadline_s=20)).spare_bytes:
                    await asyncio.sleep(0.05)
            await peer.data.put(new, store=STORE, deadline_s=20)
            assert (await peer.store.call(GetStoreStats(), StoreStats, deadline_s=20)).lent == 1
            assert flip_shard(folder(store), "b", lambda task_id: task_id == new[0].task_id)
            with pytest.raises(RpcError, match="damaged shards"):
                await check(peer.data, new)

    asyncio.run(main())


def test_a_reader_without_shared_memory_also_detects_the_damage(tmp_path: Path) -> None:
    tasks = tasks_of(0, 2)

    async def main(process: StoreProcess) -> None:
        async with peer_of(process.run) as peer:
            await peer.data.put(tasks, store=STORE, deadline_s=20)
            assert flip_shard(folder(process), "a", lambda task_id: task_id == "train/0/1")
            far = remote(peer)
            try:
                with pytest.raises(RpcError, match="damaged shards") as caught:
                    await check(far, tasks)
                assert caught.value.code == ErrorCode.MISSING
            finally:
                far.close()

    with ending(TcpStoreProcess(make_run(tmp_path, memory=96 << 20))) as process:
        process.start()
        asyncio.run(main(process))
