"""Sends chunks of pinned files to readers on other hosts, on a thread of its own. It must never block on a reader.

Readers take turns, one chunk a turn; the streams of one reader take turns within its own. A stream is sent what its
reader asked for and nothing more: who stalls holds its credit, at most `WINDOW_BYTES`, and nobody up.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
import zmq

from proto import bulk
from proto.errors import WireError
from proto.messages import ErrorCode, StreamOpened
from services.batch_store.stream_source import StreamSource
from shared.dataplane.stream_seal import REKEY_BYTES, SECRET_BYTES, TO_READER, TO_STORE, Opener, Sealer
from shared.rpc.errors import RpcError

CHUNK_BYTES = 1 << 20
WINDOW_BYTES = 16 << 20
"""Most bytes of one stream that wait to be sent."""
BUFFERS_BYTES = 128 << 20
"""Past so many bytes in buffers only streams without any may take one: it bounds what many stalled readers hold."""
MAX_STREAMS = 256
IDLE_S = 20.0
BUSY_S = 0.2
_KEPT_BUFFERS = 32
_RECEIVES = 64
_QUEUE_MESSAGES = 1024
_LONG_MS, _SHORT_MS = 1000, 20


@dataclass(slots=True)
class _Sent:
    """A chunk that ZeroMQ has not let go of yet. `buffer`: where it lies, unless in a mapped file."""

    tracker: zmq.MessageTracker
    nbytes: int
    buffer: bytearray | None


@dataclass(slots=True)
class _Stream:
    stream_id: bytes
    source: StreamSource
    sealer: Sealer | None
    opener: Opener | None
    used: float
    peer: bytes = b""
    wanted: deque[tuple[int, int]] = field(default_factory=deque)
    """Ranges [from, end) asked for and not sent."""
    sent: deque[_Sent] = field(default_factory=deque)
    queued_bytes: int = 0
    ready: bool = False
    """Stands in its reader's line."""


@dataclass(frozen=True, slots=True)
class StreamStats:
    """`queued_bytes`: handed to ZeroMQ and not sent; `buffer_bytes`: those of them that are copies."""

    streams: int
    queued_bytes: int
    buffer_bytes: int
    sent_bytes: int
    refused: int


class StreamServer:
    """Made, opened and closed on one thread; the sending is on another."""

    def __init__(self, name: str, *, plain: bool = False, chunk_bytes: int = CHUNK_BYTES) -> None:
        """`plain`: send chunks in clear and take credit from anyone who knows a stream's id."""
        if not bulk.MIN_CHUNK_BYTES <= chunk_bytes <= bulk.MAX_CHUNK_BYTES:
            raise ValueError(
                f"chunk of {chunk_bytes} bytes: {bulk.MIN_CHUNK_BYTES}..{bulk.MAX_CHUNK_BYTES} are allowed"
            )
        self._name = name
        self._plain = plain
        self.chunk_bytes = chunk_bytes
        self._endpoint = ""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._lock = threading.Lock()
        self._streams: dict[bytes, _Stream] = {}
        self._lines: dict[bytes, deque[_Stream]] = {}
        """Routing id of a reader -> its streams that have something to send, in order of their turns."""
        self._orphans: list[_Sent] = []
        self._free: list[bytearray] = []
        self._scratch = memoryview(bytearray(chunk_bytes))
        self._buffer_bytes = self._sent_bytes = self._refused = 0
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        self._thread: threading.Thread | None = None
        self._log = structlog.get_logger("streams").bind(store=name)

    def bind(self, endpoint: str, advertised: Callable[[str], str] = str) -> str:
        """Begin to serve at `endpoint`; returns it, a wildcard port resolved. Raises RpcError(bad_request).

        `advertised` makes of that what readers are told.
        """
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _QUEUE_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, _QUEUE_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, bulk.MAX_CREDIT_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise RpcError(
                ErrorCode.BAD_REQUEST, f"{self._name}: cannot bind {endpoint}: {error.strerror}; is it in use?"
            ) from None
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._endpoint = advertised(bound)
        self._thread = threading.Thread(target=self._run, args=(socket,), name="streams", daemon=True)
        self._thread.start()
        return bound

    def open(self, source: StreamSource) -> StreamOpened:
        """Serve `source` to whoever is given the answer. Raises RpcError(busy): too many streams."""
        stream_id, secret = secrets.token_bytes(16), secrets.token_bytes(SECRET_BYTES)
        sealer = None if self._plain else Sealer(secret, stream_id, TO_READER, REKEY_BYTES)
        opener = None if self._plain else Opener(secret, stream_id, TO_STORE)
        with self._lock:
            if len(self._streams) >= MAX_STREAMS:
                raise RpcError(
                    ErrorCode.BUSY,
                    f"{self._name}: {MAX_STREAMS} streams are open; another must end first",
                    retry_after_s=BUSY_S,
                )
            self._streams[stream_id] = _Stream(stream_id, source, sealer, opener, time.monotonic())
        return StreamOpened(
            stream_id=stream_id.hex(),
            endpoint=self._endpoint,
            covered=source.covered,
            total_bytes=source.total_bytes,
            chunk_bytes=source.chunk_bytes,
            head_bytes=source.head_bytes,
            head_checksum=source.head_checksum,
            secret="" if self._plain else secret.hex(),
        )

    def stats(self) -> StreamStats:
        """Counts as of now."""
        with self._lock:
            streams = list(self._streams.values())
        queued = sum(stream.queued_bytes for stream in streams) + sum(each.nbytes for each in list(self._orphans))
        return StreamStats(len(streams), queued, self._buffer_bytes, self._sent_bytes, self._refused)

    def close(self) -> None:
        """End the thread and every stream; what is queued is lost (readers ask again)."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        self._context.destroy(linger=0)
        os.close(self._wake)
        with self._lock:
            self._streams.clear()

    # ---- the thread

    def _run(self, socket: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        swept = time.monotonic()
        try:
            while not self._closing:
                sent = self._turn(socket)
                wait_ms = 0 if sent else _SHORT_MS if self._lines or self._orphans else _LONG_MS
                for ready, _ in poller.poll(wait_ms):
                    if ready is socket:
                        self._receive(socket)
                    else:
                        os.eventfd_read(self._wake)
                if time.monotonic() - swept > 1.0:
                    swept = time.monotonic()
                    self._sweep(swept)
        except Exception as error:
            if not self._closing:
                self._log.error("streams ended", exc_info=error)
                raise
        finally:
            socket.close()

    def _turn(self, socket: zmq.Socket[bytes]) -> bool:
        """Each reader one chunk; False: nobody could be sent anything."""
        self._reap(self._orphans)
        progress = False
        for peer in list(self._lines):
            line = self._lines[peer]
            for _ in range(len(line)):
                stream = line.popleft()
                outcome = self._send(socket, stream)
                if stream.wanted:
                    line.append(stream)
                else:
                    stream.ready = False
                if outcome:
                    progress = True
                    break
            if not line:
                del self._lines[peer]
        return progress

    def _send(self, socket: zmq.Socket[bytes], stream: _Stream) -> bool:
        """One chunk, unless its reader holds all it may."""
        self._let_go(stream)
        first, end = stream.wanted[0]
        size = stream.source.size(first)
        if stream.queued_bytes and (
            stream.queued_bytes + size > WINDOW_BYTES or self._buffer_bytes + size > BUFFERS_BYTES
        ):
            return False
        try:
            socket.send(stream.peer, zmq.DONTWAIT | zmq.SNDMORE)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                stream.wanted.clear()  # it asks again when it is back
            elif error.errno != zmq.EAGAIN:
                raise
            return False
        head, payload, buffer = self._pack(stream, first, size)
        socket.send(head, zmq.DONTWAIT | zmq.SNDMORE)
        tracker = socket.send(payload, zmq.DONTWAIT, copy=False, track=True)
        stream.sent.append(_Sent(tracker, len(payload), buffer))
        stream.used = time.monotonic()
        stream.queued_bytes += len(payload)
        self._sent_bytes += len(payload)
        if buffer is not None:
            self._buffer_bytes += len(buffer)
        stream.wanted.popleft()
        if first + 1 < end:
            stream.wanted.appendleft((first + 1, end))
        return True

    def _pack(self, stream: _Stream, index: int, size: int) -> tuple[bytes, memoryview, bytearray | None]:
        pieces = stream.source.pieces(index)
        if stream.sealer is None:
            head = bulk.pack_head(bulk.Head(bulk.CHUNK, 0, 0, index, 0, stream.stream_id))
            if len(pieces) == 1:
                return head, pieces[0], None  # straight from the mapped file, which never changes
            buffer = self._buffer()
            _gather(pieces, memoryview(buffer))
            return head, memoryview(buffer)[:size], buffer
        data = pieces[0] if len(pieces) == 1 else _gather(pieces, self._scratch)
        buffer = self._buffer()
        head, nbytes = stream.sealer.seal(bulk.CHUNK, 0, index, data, memoryview(buffer))
        return head, memoryview(buffer)[:nbytes], buffer

    def _buffer(self) -> bytearray:
        return self._free.pop() if self._free else bytearray(self.chunk_bytes + bulk.TAG_BYTES)

    def _let_go(self, stream: _Stream) -> None:
        nbytes = self._reap_front(stream.sent)
        if nbytes:
            stream.queued_bytes -= nbytes
            stream.used = time.monotonic()

    def _reap_front(self, sent: deque[_Sent]) -> int:
        nbytes = 0
        while sent and sent[0].tracker.done:
            done = sent.popleft()
            nbytes += done.nbytes
            self._recycle(done)
        return nbytes

    def _reap(self, sent: list[_Sent]) -> None:
        for done in [each for each in sent if each.tracker.done]:
            sent.remove(done)
            self._recycle(done)

    def _recycle(self, done: _Sent) -> None:
        if done.buffer is not None:
            self._buffer_bytes -= len(done.buffer)
            if len(self._free) < _KEPT_BUFFERS:
                self._free.append(done.buffer)

    # ---- credit

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(_RECEIVES):
            try:
                frames = [socket.recv(zmq.DONTWAIT)]
            except zmq.Again:
                return
            while socket.getsockopt(zmq.RCVMORE):
                frame = socket.recv(zmq.DONTWAIT)
                if len(frames) < 4:  # peer, head, payload, and one that is too many
                    frames.append(frame)
            try:
                self._on_credit(socket, frames)
            except WireError as error:
                self._refused += 1
                if self._refused <= 8:
                    self._log.warning("bulk message refused", peer=frames[0].hex(), error=str(error))

    def _on_credit(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
        if len(frames) != 3:
            raise WireError(f"bulk message of {len(frames) - 1} frames: must be head and payload")
        peer, packed, payload = frames
        head = bulk.unpack_head(packed)
        if head.kind != bulk.CREDIT:
            raise WireError(f"bulk message of kind {head.kind}: a store takes credit")
        with self._lock:
            stream = self._streams.get(head.stream_id)
        if stream is None:
            self._say_gone(socket, peer, head.stream_id)
            return
        if stream.opener is not None:
            room = bytearray(max(0, len(payload) - bulk.TAG_BYTES))
            stream.opener.open(packed, head, payload, memoryview(room))
            payload = bytes(room)
        ranges = bulk.unpack_ranges(payload, stream.source.chunks)
        stream.used = time.monotonic()
        if head.flags & bulk.FLAG_CLOSE:
            self._end(stream)
            return
        if head.flags & bulk.FLAG_RESET or peer != stream.peer:
            stream.wanted.clear()
        if peer != stream.peer and stream.ready:
            self._leave_line(stream)
        stream.peer = peer
        room_chunks = WINDOW_BYTES // self.chunk_bytes - sum(end - first for first, end in stream.wanted)
        for first, count in ranges:
            taken = min(count, room_chunks)
            if taken > 0:
                stream.wanted.append((first, first + taken))
                room_chunks -= taken
        if stream.wanted and not stream.ready:
            stream.ready = True
            self._lines.setdefault(peer, deque()).append(stream)

    def _say_gone(self, socket: zmq.Socket[bytes], peer: bytes, stream_id: bytes) -> None:
        head = bulk.pack_head(bulk.Head(bulk.GONE, 0, 0, 0, 0, stream_id))
        try:
            socket.send_multipart([peer, head, b""], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise

    def _leave_line(self, stream: _Stream) -> None:
        line = self._lines.get(stream.peer)
        if line is not None:
            line.remove(stream)
            if not line:
                del self._lines[stream.peer]
        stream.ready = False

    def _end(self, stream: _Stream) -> None:
        with self._lock:
            self._streams.pop(stream.stream_id, None)
        if stream.ready:
            self._leave_line(stream)
        self._orphans.extend(stream.sent)

    def _sweep(self, now: float) -> None:
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            self._let_go(stream)
            if now - stream.used > IDLE_S:
                self._end(stream)


def _gather(pieces: list[memoryview], into: memoryview) -> memoryview:
    at = 0
    for piece in pieces:
        into[at : at + len(piece)] = piece
        at += len(piece)
    return into[:at]
