"""The sending side of streams with real readers' sockets: turns, credit, stalled and hostile peers."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from proto import blockfile, bulk
from proto.blockfile import Layout, Table
from proto.errors import WireError
from proto.messages import ErrorCode, PutTask, StreamOpened
from services.batch_store import stream_places, stream_server
from services.batch_store.files import StoreFiles
from services.batch_store.room import Retire
from services.batch_store.stream_places import Places
from services.batch_store.stream_server import WINDOW_BYTES, StreamServer
from services.batch_store.stream_source import Kept, StreamSource, pin
from shared.dataplane import mapping, stream_receiver
from shared.dataplane.mapping import MappingCache
from shared.dataplane.stream_arrival import Arrival
from shared.dataplane.stream_memory import Regions
from shared.dataplane.stream_receiver import Incoming, Outcome, Receiver
from shared.dataplane.stream_seal import TO_READER, TO_STORE, Opener, Sealer
from shared.dataplane.write import copy_block, write_block
from shared.rpc.errors import RpcError

pytestmark = pytest.mark.slow

CHUNK = 1 << 16
SIZE = 24 << 20


@pytest.fixture
def source(tmp_path: Path) -> StreamSource:
    layout = Layout([("train/0/0", 1, {"a": np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)})])
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(layout.file_bytes)
        write_block(file.fileno(), layout)
    kept = Kept(str(tmp_path / "file"), table_of(tmp_path / "file"))
    return pin("s", [kept], [[0]], [PutTask("train/0/0", 1)], [], 1 << 40, CHUNK, MappingCache())


def table_of(path: Path) -> Table:
    data = path.read_bytes()
    return blockfile.parse(data, len(data))


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path, source: StreamSource) -> None:
    kept = Kept(str(tmp_path / "file"), table_of(tmp_path / "file"))
    os.truncate(tmp_path / "file", SIZE // 2)
    with pytest.raises(WireError, match=f"s: {kept.path} has {SIZE // 2} bytes, it was sealed with"):
        pin("s", [kept], [[0]], [PutTask("train/0/0", 1)], [], 1 << 40, CHUNK, MappingCache())


def test_mapping_kept_for_the_next_stream_goes_with_its_file_and_not_before_its_streams(tmp_path: Path) -> None:
    cache = MappingCache()
    files = StoreFiles("store", tmp_path, on_retire=cache.drop)
    layout = Layout([("train/0/0", 1, {"a": np.arange(1000)})])
    descriptor = os.open(files.create("p", layout.file_bytes), os.O_RDWR)
    write_block(descriptor, layout)
    os.close(descriptor)
    files.seal("p")
    stream = cache.get(files.path("p.blk"))
    assert cache.get(files.path("p.blk")) is stream
    files.retire(Retire("p.blk", "p.zombie"))
    assert files.unmapped() == []  # the stream still sends it
    with pytest.raises(FileNotFoundError):
        cache.get(files.path("p.blk"))
    del stream
    assert files.unmapped() == ["p.zombie"]
    files.close()


def test_tables_of_many_small_files_are_kept_by_the_memory_that_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "CACHED_ROWS", 1000)
    layout = Layout([("train/0/0", 1, {"a": np.arange(1000)})])
    file = np.zeros(layout.file_bytes, np.uint8)
    copy_block(file, layout)
    cache = mapping.TableCache()
    for number in range(100):
        cache.get(f"{number}.blk", file)
    assert len(cache) == 1000 // (mapping.TABLE_ROWS + 1)


def test_file_retired_while_it_was_being_mapped_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    layout = Layout([("train/0/0", 1, {"a": np.arange(1000)})])
    with path.open("w+b") as file:
        file.truncate(layout.file_bytes)
        write_block(file.fileno(), layout)
    cache = MappingCache()
    made = mapping._map_named

    def retired_meanwhile(path: str) -> mmap.mmap:
        mapped = made(path)
        os.rename(path, f"{path}.zombie")
        cache.drop(path)
        return mapped

    monkeypatch.setattr(mapping, "_map_named", retired_meanwhile)
    with pytest.raises(FileNotFoundError):
        cache.get(str(path))
    with (tmp_path / "file.zombie").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody holds it


@pytest.fixture(params=["sealed", "plain"])
def server(request: pytest.FixtureRequest) -> Iterator[StreamServer]:
    made = StreamServer("batch-store/0", plain=request.param == "plain", chunk_bytes=CHUNK)
    made.bind("tcp://127.0.0.1:*")
    yield made
    made.close()


class Reader:
    """One connection; streams are opened on it and read chunk by chunk."""

    def __init__(self, endpoint: str, *, stalls: bool = False) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.socket = socket.socket()
        if stalls:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.socket.connect((host, int(port)))
        self.streams: dict[bytes, tuple[Sealer | None, Opener | None]] = {}
        self.chunks = 0

    def take(self, opened: StreamOpened) -> bytes:
        stream_id, secret = bytes.fromhex(opened.stream_id), bytes.fromhex(opened.secret)
        pair = (Sealer(secret, stream_id, TO_STORE), Opener(secret, stream_id, TO_READER)) if secret else (None, None)
        self.streams[stream_id] = pair
        return stream_id

    def message(self, stream_id: bytes, ranges: list[tuple[int, int]], flags: int = 0) -> bytes:
        sealer = self.streams[stream_id][0]
        payload = bulk.pack_ranges(ranges)
        if sealer is None:
            return bulk.pack_head(bulk.Head(bulk.CREDIT, flags, 0, 0, 0, stream_id, len(payload))) + payload
        room = memoryview(bytearray(len(payload) + bulk.TAG_BYTES))
        head, _ = sealer.seal(bulk.CREDIT, flags, 0, payload, room)
        return head + bytes(room)

    def ask(self, stream_id: bytes, ranges: list[tuple[int, int]], flags: int = 0) -> None:
        self.socket.sendall(self.message(stream_id, ranges, flags))

    def raw(self, limit_s: float = 10) -> tuple[bytes, bytes]:
        """Head and payload of the next message; empty ones when the server closed. Raises TimeoutError."""
        self.socket.settimeout(limit_s)
        packed = self._exactly(bulk.HEAD_BYTES)
        return packed, self._exactly(bulk.unpack_head(packed).nbytes) if packed else b""

    def _exactly(self, nbytes: int) -> bytes:
        taken = bytearray()
        while len(taken) < nbytes:
            part = self.socket.recv(nbytes - len(taken))
            if not part:
                return b""
            taken += part
        return bytes(taken)

    def silent(self, for_s: float = 0.1) -> bool:
        return not select.select([self.socket], [], [], for_s)[0]

    def receive(self) -> tuple[bulk.Head, bytes]:
        packed, payload = self.raw()
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


def test_chunks_are_sent_exactly_as_asked_for(server: StreamServer, source: StreamSource) -> None:
    opened = server.open(source)
    reader = Reader(opened.endpoint)
    stream = reader.take(opened)
    last = source.chunks - 1
    reader.ask(stream, [(3, 2), (last, 1), (0, 1)])
    for expected in (3, 4, last, 0):
        head, payload = reader.receive()
        assert head.chunk == expected
        assert payload == b"".join(source.pieces(expected))
        assert len(payload) == source.size(expected)
    assert reader.silent()
    reader.ask(stream, [], bulk.FLAG_CLOSE)
    until(lambda: server.stats().streams == 0)
    reader.ask(stream, [(0, 1)])
    assert reader.receive()[0].kind == bulk.GONE


def test_readers_share_the_line_and_many_streams_are_no_more_than_one(
    server: StreamServer,
    source: StreamSource,
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
    readers = [Reader(server.open(source).endpoint) for _ in range(5)]
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
    by_socket = {reader.socket: reader for reader in readers}
    end = time.monotonic() + 30
    while max(reader.chunks for reader in readers) < wanted:
        assert time.monotonic() < end
        for ready in select.select(list(by_socket), [], [], 1)[0]:
            reader = by_socket[ready]
            head, _ = reader.receive()
            following = nexts[head.stream_id]
            if following < wanted:
                reader.ask(head.stream_id, [(following, 1)])
                nexts[head.stream_id] = following + 1
    got = [reader.chunks for reader in readers]
    assert min(got) >= wanted / 2, got


def test_stalled_reader_holds_no_more_than_its_credit_and_holds_nobody_up(
    server: StreamServer, source: StreamSource
) -> None:
    opened = server.open(source)
    stalled = Reader(opened.endpoint, stalls=True)
    stream = stalled.take(opened)
    for first in range(0, source.chunks, 64):  # asks for all of it, again and again, and reads nothing
        stalled.ask(stream, [(0, source.chunks), (first, 1)])
    until(lambda: server.stats().sent_bytes > 8 * CHUNK)
    reader = Reader(opened.endpoint)
    mine = reader.take(server.open(source))
    asked, peak = 8, 0
    reader.ask(mine, [(0, asked)])
    while reader.chunks < source.chunks:
        reader.receive()
        peak = max(peak, server.stats().queued_bytes)
        if asked < source.chunks:
            reader.ask(mine, [(asked, 1)])
            asked += 1
    assert sum(end - first for first, end in server._streams[stream].wanted) <= WINDOW_BYTES // CHUNK
    assert 0 < peak <= 2 * (CHUNK + bulk.HEAD_BYTES + bulk.TAG_BYTES), peak  # a message for each of the two
    stalled.socket.close()
    until(lambda: server.stats().queued_bytes == 0)


def test_copies_for_stalled_readers_are_one_chunk_each(source: StreamSource) -> None:
    server = StreamServer("batch-store/0", chunk_bytes=CHUNK)
    server.bind("tcp://127.0.0.1:*")
    try:
        readers = [Reader(server.open(source).endpoint, stalls=True) for _ in range(6)]
        for reader in readers:
            for _ in range(3):
                reader.ask(reader.take(server.open(source)), [(0, source.chunks)])
        buffer = CHUNK + bulk.TAG_BYTES
        until(lambda: server.stats().sent_bytes > 4 << 20)
        sent = -1
        while sent != server.stats().sent_bytes:  # until the kernel takes no more
            sent = server.stats().sent_bytes
            assert server.stats().buffer_bytes <= len(readers) * buffer
            time.sleep(0.05)
        for reader in readers:
            reader.socket.close()
        until(lambda: server.stats().buffer_bytes == 0)
    finally:
        server.close()


def test_hostile_messages_are_counted_and_end_nothing(server: StreamServer, source: StreamSource) -> None:
    opened = server.open(source)
    reader = Reader(opened.endpoint)
    stream = reader.take(opened)
    good = reader.message(stream, [(0, 1)])
    head, payload = bulk.unpack_head(good[: bulk.HEAD_BYTES]), good[bulk.HEAD_BYTES :]
    bad = [
        bulk.pack_head(head) + b"\xff" * len(payload),
        reader.message(stream, [(source.chunks, 1)]),
        reader.message(stream, [(0, source.chunks + 1)]),
        bulk.pack_head(head._replace(nbytes=0)),
        bulk.pack_head(head._replace(nbytes=5)) + b"12345",
    ]
    refused = [*bad[:3], *bad[3 if bytes.fromhex(opened.secret) else 4 :]]  # in clear, credit for nothing is in order
    for message in refused:
        reader.socket.sendall(message)
    until(lambda: server.stats().refused == len(refused))
    reader.ask(stream, [(5, 1)])
    answer, chunk = reader.receive()
    assert (answer.chunk, chunk) == (5, b"".join(source.pieces(5)))
    before = server.stats().refused
    desync = [  # nothing says where the next message begins: these end their connection
        b"GET / HTTP/1.1\r\nHost: store.example\r\nUser-Agent: nobody\r\n\r\n",
        good[1:] + good,
        bulk.pack_head(head._replace(kind=bulk.CHUNK, nbytes=CHUNK)) + bytes(CHUNK),
        bulk.pack_head(head._replace(nbytes=bulk.MAX_CREDIT_BYTES + 1)),
        bulk.pack_head(head._replace(nbytes=(1 << 32) - 1)),
        bytes(1 << 20),
    ]
    for message in desync:
        other = Reader(opened.endpoint)
        with contextlib.suppress(ConnectionError):
            other.socket.sendall(message)
            assert other.raw() == (b"", b"")
    until(lambda: server.stats().refused == before + len(desync))
    reader.ask(stream, [(6, 1)])
    assert reader.receive()[0].chunk == 6


def test_connections_are_counted_and_silent_ones_end(
    server: StreamServer, source: StreamSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_places, "MOST", 2)
    opened = server.open(source)
    readers = [Reader(opened.endpoint) for _ in range(2)]
    for reader in readers:
        reader.ask(reader.take(server.open(source)), [(0, 1)])
        reader.receive()
    assert Reader(opened.endpoint).raw() == (b"", b"")  # all places are held by those who have proved themselves
    assert server.stats().turned_away == 1
    monkeypatch.setattr(stream_places, "IDLE_S", 0.1)
    assert readers[0].raw() == readers[1].raw() == (b"", b"")
    reader = Reader(opened.endpoint)
    until(lambda: len(server._readers) == 1)
    assert reader.silent()


def junk(number: int) -> bytes:
    """Credit for a stream that is not here, as anyone can make it."""
    ranges = bulk.pack_ranges([(0, 1)]) + bytes(bulk.TAG_BYTES)
    return bulk.pack_head(bulk.Head(bulk.CREDIT, 0, 0, 0, 1, number.to_bytes(16, "little"), len(ranges))) + ranges


def test_strangers_cannot_take_every_place_from_readers(
    server: StreamServer, source: StreamSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_places, "MOST", 4)
    opened = server.open(source)
    strangers = [Reader(opened.endpoint) for _ in range(4)]
    for number, stranger in enumerate(strangers):
        stranger.socket.sendall(junk(number))
        assert bulk.unpack_head(stranger.raw()[0]).kind == bulk.GONE
    reader = Reader(opened.endpoint)
    stream = reader.take(opened)
    for index in range(source.chunks):
        reader.ask(stream, [(index, 1)])
        assert reader.receive()[1] == b"".join(source.pieces(index))
        if index < 20:  # they go on coming; the reader itself pushed out the first
            strangers.append(Reader(opened.endpoint))
            until(lambda expected=index + 2: server.stats().evicted == expected)  # type: ignore[misc]
    assert strangers[0].raw() == (b"", b"")
    assert server.stats().unknown == 4
    assert len(server._places) <= 4


def test_stranger_that_is_answered_again_and_again_has_to_go(
    server: StreamServer, source: StreamSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither answers nor bytes that trickle in hold its place; and there are only so many answers."""
    monkeypatch.setattr(stream_places, "PROVE_S", 0.5)
    opened = server.open(source)
    slow, fast = Reader(opened.endpoint), Reader(opened.endpoint)
    with contextlib.suppress(ConnectionError):
        fast.socket.sendall(b"".join(junk(number) for number in range(3 * stream_places.OFFENCES)))
    with contextlib.suppress(ConnectionError):
        while fast.raw()[0]:
            pass
    assert server.stats().hung_up == 1
    assert server.stats().unknown == stream_places.OFFENCES
    message, ended, at = junk(1), False, 0
    end = time.monotonic() + 10
    while not ended:
        assert time.monotonic() < end
        with contextlib.suppress(TimeoutError, BlockingIOError):
            slow.socket.settimeout(0.02)
            try:
                slow.socket.sendall(message[at % len(message) :][:1])
                at += 1
                ended = not slow.socket.recv(1 << 16)
            except ConnectionError:
                ended = True
    assert at < stream_places.OFFENCES * len(message)  # it was the time
    assert server.stats().unproven == 1


def test_forged_credit_ends_its_connection_and_not_the_stream(source: StreamSource) -> None:
    server = StreamServer("batch-store/0", chunk_bytes=CHUNK)
    server.bind("tcp://127.0.0.1:*")
    try:
        opened = server.open(source)
        reader, forger = Reader(opened.endpoint), Reader(opened.endpoint)
        stream = reader.take(opened)
        good = reader.message(stream, [(0, 1)])
        with contextlib.suppress(ConnectionError):
            forger.socket.sendall((good[: bulk.HEAD_BYTES] + bytes(len(good) - bulk.HEAD_BYTES)) * 100)
            assert forger.raw() == (b"", b"")
        assert server.stats().refused == stream_places.OFFENCES
        assert server.stats().hung_up == 1
        reader.socket.sendall(good)
        assert reader.receive()[0].chunk == 0
    finally:
        server.close()


def test_newcomer_pushes_out_the_oldest_stranger_of_the_host_with_most_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_places, "MOST", 4)
    places = Places(4096)
    proven, lone = places.take("crowd", 0)[0], places.take("other", 1)[0]
    first, second = places.take("crowd", 2)[0], places.take("crowd", 3)[0]
    assert proven is not None
    proven.prove(3)
    assert places.take("crowd", 4)[1] is first
    assert places.take("crowd", 5)[1] is second
    assert places.overdue(1 + stream_places.PROVE_S + 0.5) == {lone}
    assert (places.evicted, places.unproven, len(places)) == (2, 1, 4)


def test_replayed_credit_is_refused(source: StreamSource) -> None:
    server = StreamServer("batch-store/0", chunk_bytes=CHUNK)
    server.bind("tcp://127.0.0.1:*")
    try:
        opened = server.open(source)
        reader, thief = Reader(opened.endpoint), Reader(opened.endpoint)
        stream = reader.take(opened)
        credit = reader.message(stream, [(0, 1)])
        reader.socket.sendall(credit)
        reader.receive()
        thief.socket.sendall(credit)
        until(lambda: server.stats().refused == 1)
        assert thief.silent()
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
    monkeypatch.setattr(stream_server, "UNCLAIMED_S", 0.1)
    server.open(source)
    until(lambda: server.stats().streams == 0)


def test_stream_that_waits_for_its_turn_is_kept(
    server: StreamServer, source: StreamSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_server, "IDLE_S", 0.5)
    monkeypatch.setattr(stream_server, "UNCLAIMED_S", 0.5)
    monkeypatch.setattr(stream_server, "_TICK_S", 0.1)
    monkeypatch.setattr(stream_receiver, "KEEP_S", 0.1)
    settled: dict[str, Outcome] = {}
    group = object()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        first, second = server.open(source), server.open(source)
        first = msgspec.structs.replace(first, endpoint=f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        receiver = Receiver(CHUNK)  # which the first one takes for itself
        incoming = []
        for name, opened in (("first", first), ("second", second)):
            arrival = Arrival(opened, [PutTask("train/0/0", 1)], [], 2 * SIZE, Regions())
            settle = partial(lambda name, outcome, why: settled.setdefault(name, outcome), name)
            incoming.append(Incoming.of(arrival, group, opened, settle))
        try:
            receiver.add(incoming[0])
            until(lambda: bool(incoming[0].asked))
            receiver.add(incoming[1])
            until(lambda: server.stats().streams == 1)  # of the first one it never heard
            receiver.cancel(incoming[0])
            until(lambda: "second" in settled)
            assert settled == {"first": Outcome.LOST, "second": Outcome.COMPLETE}
        finally:
            receiver.close()


def test_stream_whose_keys_change_often_in_both_directions_comes_whole(source: StreamSource) -> None:
    """Five chunks an epoch there, two credits back; the line breaks in between, with sealed frames lost on it."""
    server = StreamServer("batch-store/0", chunk_bytes=CHUNK, rekey_bytes=5 * CHUNK)
    server.bind("tcp://127.0.0.1:*")
    opened = server.open(source)
    arrival = Arrival(opened, [PutTask("train/0/0", 1)], [], 2 * SIZE, Regions())
    settled: list[tuple[Outcome, str]] = []
    incoming = Incoming.of(arrival, object(), opened, lambda *end: settled.append(end), rekey_bytes=16)
    assert incoming.opener is not None
    assert incoming.sealer is not None
    receiver = Receiver(16 * CHUNK)
    try:
        receiver.add(incoming)
        until(lambda: receiver.counts.chunks > 30)
        [store] = receiver._stores.values()
        assert store.line is not None
        store.line.socket.shutdown(socket.SHUT_RDWR)
        until(lambda: bool(settled))
        assert settled == [(Outcome.COMPLETE, "")]
        assert incoming.opener.epoch >= (source.chunks - 1) // 5
        assert incoming.sealer.epoch >= 5
        assert (receiver.counts.refused, server.stats().refused) == (0, 0)
        [got] = arrival.take().copies([0], None)
        assert np.array_equal(got["a"], np.random.default_rng(0).integers(0, 256, SIZE, np.uint8))
    finally:
        receiver.close()
        server.close()


def test_sealed_bytes_do_not_cross_the_line_in_clear(source: StreamSource) -> None:
    server = StreamServer("batch-store/0", chunk_bytes=CHUNK)
    server.bind("tcp://127.0.0.1:*")
    try:
        opened = server.open(source)
        reader = Reader(opened.endpoint)
        stream = reader.take(opened)
        reader.ask(stream, [(2, 1), (2, 1)])
        payloads = [reader.raw()[1] for _ in range(2)]
        plain = b"".join(source.pieces(2))
        assert all(plain[at : at + 32] not in payload for payload in payloads for at in (0, 5000, 60_000))
        assert payloads[0] != payloads[1]  # the same chunk again: another nonce
        opener = Opener(bytes(32), stream, TO_READER)
        head = bulk.Head(bulk.CHUNK, 0, 0, 2, 1, stream, CHUNK + bulk.TAG_BYTES)
        with pytest.raises(WireError):
            opener.open(bulk.pack_head(head), head, payloads[0], memoryview(bytearray(CHUNK)))
    finally:
        server.close()


def rogue(port: int) -> StreamOpened:
    """What a store that lies announces: a stream of two chunks and a bit, at a port of its own."""
    return StreamOpened(
        stream_id="ab" * 16,
        endpoint=f"tcp://127.0.0.1:{port}",
        covered=1,
        total_bytes=2 * CHUNK + 100,
        chunk_bytes=CHUNK,
        head_bytes=200,
        head_checksum=1,
    )


def incoming_of(opened: StreamOpened, settled: list[tuple[Outcome, str]], size: int = SIZE) -> Incoming:
    arrival = Arrival(opened, [PutTask("train/0/0", 1)], [], 2 * size, Regions())
    return Incoming.of(arrival, object(), opened, lambda *end: settled.append(end))


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://127.0.0.1:99999", "tcp://127.0.0.1:\u00b2", "tcp://127.0.0.1\0:80", "ipc://a\0b", f"tcp://{'x' * 70}:80"],
)
def test_endpoint_that_cannot_be_ends_no_other_stream(
    server: StreamServer, source: StreamSource, endpoint: str
) -> None:
    lost: list[tuple[Outcome, str]] = []
    whole: list[tuple[Outcome, str]] = []
    receiver = Receiver(16 * CHUNK)
    try:
        receiver.add(incoming_of(msgspec.structs.replace(rogue(1), endpoint=endpoint), lost))
        receiver.add(incoming_of(server.open(source), whole))
        until(lambda: bool(whole))
        receiver.add(incoming_of(server.open(source), whole))
        until(lambda: len(whole) == 2)
        assert [outcome for outcome, _ in whole] == [Outcome.COMPLETE] * 2
        assert not lost  # it is tried for a while
    finally:
        receiver.close()
    assert [outcome for outcome, _ in lost] == [Outcome.LOST]


def test_stream_id_that_is_given_twice_ends_the_second_only(server: StreamServer, source: StreamSource) -> None:
    whole: list[tuple[Outcome, str]] = []
    first: list[tuple[Outcome, str]] = []
    second: list[tuple[Outcome, str]] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        opened = rogue(silent.getsockname()[1])
        receiver = Receiver(16 * CHUNK)
        try:
            receiver.add(incoming_of(opened, first))
            again = incoming_of(opened, second)
            receiver.add(again)
            until(lambda: bool(second))
            assert second == [(Outcome.FAILED, "the store gave one stream id twice")]
            receiver.cancel(again)
            receiver.add(incoming_of(server.open(source), whole))
            until(lambda: bool(whole))
            assert whole[0][0] is Outcome.COMPLETE
            assert not first
        finally:
            receiver.close()


@pytest.mark.parametrize(("stream_id", "secret"), [("ab" * 16, " "), ("ab " * 16, ""), ("ab" * 16, "cd" * 31 + "  ")])
def test_blanks_are_no_digits_of_an_id_or_a_secret(stream_id: str, secret: str) -> None:
    with pytest.raises(WireError, match="16 and 32 are expected"):
        incoming_of(msgspec.structs.replace(rogue(1), stream_id=stream_id, secret=secret), [])


def bulk_chunk(opened: StreamOpened, index: int, payload: bytes) -> bytes:
    head = bulk.Head(bulk.CHUNK, 0, 0, index, 0, bytes.fromhex(opened.stream_id), len(payload))
    return bulk.pack_head(head) + payload


def test_another_store_cannot_write_into_a_stream_nor_end_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as honest, socket.create_server(("127.0.0.1", 0)) as liar:
        opened = rogue(honest.getsockname()[1])
        theirs = msgspec.structs.replace(rogue(liar.getsockname()[1]), stream_id="cd" * 16)
        settled: list[tuple[Outcome, str]] = []
        mine = incoming_of(opened, settled)
        receiver = Receiver(16 * CHUNK)
        try:
            other = incoming_of(theirs, [])
            receiver.add(mine)
            receiver.add(other)
            line, _ = liar.accept()
            until(lambda: bool(mine.asked) and bool(other.asked))
            line.sendall(bulk_chunk(opened, 0, b"\xee" * CHUNK))
            line.sendall(bulk.pack_head(bulk.Head(bulk.GONE, 0, 0, 0, 0, bytes.fromhex(opened.stream_id), 0)))
            line.sendall(bulk_chunk(theirs, 0, b"\xdd" * CHUNK))
            until(lambda: receiver.counts.chunks == 1)  # of its own stream
            assert not settled
            assert mine.arrival.left == mine.arrival.chunks
            assert not any(mine.arrival.room(0))
            line.close()
        finally:
            receiver.close()


def test_chunks_that_nobody_asked_for_are_dropped_and_little_is_asked_for_that_cannot_be_checked() -> None:
    size = 400 * CHUNK
    with socket.create_server(("127.0.0.1", 0)) as liar:
        opened = msgspec.structs.replace(rogue(liar.getsockname()[1]), total_bytes=size)
        mine = incoming_of(opened, [], size)
        receiver = Receiver(size)
        try:
            receiver.add(mine)
            line, _ = liar.accept()
            until(lambda: bool(mine.asked))
            for index in range(1, 400):
                line.sendall(bulk_chunk(opened, index, b"\xee" * CHUNK))
                until(lambda sent=index: receiver.counts.chunks + receiver.counts.duplicates == sent)
            assert receiver.counts.chunks < stream_receiver.AHEAD_CHUNKS
            assert not any(mine.arrival.room(399))
            line.close()
        finally:
            receiver.close()


def test_connection_whose_streams_have_ended_proves_nothing_any_more(
    server: StreamServer, source: StreamSource
) -> None:
    opened = server.open(source)
    endpoint = opened.endpoint
    first, second = Reader(endpoint), Reader(endpoint)
    stream_id = first.take(opened)
    second.streams = first.streams
    first.ask(stream_id, [(0, 1)])
    assert first.receive()[0].chunk == 0
    until(lambda: [each.place.proven for each in server._readers.values()] == [True, False])
    second.ask(stream_id, [(1, 1)])
    assert second.receive()[0].chunk == 1
    until(lambda: [each.place.proven for each in server._readers.values()] == [False, True])
    first.ask(stream_id, [], bulk.FLAG_CLOSE)
    until(lambda: server.stats().streams == 0)
    until(lambda: [each.place.proven for each in server._readers.values()] == [False, False])
    first.socket.close()
    second.socket.close()


def test_stream_ends_with_shards_that_are_empty(tmp_path: Path) -> None:
    shards = {"a": np.arange(5, dtype=np.uint8), "b": np.zeros(0, np.float32), "c": np.zeros((0, 3))}
    layout = Layout([("train/0/0", 1, shards)])
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(layout.file_bytes)
        write_block(file.fileno(), layout)
    kept = Kept(str(tmp_path / "file"), table_of(tmp_path / "file"))
    made = pin("s", [kept], [[0]], [PutTask("train/0/0", 1)], ["a", "b", "c"], 1 << 40, CHUNK, MappingCache())
    sent = b"".join(bytes(piece) for index in range(made.chunks) for piece in made.pieces(index))
    assert sent == (tmp_path / "file").read_bytes()
