"""Receives chunks on a thread of its own: asks for them, puts each in its place, asks again for what got lost.

It must never have more than `inflight_bytes` asked for and not received, over all its streams, and never decrypt or
hash on the event loop's thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import structlog
import zmq

from proto import bulk
from proto.errors import WireError
from proto.messages import StreamOpened
from shared.dataplane.stream_arrival import Arrival
from shared.dataplane.stream_seal import TO_READER, TO_STORE, Opener, Sealer

STREAM_CHUNKS = 16
"""Most chunks of one stream asked for at a time."""
STALL_S = 1.0
STALLS = 3
"""Asked so often in vain, a stream is given up: the store may have restarted."""
_BURST = 16
_TICK_MS = 100
_QUEUE_MESSAGES = 1024


class Outcome(Enum):
    """How a stream ended for the receiver."""

    COMPLETE = "complete"
    LOST = "lost"  # unknown to the store, or silent: open it again, what arrived stays
    CORRUPT = "corrupt"  # the bytes are not those that were put
    FAILED = "failed"  # a defect of the receiver


@dataclass(slots=True)
class Counts:
    """What the receiver met. Sizes in bytes."""

    received_bytes: int = 0
    chunks: int = 0
    duplicates: int = 0
    refused: int = 0
    stalls: int = 0
    inflight_peak_bytes: int = 0


@dataclass(slots=True, eq=False)
class Incoming:
    """One opened stream; `settle` is called once, on the receiving thread."""

    arrival: Arrival
    endpoint: str
    stream_id: bytes
    opener: Opener | None
    sealer: Sealer | None
    settle: Callable[[Outcome, str], None]
    pending: deque[tuple[int, int]] = field(default_factory=deque)
    asked: set[int] = field(default_factory=set)
    heard: float = 0.0
    stalls: int = 0
    reset: bool = False

    @classmethod
    def of(cls, arrival: Arrival, opened: StreamOpened, settle: Callable[[Outcome, str], None]) -> Incoming:
        """Raises WireError when ids are not hexadecimal digits of the right length."""
        try:
            stream_id, secret = bytes.fromhex(opened.stream_id), bytes.fromhex(opened.secret)
        except ValueError:
            raise WireError(f"stream id {opened.stream_id[:40]!r}: hexadecimal digits are expected") from None
        if len(stream_id) != 16 or len(secret) not in (0, 32):
            raise WireError(f"stream id of {len(stream_id)} bytes, secret of {len(secret)}: 16 and 32 are expected")
        opener = Opener(secret, stream_id, TO_READER) if secret else None
        sealer = Sealer(secret, stream_id, TO_STORE) if secret else None
        return cls(arrival, opened.endpoint, stream_id, opener, sealer, settle)


class Receiver:
    """One thread and one DEALER a store; `add` and `cancel` are safe from any thread."""

    def __init__(self, inflight_bytes: int) -> None:
        self.counts = Counts()
        self._inflight_bytes = inflight_bytes
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._orders: deque[tuple[str, Incoming]] = deque()
        self._streams: dict[bytes, Incoming] = {}
        self._turns: deque[Incoming] = deque()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._refused: set[str] = set()
        """Endpoints that did not take a credit: not connected (yet)."""
        self._poller = zmq.Poller()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller.register(self._wake, zmq.POLLIN)
        self._asked_bytes = 0
        self._closing = self._failed = False
        self._log = structlog.get_logger("stream")
        self._thread: threading.Thread | None = None

    def add(self, incoming: Incoming) -> None:
        """Begin to ask for what `incoming` lacks."""
        if self._failed or self._closing:
            incoming.settle(Outcome.FAILED, "the receiving thread was closed, or ended with an error (see the log)")
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stream-receiver", daemon=True)
            self._thread.start()
        self._order("add", incoming)

    def cancel(self, incoming: Incoming) -> None:
        """Stop; `settle` is called with LOST unless it was called before, and nothing is written after that."""
        self._order("cancel", incoming)

    def close(self) -> None:
        """End the thread; streams that are not complete settle as LOST."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        self._context.destroy(linger=0)
        os.close(self._wake)

    def _order(self, what: str, incoming: Incoming) -> None:
        self._orders.append((what, incoming))
        os.eventfd_write(self._wake, 1)

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._obey()
                self._top_up()
                for ready, events in self._poller.poll(_TICK_MS if self._streams else None):
                    if ready == self._wake:
                        os.eventfd_read(self._wake)
                        continue
                    if events & zmq.POLLIN:
                        self._receive(ready)
                self._look_for_stalls()
        except Exception as error:
            self._failed = True
            self._log.error("receiver ended", exc_info=error)
        finally:
            for incoming in list(self._streams.values()):
                self._end(incoming, Outcome.FAILED if self._failed else Outcome.LOST, "the receiver has ended")
            for what, incoming in list(self._orders):
                if what == "add":
                    incoming.settle(Outcome.FAILED if self._failed else Outcome.LOST, "the receiver has ended")
            for socket in self._sockets.values():
                socket.close()

    def _obey(self) -> None:
        while self._orders:
            what, incoming = self._orders.popleft()
            if what == "add":
                self._socket(incoming.endpoint)
                incoming.pending = deque(incoming.arrival.missing())
                incoming.heard = time.monotonic()
                self._streams[incoming.stream_id] = incoming
                self._turns.append(incoming)
                if incoming.arrival.complete:
                    self._end(incoming, Outcome.COMPLETE, "")
            elif incoming.stream_id in self._streams:
                self._end(incoming, Outcome.LOST, "cancelled")

    def _socket(self, endpoint: str) -> None:
        if endpoint in self._sockets:
            return
        used = {incoming.endpoint for incoming in self._streams.values()}
        for old in [each for each in self._sockets if each not in used]:  # of a former life of a store
            self._poller.unregister(self._sockets[old])
            self._sockets.pop(old).close()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _QUEUE_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, _QUEUE_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, bulk.MAX_CHUNK_BYTES + bulk.TAG_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.connect(endpoint)
        self._sockets[endpoint] = socket
        self._poller.register(socket, zmq.POLLIN)

    # ---- credit

    def _top_up(self) -> None:
        """Ask for more, every stream in its turn, within the bytes that may be under way."""
        self._refused.clear()
        for _ in range(len(self._turns)):
            incoming = self._turns[0]
            self._turns.rotate(-1)
            if not incoming.pending or incoming.endpoint in self._refused:
                continue
            share = max(1, self._inflight_bytes // len(self._turns) // incoming.arrival.chunk_bytes)
            window = min(STREAM_CHUNKS, share)
            if len(incoming.asked) > window // 2:
                continue
            # one chunk at least may be under way, however small the bound
            left = self._inflight_bytes - self._asked_bytes
            chunks = min(window - len(incoming.asked), left // incoming.arrival.chunk_bytes)
            if not self._asked_bytes:
                chunks = max(1, chunks)
            if chunks > 0:
                self._ask(incoming, chunks)
        flags = zmq.POLLIN | zmq.POLLOUT
        for endpoint, socket in self._sockets.items():
            self._poller.register(socket, flags if endpoint in self._refused else zmq.POLLIN)

    def _ask(self, incoming: Incoming, chunks: int) -> None:
        ranges: list[tuple[int, int]] = []
        pending = deque(incoming.pending)
        while pending and chunks and len(ranges) < bulk.MAX_RANGES:
            first, end = pending.popleft()
            while first < end and incoming.arrival.has(first):
                first += 1
            upto = min(end, first + chunks)
            if upto > first:
                ranges.append((first, upto - first))
                chunks -= upto - first
            if upto < end:
                pending.appendleft((upto, end))
        if ranges and not self._credit(incoming, ranges, bulk.FLAG_RESET if incoming.reset else 0):
            self._refused.add(incoming.endpoint)
            return
        incoming.reset = False
        incoming.pending = pending
        for first, count in ranges:
            incoming.asked.update(range(first, first + count))
            self._asked_bytes += count * incoming.arrival.chunk_bytes
        self.counts.inflight_peak_bytes = max(self.counts.inflight_peak_bytes, self._asked_bytes)

    def _credit(self, incoming: Incoming, ranges: list[tuple[int, int]], flags: int) -> bool:
        payload = bulk.pack_ranges(ranges)
        if incoming.sealer is None:
            head = bulk.pack_head(bulk.Head(bulk.CREDIT, flags, 0, 0, 0, incoming.stream_id))
        else:
            room = memoryview(bytearray(len(payload) + bulk.TAG_BYTES))
            head, _ = incoming.sealer.seal(bulk.CREDIT, flags, 0, payload, room)
            payload = bytes(room)
        try:
            self._sockets[incoming.endpoint].send_multipart([head, payload], zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    # ---- chunks

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(_BURST):
            try:
                packed = socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                self._on_message(socket, packed)
            except WireError as error:
                self.counts.refused += 1
                if self.counts.refused <= 8:
                    self._log.warning("bulk message refused", error=str(error))
            while socket.getsockopt(zmq.RCVMORE):
                socket.recv(zmq.DONTWAIT)

    def _on_message(self, socket: zmq.Socket[bytes], packed: bytes) -> None:
        head = bulk.unpack_head(packed)
        if not socket.getsockopt(zmq.RCVMORE):
            raise WireError("bulk message of one frame: must be head and payload")
        incoming = self._streams.get(head.stream_id)
        if incoming is None:
            return  # cancelled or done
        if head.kind == bulk.GONE:
            # anyone could say so; then the stream is opened once more for nothing
            self._end(incoming, Outcome.LOST, "the store does not know the stream")
            return
        if head.kind != bulk.CHUNK or head.chunk >= incoming.arrival.chunks:
            raise WireError(f"bulk message of kind {head.kind}, chunk {head.chunk} of {incoming.arrival.chunks}")
        if incoming.arrival.has(head.chunk):
            self.counts.duplicates += 1
            return
        room = incoming.arrival.room(head.chunk)
        if incoming.opener is None:
            nbytes = socket.recv_into(room, flags=zmq.DONTWAIT)
            if nbytes != len(room):
                raise WireError(f"chunk {head.chunk} of {nbytes} bytes: {len(room)} belong there")
        else:
            frame = socket.recv(zmq.DONTWAIT, copy=False)
            incoming.opener.open(packed, head, frame.buffer, room)
        if socket.getsockopt(zmq.RCVMORE):
            raise WireError("bulk message of more than two frames: must be head and payload")
        self._on_chunk(incoming, head.chunk, len(room))

    def _on_chunk(self, incoming: Incoming, index: int, nbytes: int) -> None:
        self.counts.chunks += 1
        self.counts.received_bytes += nbytes
        if index in incoming.asked:
            incoming.asked.discard(index)
            self._asked_bytes -= incoming.arrival.chunk_bytes
        incoming.heard = time.monotonic()
        incoming.stalls = 0
        try:
            incoming.arrival.arrived(index)
        except WireError as error:
            self._end(incoming, Outcome.CORRUPT, str(error))
            return
        if incoming.arrival.complete:
            self._end(incoming, Outcome.COMPLETE, "")

    def _look_for_stalls(self) -> None:
        now = time.monotonic()
        for incoming in list(self._turns):
            if not incoming.asked and incoming.pending and incoming.endpoint not in self._refused:
                incoming.heard = now  # waits for its turn, not for the store
            if now - incoming.heard <= STALL_S * 2**incoming.stalls:
                continue
            incoming.stalls += 1
            incoming.heard = now
            self.counts.stalls += 1
            if incoming.stalls > STALLS:
                self._end(incoming, Outcome.LOST, "no chunk came")
                continue
            self._forget_asked(incoming)
            incoming.pending = deque(incoming.arrival.missing())
            incoming.reset = True

    def _forget_asked(self, incoming: Incoming) -> None:
        self._asked_bytes -= len(incoming.asked) * incoming.arrival.chunk_bytes
        incoming.asked.clear()

    def _end(self, incoming: Incoming, outcome: Outcome, why: str) -> None:
        del self._streams[incoming.stream_id]
        self._turns.remove(incoming)
        self._forget_asked(incoming)
        self._credit(incoming, [], bulk.FLAG_CLOSE)
        incoming.settle(outcome, why)
