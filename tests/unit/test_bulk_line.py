"""Bulk messages off a byte stream: however it is cut, and whatever it says."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto import bulk
from proto.errors import WireError
from shared.dataplane.bulk_line import BulkLine, connect, listen

STREAM = bytes(range(16))


def chunk(index: int, payload: bytes) -> bytes:
    return bulk.pack_head(bulk.Head(bulk.CHUNK, 0, 0, index, 0, STREAM, len(payload))) + payload


class Ends:
    """A line and the socket that it listens to."""

    def __init__(self, buffer_bytes: int = 1 << 12) -> None:
        self.far, near = socket.socketpair()
        near.setblocking(False)
        self.line = BulkLine(near, buffer_bytes)
        self.rooms: dict[int, bytearray] = {}
        self.got: list[tuple[int, bytes]] = []

    def room(self, head: bulk.Head) -> memoryview | None:
        return memoryview(self.rooms[head.chunk]) if head.chunk in self.rooms else None

    def take(self, head: bulk.Head, packed: bytes, payload: memoryview) -> None:
        assert bulk.unpack_head(packed) == head
        self.got.append((head.chunk, bytes(payload)))

    def receive(self) -> int:
        return self.line.receive(self.room, self.take, 1 << 20)

    def close(self) -> None:
        self.far.close()
        self.line.socket.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=6),
    cuts=st.lists(st.integers(1, 3000), max_size=40),
    placed=st.sets(st.integers(0, 5)),
)
def test_messages_come_whole_however_the_bytes_are_cut(sizes: list[int], cuts: list[int], placed: set[int]) -> None:
    ends = Ends()
    try:
        payloads = [bytes([index + 1]) * size for index, size in enumerate(sizes)]
        ends.rooms = {index: bytearray(sizes[index]) for index in placed if index < len(sizes)}
        data = b"".join(chunk(index, payload) for index, payload in enumerate(payloads))
        for cut in [*cuts, len(data)]:
            ends.far.sendall(data[:cut])
            data = data[cut:]
            assert ends.receive() >= 0
        assert ends.got == list(enumerate(payloads))
        assert all(bytes(ends.rooms[index]) == payloads[index] for index in ends.rooms)
    finally:
        ends.close()


def test_rest_of_a_payload_wakes_its_reader_once_it_is_worth_it_or_all_there() -> None:
    listener, endpoint = listen("tcp://127.0.0.1:*")
    near = connect(endpoint)
    far, _ = listener.accept()
    line, got = BulkLine(near, 1 << 20), []
    payloads = [bytes([index]) * size for index, size in enumerate((700_000, 0, 100, 300_000, 5))]

    def receive() -> int:
        return line.receive(lambda head: None, lambda head, packed, payload: got.append(bytes(payload)), 100_000)

    def wakes(limit_s: float) -> bool:
        return bool(select.select([near], [], [], limit_s)[0])

    try:
        data = b"".join(chunk(index, payload) for index, payload in enumerate(payloads))
        far.sendall(data[:1000])
        assert wakes(5)
        assert receive() == 1000
        far.sendall(data[1000:200_000])
        assert not wakes(0.05)  # not worth it
        sender = threading.Thread(target=far.sendall, args=(data[200_000:],))
        sender.start()
        while len(got) < len(payloads):
            assert wakes(5)
            assert receive() > 0
        sender.join()
        assert got == payloads
    finally:
        for each in (listener, near, far):
            each.close()


def test_payload_that_does_not_fit_its_place_ends_the_line_before_it_is_written(ends: Ends) -> None:
    ends.rooms = {0: bytearray(10)}
    ends.far.sendall(chunk(0, b"x" * 11))
    with pytest.raises(WireError, match="10 belong"):
        ends.receive()
    assert ends.rooms[0] == bytes(10)


def test_announced_size_past_the_lines_buffer_is_refused(ends: Ends) -> None:
    ends.far.sendall(chunk(0, b"x" * 5000))
    with pytest.raises(WireError, match="4096 are the limit"):
        ends.receive()


def test_memory_is_left_alone_once_its_payload_is_not_wanted(ends: Ends) -> None:
    ends.rooms = {0: bytearray(1000)}
    message = chunk(0, b"x" * 1000)
    ends.far.sendall(message[:500])
    ends.receive()
    written = bytes(ends.rooms[0])
    assert written.count(b"x") == 500 - bulk.HEAD_BYTES
    ends.line.discard()
    ends.far.sendall(message[500:] + chunk(1, b"next"))
    ends.receive()
    assert ends.rooms[0] == written
    assert ends.got[-1] == (1, b"next")


def test_peer_that_closed_is_told_from_one_that_is_silent(ends: Ends) -> None:
    assert ends.receive() == 0
    ends.far.close()
    assert ends.receive() == -1


def test_endpoints_are_tcp_or_ipc_and_an_old_socket_file_is_no_obstacle(tmp_path: object) -> None:
    for endpoint in ("tcp://127.0.0.1:*", f"ipc://{tmp_path}/bulk"):
        for _ in range(2):
            listener, bound = listen(endpoint)
            line = connect(bound)
            listener.setblocking(True)
            listener.accept()[0].close()
            line.close()
            listener.close()
    for bad in ("", "udp://127.0.0.1:1", "tcp://127.0.0.1", "tcp://:1", "tcp://a:b", "ipc://"):
        with pytest.raises(WireError, match="is expected"):
            connect(bad)
