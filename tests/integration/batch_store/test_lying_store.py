"""Tests a store whose replies are falsified on their way to readers, and readers that send impossible requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from proto import bulk
from proto.messages import ErrorCode, LineOpened, OpenLine, OpenStream, PutTask, StreamOpened
from proto.registry import Message, Request
from shared.dataplane import stream
from shared.dataplane.client import TaskShards
from shared.dataplane.stream import StreamReader
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from tests.integration.hosts.streamed import assert_same, block, fetch, with_peer
from tests.integration.store_process import STORE, Peer, ending, make_run
from tests.integration.stream_line import Message as BulkMessage
from tests.integration.stream_line import TcpStoreProcess, meddled, remote

Change = Callable[[Any], Message]
NOTHING: BulkMessage = [bytes(bulk.HEAD_BYTES), b""]
"""An invalid message, which makes the reader close the connection."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TcpStoreProcess]:
    with ending(TcpStoreProcess(make_run(tmp_path, memory=192 << 20))) as process:
        yield process


class Liar:
    """A store client that changes the replies."""

    def __init__(self, client: Client, changes: dict[type[Request], Change]) -> None:
        self._client = client
        self._changes = changes
        self.asked = 0

    async def call(self, request: Request, reply: type[Message], *, deadline_s: float) -> Message:
        answer = await self._client.call(request, reply, deadline_s=deadline_s)
        change = self._changes.get(type(request))
        if change is None:
            return answer
        self.asked += 1
        return change(answer)


@contextmanager
def reader_of(liar: Liar) -> Iterator[StreamReader]:
    client: Callable[[str], Any] = lambda _: liar  # noqa: E731
    reader = StreamReader(client)
    try:
        yield reader
    finally:
        reader.close()


def names(tasks: list[TaskShards]) -> list[PutTask]:
    return [PutTask(task.task_id, task.fence) for task in tasks]


def test_announcements_that_keep_changing_end_the_fetch(store: TcpStoreProcess) -> None:
    """Each stream sends a range that cannot be checked yet and closes the connection."""
    tasks = block(0, 1, 300_000)

    def meddle(message: BulkMessage) -> list[BulkMessage]:
        return [message, NOTHING]

    async def body(peer: Peer) -> None:
        await peer.data.put(tasks, store=STORE, deadline_s=10)
        lives = iter(range(1, 1000))
        changed: Change = lambda answer: msgspec.structs.replace(answer, head_checksum=next(lives))  # noqa: E731
        liar = Liar(peer.store, {OpenStream: changed})
        with reader_of(liar) as reader, pytest.raises(RpcError, match="announces different bytes") as caught:
            await reader.fetch(STORE, names(tasks), (), 10)
        assert caught.value.code == ErrorCode.INTERNAL
        assert liar.asked == stream.CORRUPT_TRIES + 1

    with meddled(store, meddle):
        with_peer(store, body)


def test_streams_whose_connections_end_at_once_are_reopened_with_backoff(store: TcpStoreProcess) -> None:
    tasks = block(0, 1, 300_000)

    def meddle(message: BulkMessage) -> list[BulkMessage]:
        return [NOTHING]

    async def body(peer: Peer) -> None:
        await peer.data.put(tasks, store=STORE, deadline_s=10)
        same: Change = lambda answer: answer  # noqa: E731
        liar = Liar(peer.store, {OpenStream: same})
        with reader_of(liar) as reader, pytest.raises(RpcError):
            await reader.fetch(STORE, names(tasks), (), 3)
        assert 2 < liar.asked <= 8  # The pauses are 0.1, 0.2, 0.4, 0.8 and 1.6 s.

    with meddled(store, meddle):
        with_peer(store, body)


def test_head_larger_than_the_request_allows_is_refused_before_memory_is_allocated(
    store: TcpStoreProcess,
) -> None:
    tasks = block(0, 1)

    async def body(peer: Peer) -> None:
        await peer.data.put(tasks, store=STORE, deadline_s=10)
        huge: Change = lambda answer: msgspec.structs.replace(answer, head_bytes=1 << 30, total_bytes=1 << 31)  # noqa: E731
        liar = Liar(peer.store, {OpenStream: huge})
        with reader_of(liar) as reader, pytest.raises(ValueError, match="head of 1073741824 bytes"):
            await reader.fetch(STORE, names(tasks), ("a",), 10)

    store.start()
    with_peer(store, body)


def test_tasks_that_end_with_empty_shards_arrive_and_the_store_survives(store: TcpStoreProcess) -> None:
    tasks = [
        TaskShards(f"train/0/{i}", 1, {"a": np.arange(5 + i, dtype=np.uint8), "b": np.zeros(0, np.float32)})
        for i in range(4)
    ]

    async def body(peer: Peer) -> None:
        for task in tasks:
            await peer.data.put([task], store=STORE, deadline_s=10)
        data = remote(peer)
        assert_same(await fetch(data, tasks), tasks)
        for task in tasks:
            assert_same(await fetch(data, [task]), [task])
        data.close()
        assert store.process is not None
        assert store.process.poll() is None

    store.start()
    with_peer(store, body)


def test_requests_for_too_much_are_refused_or_truncated_and_take_little_memory(store: TcpStoreProcess) -> None:
    def most_rss() -> int:
        """Return the store's peak memory since its start. Its current memory would not suffice, because the memory of a
        reply is freed before the reply arrives.
        """
        assert store.process is not None
        status = Path(f"/proc/{store.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10

    async def refused(ask: Awaitable[Any]) -> RpcError:
        with pytest.raises(RpcError) as caught:
            await ask
        return caught.value

    async def body(peer: Peer) -> None:
        tasks = block(0, 2000, 4)
        await peer.data.put(tasks, store=STORE, deadline_s=10)
        before = most_rss()
        many = [PutTask("train/0/0", 1)] * 200_000
        line = (await peer.store.call(OpenLine(), LineOpened, deadline_s=20)).line_id
        request = OpenStream(line_id=line, tasks=many, keys=["a"])
        error = await refused(peer.store.call(request, StreamOpened, deadline_s=20))
        assert error.code == ErrorCode.BAD_REQUEST
        keys = [f"absent_{i}" for i in range(20_000)]
        request = OpenStream(line_id=line, tasks=names(tasks), keys=keys)
        error = await refused(peer.store.call(request, StreamOpened, deadline_s=20))
        assert error.code == ErrorCode.MISSING
        assert most_rss() - before < 64 << 20  # Forty million names were requested.

    store.start()
    with_peer(store, body)
