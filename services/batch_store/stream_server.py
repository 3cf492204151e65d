"""Sends chunks of pinned files to readers on other hosts, on a thread of its own. It must never block on a reader.

Readers take turns, one chunk a turn; the streams of one reader take turns within its own. A stream is sent what its
reader asked for and nothing more: who stalls holds one chunk, its credit, at most `WINDOW_BYTES`, and nobody up.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

import structlog

from proto import bulk
from proto.errors import WireError
from proto.messages import ErrorCode, StreamOpened
from proto.tensors import Buffer
from services.batch_store.stream_lines import Reader, Stream, StreamStats
from services.batch_store.stream_places import Place, Places
from services.batch_store.stream_source import StreamSource
from shared.dataplane import bulk_line
from shared.dataplane.bulk_line import BulkLine
from shared.dataplane.stream_seal import REKEY_BYTES, SECRET_BYTES, TO_READER, TO_STORE, Opener, Sealer
from shared.descriptors import raise_descriptor_limit
from shared.rpc.errors import RpcError

CHUNK_BYTES = 1 << 20
WINDOW_BYTES = 16 << 20
"""Most bytes of one stream that wait to be sent."""
MAX_STREAMS = 256
IDLE_S = 20.0
UNCLAIMED_S = 10.0
"""A stream that nobody uses ends; one that nobody has asked anything of ends earlier."""
BUSY_S = 0.2
_KEPT_BUFFERS = 8
_RECEIVE_BYTES = 1 << 16
_MAX_PIECES = 256
_MAX_GONE = 64
_TICK_S = 1.0


class _HangUp(Exception):
    """The connection had its chances."""


class StreamServer:
    """Made, opened and closed on one thread; the sending is on another."""

    def __init__(
        self, name: str, *, plain: bool = False, chunk_bytes: int = CHUNK_BYTES, rekey_bytes: int = REKEY_BYTES
    ) -> None:
        """`plain`: send chunks in clear and take credit from anyone who knows a stream's id.

        `rekey_bytes`: so many of one stream are sealed under one key.
        """
        if not bulk.MIN_CHUNK_BYTES <= chunk_bytes <= bulk.MAX_CHUNK_BYTES:
            raise ValueError(
                f"chunk of {chunk_bytes} bytes: {bulk.MIN_CHUNK_BYTES}..{bulk.MAX_CHUNK_BYTES} are allowed"
            )
        self._name = name
        self._plain = plain
        self._rekey_bytes = rekey_bytes
        self.chunk_bytes = chunk_bytes
        self._endpoint = ""
        self._lock = threading.Lock()
        self._streams: dict[bytes, Stream] = {}
        self._listener: socket.socket | None = None
        self._readers: dict[int, Reader] = {}
        """By descriptor."""
        self._epoll = select.epoll()
        self._free: list[bytearray] = []
        self._scratch = memoryview(bytearray(chunk_bytes))
        self._buffer_bytes = self._sent_bytes = self._refused = self._unknown = 0
        self._places = Places(raise_descriptor_limit())
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._closing = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._log = structlog.get_logger("streams").bind(store=name)

    def bind(self, endpoint: str, advertised: Callable[[str], str] = str) -> str:
        """Begin to serve at `endpoint`; returns it, a wildcard port resolved. Raises RpcError(bad_request).

        `advertised` makes of that what readers are told.
        """
        try:
            self._listener, bound = bulk_line.listen(endpoint)
        except OSError as error:
            raise RpcError(
                ErrorCode.BAD_REQUEST, f"{self._name}: cannot bind {endpoint}: {error.strerror}; is it in use?"
            ) from None
        self._epoll.register(self._listener, select.EPOLLIN)
        self._endpoint = advertised(bound)
        self._thread = threading.Thread(target=self._run, args=(self._listener,), name="streams", daemon=True)
        self._thread.start()
        return bound

    def check(self) -> None:
        """Raises RpcError(draining) when the thread has ended: nobody would send what is promised from here on."""
        if self._failure is not None:
            raise RpcError(
                ErrorCode.DRAINING,
                f"{self._name}: sends no streams any more, its thread ended with {type(self._failure).__name__}: "
                f"{self._failure}; this store must be restarted",
            ) from self._failure

    def open(self, source: StreamSource) -> StreamOpened:
        """Serve `source` to whoever is given the answer. Raises RpcError: busy (too many streams), draining."""
        self.check()
        stream_id, secret = secrets.token_bytes(16), secrets.token_bytes(SECRET_BYTES)
        sealer = None if self._plain else Sealer(secret, stream_id, TO_READER, self._rekey_bytes)
        opener = None if self._plain else Opener(secret, stream_id, TO_STORE)
        with self._lock:
            if len(self._streams) >= MAX_STREAMS:
                raise RpcError(
                    ErrorCode.BUSY,
                    f"{self._name}: {MAX_STREAMS} streams are open; another must end first",
                    retry_after_s=BUSY_S,
                )
            self._streams[stream_id] = Stream(stream_id, source, sealer, opener, time.monotonic())
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
            streams = len(self._streams)
        queued = sum(reader.left for reader in list(self._readers.values()))
        places = self._places
        return StreamStats(
            streams,
            queued,
            self._buffer_bytes,
            self._sent_bytes,
            self._refused,
            self._unknown,
            places.turned_away,
            places.evicted,
            places.unproven,
            places.hung_up,
        )

    def close(self) -> None:
        """End the thread and every stream; what is queued is lost (readers ask again)."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        self._epoll.close()
        os.close(self._wake)
        with self._lock:
            self._streams.clear()

    # ---- the thread

    def _run(self, listener: socket.socket) -> None:
        swept = time.monotonic()
        try:
            while not self._closing:
                for descriptor, events in self._epoll.poll(_TICK_S):
                    if descriptor == self._wake:
                        os.eventfd_read(self._wake)
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

    def _serve(self, reader: Reader, events: int) -> None:
        """What a reader says, and one chunk to it: so they take turns."""
        try:
            if events & ~select.EPOLLOUT:
                got = reader.line.receive(_credit_only, partial(self._on_message, reader), _RECEIVE_BYTES)
                if got < 0:
                    self._leave(reader)
                    return
            self._send(reader)
        except WireError as error:
            self._refuse(reader, error)
            self._leave(reader)
        except (_HangUp, OSError):
            self._leave(reader)

    # ---- connections

    def _accept(self, listener: socket.socket) -> None:
        try:
            line, peer = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptors, mostly
            self._log.warning("no connection taken", error=str(error))
            self._epoll.modify(listener, 0)  # until the next sweep
            return
        place, victim = self._places.take(peer[0] if isinstance(peer, tuple) else "", time.monotonic())
        if victim is not None:
            self._leave_all({victim})
        if place is None:
            line.close()
            return
        line.setblocking(False)
        bulk_line.quick(line)
        bulk_line.unpaced(line)
        self._readers[line.fileno()] = Reader(BulkLine(line, bulk.MAX_CREDIT_BYTES), place)
        self._epoll.register(line, select.EPOLLIN)

    def _leave(self, reader: Reader) -> None:
        """The connection ends; its streams wait for their reader to come back."""
        self._readers.pop(reader.line.socket.fileno(), None)
        self._places.leave(reader.place)
        reader.line.socket.close()  # which takes it out of the epoll set
        for stream in reader.turns:
            stream.ready = False
            stream.wanted.clear()  # it asks again when it is back
        reader.turns.clear()
        self._sent(reader)

    def _leave_all(self, places: set[Place]) -> None:
        for reader in [each for each in self._readers.values() if each.place in places]:
            self._leave(reader)

    def _offend(self, reader: Reader) -> None:
        """Raises _HangUp: once too often."""
        if self._places.offend(reader.place):
            raise _HangUp

    def _refuse(self, reader: Reader, error: WireError) -> None:
        self._refused += 1
        if self._refused <= 8:
            self._log.warning("bulk message refused", peer=_peer(reader), error=str(error))

    # ---- chunks

    def _send(self, reader: Reader) -> None:
        """As much of one message as the kernel takes."""
        if not reader.out:
            self._next(reader)
        if reader.out:
            try:
                sent = reader.line.socket.sendmsg(reader.out, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                sent = 0
            if sent:
                self._progress(reader, sent)
        writes = bool(reader.out or reader.turns or reader.gone)
        if writes != reader.writes:
            reader.writes = writes
            self._epoll.modify(reader.line.socket, select.EPOLLIN | (select.EPOLLOUT if writes else 0))

    def _progress(self, reader: Reader, sent: int) -> None:
        if reader.sending is not None:  # what everybody gets, a GONE, proves nothing
            reader.sending.used = reader.place.used = time.monotonic()
        self._sent_bytes += sent
        if sent == reader.left:
            self._sent(reader)
            return
        reader.left -= sent
        done = 0
        while sent >= len(reader.out[done]):
            sent -= len(reader.out[done])
            done += 1
        reader.out[: done + 1] = [memoryview(reader.out[done])[sent:]]

    def _sent(self, reader: Reader) -> None:
        """The message is out, or nobody wants it any more."""
        reader.out, reader.left, reader.sending = [], 0, None
        if reader.buffer is not None:
            self._buffer_bytes -= len(reader.buffer)
            if len(self._free) < _KEPT_BUFFERS:
                self._free.append(reader.buffer)
            reader.buffer = None

    def _next(self, reader: Reader) -> None:
        """Make ready the next message to this reader, if there is one; its streams take turns."""
        if reader.gone:
            reader.out = [bulk.pack_head(bulk.Head(bulk.GONE, 0, 0, 0, 0, reader.gone.popleft(), 0))]
        elif reader.turns:
            stream = reader.turns.popleft()
            first, end = stream.wanted.popleft()
            if first + 1 < end:
                stream.wanted.appendleft((first + 1, end))
            stream.ready = bool(stream.wanted)
            if stream.ready:
                reader.turns.append(stream)
            reader.sending = stream
            reader.out = self._pack(reader, stream, first)
        reader.left = sum(map(len, reader.out))

    def _pack(self, reader: Reader, stream: Stream, index: int) -> list[Buffer]:
        pieces = stream.source.pieces(index)
        size = stream.source.size(index)
        if stream.sealer is None:
            head = bulk.pack_head(bulk.Head(bulk.CHUNK, 0, 0, index, 0, stream.stream_id, size))
            if len(pieces) <= _MAX_PIECES:
                return [head, *pieces]  # straight from the mapped files, which never change
            return [head, _gather(pieces, self._buffer(reader))]
        data = pieces[0] if len(pieces) == 1 else _gather(pieces, self._scratch)
        room = self._buffer(reader)
        head, nbytes = stream.sealer.seal(bulk.CHUNK, 0, index, data, room)
        return [head, room[:nbytes]]

    def _buffer(self, reader: Reader) -> memoryview:
        """One a reader at most."""
        reader.buffer = self._free.pop() if self._free else bytearray(self.chunk_bytes + bulk.TAG_BYTES)
        self._buffer_bytes += len(reader.buffer)
        return memoryview(reader.buffer)

    # ---- credit

    def _on_message(self, reader: Reader, head: bulk.Head, packed: bytes, payload: memoryview) -> None:
        try:
            self._on_credit(reader, head, packed, payload)
        except WireError as error:
            self._refuse(reader, error)
            self._offend(reader)

    def _on_credit(self, reader: Reader, head: bulk.Head, packed: bytes, payload: memoryview) -> None:
        with self._lock:
            stream = self._streams.get(head.stream_id)
        if stream is None:
            self._unknown += 1
            self._offend(reader)
            if len(reader.gone) < _MAX_GONE:
                reader.gone.append(head.stream_id)
            return
        if stream.opener is not None:
            room = memoryview(bytearray(max(0, len(payload) - bulk.TAG_BYTES)))
            stream.opener.open(packed, head, payload, room)
            payload = room
        ranges = bulk.unpack_ranges(payload, stream.source.chunks)
        stream.used = time.monotonic()
        reader.place.prove(stream.used)
        if head.flags & bulk.FLAG_CLOSE:
            self._end(stream)
            self._look_at_proof(reader)
            return
        if head.flags & bulk.FLAG_RESET or reader is not stream.reader:
            stream.wanted.clear()
            self._leave_line(stream)
        former, stream.reader = stream.reader, reader
        if former is not None and former is not reader:
            self._look_at_proof(former)
        room_chunks = WINDOW_BYTES // self.chunk_bytes - sum(end - first for first, end in stream.wanted)
        for first, count in ranges:
            taken = min(count, room_chunks)
            if taken > 0:
                stream.wanted.append((first, first + taken))
                room_chunks -= taken
        if stream.wanted and not stream.ready:
            stream.ready = True
            reader.turns.append(stream)

    def _leave_line(self, stream: Stream) -> None:
        if stream.ready and stream.reader is not None:
            stream.reader.turns.remove(stream)
            stream.ready = False

    def _end(self, stream: Stream) -> None:
        with self._lock:
            self._streams.pop(stream.stream_id, None)
        stream.wanted.clear()
        self._leave_line(stream)
        if stream.reader is not None:
            self._look_at_proof(stream.reader)

    def _look_at_proof(self, reader: Reader) -> None:
        """It has proved itself as long as a stream is open that it was the last to ask for.

        So there are never more such connections than streams, however often one reader's credit is played again.
        """
        with self._lock:
            reader.place.proven = any(each.reader is reader for each in self._streams.values())

    def _sweep(self, now: float) -> None:
        """End what nobody uses: streams, and connections, which may hold half a chunk of one."""
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            if now - stream.used > (IDLE_S if stream.reader is not None else UNCLAIMED_S):
                self._end(stream)
        self._leave_all(self._places.overdue(now))


def _credit_only(head: bulk.Head) -> memoryview | None:
    if head.kind != bulk.CREDIT:
        raise WireError(f"bulk message of kind {head.kind}: a store takes credit")
    return None


def _peer(reader: Reader) -> str:
    try:
        return str(reader.line.socket.getpeername())
    except OSError:
        return "gone"


def _gather(pieces: list[memoryview], into: memoryview) -> memoryview:
    at = 0
    for piece in pieces:
        into[at : at + len(piece)] = piece
        at += len(piece)
    return into[:at]
