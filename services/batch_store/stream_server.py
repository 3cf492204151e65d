"""Sends ranges of pinned files to readers on other hosts, on a thread of its own that does not block on any reader.

A reader has one connection, its line, and opens streams on it. It receives the ranges that it requested, in that order,
and nothing else. Readers take turns, one range per turn: a stalled reader holds one range and its requests, at most
`READER_BYTES`, and does not delay others. A stream lasts until its last byte has been sent, its reader closes it or its
line ends.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from proto import bulk
from proto.bulk import Head, Kind
from proto.errors import WireError
from proto.messages import ErrorCode, LineOpened, StreamOpened
from proto.tensors import Buffer
from shared.dataplane import bulk_connection
from shared.dataplane.bulk_connection import KEY_LIMIT_BYTES, SECRET_BYTES, TO_READER, TO_STORE, Seal
from shared.os_limits import raise_descriptor_limit
from shared.places import Place, Places
from shared.rpc.errors import RpcError

READER_BYTES = 32 << 20
"""Maximum number of bytes waiting to be sent to one reader. Beyond this or `READER_RANGES`, its requests are not
read."""
READER_RANGES = 256
MAX_LINES, MAX_STREAMS = 256, 256
MAX_CONNECTIONS, DESCRIPTOR_SHARE = 256, 16
"""Maximum number of connections. The descriptor limit divided by `DESCRIPTOR_SHARE` is a second maximum. Each
connection holds at most one range that was copied to be sent."""
IDLE_S = 20.0
"""Seconds after which a proven connection ends if it has neither requested nor received anything."""
PROVE_S = 10.0
"""Seconds within which a new connection must prove itself with the HELLO of a line."""
UNCLAIMED_S = 10.0
"""Seconds after which a line without a connection ends."""
STREAM_IDLE_S = 60.0
"""Seconds after which a stream ends if no part of it was requested or sent, even if its line is in use."""
BUSY_S = 0.2
_KEPT_BUFFERS = 8
_RECEIVE_BYTES = 1 << 16
_MAX_PIECES = 256
_TICK_S = 1.0


class StreamedContent(Protocol):
    """The content of a stream. Other threads read it."""

    @property
    def total_bytes(self) -> int:
        """Size of the stream in bytes."""

    @property
    def available_bytes(self) -> int:
        """Number of bytes, from the start, that can be sent so far, or -1 if no more bytes can be sent."""

    @property
    def head_bytes(self) -> int:
        """Length of the header and table, in bytes."""

    @property
    def head_checksum(self) -> int:
        """xxh3-64 checksum of the header and table."""

    @property
    def covered(self) -> int:
        """Number of tasks that the stream covers."""

    def pieces(self, at: int, nbytes: int) -> list[memoryview]:
        """Return views whose concatenation is the available bytes `at` to `at + nbytes`."""


@dataclass(slots=True, eq=False)
class _Stream:
    number: int
    source: StreamedContent
    used: float


@dataclass(slots=True, eq=False)
class _ReaderLine:
    """A line that has been promised to one reader in the answer to `OpenLine`."""

    line_id: str
    """Id of the line, in hexadecimal."""
    sealer: Seal | None
    opener: Seal | None
    opened_at: float
    streams: dict[int, _Stream] = field(default_factory=dict)
    last_stream: int = 0


@dataclass(slots=True, eq=False)
class _Range:
    """A range of a stream that has been requested but is not being sent yet."""

    stream: _Stream
    offset: int
    nbytes: int


@dataclass(slots=True, eq=False)
class _Reader:
    """One connection. `line` is None until the HELLO of the connection has arrived."""

    socket: socket.socket
    place: Place
    line: _ReaderLine | None = None
    inbox: bytearray = field(default_factory=bytearray)
    ranges: deque[_Range] = field(default_factory=deque)
    asked_bytes: int = 0
    out: list[Buffer] = field(default_factory=list)
    """The unsent rest of the current message."""
    left: int = 0
    """Number of bytes in `out`."""
    buffer: bytearray | None = None
    """The memory of `out`, or None if `out` refers to mapped files."""
    events: int = select.EPOLLIN
    waits: bool = False
    """Whether the line is waiting for the next range, which is not available yet."""

    @property
    def is_full(self) -> bool:
        return self.asked_bytes + bulk.MAX_RANGE_BYTES > READER_BYTES or len(self.ranges) >= READER_RANGES


@dataclass(slots=True)
class StreamStats:
    """Counts of a stream server.

    `queued_bytes` is the number of unsent bytes in messages that are being sent, and `buffer_bytes` is the size of the
    copies made for them. `refused` counts invalid messages, `unknown` counts HELLOs for lines that are not open, and
    `hung_up` is their sum. `turned_away`, `evicted` and `unproven` count connections (see `Places`).
    """

    streams: int = 0
    queued_bytes: int = 0
    buffer_bytes: int = 0
    sent_bytes: int = 0
    refused: int = 0
    unknown: int = 0
    turned_away: int = 0
    evicted: int = 0
    unproven: int = 0
    hung_up: int = 0


class StreamServer:
    """Serves streams. Its methods are called on one thread; it sends on another, which it starts."""

    def __init__(self, name: str, *, plain: bool = False, key_limit_bytes: int = KEY_LIMIT_BYTES) -> None:
        """`plain` means that lines carry everything unencrypted and serve any peer that knows their id.

        `key_limit_bytes` is the maximum number of bytes that a line seals before it ends. Readers then open another.
        """
        self._name = name
        self._plain = plain
        self._key_limit_bytes = key_limit_bytes
        self._endpoint = ""
        self._lock = threading.Lock()
        self._lines: dict[str, _ReaderLine] = {}
        self._claimed: set[str] = set()
        """Ids of the lines that have a connection."""
        self._readers: dict[int, _Reader] = {}
        """Descriptor -> reader."""
        self._epoll = select.epoll()
        self._free: list[bytearray] = []
        self._scratch = memoryview(bytearray(bulk.MAX_RANGE_BYTES))
        self._counts = StreamStats()
        self._places = Places(min(MAX_CONNECTIONS, raise_descriptor_limit() // DESCRIPTOR_SHARE))
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._closing = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._log = structlog.get_logger("streams", store=name)

    def bind(self, endpoint: str, advertised: Callable[[str], str] = str) -> str:
        """Begin to serve at `endpoint` and return it with its wildcard port resolved. Raises RpcError(bad_request).

        `advertised` maps the bound endpoint to the one that is given to readers.
        """
        try:
            listener, bound = bulk_connection.listen(endpoint)
        except OSError as error:
            raise RpcError(
                ErrorCode.BAD_REQUEST, f"{self._name}: cannot bind {endpoint}: {error.strerror}; is it in use?"
            ) from None
        self._epoll.register(listener, select.EPOLLIN)
        self._endpoint = advertised(bound)
        self._thread = threading.Thread(target=self._run, args=(listener,), name="streams", daemon=True)
        self._thread.start()
        return bound

    def check(self) -> None:
        """Raise RpcError(draining) if the sending thread has ended, because nothing more would be sent."""
        if self._failure is not None:
            raise RpcError(
                ErrorCode.DRAINING,
                f"{self._name}: no longer sends streams, because its thread ended with {type(self._failure).__name__}: "
                f"{self._failure}; restart this store",
            ) from self._failure

    def open_line(self) -> LineOpened:
        """Promise a line with a new secret to one reader. Raises RpcError: busy (too many lines), draining."""
        self.check()
        line_id, secret = secrets.token_bytes(bulk.LINE_ID_BYTES), secrets.token_bytes(SECRET_BYTES)
        sealer = None if self._plain else Seal(secret, line_id, TO_READER)
        opener = None if self._plain else Seal(secret, line_id, TO_STORE)
        with self._lock:
            if len(self._lines) >= MAX_LINES:
                raise self._busy(f"{MAX_LINES} lines are open")
            self._lines[line_id.hex()] = _ReaderLine(line_id.hex(), sealer, opener, time.monotonic())
        return LineOpened(line_id=line_id.hex(), endpoint=self._endpoint, secret="" if self._plain else secret.hex())

    def open_stream(self, line_id: str, source: StreamedContent) -> StreamOpened:
        """Serve `source` on a line. Raises RpcError: lost (no such line), busy (too many streams), draining."""
        self.check()
        with self._lock:
            line = self._lines.get(line_id)
            if line is None:
                raise RpcError(
                    ErrorCode.LOST, f"{self._name}: line {line_id[:40]!r} is not open: it has ended; open another"
                )
            if sum(len(other.streams) for other in self._lines.values()) >= MAX_STREAMS:
                raise self._busy(f"{MAX_STREAMS} streams are open")
            line.last_stream += 1
            number = line.last_stream
            line.streams[number] = _Stream(number, source, time.monotonic())
        return StreamOpened(
            stream=number,
            covered=source.covered,
            total_bytes=source.total_bytes,
            head_bytes=source.head_bytes,
            head_checksum=source.head_checksum,
        )

    def look_again(self) -> None:
        """Send the bytes that have become available since readers requested them. May be called on any thread."""
        if not self._closing:
            os.eventfd_write(self._wake, 1)

    def stats(self) -> StreamStats:
        """Return the current counts."""
        with self._lock:
            streams = sum(len(line.streams) for line in self._lines.values())
        return replace(
            self._counts,
            streams=streams,
            queued_bytes=sum(reader.left for reader in list(self._readers.values())),
            turned_away=self._places.turned_away,
            evicted=self._places.evicted,
            hung_up=self._counts.refused + self._counts.unknown,
        )

    def close(self) -> None:
        """Stop the thread, and close every line and every stream. Queued bytes are lost; readers request them again."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        self._epoll.close()
        os.close(self._wake)
        with self._lock:
            self._lines.clear()

    def _busy(self, why: str) -> RpcError:
        return RpcError(ErrorCode.BUSY, f"{self._name}: {why}; one of them must end first", retry_after_s=BUSY_S)

    # ---- the thread

    def _run(self, listener: socket.socket) -> None:
        swept = time.monotonic()
        try:
            while not self._closing:
                for descriptor, events in self._epoll.poll(_TICK_S):
                    if descriptor == self._wake:
                        os.eventfd_read(self._wake)
                        for reader in [reader for reader in self._readers.values() if reader.waits]:
                            self._serve(reader, 0)
                    elif descriptor == listener.fileno():
                        self._accept(listener)
                    elif descriptor in self._readers:
                        self._serve(self._readers[descriptor], events)
                if time.monotonic() - swept > _TICK_S:
                    swept = time.monotonic()
                    self._sweep(swept)
                    self._epoll.modify(listener, select.EPOLLIN)
        except Exception as error:
            self._log.error("streams ended", exc_info=error)
            self._failure = error
        finally:
            listener.close()
            for reader in list(self._readers.values()):
                self._leave(reader)

    def _serve(self, reader: _Reader, events: int) -> None:
        """Handle the requests of a reader and send it at most one range, so that readers take turns."""
        try:
            self._take_messages(reader)
            if events & ~select.EPOLLOUT and not reader.is_full:
                received = reader.socket.recv(_RECEIVE_BYTES)
                if not received:
                    self._leave(reader)
                    return
                reader.inbox += received
                self._take_messages(reader)
            self._send(reader)
        except WireError as error:
            self._counts.refused += 1
            if self._counts.refused <= 8:
                self._log.warning("bulk message refused", peer=_peer(reader), error=str(error))
            self._leave(reader)
        except OSError:
            self._leave(reader)

    # ---- connections

    def _accept(self, listener: socket.socket) -> None:
        try:
            line, peer = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # usually because no descriptor is left
            self._log.warning("connection not accepted", error=str(error))
            self._epoll.modify(listener, 0)  # until the next sweep
            return
        place, victim = self._places.take(peer[0] if isinstance(peer, tuple) else "", time.monotonic())
        if victim is not None:
            self._leave_all({victim})
        if place is None:
            line.close()
            return
        line.setblocking(False)
        bulk_connection.quick(line)
        bulk_connection.unpaced(line)
        self._readers[line.fileno()] = _Reader(line, place)
        self._epoll.register(line, select.EPOLLIN)

    def _leave(self, reader: _Reader) -> None:
        """Close a connection, its line and its streams."""
        self._readers.pop(reader.socket.fileno(), None)
        self._places.leave(reader.place)
        reader.socket.close()  # also removes it from the epoll set
        if reader.line is not None:
            with self._lock:
                self._lines.pop(reader.line.line_id, None)
            self._claimed.discard(reader.line.line_id)
        reader.ranges.clear()
        self._sent(reader)

    def _leave_all(self, places: set[Place]) -> None:
        for reader in [reader for reader in self._readers.values() if reader.place in places]:
            self._leave(reader)

    def _sweep(self, now: float) -> None:
        """Close idle connections, idle streams, and lines to which no reader has connected."""
        unused = self._places.unused(now, IDLE_S, PROVE_S)
        self._counts.unproven += sum(not place.proven for place in unused)
        self._leave_all(unused)
        wanted = {due.stream for reader in self._readers.values() for due in reader.ranges}
        with self._lock:
            for line in list(self._lines.values()):
                if line.line_id not in self._claimed and now - line.opened_at > UNCLAIMED_S:
                    del self._lines[line.line_id]
                for number, stream in list(line.streams.items()):
                    if stream not in wanted and now - stream.used > STREAM_IDLE_S:
                        del line.streams[number]

    # ---- messages from readers

    def _take_messages(self, reader: _Reader) -> None:
        """Process the complete messages in the inbox until the reader `is_full`. Raises WireError."""
        tag_bytes = 0 if self._plain else bulk.TAG_BYTES
        while len(reader.inbox) >= bulk.HEAD_BYTES and not reader.is_full:
            head = bulk.unpack_head(bytes(reader.inbox[: bulk.HEAD_BYTES]))
            size = bulk.HEAD_BYTES + (bulk.LINE_ID_BYTES if head.kind is Kind.HELLO else 0)
            if len(reader.inbox) < size + tag_bytes:
                break
            message, tag = bytes(reader.inbox[:size]), bytes(reader.inbox[size : size + tag_bytes])
            del reader.inbox[: size + tag_bytes]
            line = self._claim(reader, head, message) if reader.line is None else reader.line
            if line.opener is not None:
                line.opener.open(message, tag, memoryview(bytearray()))
            reader.place.used = time.monotonic()
            if reader.line is None:
                reader.line = line
                reader.place.proven = reader.place.in_use = True
                self._claimed.add(line.line_id)
            else:
                self._obey(reader, line, head)

    def _claim(self, reader: _Reader, head: Head, message: bytes) -> _ReaderLine:
        """Return the line that a HELLO names. Raises WireError."""
        if head.kind is not Kind.HELLO:
            raise WireError(f"bulk {head.kind.name.lower()} before hello")
        line_id = message[bulk.HEAD_BYTES :].hex()
        with self._lock:
            line = self._lines.get(line_id)
        if line is None or line_id in self._claimed:
            self._counts.unknown += 1
            self._counts.refused -= 1  # the caller counts every WireError as refused
            raise WireError("bulk hello for a line that is not open or already has a connection")
        return line

    def _obey(self, reader: _Reader, line: _ReaderLine, head: Head) -> None:
        if head.kind is Kind.CLOSE:
            line.streams.pop(head.stream, None)  # requested ranges are still sent: the reader relies on their order
            return
        stream = line.streams.get(head.stream)
        if head.kind is not Kind.READ or stream is None or head.offset + head.nbytes > stream.source.total_bytes:
            raise WireError(
                f"bulk {head.kind.name.lower()} of {head.nbytes} bytes at {head.offset} of stream {head.stream}: "
                + ("the stream is not open" if stream is None else f"it has {stream.source.total_bytes} bytes")
            )
        reader.ranges.append(_Range(stream, head.offset, head.nbytes))
        reader.asked_bytes += head.nbytes

    # ---- messages to readers

    def _send(self, reader: _Reader) -> None:
        """Send as much of one message as the kernel accepts."""
        reader.waits = not reader.out and bool(reader.ranges) and not _is_available(reader.ranges[0])
        if not reader.out and reader.ranges and reader.line is not None and not reader.waits:
            self._next(reader, reader.line)
        if reader.out:
            try:
                sent = reader.socket.sendmsg(reader.out, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                sent = 0
            if sent:
                self._progress(reader, sent)
        can_send = bool(reader.out or reader.ranges) and not reader.waits
        events = (0 if reader.is_full else select.EPOLLIN) | (select.EPOLLOUT if can_send else 0)
        if events != reader.events:
            reader.events = events
            self._epoll.modify(reader.socket, events)

    def _progress(self, reader: _Reader, sent: int) -> None:
        reader.place.used = time.monotonic()
        self._counts.sent_bytes += sent
        if sent == reader.left:
            self._sent(reader)
            return
        reader.left -= sent
        done = 0
        while sent >= len(reader.out[done]):
            sent -= len(reader.out[done])
            done += 1
        reader.out[: done + 1] = [memoryview(reader.out[done])[sent:]]

    def _sent(self, reader: _Reader) -> None:
        """Release the current message, which has been sent or is no longer needed."""
        reader.out, reader.left = [], 0
        if reader.buffer is not None:
            self._counts.buffer_bytes -= len(reader.buffer)
            if len(self._free) < _KEPT_BUFFERS:
                self._free.append(reader.buffer)
            reader.buffer = None

    def _next(self, reader: _Reader, line: _ReaderLine) -> None:
        """Prepare the next range for sending. Raises ConnectionAbortedError if the line's key may not be used to seal
        it."""
        wanted = reader.ranges.popleft()
        reader.asked_bytes -= wanted.nbytes
        wanted.stream.used = time.monotonic()
        if wanted.offset + wanted.nbytes == wanted.stream.source.total_bytes:
            with self._lock:
                line.streams.pop(wanted.stream.number, None)
        reader.out = self._pack(reader, line, wanted)
        reader.left = sum(map(len, reader.out))

    def _pack(self, reader: _Reader, line: _ReaderLine, wanted: _Range) -> list[Buffer]:
        pieces = wanted.stream.source.pieces(wanted.offset, wanted.nbytes)
        head = bulk.pack_head(Head(Kind.DATA, wanted.stream.number, wanted.nbytes, wanted.offset))
        if line.sealer is None:
            if len(pieces) <= _MAX_PIECES:
                return [head, *pieces]  # sent directly from the mapped files, which do not change
            return [head, _gather(pieces, self._buffer(reader))]
        if line.sealer.nbytes + wanted.nbytes > self._key_limit_bytes:
            raise ConnectionAbortedError("the line's key has reached its limit")
        data = pieces[0] if len(pieces) == 1 else _gather(pieces, self._scratch)
        room = self._buffer(reader)
        return [head, room[: line.sealer.seal(head, data, room)]]

    def _buffer(self, reader: _Reader) -> memoryview:
        """Return a buffer for the current message of a reader, which has at most one."""
        reader.buffer = self._free.pop() if self._free else bytearray(bulk.MAX_RANGE_BYTES + bulk.TAG_BYTES)
        self._counts.buffer_bytes += len(reader.buffer)
        return memoryview(reader.buffer)


def _is_available(wanted: _Range) -> bool:
    """Return whether a range can be sent. Raises ConnectionAbortedError if it can never be sent."""
    available = wanted.stream.source.available_bytes
    if available < 0:
        raise ConnectionAbortedError("the rest of the stream will not arrive")
    return wanted.offset + wanted.nbytes <= available


def _peer(reader: _Reader) -> str:
    try:
        return str(reader.socket.getpeername())
    except OSError:
        return "gone"


def _gather(pieces: list[memoryview], into: memoryview) -> memoryview:
    at = 0
    for piece in pieces:
        into[at : at + len(piece)] = piece
        at += len(piece)
    return into[:at]
