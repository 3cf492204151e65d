"""Tests the reader's side of lines on real sockets: windows, turns, broken lines, and stores that send false data."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from proto import bulk
from proto.blockfile import BlockLayout
from proto.bulk import Head, Kind
from proto.errors import WireError
from proto.messages import LineOpened, PutTask, StreamOpened
from services.batch_store.stream_server import StreamServer
from services.batch_store.stream_source import SealedFile, StreamSource, pin
from shared.dataplane import stream_line
from shared.dataplane.mapping import MappingCache
from shared.dataplane.reused_pages import Regions
from shared.dataplane.stream_arrival import Arrival
from shared.dataplane.stream_line import Counts, Incoming, RequestWindow, StreamGroup, StreamLine, StreamOutcome
from shared.dataplane.write import write_block
from tests.unit.shared.stream_rig import CHUNK, SIZE, expected, serving, table_of, until


class Lines:
    """The reader's side of several lines, with their common counts."""

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


def test_stream_whose_line_breaks_or_uses_up_its_key_continues_over_other_lines(
    source: StreamSource, lines: Lines
) -> None:
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


def test_groups_of_streams_take_turns_but_streams_in_one_group_do_not(
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


def test_line_without_streams_is_closed(
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
def test_invalid_endpoint_does_not_end_other_lines(
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
    """Yield the store's side of a plaintext line after the hello, and a stream that its reader wants."""
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
                time.sleep(0.01)  # This gives the check time to run.
        assert taken.outcome() is StreamOutcome.CORRUPT
        assert taken.arrival.received <= stream_line.CHECK_BYTES + (2 << 20)


def test_store_that_stays_silent_loses_the_line(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_line, "SILENT_S", 0.3)
    with lying(lines, CHUNK) as (store, taken, _):
        store.sendall(bulk.pack_head(Head(Kind.DATA, 1, CHUNK, 0)) + b"\xee" * 100)
        assert taken.outcome() is StreamOutcome.LOST
        assert "nothing arrived for 0.3 s" in taken.settled[0][1]
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
