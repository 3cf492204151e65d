"""Tests the store's side of lines on real sockets: turns, windows, seals, stalled and hostile readers."""

from __future__ import annotations

import contextlib
import select
import time

import pytest

from proto import bulk
from proto.bulk import Head, Kind
from proto.errors import WireError
from proto.messages import ErrorCode
from services.batch_store import stream_server
from services.batch_store.stream_server import READER_BYTES, StreamServer
from services.batch_store.stream_source import StreamSource
from shared.dataplane.bulk_connection import TO_READER, Seal
from shared.rpc.errors import RpcError
from tests.unit.shared.stream_rig import CHUNK, Reader, connected, ended, serving, until


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
    assert ended(reader.socket)  # A request for a closed stream ends the line.
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
    """When one reader has received the wanted number of ranges, every other reader has at least half as many.

    Reading the files is the bottleneck here, so the server's turns determine the shares. On a real network, TCP
    determines them.
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
        for _ in range(4 if number == 0 else 1):  # The first reader is greedy.
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


def test_stalled_reader_holds_no_more_than_its_share_and_does_not_delay_others(
    server: StreamServer, source: StreamSource
) -> None:
    stalled, reader = Reader(server, stalls=True), Reader(server)
    stream, mine = stalled.take(source), reader.take(source)
    stalled.socket.settimeout(0.2)
    with contextlib.suppress(TimeoutError):  # The reader requests everything repeatedly and reads nothing.
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
    # The inbox holds received requests that have not yet been processed.
    assert max(len(each.inbox) for each in server._readers.values()) <= stream_server._RECEIVE_BYTES + 64
    # The queue holds at most one message for each reader.
    assert 0 < peak <= bulk.MAX_RANGE_BYTES + CHUNK + 2 * (bulk.HEAD_BYTES + bulk.TAG_BYTES), peak
    stalled.socket.close()
    until(lambda: server.stats().queued_bytes == 0)


def test_at_most_one_range_is_copied_for_each_stalled_reader(source: StreamSource) -> None:
    with serving() as server:
        readers = [Reader(server, stalls=True) for _ in range(6)]
        for reader in readers:
            for _ in range(3):
                reader.ask(reader.take(source), *range(0, source.total_bytes - CHUNK, CHUNK)[:80])
        buffer = bulk.MAX_RANGE_BYTES + bulk.TAG_BYTES
        until(lambda: server.stats().sent_bytes > 4 << 20)
        sent = -1
        while sent != server.stats().sent_bytes:  # The server sends until the kernel's buffers are full.
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
        bulk.pack_head(Head(Kind.READ, 1, 1, 0)) + bytes(bulk.TAG_BYTES),  # This request precedes the hello.
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


def test_line_accepts_one_connection_and_a_replayed_hello_is_refused(
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
    until(lambda: server.stats().streams == 0)  # The stream ends with its line.
    late = connected(reader.opened.endpoint)
    late.sendall(reader.hello)
    assert ended(late)
    with pytest.raises(RpcError, match="is not open") as caught:
        reader.take(source)
    assert caught.value.code == ErrorCode.LOST


@pytest.mark.parametrize("line_id", ["", "xy" * 16, "ab" * 15, "ab " * 16, "AB" * 16, "ab" * 500_000])
def test_an_unknown_or_invalid_line_is_reported_as_lost(
    server: StreamServer, source: StreamSource, line_id: str
) -> None:
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
        first.socket.sendall(asked)  # This request is repeated.
        assert ended(first.socket)
        second.socket.sendall(asked)  # This request belongs to another line.
        assert ended(second.socket)
        third = Reader(server)
        third.take(source)
        good = third.message(Head(Kind.READ, 1, CHUNK, 0))
        third.socket.sendall(good[:-1] + bytes([good[-1] ^ 1]))
        assert ended(third.socket)
        assert server.stats().refused == 3


def test_connections_are_limited_and_silent_ones_are_closed(
    server: StreamServer, source: StreamSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    server._places.most = 2
    readers = [Reader(server) for _ in range(2)]
    for reader in readers:
        reader.ask(reader.take(source), 0)
        reader.receive()
    assert ended(connected(readers[0].opened.endpoint))  # Proven readers occupy all places.
    assert server.stats().turned_away == 1
    monkeypatch.setattr(stream_server, "IDLE_S", 0.1)
    assert readers[0].raw() == readers[1].raw() == (b"", b"")
    until(lambda: len(server._readers) == 0)
    monkeypatch.setattr(stream_server, "IDLE_S", 20)
    assert Reader(server).silent()


def test_strangers_cannot_take_every_place_from_readers(server: StreamServer, source: StreamSource) -> None:
    server._places.most = 4
    endpoint = server.open_line().endpoint
    strangers = [connected(endpoint) for _ in range(4)]
    until(lambda: len(server._places) == 4)
    reader = Reader(server)
    stream = reader.take(source)
    for number in range(60):
        reader.ask(stream, number * CHUNK)
        assert reader.receive()[1] == b"".join(source.pieces(number * CHUNK, CHUNK))
        if number < 20:  # More strangers arrive after the reader has evicted the first one.
            strangers.append(connected(endpoint))
            until(lambda expected=number + 2: server.stats().evicted == expected)  # type: ignore[misc]
    assert ended(strangers[0])
    assert len(server._places) <= 4


def test_stranger_that_sends_its_hello_too_slowly_is_evicted(
    server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_server, "PROVE_S", 0.3)
    stranger = connected(server.open_line().endpoint)
    stranger.settimeout(0.02)
    message, at, end = bulk.pack_head(Head(Kind.HELLO)) + bytes(bulk.LINE_ID_BYTES), 0, time.monotonic() + 10
    over = False
    while not over:
        assert time.monotonic() < end
        try:
            if at < bulk.HEAD_BYTES + bulk.LINE_ID_BYTES - 1:  # The message is never completed.
                stranger.sendall(message[at : at + 1])
                at += 1
            over = not stranger.recv(1)
        except TimeoutError:
            continue
        except ConnectionError:
            over = True
    until(lambda: server.stats().unproven == 1)
    assert server.stats().refused == 0


def test_lines_and_streams_are_limited_and_a_request_beyond_the_limit_is_answered_with_busy(
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


def test_unconnected_lines_and_idle_streams_are_ended(
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
        assert messages[0][1] != messages[1][1]  # The same bytes are sealed with a different nonce.
        opener = Seal(bytes(32), reader.line_id, TO_READER)
        with pytest.raises(WireError):
            opener.open(*messages[0], memoryview(bytearray(CHUNK)))


def test_every_line_has_its_own_secret(source: StreamSource) -> None:
    with serving() as server:
        secrets = {server.open_line().secret for _ in range(10)}
        assert len(secrets) == 10
        assert all(len(bytes.fromhex(secret)) == 32 for secret in secrets)
