"""The sending side of streams with real readers' sockets: turns, credit, stalled and hostile peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from proto import bulk
from proto.blockfile import Layout
from proto.errors import WireError
from proto.messages import ErrorCode, Located, PutTask, StreamOpened
from services.batch_store import stream_server
from services.batch_store.stream_server import WINDOW_BYTES, StreamServer
from services.batch_store.stream_source import StreamSource, pin
from shared.dataplane.mapping import TableCache
from shared.dataplane.stream_seal import TO_READER, TO_STORE, Opener, Sealer
from shared.dataplane.write import write_block
from shared.rpc.errors import RpcError

CHUNK = 1 << 16
SIZE = 24 << 20


@pytest.fixture
def source(tmp_path: Path) -> StreamSource:
    layout = Layout([("train/0/0", 1, {"a": np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)})])
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(layout.file_bytes)
        write_block(file.fileno(), layout)
    located = Located(files=[str(tmp_path / "file")], places=[[0]])
    return pin("s", located, [PutTask("train/0/0", 1)], [], 1 << 40, CHUNK, TableCache())


@pytest.fixture(params=["sealed", "plain"])
def server(request: pytest.FixtureRequest) -> Iterator[StreamServer]:
    made = StreamServer("batch-store/0", plain=request.param == "plain", chunk_bytes=CHUNK)
    made.bind("tcp://127.0.0.1:*")
    yield made
    made.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


class Reader:
    """One DEALER; streams are opened on it and read chunk by chunk."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, *, stalls: bool = False) -> None:
        self.socket = context.socket(zmq.DEALER)
        if stalls:
            self.socket.setsockopt(zmq.RCVHWM, 1)
            self.socket.setsockopt(zmq.RCVBUF, 1 << 16)
        self.socket.connect(endpoint)
        self.streams: dict[bytes, tuple[Sealer | None, Opener | None]] = {}
        self.chunks = 0

    def take(self, opened: StreamOpened) -> bytes:
        stream_id, secret = bytes.fromhex(opened.stream_id), bytes.fromhex(opened.secret)
        pair = (Sealer(secret, stream_id, TO_STORE), Opener(secret, stream_id, TO_READER)) if secret else (None, None)
        self.streams[stream_id] = pair
        return stream_id

    def frames(self, stream_id: bytes, ranges: list[tuple[int, int]], flags: int = 0) -> list[bytes]:
        sealer = self.streams[stream_id][0]
        payload = bulk.pack_ranges(ranges)
        if sealer is None:
            return [bulk.pack_head(bulk.Head(bulk.CREDIT, flags, 0, 0, 0, stream_id)), payload]
        room = memoryview(bytearray(len(payload) + bulk.TAG_BYTES))
        head, _ = sealer.seal(bulk.CREDIT, flags, 0, payload, room)
        return [head, bytes(room)]

    def ask(self, stream_id: bytes, ranges: list[tuple[int, int]], flags: int = 0) -> None:
        self.socket.send_multipart(self.frames(stream_id, ranges, flags))

    def receive(self, limit_ms: int = 10_000) -> tuple[bulk.Head, bytes]:
        assert self.socket.poll(limit_ms), "nothing came"
        packed, payload = self.socket.recv_multipart()
        head = bulk.unpack_head(packed)
        opener = self.streams[head.stream_id][1]
        if head.kind == bulk.CHUNK and opener is not None:
            room = bytearray(len(payload) - bulk.TAG_BYTES)
            opener.open(packed, head, payload, memoryview(room))
            payload = bytes(room)
        self.chunks += head.kind == bulk.CHUNK
        return head, payload


def until(condition: Callable[[], bool], limit_s: float = 10) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.005)


def test_chunks_are_sent_exactly_as_asked_for(
    server: StreamServer, source: StreamSource, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    opened = server.open(source)
    reader = Reader(context, opened.endpoint)
    stream = reader.take(opened)
    last = source.chunks - 1
    reader.ask(stream, [(3, 2), (last, 1), (0, 1)])
    for expected in (3, 4, last, 0):
        head, payload = reader.receive()
        assert head.chunk == expected
        assert payload == b"".join(source.pieces(expected))
        assert len(payload) == source.size(expected)
    assert not reader.socket.poll(100)
    reader.ask(stream, [], bulk.FLAG_CLOSE)
    until(lambda: server.stats().streams == 0)
    reader.ask(stream, [(0, 1)])
    assert reader.receive()[0].kind == bulk.GONE


def test_readers_share_the_line_and_many_streams_are_no_more_than_one(
    server: StreamServer,
    source: StreamSource,
    context: zmq.Context[zmq.Socket[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stated bound: when the first reader has its chunks, each other has at least half as many.

    Reading the files is what takes time here, so that the server's turns decide; on a line they are TCP's.
    """
    read = source.pieces

    def read_slowly(index: int) -> list[memoryview]:
        time.sleep(0.001)
        return read(index)

    monkeypatch.setattr(source, "pieces", read_slowly)
    readers = [Reader(context, server.open(source).endpoint) for _ in range(5)]
    wanted = 120
    nexts: dict[bytes, int] = {}
    for number, reader in enumerate(readers):
        for _ in range(4 if number == 0 else 1):  # the first is greedy
            nexts[reader.take(server.open(source))] = 0
    window = 16
    for reader in readers:
        for stream in reader.streams:
            reader.ask(stream, [(0, window)])
            nexts[stream] = window
    poller = zmq.Poller()
    for reader in readers:
        poller.register(reader.socket, zmq.POLLIN)
    by_socket = {reader.socket: reader for reader in readers}
    end = time.monotonic() + 30
    while max(reader.chunks for reader in readers) < wanted:
        assert time.monotonic() < end
        for socket, _ in poller.poll(1000):
            reader = by_socket[socket]
            head, _ = reader.receive()
            following = nexts[head.stream_id]
            if following < wanted:
                reader.ask(head.stream_id, [(following, 1)])
                nexts[head.stream_id] = following + 1
    got = [reader.chunks for reader in readers]
    assert min(got) >= wanted / 2, got


def test_stalled_reader_holds_no_more_than_its_credit_and_holds_nobody_up(
    server: StreamServer, source: StreamSource, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    opened = server.open(source)
    stalled = Reader(context, opened.endpoint, stalls=True)
    stream = stalled.take(opened)
    for first in range(0, source.chunks, 64):  # asks for all of it, again and again, and reads nothing
        stalled.ask(stream, [(0, source.chunks), (first, 1)])
    until(lambda: server.stats().sent_bytes > 8 * CHUNK)
    reader = Reader(context, opened.endpoint)
    mine = reader.take(server.open(source))
    asked, peak = 8, 0
    reader.ask(mine, [(0, asked)])
    while reader.chunks < source.chunks:
        reader.receive()
        peak = max(peak, server._streams[stream].queued_bytes)
        if asked < source.chunks:
            reader.ask(mine, [(asked, 1)])
            asked += 1
    credit = WINDOW_BYTES + 16 * (WINDOW_BYTES // CHUNK)  # tags included
    assert 8 * CHUNK < peak <= credit, peak
    stalled.socket.close(linger=0)
    until(lambda: server.stats().queued_bytes == 0)


def test_copies_for_stalled_readers_are_bounded_for_all_of_them_together(
    source: StreamSource, context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_server, "BUFFERS_BYTES", 4 << 20)
    server = StreamServer("batch-store/0", chunk_bytes=CHUNK)
    server.bind("tcp://127.0.0.1:*")
    try:
        readers = 6
        for _ in range(readers):
            opened = server.open(source)
            stalled = Reader(context, opened.endpoint, stalls=True)
            stalled.ask(stalled.take(opened), [(0, source.chunks)])
        peak, end = 0, time.monotonic() + 1.0
        while time.monotonic() < end:
            peak = max(peak, server.stats().buffer_bytes)
            time.sleep(0.005)
        assert 1 << 20 < peak <= (4 << 20) + readers * (CHUNK + 16)
    finally:
        server.close()


def test_hostile_messages_are_counted_and_end_nothing(
    server: StreamServer, source: StreamSource, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    opened = server.open(source)
    reader = Reader(context, opened.endpoint)
    stream = reader.take(opened)
    good = reader.frames(stream, [(0, 1)])
    bad = [
        [b""],
        [b"", b""],
        [good[0]],
        [good[0], good[1], b""],
        [b""] * 20_000,
        [good[0][:-1], good[1]],
        [good[0], b"\xff" * len(good[1])],
        [bulk.pack_head(bulk.Head(bulk.CHUNK, 0, 0, 0, 1, stream)), good[1]],
        reader.frames(stream, [(source.chunks, 1)]),
        reader.frames(stream, [(0, source.chunks + 1)]),
    ]
    for frames in bad:
        reader.socket.send_multipart(frames)
    until(lambda: server.stats().refused >= len(bad) - 1)
    reader.ask(stream, [(5, 1)])
    head, payload = reader.receive()
    assert (head.chunk, payload) == (5, b"".join(source.pieces(5)))


def test_replayed_credit_is_refused(source: StreamSource, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    server = StreamServer("batch-store/0", chunk_bytes=CHUNK)
    server.bind("tcp://127.0.0.1:*")
    try:
        opened = server.open(source)
        reader, thief = Reader(context, opened.endpoint), Reader(context, opened.endpoint)
        stream = reader.take(opened)
        credit = reader.frames(stream, [(0, 1)])
        reader.socket.send_multipart(credit)
        reader.receive()
        thief.socket.send_multipart(credit)
        until(lambda: server.stats().refused == 1)
        assert not thief.socket.poll(100)
    finally:
        server.close()


def test_streams_are_counted_and_one_too_many_is_busy(
    server: StreamServer, source: StreamSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_server, "MAX_STREAMS", 2)
    server.open(source)
    server.open(source)
    with pytest.raises(RpcError) as caught:
        server.open(source)
    assert caught.value.code == ErrorCode.BUSY
    assert caught.value.retry_after_s > 0


def test_stream_that_nobody_asks_of_ends(
    server: StreamServer, source: StreamSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_server, "IDLE_S", 0.1)
    server.open(source)
    until(lambda: server.stats().streams == 0)


def test_sealed_bytes_do_not_cross_the_line_in_clear(
    source: StreamSource, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    server = StreamServer("batch-store/0", chunk_bytes=CHUNK)
    server.bind("tcp://127.0.0.1:*")
    try:
        opened = server.open(source)
        reader = Reader(context, opened.endpoint)
        stream = reader.take(opened)
        reader.ask(stream, [(2, 1), (2, 1)])
        payloads = []
        for _ in range(2):
            assert reader.socket.poll(5000)
            payloads.append(reader.socket.recv_multipart()[1])
        plain = b"".join(source.pieces(2))
        assert all(plain[at : at + 32] not in payload for payload in payloads for at in (0, 5000, 60_000))
        assert payloads[0] != payloads[1]  # the same chunk again: another nonce
        opener = Opener(bytes(32), stream, TO_READER)
        head = bulk.Head(bulk.CHUNK, 0, 0, 2, 1, stream)
        with pytest.raises(WireError):
            opener.open(bulk.pack_head(head), head, payloads[0], memoryview(bytearray(CHUNK)))
    finally:
        server.close()
