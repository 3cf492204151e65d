"""Provides a stream server and its readers, which tests drive by hand over real sockets."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from proto import blockfile, bulk
from proto.blockfile import BlockLayout, Table
from proto.bulk import Head, Kind
from proto.messages import PutTask
from services.batch_store.stream_server import StreamServer
from services.batch_store.stream_source import SealedFile, StreamSource, pin
from shared.dataplane.bulk_connection import TO_READER, TO_STORE, Seal
from shared.dataplane.mapping import MappingCache
from shared.dataplane.write import write_block

CHUNK = 1 << 16


SIZE = 24 << 20


def source_of(folder: Path) -> StreamSource:
    """Write a file with one shard of `SIZE` random bytes and return a source that reads it."""
    layout = BlockLayout([("train/0/0", 1, {"a": np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)})])
    with (folder / "file").open("w+b") as file:
        file.truncate(layout.file_bytes)
        write_block(file.fileno(), layout)
    kept = SealedFile(str(folder / "file"), table_of(folder / "file"))
    return pin("s", [kept], [[0]], [PutTask("train/0/0", 1)], [], 1 << 40, MappingCache())


def table_of(path: Path) -> Table:
    data = path.read_bytes()
    return blockfile.parse(data, len(data))


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
    """Return True once the other end has closed, discarding anything that arrives before that. Raises TimeoutError if
    nothing arrives for 10 s."""
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
        """Return a head and the bytes that follow it, both empty if the server has closed the connection. Raises
        TimeoutError."""
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


def expected() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
