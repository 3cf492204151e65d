"""Tests that a store killed with SIGKILL at any instant does not lose acknowledged data and does not serve partly
written data."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest

from proto.blockfile import BlockLayout
from proto.messages import (
    Ack,
    BatchMeta,
    BatchPart,
    Clear,
    ErrorCode,
    GetInventory,
    GetStoreStats,
    Inventory,
    PutBegin,
    PutGrant,
    PutSeal,
    PutSealed,
    PutTask,
    StoreStats,
    TaskHandle,
)
from shared.dataplane.client import TaskShards
from shared.dataplane.mapping import lock_named
from shared.dataplane.write import write_block
from shared.rpc.errors import RpcError
from tests.integration.store_process import STORE, Peer, StoreProcess, peer_of

MEMORY = 96 << 20
KILLS = 8


def shards_of(number: int) -> TaskShards:
    rng = np.random.default_rng(number)
    sizes = rng.integers(0, 40_000, 3)
    return TaskShards(f"train/0/{number}", 1, {f"k{i}": rng.standard_normal(size) for i, size in enumerate(sizes)})


def meta_of(tasks: list[TaskShards]) -> BatchMeta:
    handles = [TaskHandle(task.task_id, task.fence, stores=[0]) for task in tasks]
    return BatchMeta(tasks=handles, parts=[BatchPart("s", ["k0", "k1", "k2"])], stores=[STORE])


async def check(peer: Peer, tasks: list[TaskShards]) -> None:
    found = await peer.data.fetch(meta_of(tasks), ["k0", "k1", "k2"], deadline_s=30)
    for task, arrays in zip(tasks, found, strict=True):
        for key, array in task.shards.items():
            assert np.array_equal(arrays[key], array), f"{task.task_id}#{key}"


def test_acknowledged_puts_and_clears_survive_kills_at_random_instants(store: StoreProcess) -> None:
    rng = random.Random(5)
    acknowledged: dict[int, TaskShards] = {}
    cleared: set[int] = set()
    done = asyncio.Event()

    async def produce(peer: Peer, first: int) -> None:
        number = first
        while not done.is_set():
            tasks = [shards_of(number + i) for i in range(4)]
            await peer.data.put(tasks, store=STORE, deadline_s=60)
            for i, task in enumerate(tasks):
                acknowledged[number + i] = task
            number += 12
            if number > first + 60:
                gone = [old for old in list(acknowledged) if old < number - 60 and old not in cleared][:4]
                cleared.update(gone)  # The shards of these tasks might be gone as soon as the request is sent.
                for old in gone:
                    del acknowledged[old]
                request = Clear(tasks=[PutTask(f"train/0/{old}", 1) for old in gone])
                await peer.store.call(request, Ack, deadline_s=60)

    async def consume(peer: Peer) -> None:
        while not done.is_set():
            numbers = rng.sample(sorted(acknowledged), min(5, len(acknowledged)))
            try:
                await check(peer, [acknowledged[number] for number in numbers])
            except RpcError as error:
                if error.code != ErrorCode.COLLECTED or not cleared & set(numbers):
                    raise
            await asyncio.sleep(0.005)

    async def kill() -> None:
        for _ in range(KILLS):
            await asyncio.sleep(rng.uniform(0.05, 0.9))
            store.kill()
            store.start()
        async with asyncio.timeout(60):
            while len(cleared) < 12:
                await asyncio.sleep(0.05)
        done.set()

    async def main() -> None:
        async with peer_of(store.run) as one, peer_of(store.run) as two, peer_of(store.run) as three:
            async with asyncio.timeout(100), asyncio.TaskGroup() as group:
                group.create_task(produce(one, 0))
                group.create_task(produce(two, 4))
                group.create_task(produce(two, 8))
                group.create_task(consume(three))
                group.create_task(kill())
            for _ in range(2):
                await check(one, list(acknowledged.values()))
                page = await one.store.call(GetInventory(), Inventory, deadline_s=30)
                held = {task.task_id for task in page.tasks}
                assert held == {task.task_id for task in acknowledged.values()}
                stats = await one.store.call(GetStoreStats(), StoreStats, deadline_s=30)
                assert stats.shards == 3 * len(acknowledged)
                assert stats.bytes <= MEMORY
                store.kill()
                store.start()

    asyncio.run(main())
    assert store.killed == KILLS + 2


def test_a_put_whose_file_cannot_be_renamed_is_not_acknowledged(store: StoreProcess) -> None:
    task = shards_of(1)
    layout = BlockLayout([(task.task_id, task.fence, task.shards)])
    begin = PutBegin(put_id="a" * 32, nbytes=layout.file_bytes, tasks=[PutTask(task.task_id, task.fence)])
    seal = PutSeal(put_id=begin.put_id)

    async def main() -> None:
        async with peer_of(store.run) as peer:
            grant = await peer.store.call(begin, PutGrant, deadline_s=10)
            locked = lock_named(grant.path, os.O_RDWR)
            assert locked is not None
            write_block(locked, layout)
            in_the_way = Path(grant.path).with_suffix(".blk")
            in_the_way.mkdir()
            for _ in range(2):
                with pytest.raises(RpcError, match="Is a directory"):
                    await peer.store.call(seal, PutSealed, deadline_s=10)
            in_the_way.rmdir()
            await peer.store.call(seal, PutSealed, deadline_s=10)
            os.close(locked)
            store.kill()
            store.start()
            await check(peer, [task])

    asyncio.run(main())


def test_file_damaged_while_the_store_was_down_is_not_served(store: StoreProcess) -> None:
    good, bad = [shards_of(1)], [shards_of(2)]

    async def main() -> None:
        async with peer_of(store.run) as peer:
            await peer.data.put(good, store=STORE, deadline_s=10)
            folder = store.run.shm / "batch-store-0"
            known = set(folder.glob("*.blk"))
            await peer.data.put(bad, store=STORE, deadline_s=10)
            [path] = set(folder.glob("*.blk")) - known
            store.kill()
            body = bytearray(path.read_bytes())
            body[-3] ^= 1
            path.write_bytes(bytes(body))
            store.start()
            await check(peer, good)
            with pytest.raises(RpcError, match="train/0/2#k0") as caught:
                await check(peer, bad)
            assert caught.value.code == ErrorCode.MISSING
            await peer.data.put(bad, store=STORE, deadline_s=10)  # A new attempt repairs the task.
            await check(peer, bad)

    asyncio.run(main())


def test_a_clear_interrupted_by_the_stores_death_stays_in_effect(store: StoreProcess) -> None:
    """The store dies after it has removed the first of two files. Whatever the clear had done by then is permanent."""
    tasks = [shards_of(number) for number in (1, 2)]
    names = [PutTask(task.task_id, task.fence) for task in tasks]

    async def clear(peer: Peer) -> None:
        for task in tasks:
            await peer.data.put([task], store=STORE, deadline_s=10)
        asked = asyncio.create_task(peer.store.call(Clear(tasks=names), Ack, deadline_s=60))
        assert store.process is not None
        assert await asyncio.to_thread(store.process.wait, 20) == -signal.SIGKILL
        asked.cancel()

    async def look(peer: Peer) -> None:
        page = await peer.store.call(GetInventory(), Inventory, deadline_s=10)
        assert page.tasks == []
        for task in tasks:  # A late attempt uses the expired fence.
            with pytest.raises(RpcError, match="were collected"):
                await peer.data.put([task], store=STORE, deadline_s=10)

    async def main() -> None:
        async with peer_of(store.run) as peer:
            await clear(peer)
            store.module = "services.batch_store"
            store.start()
            await look(peer)

    store.kill()
    store.module = "tests.integration.batch_store.dying_store"
    store.start()
    asyncio.run(main())


def test_superseded_shards_stay_gone_after_a_kill_although_their_file_remains(store: StoreProcess) -> None:
    def revised(names: list[int], revision: str, value: float) -> list[TaskShards]:
        return [TaskShards(f"train/0/{n}", 1, {f"p:{revision}": np.full(9, value)}) for n in names]

    async def main() -> None:
        async with peer_of(store.run) as peer:

            async def shards() -> int:
                return (await peer.store.call(GetStoreStats(), StoreStats, deadline_s=30)).shards

            for tasks in (
                revised([1, 2], "a", 1.0),  # Task 2 keeps the file alive.
                revised([1], "b", 2.0),
                revised([1], "a", 3.0),  # This is revision "a" with different bytes; the file of "b" is gone.
            ):
                await peer.data.put(tasks, store=STORE, deadline_s=10)
                before = await shards()
                store.kill()
                store.start()
                assert await shards() == before
            assert before == 2
            handle = TaskHandle("train/0/1", 1, stores=[0])
            meta = BatchMeta(tasks=[handle], parts=[BatchPart("s", ["p:a"])], stores=[STORE])
            [found] = await peer.data.fetch(meta, ["p:a"], deadline_s=30)
            assert found["p:a"].tolist() == [3.0] * 9

    asyncio.run(main())
