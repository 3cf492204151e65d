"""Tests how shards are streamed to a reader that shares no memory with the store, with real store processes and real
TCP."""

from __future__ import annotations

import asyncio
import weakref

import numpy as np
import pytest

from proto import dtypes
from proto.messages import (
    BatchMeta,
    BatchPart,
    ErrorCode,
    GetStoreStats,
    StoreStats,
    TaskHandle,
)
from shared.dataplane import stream
from shared.dataplane.client import DataClient, TaskShards
from shared.rpc.errors import RpcError
from tests.integration.hosts.streamed import assert_same, block, clear, fetch, meta_of, slowed, until, with_peer
from tests.integration.store_process import STORE, Peer
from tests.integration.stream_line import Tap, TcpLine, TcpStoreProcess, remote


@pytest.mark.parametrize("plain", [False, True])
def test_every_element_type_and_shape_arrives_byte_exact(store: TcpStoreProcess, plain: bool) -> None:
    rng = np.random.default_rng(1)
    shapes = {"scalar": (), "empty": (0, 3), "odd": (7, 3, 5), "long": (70_001,)}
    tasks = [
        TaskShards(
            f"train/0/{row.code}",
            1,
            {
                key: rng.integers(0, 2, int(np.prod(shape)) * row.itemsize, np.uint8).view(row.numpy).reshape(shape)
                for key, shape in shapes.items()
            },
        )
        for row in dtypes.TABLE
    ]

    async def body(peer: Peer) -> None:
        await peer.data.put(tasks, store=STORE, deadline_s=10)
        data = remote(peer, plain=plain)
        assert_same(await fetch(data, tasks), tasks)
        assert_same(await data.fetch(meta_of(tasks), ["odd"], deadline_s=10), tasks, ["odd"])
        assert_same(await data.fetch(meta_of(tasks), [], deadline_s=10), tasks)
        assert data.streams.counts.chunks > 0
        data.close()

    store.plain = plain
    store.start()
    with_peer(store, body)


@pytest.mark.parametrize("plain", [False, True])
def test_chunks_are_sealed_unless_the_topology_says_otherwise(store: TcpStoreProcess, plain: bool) -> None:
    async def body(peer: Peer) -> None:
        tasks = block(0, 3, 50_000)
        await peer.data.put(tasks, store=STORE, deadline_s=10)
        data = remote(peer, plain=True)  # accepts encrypted and plain streams
        assert_same(await fetch(data, tasks), tasks)
        data.close()

    tap = Tap(f"tcp://127.0.0.1:{store.port}")
    store.advertised, store.plain = tap.endpoint, plain
    store.start()
    try:
        with_peer(store, body)
    finally:
        tap.close()
    seen, unseen = (tap.clear_bytes, tap.sealed_bytes) if plain else (tap.sealed_bytes, tap.clear_bytes)
    assert seen > 3 * 50_000
    assert not unseen


def test_shards_of_a_store_on_this_host_are_mapped_and_nothing_is_streamed(store: TcpStoreProcess) -> None:
    async def body(peer: Peer) -> None:
        tasks = block(0, 3)
        await peer.data.put(tasks, store=STORE, deadline_s=10)
        assert_same(await fetch(peer.data, tasks), tasks)
        assert peer.data.streams.counts.chunks == 0

    store.start()
    with_peer(store, body)


def test_a_store_whose_token_is_not_visible_here_streams_its_shards_and_does_not_accept_puts(
    store: TcpStoreProcess,
) -> None:
    async def body(peer: Peer) -> None:
        tasks = block(0, 3)
        await peer.data.put(tasks, store=STORE, deadline_s=10)
        # A reader with its own shared memory would find another file at that path.
        (store.run.shm / "batch-store-0" / "place").write_text("another file")
        stranger = DataClient(lambda service, instance: peer.store)
        stranger._shares[STORE] = False
        assert_same(await fetch(stranger, tasks), tasks)
        assert stranger.streams.counts.chunks > 0
        with pytest.raises(RpcError, match="another host"):
            await stranger.put(block(9, 1), store=STORE, deadline_s=5)
        stranger.close()

    store.start()
    with_peer(store, body)


def test_a_reader_that_wants_encryption_refuses_an_unencrypted_store(store: TcpStoreProcess) -> None:
    async def body(peer: Peer) -> None:
        tasks = block(0, 1)
        await peer.data.put(tasks, store=STORE, deadline_s=10)
        data = remote(peer)
        with pytest.raises(RpcError, match="encrypt_bulk"):
            await fetch(data, tasks)
        data.close()

    store.plain = True
    store.start()
    with_peer(store, body)


def test_a_large_request_uses_many_streams_and_a_large_task_only_one(
    store: TcpStoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "STREAM_BYTES", 8 << 20)

    async def body(peer: Peer) -> None:
        many = block(0, 24, 130_000)  # 62 MB
        [large] = block(100, 1, 2_000_000)  # 40 MB
        for begin in range(0, 24, 8):
            await peer.data.put(many[begin : begin + 8], store=STORE, deadline_s=10)
        await peer.data.put([large], store=STORE, deadline_s=10)
        data = remote(peer, inflight_bytes=4 << 20)
        # each stream begins while the previous one uses the whole window
        found = await asyncio.gather(fetch(data, many), fetch(data, [large]))
        assert_same([*found[0], *found[1]], [*many, large])
        assert data.streams.counts.inflight_peak_bytes <= 4 << 20
        assert data.streams.counts.refused == 0
        data.close()

    store.start()
    with_peer(store, body)


def test_errors_name_missing_shards_and_collected_tasks(store: TcpStoreProcess) -> None:
    async def body(peer: Peer) -> None:
        tasks = block(0, 4)
        await peer.data.put(tasks[:3], store=STORE, deadline_s=10)
        data = remote(peer)
        with pytest.raises(RpcError) as caught:
            await fetch(data, tasks)
        assert caught.value.code == ErrorCode.MISSING
        assert caught.value.names == ["train/0/3#a", "train/0/3#b"]
        handles = [TaskHandle("train/0/1", 1, stores=[0])]
        meta = BatchMeta(tasks=handles, parts=[BatchPart("s", ["a", "z"])], stores=[STORE])
        with pytest.raises(RpcError) as caught:
            await data.fetch(meta, ["a", "z"], deadline_s=10)
        assert caught.value.names == ["train/0/1#z"]
        await clear(peer, tasks[1:2])
        with pytest.raises(RpcError) as caught:
            await fetch(data, tasks[:3])
        assert caught.value.code == ErrorCode.COLLECTED
        assert caught.value.names == ["train/0/1"]
        assert_same(await fetch(data, [tasks[0], tasks[2]]), [tasks[0], tasks[2]])
        data.close()

    store.start()
    with_peer(store, body)


def test_writing_to_a_streamed_array_does_not_change_the_arrays_of_other_readers(store: TcpStoreProcess) -> None:
    async def body(peer: Peer) -> None:
        tasks = block(0, 2)
        await peer.data.put(tasks, store=STORE, deadline_s=10)
        data = remote(peer)
        for _ in range(2):
            found = await asyncio.gather(fetch(data, tasks), fetch(data, tasks[::-1]), fetch(data, tasks[1:]))
            for each, expected in zip(found, (tasks, tasks[::-1], tasks[1:]), strict=True):
                assert_same(each, expected)
                for arrays in each:
                    arrays["a"][:] = -1
                    arrays["b"][:] = -1
        assert_same(await fetch(data, tasks), tasks)
        data.close()

    store.start()
    with_peer(store, body)


def test_memory_of_earlier_streams_is_reused_only_when_no_array_refers_to_it(store: TcpStoreProcess) -> None:
    async def body(peer: Peer) -> None:
        blocks = [block(10 * i, 2, 50_000) for i in range(6)]
        for tasks in blocks:
            await peer.data.put(tasks, store=STORE, deadline_s=10)
        data = remote(peer)
        held = await fetch(data, blocks[0])
        for tasks in blocks[1:]:
            assert_same(await fetch(data, tasks), tasks)
        assert_same(held, blocks[0])
        found = await fetch(data, blocks[1])
        array = weakref.ref(found[0]["a"])
        del found
        await until(lambda: array() is None, "the release of an array that nothing refers to")
        data.close()

    store.start()
    with_peer(store, body)


def test_cancelled_fetches_do_not_disturb_another_fetch_on_the_same_connection(store: TcpStoreProcess) -> None:
    async def body(peer: Peer) -> None:
        line = TcpLine(store.port, 8e6)
        line.port = int(store.advertised.rpartition(":")[2])
        async with line.open():
            tasks = block(0, 4, 100_000)
            await peer.data.put(tasks, store=STORE, deadline_s=10)
            data = remote(peer)
            first = asyncio.create_task(fetch(data, tasks))
            await until(lambda: data.streams.counts.chunks > 0, "the first chunk")
            second = asyncio.create_task(fetch(data, tasks))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await fetch(data, tasks)
            first.cancel()
            assert_same(await second, tasks)
            assert line.connections == 1
            data.close()

    store.advertised = f"tcp://127.0.0.1:{TcpLine(0).port}"
    store.start()
    with_peer(store, body)


def test_a_collected_task_can_no_longer_be_fetched(store: TcpStoreProcess) -> None:
    async def body(peer: Peer) -> None:
        tasks = block(0, 4, 10_000)
        await peer.data.put(tasks, store=STORE, deadline_s=10)
        data = remote(peer)
        assert_same(await fetch(data, tasks), tasks)
        await clear(peer, tasks[:1])
        with pytest.raises(RpcError) as caught:
            await fetch(data, tasks)
        assert caught.value.code == ErrorCode.COLLECTED
        assert caught.value.names == ["train/0/0"]
        assert_same(await fetch(data, tasks[1:]), tasks[1:])  # Their file also holds a collected task.
        data.close()

    store.start()
    with_peer(store, body)


def test_a_task_collected_while_it_is_streamed_arrives_whole_and_its_space_is_freed_afterwards(
    store: TcpStoreProcess,
) -> None:
    async def body(peer: Peer) -> None:
        async with line.open():
            tasks = block(0, 4, 100_000)
            await peer.data.put(tasks, store=STORE, deadline_s=10)
            data = remote(peer)
            coming = asyncio.create_task(fetch(data, tasks))
            await until(lambda: data.streams.counts.chunks > 0, "the first chunk")
            await clear(peer, tasks)
            assert not coming.done()
            # later readers get nothing, not even from the stream in progress
            with pytest.raises(RpcError, match="collected"):
                await fetch(data, tasks)
            assert not coming.done()
            assert_same(await coming, tasks)

            async def held() -> int:
                stats = await peer.store.call(GetStoreStats(), StoreStats, deadline_s=5)
                return stats.bytes - stats.spare_bytes

            async with asyncio.timeout(10):
                while await held():
                    await asyncio.sleep(0.05)
            data.close()

    line = slowed(store, 8e6)
    with_peer(store, body)
