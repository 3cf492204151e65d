"""Lines between stores and readers on real sockets: turns, windows, seals, stalled and hostile peers at both ends."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from proto import blockfile, bulk
from proto.blockfile import BlockLayout, Table
from proto.bulk import Head, Kind
from proto.errors import WireError
from proto.messages import ErrorCode, LineOpened, PutTask, StreamOpened
from services.batch_store import stream_places, stream_server
from services.batch_store.files import StoreFiles
from services.batch_store.room import Retire
from services.batch_store.stream_places import Places
from services.batch_store.stream_server import READER_BYTES, StreamServer
from services.batch_store.stream_source import SealedFile, StreamSource, pin
from shared.dataplane import mapping, stream_line
from shared.dataplane.bulk_seal import TO_READER, TO_STORE, Seal
from shared.dataplane.mapping import MappingCache
from shared.dataplane.memory import Regions
from shared.dataplane.stream_arrival import Arrival
from shared.dataplane.stream_line import Counts, Incoming, RequestWindow, StreamGroup, StreamLine, StreamOutcome
from shared.dataplane.write import copy_block, write_block
from shared.rpc.errors import RpcError

CHUNK = 1 << 16
SIZE = 24 << 20


@pytest.fixture
def source(tmp_path: Path) -> StreamSource:
    layout = BlockLayout([("train/0/0", 1, {"a": np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)})])
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(layout.file_bytes)
        write_block(file.fileno(), layout)
    kept = SealedFile(str(tmp_path / "file"), table_of(tmp_path / "file"))
    return pin("s", [kept], [[0]], [PutTask("train/0/0", 1)], [], 1 << 40, MappingCache())


def table_of(path: Path) -> Table:
    data = path.read_bytes()
    return blockfile.parse(data, len(data))


def test_a_truncated_file_is_refused(tmp_path: Path, source: StreamSource) -> None:
    kept = SealedFile(str(tmp_path / "file"), table_of(tmp_path / "file"))
    os.truncate(tmp_path / "file", SIZE // 2)
    with pytest.raises(WireError, match=f"s: {kept.path} has {SIZE // 2} bytes, it was sealed with"):
        pin("s", [kept], [[0]], [PutTask("train/0/0", 1)], [], 1 << 40, MappingCache())


def test_kept_mapping_is_dropped_with_its_file_and_not_before_its_streams(tmp_path: Path) -> None:
    cache = MappingCache()
    files = StoreFiles("store", tmp_path, on_retire=cache.drop)
    layout = BlockLayout([("train/0/0", 1, {"a": np.arange(1000)})])
    descriptor = os.open(files.create("p", layout.file_bytes), os.O_RDWR)
    write_block(descriptor, layout)
    os.close(descriptor)
    files.seal("p")
    stream = cache.get(files.path("p.blk"))
    assert cache.get(files.path("p.blk")) is stream
    files.retire(Retire("p.blk", "p.zombie"))
    assert files.unmapped() == []  # the stream is still sending it
    with pytest.raises(FileNotFoundError):
        cache.get(files.path("p.blk"))
    del stream
    assert files.unmapped() == ["p.zombie"]
    files.close()


def test_number_of_kept_tables_is_limited_by_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "CACHED_ROWS", 1000)
    layout = BlockLayout([("train/0/0", 1, {"a": np.arange(1000)})])
    file = np.zeros(layout.file_bytes, np.uint8)
    copy_block(file, layout)
    cache = mapping.TableCache()
    for number in range(100):
        cache.get(f"{number}.blk", file)
    assert len(cache) == 1000 // (mapping.TABLE_ROWS + 1)


def test_file_retired_while_it_was_being_mapped_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    layout = BlockLayout([("train/0/0", 1, {"a": np.arange(1000)})])
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
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no lock is left


@pytest.fixture(params=["sealed", "plain"])
def server(request: pytest.FixtureRequest) -> Iterator[StreamServer]:
    with serving(plain=request.param == "plain") as made:
        yield made


@contextmanager
def serving(*, plain: bool = False, key_limit_bytes: int = 1 << 36) -> Iterator[StreamServer]:
    made = StreamServer("batch-store/0", plain=plain, key_limit_bytes=key_limit_bytes)
    made.bind("tcp://127.0.0.1:*")
    try:
        yield made
    finally:
        made.close()


def connected(endpoint: str) -> socket.socket:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def ended(line: socket.socket) -> bool:
    """Return whether the other end closes within 10 s, discarding anything that arrives before."""
    with contextlib.suppress(ConnectionError):
        while line.recv(1 << 16):
            pass
    return True


class Reader:
    """A line driven by hand, on which streams are opened and read range by range."""

    def __init__(self, server: StreamServer, *, stalls: bool = False) -> None:
        self.opened = server.open_line()
        self._server = server
        self.line_id, secret = bytes.fromhex(self.opened.line_id), bytes.fromhex(self.opened.secret)
        self._sealer = Seal(secret, self.line_id, TO_STORE) if secret else None
        self._opener = Seal(secret, self.line_id, TO_READER) if secret else None
        self.hello = self.message(Head(Kind.HELLO), self.line_id)
        self.socket = socket.socket()
        if stalls:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        host, _, port = self.opened.endpoint.removeprefix("tcp://").rpartition(":")
        self.socket.connect((host, int(port)))
        self.socket.settimeout(10)
        self.socket.sendall(self.hello)
        self.ranges = 0

    def message(self, head: Head, behind: bytes = b"") -> bytes:
        packed = bulk.pack_head(head) + behind
        return packed + (self._sealer.tag(packed) if self._sealer is not None else b"")

    def take(self, source: StreamSource) -> int:
        return self._server.open_stream(self.opened.line_id, source).stream

    def ask(self, stream: int, *offsets: int) -> None:
        """Ask for `CHUNK` bytes at each of the offsets."""
        self.socket.sendall(b"".join(self.message(Head(Kind.READ, stream, CHUNK, at)) for at in offsets))

    def close_stream(self, stream: int) -> None:
        self.socket.sendall(self.message(Head(Kind.CLOSE, stream)))

    def raw(self) -> tuple[bytes, bytes]:
        """Return a head and the bytes that follow it, both empty if the server closed. Raises TimeoutError."""
        packed = self._exactly(bulk.HEAD_BYTES)
        tag_bytes = bulk.TAG_BYTES if self._opener is not None else 0
        return packed, self._exactly(bulk.unpack_head(packed).nbytes + tag_bytes) if packed else b""

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

    def receive(self) -> tuple[Head, bytes]:
        packed, payload = self.raw()
        head = bulk.unpack_head(packed)
        assert head.kind is Kind.DATA
        if self._opener is not None:
            room = bytearray(len(payload) - bulk.TAG_BYTES)
            self._opener.open(packed, payload, memoryview(room))
            payload = bytes(room)
        self.ranges += 1
        return head, payload


def until(condition: Callable[[], bool], limit_s: float = 10) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.005)


def test_ranges_are_sent_exactly_as_asked_for(server: StreamServer, source: StreamSource) -> None:
    reader = Reader(server)
    stream, other = reader.take(source), reader.take(source)
    assert stream != other
    wanted = [(stream, 3 * CHUNK + 5, CHUNK), (other, 0, 1), (stream, 7, bulk.MAX_RANGE_BYTES), (stream, 7, 9)]
    for number, offset, nbytes in wanted:
        reader.socket.sendall(reader.message(Head(Kind.READ, number, nbytes, offset)))
    for number, offset, nbytes in wanted:
        head, payload = reader.receive()
        assert head == Head(Kind.DATA, number, nbytes, offset)
        assert payload == b"".join(source.pieces(offset, nbytes))
    assert reader.silent()
    reader.close_stream(stream)
    until(lambda: server.stats().streams == 1)
    reader.ask(other, 0)
    assert reader.receive()[0].stream == other
    reader.ask(stream, 0)
    assert ended(reader.socket)  # requests for a closed stream have no meaning
    until(lambda: server.stats().streams == 0)


def test_stream_ends_with_its_last_byte(server: StreamServer, source: StreamSource) -> None:
    reader = Reader(server)
    reader.ask(reader.take(source), source.total_bytes - CHUNK)
    assert reader.receive()[1] == b"".join(source.pieces(source.total_bytes - CHUNK, CHUNK))
    assert server.stats().streams == 0
    reader.ask(reader.take(source), 0)
    assert reader.receive()[0].stream == 2


def test_readers_share_the_server_fairly_however_many_streams_each_has(
    server: StreamServer,
    source: StreamSource,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the first reader has its ranges, every other reader has at least half as many.

    Reading the files is the bottleneck here, so that the server's turns decide. On a real line, TCP decides.
    """
    read = source.pieces

    def read_slowly(at: int, nbytes: int) -> list[memoryview]:
        time.sleep(0.001)
        return read(at, nbytes)

    monkeypatch.setattr(source, "pieces", read_slowly)
    readers = [Reader(server) for _ in range(5)]
    wanted = 120
    nexts: dict[tuple[Reader, int], int] = {}
    for number, reader in enumerate(readers):
        for _ in range(4 if number == 0 else 1):  # the first reader is greedy
            nexts[reader, reader.take(source)] = 16
    for reader, stream in nexts:
        reader.ask(stream, *(at * CHUNK for at in range(16)))
    by_socket = {reader.socket: reader for reader in readers}
    end = time.monotonic() + 30
    while max(reader.ranges for reader in readers) < wanted:
        assert time.monotonic() < end
        for ready in select.select(list(by_socket), [], [], 1)[0]:
            reader = by_socket[ready]
            stream = reader.receive()[0].stream
            if nexts[reader, stream] < wanted:
                reader.ask(stream, nexts[reader, stream] * CHUNK)
                nexts[reader, stream] += 1
    got = [reader.ranges for reader in readers]
    assert min(got) >= wanted / 2, got


def test_stalled_reader_holds_no_more_than_its_share_and_delays_no_other(
    server: StreamServer, source: StreamSource
) -> None:
    stalled, reader = Reader(server, stalls=True), Reader(server)
    stream, mine = stalled.take(source), reader.take(source)
    stalled.socket.settimeout(0.2)
    with contextlib.suppress(TimeoutError):  # requests everything repeatedly and reads nothing
        while True:
            stalled.socket.sendall(stalled.message(Head(Kind.READ, stream, bulk.MAX_RANGE_BYTES, 0)))
    asked, peak, chunks = 8, 0, source.total_bytes // CHUNK
    reader.ask(mine, *(at * CHUNK for at in range(asked)))
    while reader.ranges < chunks:
        reader.receive()
        peak = max(peak, server.stats().queued_bytes)
        if asked < chunks:
            reader.ask(mine, asked * CHUNK)
            asked += 1
    assert 0 < max(each.asked_bytes for each in server._readers.values()) <= READER_BYTES
    # received requests that were not yet processed
    assert max(len(each.inbox) for each in server._readers.values()) <= stream_server._RECEIVE_BYTES + 64
    # one message for each reader
    assert 0 < peak <= bulk.MAX_RANGE_BYTES + CHUNK + 2 * (bulk.HEAD_BYTES + bulk.TAG_BYTES), peak
    stalled.socket.close()
    until(lambda: server.stats().queued_bytes == 0)


def test_copies_for_stalled_readers_are_one_range_each(source: StreamSource) -> None:
    with serving() as server:
        readers = [Reader(server, stalls=True) for _ in range(6)]
        for reader in readers:
            for _ in range(3):
                reader.ask(reader.take(source), *range(0, source.total_bytes - CHUNK, CHUNK)[:80])
        buffer = bulk.MAX_RANGE_BYTES + bulk.TAG_BYTES
        until(lambda: server.stats().sent_bytes > 4 << 20)
        sent = -1
        while sent != server.stats().sent_bytes:  # until the kernel buffers no more
            sent = server.stats().sent_bytes
            assert server.stats().buffer_bytes <= len(readers) * buffer
            time.sleep(0.05)
        for reader in readers:
            reader.socket.close()
        until(lambda: server.stats().buffer_bytes == 0)


def test_hostile_messages_are_counted_and_end_only_their_connection(server: StreamServer, source: StreamSource) -> None:
    good = Reader(server)
    stream = good.take(source)
    total = source.total_bytes
    hostile = [
        Head(Kind.READ, 1, 2, total - 1),
        Head(Kind.READ, 1, 1, total),
        Head(Kind.READ, 1, 1, (1 << 64) - 1),
        Head(Kind.READ, 9, 1, 0),
        Head(Kind.DATA, 1, 1, 0),
        Head(Kind.READ, 1, bulk.MAX_RANGE_BYTES + 1, 0),
        Head(Kind.READ, 1, 0, 0),
        Head(Kind.READ, 1, (1 << 32) - 1, 0),
        Head(Kind.CLOSE, 1, 1, 0),
        Head(Kind.READ, 0, 1, 0),
        Head(Kind.HELLO),
    ]
    for head in hostile:
        reader = Reader(server)
        reader.take(source)
        reader.ask(1, 0)
        reader.receive()
        reader.socket.sendall(reader.message(head, bytes(bulk.LINE_ID_BYTES) if head.kind is Kind.HELLO else b""))
        assert ended(reader.socket)
    for message in (
        b"GET / HTTP/1.1\r\nHost: store.example\r\nUser-Agent: nobody\r\n\r\n",
        good.hello[1:] + good.hello,
        bulk.pack_head(Head(Kind.READ, 1, 1, 0)) + bytes(bulk.TAG_BYTES),  # a request before the hello
        bulk.pack_head(Head(Kind.DATA, 1, CHUNK, 0)) + bytes(CHUNK),
        bytes(1 << 20),
    ):
        stranger = connected(good.opened.endpoint)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(message)
        assert ended(stranger)
    until(lambda: server.stats().refused == len(hostile) + 5)
    assert server.stats().hung_up == len(hostile) + 5
    good.ask(stream, 6 * CHUNK)
    assert good.receive()[1] == b"".join(source.pieces(6 * CHUNK, CHUNK))


@pytest.mark.parametrize("cut", [1, 7, 39])
def test_requests_are_parsed_however_their_bytes_are_split(
    server: StreamServer, source: StreamSource, cut: int
) -> None:
    reader = Reader(server)
    stream = reader.take(source)
    said = b"".join(reader.message(Head(Kind.READ, stream, 10 + at, at)) for at in range(8))
    for at in range(0, len(said), cut):
        reader.socket.sendall(said[at : at + cut])
    assert [reader.receive()[0] for _ in range(8)] == [Head(Kind.DATA, stream, 10 + at, at) for at in range(8)]


def test_line_accepts_one_connection_and_a_replayed_hello_gets_nothing(
    server: StreamServer, source: StreamSource
) -> None:
    reader = Reader(server)
    stream = reader.take(source)
    reader.ask(stream, 0)
    reader.receive()
    thief = connected(reader.opened.endpoint)
    thief.sendall(reader.hello)
    assert ended(thief)
    assert server.stats().unknown == 1
    reader.ask(stream, CHUNK)
    assert reader.receive()[0].offset == CHUNK
    reader.socket.close()
    until(lambda: server.stats().streams == 0)  # the stream ends with its line
    late = connected(reader.opened.endpoint)
    late.sendall(reader.hello)
    assert ended(late)
    with pytest.raises(RpcError, match="is not open") as caught:
        reader.take(source)
    assert caught.value.code == ErrorCode.LOST


@pytest.mark.parametrize("line_id", ["", "xy" * 16, "ab" * 15, "ab " * 16, "AB" * 16, "ab" * 500_000])
def test_unknown_or_invalid_line_is_lost(server: StreamServer, source: StreamSource, line_id: str) -> None:
    with pytest.raises(RpcError) as caught:
        server.open_stream(line_id, source)
    assert caught.value.code == ErrorCode.LOST
    assert len(str(caught.value)) < 200


def test_forged_repeated_and_misdirected_requests_end_their_line(source: StreamSource) -> None:
    with serving() as server:
        first, second = Reader(server), Reader(server)
        stream = first.take(source)
        second.take(source)
        asked = first.message(Head(Kind.READ, stream, CHUNK, 0))
        first.socket.sendall(asked)
        first.receive()
        first.socket.sendall(asked)  # a repeated request
        assert ended(first.socket)
        second.socket.sendall(asked)  # a request of another line
        assert ended(second.socket)
        third = Reader(server)
        third.take(source)
        good = third.message(Head(Kind.READ, 1, CHUNK, 0))
        third.socket.sendall(good[:-1] + bytes([good[-1] ^ 1]))
        assert ended(third.socket)
        assert server.stats().refused == 3


def test_connections_are_limited_and_silent_ones_end(
    server: StreamServer, source: StreamSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_places, "MOST", 2)
    readers = [Reader(server) for _ in range(2)]
    for reader in readers:
        reader.ask(reader.take(source), 0)
        reader.receive()
    assert ended(connected(readers[0].opened.endpoint))  # all places are held by proven readers
    assert server.stats().turned_away == 1
    monkeypatch.setattr(stream_places, "IDLE_S", 0.1)
    assert readers[0].raw() == readers[1].raw() == (b"", b"")
    until(lambda: len(server._readers) == 0)
    monkeypatch.setattr(stream_places, "IDLE_S", 20)
    assert Reader(server).silent()


def test_strangers_cannot_take_every_place_from_readers(
    server: StreamServer, source: StreamSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_places, "MOST", 4)
    endpoint = server.open_line().endpoint
    strangers = [connected(endpoint) for _ in range(4)]
    until(lambda: len(server._places) == 4)
    reader = Reader(server)
    stream = reader.take(source)
    for number in range(60):
        reader.ask(stream, number * CHUNK)
        assert reader.receive()[1] == b"".join(source.pieces(number * CHUNK, CHUNK))
        if number < 20:  # more strangers arrive; the reader pushed out the first one
            strangers.append(connected(endpoint))
            until(lambda expected=number + 2: server.stats().evicted == expected)  # type: ignore[misc]
    assert ended(strangers[0])
    assert len(server._places) <= 4


def test_stranger_that_sends_its_hello_too_slowly_is_evicted(
    server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_places, "PROVE_S", 0.3)
    stranger = connected(server.open_line().endpoint)
    stranger.settimeout(0.02)
    message, at, end = bulk.pack_head(Head(Kind.HELLO)) + bytes(bulk.LINE_ID_BYTES), 0, time.monotonic() + 10
    over = False
    while not over:
        assert time.monotonic() < end
        try:
            if at < bulk.HEAD_BYTES + bulk.LINE_ID_BYTES - 1:  # never the complete message
                stranger.sendall(message[at : at + 1])
                at += 1
            over = not stranger.recv(1)
        except TimeoutError:
            continue
        except ConnectionError:
            over = True
    until(lambda: server.stats().unproven == 1)
    assert server.stats().refused == 0


def test_newcomer_evicts_the_oldest_stranger_of_the_host_with_most_strangers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_places, "MOST", 4)
    places = Places(4096)
    proven, lone = places.take("crowd", 0)[0], places.take("other", 1)[0]
    first, second = places.take("crowd", 2)[0], places.take("crowd", 3)[0]
    assert proven is not None
    proven.proven = True
    assert places.take("crowd", 4)[1] is first
    assert places.take("crowd", 5)[1] is second
    assert places.overdue(1 + stream_places.PROVE_S + 0.5) == {lone}
    assert (places.evicted, places.unproven, len(places)) == (2, 1, 4)


def test_lines_and_streams_are_limited_and_one_too_many_is_busy(
    server: StreamServer, source: StreamSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_server, "MAX_STREAMS", 2)
    monkeypatch.setattr(stream_server, "MAX_LINES", 2)
    first, second = Reader(server), Reader(server)
    first.take(source)
    second.take(source)
    for one_too_many in (server.open_line, lambda: first.take(source)):
        with pytest.raises(RpcError) as caught:
            one_too_many()
        assert caught.value.code == ErrorCode.BUSY
        assert caught.value.retry_after_s > 0


def test_unconnected_line_and_idle_stream_end(
    server: StreamServer, source: StreamSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(server)
    used, unused = reader.take(source), reader.take(source)
    server.open_stream(server.open_line().line_id, source)
    assert server.stats().streams == 3
    monkeypatch.setattr(stream_server, "UNCLAIMED_S", 0.1)
    monkeypatch.setattr(stream_server, "_TICK_S", 0.1)
    until(lambda: server.stats().streams == 2)
    monkeypatch.setattr(stream_server, "STREAM_IDLE_S", 0.5)
    end = time.monotonic() + 10
    while server.stats().streams == 2:
        assert time.monotonic() < end
        reader.ask(used, 0)
        reader.receive()
    reader.ask(used, 0)
    reader.receive()
    reader.ask(unused, 0)
    assert ended(reader.socket)


def test_sealed_bytes_are_not_sent_in_plaintext(source: StreamSource) -> None:
    with serving() as server:
        reader = Reader(server)
        reader.ask(reader.take(source), 2 * CHUNK, 2 * CHUNK)
        messages = [reader.raw() for _ in range(2)]
        plain = b"".join(source.pieces(2 * CHUNK, CHUNK))
        assert all(plain[at : at + 32] not in payload for _, payload in messages for at in (0, 5000, 60_000))
        assert messages[0][1] != messages[1][1]  # the same bytes have another nonce
        opener = Seal(bytes(32), reader.line_id, TO_READER)
        with pytest.raises(WireError):
            opener.open(*messages[0], memoryview(bytearray(CHUNK)))


def test_every_line_has_its_own_secret(source: StreamSource) -> None:
    with serving() as server:
        secrets = {server.open_line().secret for _ in range(10)}
        assert len(secrets) == 10
        assert all(len(bytes.fromhex(secret)) == 32 for secret in secrets)


# ---- the reader's end


class Lines:
    """The reader's ends of lines, with their counts."""

    def __init__(self, inflight_bytes: int = 16 << 20) -> None:
        self.counts = Counts()
        self.window = RequestWindow(inflight_bytes, self.counts)
        self._checker = ThreadPoolExecutor(1)
        self._lines: list[StreamLine] = []

    def line(self, opened: LineOpened) -> StreamLine:
        self._lines.append(StreamLine(opened, self.window, self._checker, self.counts))
        return self._lines[-1]

    def close(self) -> None:
        for line in self._lines:
            line.close()
        self._checker.shutdown()


@pytest.fixture
def lines() -> Iterator[Lines]:
    made = Lines()
    yield made
    made.close()


class Taken:
    """A stream to add to a line, with its outcome."""

    def __init__(self, opened: StreamOpened, group: StreamGroup | None = None, arrival: Arrival | None = None) -> None:
        self.settled: list[tuple[StreamOutcome, str]] = []
        self.arrival = arrival or Arrival(opened, [PutTask("train/0/0", 1)], [], 2 * SIZE, Regions())
        self.incoming = Incoming(self.arrival, group or StreamGroup(), opened.stream, self._settle)

    def _settle(self, outcome: StreamOutcome, why: str) -> None:
        self.settled.append((outcome, why))

    def outcome(self) -> StreamOutcome:
        until(lambda: bool(self.settled))
        return self.settled[0][0]


def expected() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)


def test_stream_arrives_completely_within_its_window(server: StreamServer, source: StreamSource) -> None:
    lines = Lines(3 << 20)
    try:
        opened = server.open_line()
        line = lines.line(opened)
        taken = [Taken(server.open_stream(opened.line_id, source)) for _ in range(3)]
        for each in taken:
            line.add(each.incoming)
        for each in taken:
            assert each.outcome() is StreamOutcome.COMPLETE
            assert np.array_equal(each.arrival.arrays()[0]["a"], expected())
        assert 1 << 20 < lines.counts.inflight_peak_bytes <= 3 << 20
        assert lines.counts.received_bytes == 3 * source.total_bytes
        assert lines.counts.refused == 0
        assert server.stats().streams == 0
    finally:
        lines.close()


def test_stream_whose_line_breaks_or_uses_up_its_key_continues_over_others(source: StreamSource, lines: Lines) -> None:
    """A key lasts for five ranges here. Each line has a different key, and no byte is received twice."""
    with serving(key_limit_bytes=5 << 20) as server:
        arrival, outcome, used = None, StreamOutcome.LOST, 0
        while outcome is StreamOutcome.LOST:
            opened = server.open_line()
            line = lines.line(opened)
            taken = Taken(server.open_stream(opened.line_id, source), arrival=arrival)
            before, arrival = taken.arrival.received, taken.arrival
            line.add(taken.incoming)
            if used == 1:
                until(lambda here=arrival, at=before: here.received > at)  # type: ignore[misc]
                for reader in list(server._readers.values()):
                    with contextlib.suppress(OSError):
                        reader.socket.shutdown(socket.SHUT_RDWR)
            outcome = taken.outcome()
            used += 1
            assert arrival.received <= before + (5 << 20)
        assert outcome is StreamOutcome.COMPLETE
        assert used >= SIZE // (5 << 20)
        assert arrival is not None
        assert np.array_equal(arrival.arrays()[0]["a"], expected())
        assert (lines.counts.refused, server.stats().refused) == (0, 0)
        assert lines.counts.received_bytes == source.total_bytes


def test_groups_of_streams_take_turns_and_those_of_one_group_do_not(
    server: StreamServer, source: StreamSource, lines: Lines
) -> None:
    lines.window = RequestWindow(2 << 20, lines.counts)
    opened = server.open_line()
    line = lines.line(opened)
    group = StreamGroup()
    mine = [Taken(server.open_stream(opened.line_id, source), group) for _ in range(2)]
    other = Taken(server.open_stream(opened.line_id, source))
    seen: list[tuple[int, int, int]] = []
    for each in (*mine, other):
        line.add(each.incoming)
    while not (mine[1].settled and other.settled):
        seen.append((mine[0].arrival.received, mine[1].arrival.received, other.arrival.received))
        time.sleep(0.001)
    assert all(first == source.total_bytes for first, second, _ in seen if second > 0)
    assert all(abs(first - third) <= 4 << 20 for first, _, third in seen)


def test_cancelled_stream_is_not_written_to_and_others_on_its_line_continue(
    server: StreamServer, source: StreamSource, lines: Lines
) -> None:
    opened = server.open_line()
    line = lines.line(opened)
    gone, kept = (Taken(server.open_stream(opened.line_id, source)) for _ in range(2))
    for each in (gone, kept):
        line.add(each.incoming)
    until(lambda: gone.arrival.received > 0)
    line.cancel(gone.incoming)
    assert gone.outcome() in (StreamOutcome.LOST, StreamOutcome.COMPLETE)
    before = gone.arrival.received
    assert kept.outcome() is StreamOutcome.COMPLETE
    assert gone.arrival.received == before
    assert line.is_open
    until(lambda: server.stats().streams == 0)


def test_line_that_no_stream_needs_is_closed(
    server: StreamServer, source: StreamSource, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_line, "IDLE_S", 0.05)
    line = lines.line(server.open_line())
    until(lambda: not line.is_open)
    until(lambda: not server._readers)
    late = Taken(StreamOpened(stream=1, covered=1, total_bytes=300, head_bytes=200, head_checksum=1))
    line.add(late.incoming)
    assert late.outcome() is StreamOutcome.LOST


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://127.0.0.1:99999", "tcp://127.0.0.1:\u00b2", "tcp://127.0.0.1\0:80", "ipc://a\0b", f"tcp://{'x' * 70}:80"],
)
def test_invalid_endpoint_ends_no_other_line(
    server: StreamServer, source: StreamSource, lines: Lines, endpoint: str
) -> None:
    opened = server.open_line()
    bad, good = lines.line(msgspec.structs.replace(opened, endpoint=endpoint)), lines.line(opened)
    whole = Taken(server.open_stream(opened.line_id, source))
    lost = Taken(StreamOpened(stream=1, covered=1, total_bytes=300, head_bytes=200, head_checksum=1))
    bad.add(lost.incoming)
    good.add(whole.incoming)
    assert whole.outcome() is StreamOutcome.COMPLETE
    assert lost.outcome() is StreamOutcome.LOST


@pytest.mark.parametrize(("line_id", "secret"), [("ab" * 16, " "), ("ab " * 16, ""), ("ab" * 16, "cd" * 31 + "  ")])
def test_blanks_in_an_id_or_a_secret_are_refused(lines: Lines, line_id: str, secret: str) -> None:
    with pytest.raises(WireError, match="hexadecimal digits are expected"):
        lines.line(LineOpened(line_id=line_id, endpoint="tcp://127.0.0.1:1", secret=secret))


@contextmanager
def lying(lines: Lines, total_bytes: int) -> Iterator[tuple[socket.socket, Taken, StreamLine]]:
    """Yield the store's end of a plaintext line after the hello, and a stream that its reader wants."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        line = lines.line(LineOpened(line_id="ab" * 16, endpoint=endpoint))
        taken = Taken(StreamOpened(stream=1, covered=1, total_bytes=total_bytes, head_bytes=200, head_checksum=1))
        line.add(taken.incoming)
        store, _ = listener.accept()
        with store, store.makefile("rb") as said:
            assert bulk.unpack_head(said.read(bulk.HEAD_BYTES)).kind is Kind.HELLO
            assert said.read(bulk.LINE_ID_BYTES) == b"\xab" * 16
            asked = bulk.unpack_head(said.read(bulk.HEAD_BYTES))
            assert asked == Head(Kind.READ, 1, min(total_bytes, bulk.MAX_RANGE_BYTES), 0)
            yield store, taken, line


def test_ranges_arrive_completely_however_their_bytes_are_split(lines: Lines) -> None:
    data = np.random.default_rng(2).integers(0, 256, 5000, np.uint8).tobytes()
    with lying(lines, len(data)) as (store, taken, _):
        store.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        message = bulk.pack_head(Head(Kind.DATA, 1, len(data), 0)) + data
        for at, end in pairwise([0, 1, 20, 24, 25, 3000, len(message)]):
            store.sendall(message[at:end])
        until(lambda: taken.arrival.received == len(data))
        assert taken.arrival._view.tobytes() == data


@pytest.mark.parametrize(
    "head",
    [
        Head(Kind.DATA, 2, CHUNK, 0),
        Head(Kind.DATA, 1, CHUNK, CHUNK),
        Head(Kind.DATA, 1, CHUNK - 1, 0),
        Head(Kind.READ, 1, CHUNK, 0),
    ],
)
def test_unrequested_bytes_are_not_written_and_end_the_line(lines: Lines, head: Head) -> None:
    with lying(lines, CHUNK) as (store, taken, line):
        with contextlib.suppress(ConnectionError):
            store.sendall(bulk.pack_head(head) + b"\xee" * head.nbytes)
        assert taken.outcome() is StreamOutcome.LOST
        until(lambda: not line.is_open)
    assert taken.arrival.received == 0
    assert not any(taken.arrival.room(CHUNK))
    assert lines.counts.refused == 1


def test_bytes_that_were_not_put_end_the_stream_soon_after_they_arrive(lines: Lines) -> None:
    size = 400 << 20
    with lying(lines, size) as (store, taken, _):
        at = 0
        with contextlib.suppress(ConnectionError):
            while not taken.settled:
                head = Head(Kind.DATA, 1, bulk.MAX_RANGE_BYTES, at)
                store.sendall(bulk.pack_head(head) + b"\xee" * bulk.MAX_RANGE_BYTES)
                at += bulk.MAX_RANGE_BYTES
                until(lambda sent=at: bool(taken.settled) or taken.arrival.received == sent)  # type: ignore[misc]
                time.sleep(0.01)  # gives the check time
        assert taken.outcome() is StreamOutcome.CORRUPT
        assert taken.arrival.received <= stream_line.CHECK_BYTES + (2 << 20)


def test_store_that_stays_silent_loses_the_line(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_line, "SILENT_S", 0.3)
    with lying(lines, CHUNK) as (store, taken, _):
        store.sendall(bulk.pack_head(Head(Kind.DATA, 1, CHUNK, 0)) + b"\xee" * 100)
        assert taken.outcome() is StreamOutcome.LOST
        assert "nothing came for 0.3 s" in taken.settled[0][1]
        assert taken.arrival.received == 0


def test_memory_is_not_written_after_its_stream_is_cancelled_during_a_range(lines: Lines) -> None:
    with lying(lines, CHUNK) as (store, taken, line):
        store.sendall(bulk.pack_head(Head(Kind.DATA, 1, CHUNK, 0)) + b"\xee" * 100)
        until(lambda: taken.arrival.room(CHUNK)[99] == 0xEE)
        line.cancel(taken.incoming)
        assert taken.outcome() is StreamOutcome.LOST
        store.sendall(b"\xee" * (CHUNK - 100))
        line.close()
    assert not any(taken.arrival.room(CHUNK)[100:])


def test_stream_may_end_with_empty_shards(tmp_path: Path) -> None:
    shards = {"a": np.arange(5, dtype=np.uint8), "b": np.zeros(0, np.float32), "c": np.zeros((0, 3))}
    layout = BlockLayout([("train/0/0", 1, shards)])
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(layout.file_bytes)
        write_block(file.fileno(), layout)
    kept = SealedFile(str(tmp_path / "file"), table_of(tmp_path / "file"))
    made = pin("s", [kept], [[0]], [PutTask("train/0/0", 1)], ["a", "b", "c"], 1 << 40, MappingCache())
    sent = b"".join(bytes(piece) for at in range(made.total_bytes) for piece in made.pieces(at, 1))
    assert sent == (tmp_path / "file").read_bytes()
