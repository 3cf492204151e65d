"""Tests streams over links that are slow or cut, streams from stores that die, and streams whose bytes are forged or
damaged on the way."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from proto import bulk
from proto.messages import (
    ErrorCode,
    PutTask,
)
from shared.dataplane import stream
from shared.rpc.errors import DeadlineExceeded, RpcError
from tests.integration.hosts.streamed import MEMORY, assert_same, block, fetch, meta_of, slowed, until, with_peer
from tests.integration.store_process import STORE, Peer, make_run, peer_of
from tests.integration.stream_line import Message, TcpStoreProcess, meddled, remote


def test_a_fetch_over_a_cut_connection_continues_where_it_stopped(store: TcpStoreProcess) -> None:
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
            assert data.streams.counts.received_bytes < nbytes + (1 << 20)  # no received data was sent again
            data.close()

    line = slowed(store, 20e6)
    with_peer(store, body)


def test_a_fetch_continues_after_its_store_is_killed_and_restarted(store: TcpStoreProcess) -> None:
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


def test_a_fetch_from_a_store_that_never_returns_ends_at_its_deadline(store: TcpStoreProcess) -> None:
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


def test_a_fetch_that_takes_far_longer_than_its_deadline_continues_while_data_arrives(store: TcpStoreProcess) -> None:
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


def test_reader_closed_during_a_stream_does_not_write_to_reused_descriptors(store: TcpStoreProcess) -> None:
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


def test_an_absent_store_does_not_delay_fetches_from_another_store(
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
            line.cut()  # also drops what the line buffers
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


def test_a_store_whose_sending_thread_dies_exits_with_a_message_and_readers_use_the_restarted_store(
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
    """Damages a store's messages for `Meddler`: does each kind of damage once, on a separate connection."""

    def __init__(self) -> None:
        self.done = 0
        """Number of kinds of damage done so far."""
        self.former: dict[threading.Thread, Message] = {}
        """The previous message of each connection."""
        self.spent: set[threading.Thread] = set()
        """The threads whose connections have been damaged."""

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
            [[head, former[1]], message],  # the previous payload under the next head
            [],  # one message left out, so that the next one takes its place
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


def test_damage_on_an_unencrypted_stream_is_found_by_checksum_and_never_returned(store: TcpStoreProcess) -> None:
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
