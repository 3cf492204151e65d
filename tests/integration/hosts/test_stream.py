"""Shards streamed to a reader that shares no memory with the store: real store processes, real TCP."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proto import bulk, dtypes
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
from shared.dataplane import stream
from shared.dataplane.client import DataClient, TaskShards
from shared.rpc.errors import DeadlineExceeded, RpcError
from tests.integration.store_process import STORE, Peer, ending, make_run, peer_of
from tests.integration.stream_line import Message, Tap, TcpLine, TcpStoreProcess, meddled, remote

MEMORY = 192 << 20
Body = Callable[[Peer], Coroutine[Any, Any, None]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TcpStoreProcess]:
    with ending(TcpStoreProcess(make_run(tmp_path, memory=MEMORY))) as process:
        yield process


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


@pytest.mark.parametrize("plain", [False, True])
def test_every_element_type_and_shape_comes_byte_exact(store: TcpStoreProcess, plain: bool) -> None:
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
        data = remote(peer, plain=True)  # accepts both
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


def test_store_on_this_host_is_mapped_and_nothing_is_streamed(store: TcpStoreProcess) -> None:
    async def body(peer: Peer) -> None:
        tasks = block(0, 3)
        await peer.data.put(tasks, store=STORE, deadline_s=10)
        assert_same(await fetch(peer.data, tasks), tasks)
        assert peer.data.streams.counts.chunks == 0

    store.start()
    with_peer(store, body)


def test_store_whose_token_is_not_seen_here_is_streamed_from_and_takes_no_put(store: TcpStoreProcess) -> None:
    async def body(peer: Peer) -> None:
        tasks = block(0, 3)
        await peer.data.put(tasks, store=STORE, deadline_s=10)
        # what a reader with its own shared memory would find at that path
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


def test_reader_that_wants_encryption_refuses_a_store_in_clear(store: TcpStoreProcess) -> None:
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


def test_large_request_comes_in_many_streams_and_one_large_task_in_one(
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
        # each stream begins while the previous one has all the credit
        found = await asyncio.gather(fetch(data, many), fetch(data, [large]))
        assert_same([*found[0], *found[1]], [*many, large])
        assert data.streams.counts.inflight_peak_bytes <= 4 << 20
        assert data.streams.counts.refused == 0
        data.close()

    store.start()
    with_peer(store, body)


def test_missing_and_collected_shards_are_named(store: TcpStoreProcess) -> None:
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


def test_writing_to_a_streamed_array_changes_no_other_readers_array(store: TcpStoreProcess) -> None:
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
        await until(lambda: array() is None, "what nobody but its fetcher holds to go")
        data.close()

    store.start()
    with_peer(store, body)


def test_cancelled_fetches_do_not_disturb_another_on_their_connection(store: TcpStoreProcess) -> None:
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


def test_collected_task_cannot_be_fetched_from_then_on(store: TcpStoreProcess) -> None:
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
        assert_same(await fetch(data, tasks[1:]), tasks[1:])  # although their file also holds a collected task
        data.close()

    store.start()
    with_peer(store, body)


def slowed(store: TcpStoreProcess, bytes_per_s: float) -> TcpLine:
    """Start `store` behind a line of that speed."""
    line = TcpLine(store.port, bytes_per_s)
    store.advertised = f"tcp://127.0.0.1:{line.port}"
    store.start()
    return line


def test_task_collected_while_it_streams_comes_whole_and_its_room_is_free_afterwards(store: TcpStoreProcess) -> None:
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


def test_cut_connection_goes_on_where_it_was(store: TcpStoreProcess) -> None:
    async def body(peer: Peer) -> None:
        async with line.open():
            tasks = block(0, 8, 130_000)
            nbytes = sum(array.nbytes for task in tasks for array in task.shards.values())
            await peer.data.put(tasks, store=STORE, deadline_s=10)
            data = remote(peer, inflight_bytes=2 << 20)
            coming = asyncio.create_task(fetch(data, tasks))
            await until(lambda: data.streams.counts.chunks >= 4, "4 chunks")
            line.cut()
            await until(lambda: data.streams.counts.chunks >= 9, "9 chunks")
            line.cut()
            assert_same(await coming, tasks)
            assert line.connections >= 3
            assert data.streams.counts.received_bytes < nbytes + (1 << 20)  # nothing received was sent again
            data.close()

    line = slowed(store, 20e6)
    with_peer(store, body)


def test_store_killed_during_a_fetch_goes_on_after_its_restart(store: TcpStoreProcess) -> None:
    async def body(peer: Peer) -> None:
        async with line.open():
            tasks = block(0, 8, 130_000)
            nbytes = sum(array.nbytes for task in tasks for array in task.shards.values())
            await peer.data.put(tasks, store=STORE, deadline_s=10)
            data = remote(peer, inflight_bytes=2 << 20)
            coming = asyncio.create_task(fetch(data, tasks))
            await until(lambda: data.streams.counts.chunks >= 6, "6 chunks")
            store.kill()
            store.start()
            assert_same(await coming, tasks)
            assert nbytes <= data.streams.counts.received_bytes < nbytes + (1 << 20)
            data.close()

    line = slowed(store, 20e6)
    with_peer(store, body)
    assert store.killed == 1


def test_fetch_from_a_store_that_stays_away_ends_at_its_deadline(store: TcpStoreProcess) -> None:
    async def body(peer: Peer) -> None:
        async with line.open():
            tasks = block(0, 8, 130_000)
            await peer.data.put(tasks, store=STORE, deadline_s=10)
            data = remote(peer)
            coming = asyncio.create_task(fetch(data, tasks, deadline_s=3))
            await until(lambda: data.streams.counts.chunks >= 2, "2 chunks")
            store.kill()
            with pytest.raises(DeadlineExceeded):
                await coming
            data.close()

    line = slowed(store, 10e6)
    with_peer(store, body)


def _note(said: list[float]) -> None:
    said.append(time.monotonic())


def test_fetch_that_takes_far_longer_than_its_deadline_goes_on_while_something_comes(store: TcpStoreProcess) -> None:
    async def body(peer: Peer) -> None:
        async with line.open():
            many, [large] = block(0, 8, 130_000), block(100, 1, 800_000)  # 16 MB each
            for tasks in (many, [large]):
                await peer.data.put(tasks, store=STORE, deadline_s=10)
            for tasks in (many, [large]):
                data = remote(peer)
                said: list[float] = []
                moved = partial(_note, said)
                moved()
                assert_same(await data.fetch(meta_of(tasks), ("a", "b"), deadline_s=0.4, on_progress=moved), tasks)
                moved()
                assert said[-1] - said[0] > 3 * 0.4
                assert all(later - one < 2 * 0.4 for one, later in pairwise(said))
                data.close()

    line = slowed(store, 10e6)
    with_peer(store, body)


def test_reader_closed_during_a_stream_writes_to_no_reused_descriptor(store: TcpStoreProcess) -> None:
    async def body(peer: Peer) -> None:
        async with line.open():
            tasks = block(0, 8, 130_000)
            await peer.data.put(tasks, store=STORE, deadline_s=10)
            data = remote(peer)
            coming = asyncio.create_task(fetch(data, tasks))
            await until(lambda: data.streams.counts.chunks >= 1, "1 chunk")
            data.close()
            # these reuse the numbers of the closed descriptors
            others = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(8)]
            with pytest.raises(RpcError, match="this reader was closed") as caught:
                await coming
            assert caught.value.code == ErrorCode.DRAINING
            for each in others:
                with pytest.raises(BlockingIOError):
                    os.eventfd_read(each)
                os.close(each)

    line = slowed(store, 10e6)
    with_peer(store, body)


def test_store_that_is_away_holds_up_no_fetch_from_another(
    store: TcpStoreProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "STREAM_BYTES", 1 << 20)  # more streams than run concurrently
    (tmp_path / "other").mkdir()
    other = TcpStoreProcess(make_run(tmp_path / "other", memory=MEMORY))
    line = slowed(store, 2e6)

    async def body(peer: Peer) -> None:
        async with line.open(), peer_of(other.run) as second:
            tasks = block(0, 16, 130_000)
            for each in (peer, second):
                await each.data.put(tasks, store=STORE, deadline_s=10)
            clients = {"away": peer.store, "there": second.store}
            reader = stream.StreamReader(clients.__getitem__)
            handles = [PutTask(task.task_id, task.fence) for task in tasks]
            coming = asyncio.create_task(reader.fetch("away", handles, ("a",), 40))
            await until(lambda: reader.counts.chunks >= 1, "1 chunk")
            store.kill()
            line.cut()  # and drop what it buffers
            found = await reader.fetch("there", handles, ("a",), 15)
            assert_same(found, tasks, ["a"])
            assert not coming.done()
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
            reader.close()

    other.start()
    try:
        with_peer(store, body)
    finally:
        other.kill()
        other.run.remove_volatile()


def test_store_whose_sending_thread_dies_ends_with_a_message_and_readers_use_its_next_life(
    store: TcpStoreProcess,
) -> None:
    async def body(peer: Peer) -> None:
        tasks = block(0, 4, 130_000)
        await peer.data.put(tasks, store=STORE, deadline_s=10)
        data = remote(peer)
        coming = asyncio.create_task(fetch(data, tasks))
        assert store.process is not None
        assert await asyncio.to_thread(store.process.wait, 20) == 1
        store.kill()  # closes its pipes
        store.start()
        assert_same(await coming, tasks)
        data.close()

    store.defect = "services.batch_store.stream_source:StreamSource.pieces"
    store.start()
    store.defect = ""
    with_peer(store, body)


class Mischief:
    """Damages a store's messages for `Meddler`: each kind of damage once, on a connection of its own."""

    def __init__(self) -> None:
        self.done = 0
        """Number of kinds that were tried."""
        self.former: dict[threading.Thread, Message] = {}
        """The previous message of each connection."""
        self.spent: set[threading.Thread] = set()
        """Connections that were damaged, by their threads."""

    def __call__(self, message: Message) -> list[Message]:
        head, payload = message
        parsed = bulk.unpack_head(head)
        line = threading.current_thread()
        former, self.former[line] = self.former.get(line), message
        if former is None or line in self.spent or bulk.unpack_head(former[0]).stream != parsed.stream:
            return [message]  # some kinds need a previous message of the same stream
        ways: list[list[Message]] = [
            [[head, payload[:1000] + bytes([payload[1000] ^ 1]) + payload[1001:]]],  # one bit flipped
            [[bulk.pack_head(parsed._replace(offset=parsed.offset + parsed.nbytes)), payload]],  # at another offset
            [[bulk.pack_head(parsed._replace(stream=parsed.stream + 1)), payload]],  # of another stream
            [former, message],  # the previous message repeated
            [[head, former[1]], message],  # the previous payload as the next
            [],  # one message left out, so that the next takes its place
            [[head, payload[:-1]], message],  # truncated, so that the framing is lost
            [[b"RLBX" + head[4:], payload]],
        ]
        if self.done == len(ways):
            return [message]
        self.done += 1
        self.spent.add(line)
        return ways[self.done - 1]


def test_forged_replayed_and_reordered_ranges_are_refused_and_the_rest_is_fetched_again(
    store: TcpStoreProcess,
) -> None:
    mischief = Mischief()

    async def body(peer: Peer) -> None:
        tasks = block(0, 8, 130_000)
        await peer.data.put(tasks, store=STORE, deadline_s=10)
        data = remote(peer)
        while mischief.done < 8:
            assert_same(await fetch(data, tasks), tasks)
        assert_same(await fetch(data, tasks), tasks)
        assert data.streams.counts.refused == 8
        data.close()

    with meddled(store, mischief):
        with_peer(store, body)


def test_damage_in_clear_is_found_by_checksum_and_never_given_out(store: TcpStoreProcess) -> None:
    damaged = 0
    always = False

    def meddle(message: Message) -> list[Message]:
        nonlocal damaged
        head, payload = message
        if bulk.unpack_head(head).offset == 1 << 20 and (always or not damaged):
            damaged += 1
            payload = payload[:-1] + bytes([payload[-1] ^ 0x80])
        return [[head, payload]]

    async def body(peer: Peer) -> None:
        nonlocal always
        tasks = block(0, 2, 130_000)
        await peer.data.put(tasks, store=STORE, deadline_s=10)
        data = remote(peer, plain=True)
        assert_same(await fetch(data, tasks), tasks)
        assert damaged == 1
        always = True
        with pytest.raises(RpcError, match="damaged") as caught:
            await fetch(data, tasks)
        assert caught.value.code == ErrorCode.MISSING
        assert "train/0/0#a" in caught.value.names
        data.close()

    store.plain = True
    with meddled(store, meddle):
        with_peer(store, body)
