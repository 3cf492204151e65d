"""Repeats cases from the test suites of other data planes, and adds a few more: partial requests, errors midway and
constant memory."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import psutil
import pytest

from proto import dtypes
from proto.errors import WireError
from proto.messages import (
    Ack,
    BatchMeta,
    BatchPart,
    Clear,
    ErrorCode,
    GetStoreStats,
    PutTask,
    StoreStats,
    TaskHandle,
)
from shared.dataplane import client as data_client
from shared.dataplane import mapping
from shared.dataplane.client import TaskShards
from shared.rpc.errors import MAX_NAMES, RpcError
from tests.integration.store_process import STORE, Peer, StoreProcess, peer_of
from tests.integration.stream_line import remote

MEMORY = 64 << 20
STEPS = 1000
GROWTH_BYTES = 5 << 20
"""Maximum growth of a process over 900 steps: less than a thousandth of the bytes that have passed through it."""


def meta_of(tasks: list[TaskShards], keys: list[str]) -> BatchMeta:
    handles = [TaskHandle(task.task_id, task.fence, stores=[0]) for task in tasks]
    return BatchMeta(tasks=handles, parts=[BatchPart("s", keys)], stores=[STORE])


async def clear(peer: Peer, tasks: list[TaskShards]) -> None:
    await peer.store.call(Clear(tasks=[PutTask(task.task_id, task.fence) for task in tasks]), Ack, deadline_s=20)


async def stats(peer: Peer) -> StoreStats:
    return await peer.store.call(GetStoreStats(), StoreStats, deadline_s=20)


def test_memory_of_store_and_client_stays_flat_over_a_thousand_steps(
    store: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "CACHED_ROWS", 1 << 11)  # The cache is then full after a few steps, not after 3,000.
    values = np.random.default_rng(1).standard_normal(64 * 1024)

    async def main() -> None:
        async with peer_of(store.run) as peer:
            assert store.process is not None
            processes = [psutil.Process(), psutil.Process(store.process.pid)]
            early: list[int] = []
            for step in range(STEPS):
                tasks = [TaskShards(f"train/{step}/{i}", 1, {"a": values, "b": values[: i * 100]}) for i in range(8)]
                await peer.data.put(tasks, store=STORE, deadline_s=20)
                found = await peer.data.fetch(meta_of(tasks, ["a", "b"]), ["a", "b"], deadline_s=20)
                assert found[7]["b"][-1] == values[699]
                del found
                await clear(peer, tasks)
                if step == STEPS // 10:
                    gc.collect()
                    early = [process.memory_info().rss for process in processes]
            gc.collect()
            growth = [process.memory_info().rss - before for process, before in zip(processes, early, strict=True)]
            # If the reader was late once, both sides keep the pages of one more step mapped.
            assert max(growth) < GROWTH_BYTES + 9 * values.nbytes, growth
            now = await stats(peer)
            assert (now.bytes, now.shards, now.files, now.zombie_bytes) == (now.spare_bytes, 0, 0, 0)
            # These are the pages of one step, and of another step whose reader was late.
            assert now.spare_bytes < 3 * 9 * values.nbytes
            assert STEPS - 4 < now.lent < STEPS
            assert (now.puts, now.clears) == (STEPS, 8 * STEPS)

    asyncio.run(main())


def test_a_request_larger_than_one_message_is_sent_in_parts(
    store: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_client, "LOCATE_TASKS", 64)

    async def main() -> None:
        async with peer_of(store.run) as peer:
            tasks = [TaskShards(f"train/0/{i}", 1, {"a": np.full(3, i)}) for i in range(300)]
            await peer.data.put(tasks[:150], store=STORE, deadline_s=20)
            await peer.data.put(tasks[150:], store=STORE, deadline_s=20)
            found = await peer.data.fetch(meta_of(tasks, ["a"]), ["a"], deadline_s=20)
            assert [int(each["a"][0]) for each in found] == list(range(300))
            await clear(peer, [tasks[7], tasks[290]])
            with pytest.raises(RpcError) as caught:  # One invalid part fails the whole request.
                await peer.data.fetch(meta_of(tasks, ["a"]), ["a"], deadline_s=20)
            assert caught.value.code == ErrorCode.COLLECTED
            assert set(caught.value.names) <= {"train/0/7", "train/0/290"}

    asyncio.run(main())


@pytest.mark.parametrize("streamed", [False, True])
def test_a_reply_counts_the_missing_shards_that_it_does_not_name(store: StoreProcess, streamed: bool) -> None:
    tasks = [TaskShards(f"train/0/{i}", 1, {"a": np.full(3, i)}) for i in range(200)]

    async def main() -> None:
        async with peer_of(store.run) as peer:
            data = remote(peer) if streamed else peer.data
            await peer.data.put(tasks[:100], store=STORE, deadline_s=20)
            with pytest.raises(
                RpcError, match=r"100 of 128 tasks .*36 more that are not named.*train/0/100#a"
            ) as caught:
                await data.fetch(meta_of(tasks[72:], ["a"]), ["a"], deadline_s=20)
            assert caught.value.code == ErrorCode.MISSING
            assert caught.value.names == [f"train/0/{i}#a" for i in range(100, 100 + MAX_NAMES)]
            with pytest.raises(RpcError, match=r"100 shards are missing: train/0/0#b") as caught:
                await data.fetch(meta_of(tasks[:100], ["a", "b"]), ["a", "b"], deadline_s=20)
            assert caught.value.names[:MAX_NAMES] == [f"train/0/{i}#b" for i in range(MAX_NAMES)]
            # Without streaming, the client itself finds the missing shards.
            assert ("36 more that are not named" in str(caught.value)) == streamed
            if streamed:
                data.close()

    asyncio.run(main())


def test_counts_are_exact_after_concurrent_puts_fetches_and_clears(store: StoreProcess) -> None:
    rounds, width = 30, 6

    async def lane(peer: Peer, number: int) -> None:
        for step in range(rounds):
            tasks = [TaskShards(f"lane-{number}/{step}/{i}", 1, {"a": np.full(500, i + step)}) for i in range(3)]
            await peer.data.put(tasks, store=STORE, deadline_s=30)
            found = await peer.data.fetch(meta_of(tasks, ["a"]), ["a"], deadline_s=30)
            assert [int(each["a"][0]) for each in found] == [step, step + 1, step + 2]
            await clear(peer, tasks[:2])

    async def main() -> None:
        async with peer_of(store.run) as one, peer_of(store.run) as two:
            await asyncio.gather(*(lane((one, two)[number % 2], number) for number in range(width)))
            gc.collect()
            now = await stats(one)
            assert (now.tasks, now.shards, now.files) == (rounds * width,) * 3
            assert (now.puts, now.clears, now.zombie_bytes) == (rounds * width, 2 * rounds * width, 0)

    asyncio.run(main())


def test_nested_keys_scalars_and_empty_shards_come_back_and_are_cleared_as_one_task(store: StoreProcess) -> None:
    shards = {
        "reward/parts/format": np.float32(0.5).reshape(()),
        "reward/parts/answer": np.array(1.0, np.float64),
        "images/0": np.zeros((0, 3), np.uint8),
        "images/1": np.arange(6, dtype=np.uint8).reshape(2, 3),
    }

    async def main() -> None:
        async with peer_of(store.run) as peer:
            task = TaskShards("train/0/0", 1, shards)
            await peer.data.put([task], store=STORE, deadline_s=20)
            [found] = await peer.data.fetch(meta_of([task], list(shards)), list(shards), deadline_s=20)
            for key, array in shards.items():
                assert (found[key].shape, found[key].dtype) == (array.shape, array.dtype)
                assert found[key].tobytes() == array.tobytes()
            await clear(peer, [task])
            del found
            gc.collect()
            assert (await stats(peer)).bytes == 0
            with pytest.raises(WireError):  # A task must have at least one shard.
                await peer.data.put([TaskShards("train/0/1", 1, {})], store=STORE, deadline_s=20)

    asyncio.run(main())


def test_a_dtype_outside_the_table_is_refused_before_any_request_to_the_store(store: StoreProcess) -> None:
    assert "complex128" not in {row.name for row in dtypes.TABLE}
    bad = [np.zeros(2, np.complex128), np.array(["a"]), np.array([None]), np.zeros(1, "M8[s]")]

    async def main() -> None:
        async with peer_of(store.run) as peer:
            for array in bad:
                with pytest.raises(WireError):
                    await peer.data.put([TaskShards("train/0/0", 1, {"a": array})], store=STORE, deadline_s=20)
            now = await stats(peer)
            assert (now.bytes, now.puts) == (0, 0)

    asyncio.run(main())
