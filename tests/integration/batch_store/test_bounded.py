"""Tests that a full store spills to disk and then replies BUSY, and that no data is lost, duplicated or partly
visible."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import zmq

from proto.ids import new_incarnation
from proto.messages import (
    ErrorCode,
    GetInventory,
    GetStorePlace,
    Inventory,
    Ping,
    Pong,
    PutBegin,
    PutGrant,
    PutTask,
    StorePlace,
    Telemetry,
)
from services.batch_store.room import RETRY_AFTER_S
from shared.dataplane.client import TaskShards
from shared.dataplane.reach import write_place
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Call, Mailbox
from shared.rundir import RunDir
from tests.integration.batch_store.full_store import (
    MEMORY,
    MIB,
    SHARD,
    SPILL,
    check,
    clear,
    meta_of,
    places,
    put,
    served,
    shard,
    stats,
)
from tests.integration.store_process import STORE, Peer, make_run, peer_of


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path, memory=MEMORY, spill=tmp_path / "spill", spill_limit=SPILL)


def test_full_memory_spills_its_oldest_files_and_puts_wait_while_the_spill_folder_is_full_too(run: RunDir) -> None:
    tasks = [shard(i) for i in range(12)]

    async def main() -> None:
        async with served(run) as (_, peer):
            weights = shard(0, split="weights")
            await put(peer, weights)
            for task in tasks[:11]:
                await put(peer, task)
            assert await places(peer, [weights]) == ["memory"]  # The weights are the oldest, but they are spilled last.
            assert await places(peer, tasks[:11]) == ["disk"] * 8 + ["memory"] * 3
            full = await stats(peer)
            assert full.bytes == full.limit_bytes == MEMORY + SPILL
            assert (full.shards, full.busy) == (12, 0)
            with pytest.raises(RpcError, match="of the spill") as caught:
                await put(peer, tasks[11], deadline_s=1)
            assert caught.value.code == ErrorCode.BUSY
            # The put is retried, and never before retry_after_s.
            assert 2 <= (await stats(peer)).busy <= 1 / RETRY_AFTER_S
            waiting = asyncio.ensure_future(put(peer, tasks[11]))
            await clear(peer, tasks[:1])
            await waiting
            await check(peer, tasks[1:])
            await clear(peer, [*tasks, weights])
            gc.collect()
            done = await stats(peer)
            assert (done.bytes, done.shards, done.files, done.zombie_bytes) == (done.spare_bytes, 0, 0, 0)
            assert not list((run.path.parent / "spill").rglob("*.blk"))

    asyncio.run(main())


def test_a_producer_retries_at_the_time_that_the_store_names_and_not_before(run: RunDir) -> None:
    """The store is a mailbox whose replies the test chooses."""
    pauses_s = [0.05, 0.6, 0.1, 0.3, 60.0]
    asked: list[float] = []

    def begin(request: PutBegin, call: Call) -> PutGrant:
        asked.append(time.monotonic())
        raise RpcError(ErrorCode.BUSY, "no room", retry_after_s=pauses_s[len(asked) - 1])

    def place(request: GetStorePlace, call: Call) -> StorePlace:
        return write_place(str(run.path / "place"))

    async def main() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        store = Mailbox(STORE, new_incarnation())
        store.handle(PutBegin, begin)
        store.handle(GetStorePlace, place)
        store.handle(Ping, lambda request, call: Pong(service="batch-store", instance=0, incarnation=1, state="READY"))
        store.bind(context, run.endpoint("batch-store", 0))
        try:
            async with peer_of(run) as peer:
                with pytest.raises(RpcError, match="no room") as caught:
                    await put(peer, shard(1), deadline_s=20)
                assert caught.value.code == ErrorCode.BUSY
                # No time is left for another attempt, so the put fails at once.
                assert time.monotonic() - asked[-1] < 5
        finally:
            await store.close()
            await asyncio.to_thread(context.term)

    asyncio.run(main())
    run.remove_volatile()
    gaps_s = [later - earlier for earlier, later in pairwise(asked)]
    assert len(asked) == len(pauses_s)
    assert all(gap_s >= told_s for gap_s, told_s in zip(gaps_s, pauses_s, strict=False)), gaps_s
    assert sum(gaps_s) < sum(pauses_s[:-1]) + 2  # The client does not wait much longer than the store tells it to.


def test_a_put_that_can_never_be_granted_does_not_cause_spilling(run: RunDir) -> None:
    tasks = [shard(i) for i in range(4)]
    hopeless = [
        PutBegin(put_id="0" * 32, nbytes=2**62, tasks=[PutTask("train/0/9", 1)]),
        PutBegin(put_id="0" * 32, nbytes=SHARD, tasks=[]),
        PutBegin(put_id="../escape", nbytes=SHARD, tasks=[PutTask("train/0/9", 1)]),
    ]

    async def main() -> None:
        async with served(run) as (_, peer):
            for task in tasks:
                await put(peer, task)
            for request in hopeless:
                with pytest.raises(RpcError) as caught:
                    await peer.store.call(request, PutGrant, deadline_s=10)
                assert caught.value.code == ErrorCode.BAD_REQUEST
            assert await places(peer, tasks) == ["memory"] * 4

    asyncio.run(main())


def test_a_reader_keeps_its_mapping_when_the_file_is_spilled(run: RunDir) -> None:
    tasks = [shard(i) for i in range(5)]

    async def main() -> None:
        async with served(run) as (_, peer):
            await put(peer, tasks[0])
            [held] = await peer.data.fetch(meta_of(tasks[:1]), ["a"], deadline_s=10)
            for task in tasks[1:]:
                await put(peer, task)
            assert await places(peer, tasks[:1]) == ["disk"]
            now = await stats(peer)
            assert now.zombie_bytes == 2 * MIB  # The file is still in memory for this reader.
            assert np.array_equal(held["a"], tasks[0].shards["a"])
            await check(peer, tasks)
            del held
            gc.collect()
            assert (await stats(peer)).zombie_bytes == 0

    asyncio.run(main())


def test_a_put_larger_than_the_memory_does_not_cause_spilling(run: RunDir) -> None:
    async def main() -> None:
        async with served(run) as (_, peer):
            await put(peer, shard(1))
            with pytest.raises(RpcError, match="can never fit") as caught:
                await put(peer, shard(2, nbytes=MEMORY))
            assert caught.value.code == ErrorCode.BAD_REQUEST
            assert await places(peer, [shard(1)]) == ["memory"]

    asyncio.run(main())


def test_a_restarted_store_serves_files_in_memory_and_on_disk_except_a_damaged_one(run: RunDir) -> None:
    tasks = [shard(i) for i in range(7)]

    async def main() -> None:
        async with served(run) as (store, peer):
            for task in tasks:
                await put(peer, task)
            assert await places(peer, tasks) == ["disk"] * 3 + ["memory"] * 4
            store.kill()
            [first, *_] = sorted(run.spill_link.rglob("*.blk"), key=lambda path: path.stat().st_mtime_ns)
            body = bytearray(first.read_bytes())
            body[-7] ^= 1
            first.write_bytes(body)
            store.start()
            await check(peer, tasks[1:])
            assert await places(peer, tasks[1:]) == ["disk"] * 2 + ["memory"] * 4
            with pytest.raises(RpcError, match="train/0/0#a") as caught:
                await check(peer, tasks[:1])
            assert caught.value.code == ErrorCode.MISSING

    asyncio.run(main())


def test_a_file_in_both_places_is_kept_once_and_a_partial_copy_is_deleted(run: RunDir) -> None:
    tasks = [shard(i) for i in range(2)]

    async def main() -> None:
        async with served(run) as (store, peer):
            for task in tasks:
                await put(peer, task)
            store.kill()  # The writes below leave the traces of a kill after a rename and of a kill during a copy.
            folder = run.spill_link / "batch-store-0"
            [first, second] = sorted(
                (run.shm / "batch-store-0").glob("*.blk"), key=lambda path: path.stat().st_mtime_ns
            )
            (folder / first.name).write_bytes(first.read_bytes())
            (folder / f"{second.stem}.part").write_bytes(second.read_bytes()[:5000])
            store.start()
            await check(peer, tasks)
            assert await places(peer, tasks) == ["disk", "memory"]
            now = await stats(peer)
            assert (now.bytes, now.shards, now.files, now.zombie_bytes) == (4 * MIB, 2, 2, 0)
            assert [path.name for path in folder.iterdir()] == [first.name]

    asyncio.run(main())


def test_kills_during_moves_neither_lose_nor_duplicate_data(tmp_path: Path) -> None:
    memory, spill = 4 * MIB, 64 * MIB
    run = make_run(tmp_path, memory=memory, spill=tmp_path / "spill", spill_limit=spill)
    chance = random.Random(11)
    acknowledged: list[TaskShards] = []
    gone: list[TaskShards] = []
    stop = asyncio.Event()
    checking = asyncio.Lock()

    def piece(number: int) -> TaskShards:
        return shard(number, nbytes=300_000 + number % 7 * 1000)

    async def produce(peer: Peer) -> None:
        number = 0
        while not stop.is_set():
            await put(peer, piece(number), deadline_s=60)
            acknowledged.append(piece(number))
            number += 1
            if len(acknowledged) > 60:
                async with checking:
                    gone.extend(acknowledged[:20])
                    del acknowledged[:20]
                await clear(peer, gone[-20:])

    async def main() -> None:
        async with served(run) as (store, peer), peer_of(run) as other:
            async with asyncio.timeout(100), asyncio.TaskGroup() as group:
                producing = group.create_task(produce(peer))
                for _ in range(8):
                    await asyncio.sleep(chance.uniform(0.3, 0.9))
                    assert not producing.done()
                    store.kill()
                    store.start()
                    async with checking:
                        await check(other, acknowledged[-5:])
                stop.set()
            for _ in range(2):
                await check(other, acknowledged)
                page = await other.store.call(GetInventory(), Inventory, deadline_s=30)
                assert sorted(task.task_id for task in page.tasks) == sorted(task.task_id for task in acknowledged)
                gc.collect()
                now = await stats(other)
                assert now.shards == len(acknowledged)
                assert now.bytes <= memory + spill
                assert "disk" in await places(other, acknowledged)
                store.kill()
                store.start()

    asyncio.run(main())
    assert gone


def test_telemetry_shows_memory_spill_and_refusals(run: RunDir) -> None:
    seen: dict[str, float] = {}
    grown = asyncio.Event()

    def keep(message: Telemetry, call: Call) -> None:
        if message.topic == "store":
            seen.update({name: float(value) for name, value in message.values.items()})
            grown.set()

    async def main() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        monitor = Mailbox("monitor/0", new_incarnation())
        monitor.handle(Telemetry, keep)
        monitor.bind(context, run.endpoint("monitor", 0))
        try:
            async with served(run) as (_, peer):
                for number in range(12):
                    await put(peer, shard(number))
                with pytest.raises(RpcError):
                    await put(peer, shard(12), deadline_s=0.3)
                async with asyncio.timeout(20):
                    while not (seen.get("busy") and seen["spilled_bytes"] == SPILL):
                        grown.clear()
                        await grown.wait()
                assert seen["memory_bytes"] == MEMORY
                assert seen["bytes"] == seen["limit_bytes"] == MEMORY + SPILL
                assert (seen["shards"], seen["zombie_bytes"]) == (12.0, 0.0)
        finally:
            await monitor.close()
            context.term()

    asyncio.run(main())
