"""A reader's end of one bulk connection: requests ranges of its streams and stores the bytes that arrive.

Bytes arrive in the order in which they were requested. The reader's window limits the number of bytes that have been
requested but have not arrived. A line is not repaired: any failure ends it, and its streams continue on another line
from where they stopped. One thread receives and decrypts. Another thread, shared by all lines, checks the bytes, so
that checking does not hold up the line.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import structlog

from proto import bulk
from proto.bulk import Head, Kind
from proto.errors import WireError
from proto.messages import LineOpened
from shared.dataplane import bulk_connection
from shared.dataplane.bulk_connection import SECRET_BYTES, TO_READER, TO_STORE, Seal

SILENT_S = 10.0
"""Seconds without data after which a line is considered lost if ranges are due."""
IDLE_S = 10.0
"""Seconds after which a line that no stream needs is closed."""
CHECK_BYTES = 2 << 20
"""Minimum number of bytes per check, except at the end of a stream. Checking each range separately wakes threads too
often."""
_LOW_BYTES = 256 << 10
"""Number of bytes for which the thread waits, unless fewer are due. Waking up for each packet costs the sender a
quarter of its time."""
_TICK_S = 0.2
_JOIN_S = 1.0


class StreamOutcome(StrEnum):
    """The ways in which a line finishes with a stream."""

    COMPLETE = "complete"
    LOST = "lost"  # the line ended, or the stream was cancelled; received bytes are kept
    CORRUPT = "corrupt"  # the bytes are not those that were put
    FAILED = "failed"  # a defect in the reader


class Target(Protocol):
    """The memory into which a line receives one stream. The line's thread writes to it; another thread checks it."""

    received: int
    """Number of bytes, counted from the start, that have arrived."""

    @property
    def total_bytes(self) -> int:
        """Size of the stream."""

    def room(self, nbytes: int) -> memoryview:
        """Return the memory for the next `nbytes` bytes."""

    def check(self, upto: int) -> None:
        """Check the first `upto` bytes, which have arrived. Raises WireError if they are not the expected ones."""


@dataclass(slots=True)
class Counts:
    """Counters of a reader. Sizes are in bytes."""

    received_bytes: int = 0
    chunks: int = 0
    """Number of ranges received."""
    refused: int = 0
    """Number of received messages that a store is not allowed to send. Each of them ended its line."""
    inflight_peak_bytes: int = 0


class RequestWindow:
    """Limits the number of requested bytes that have not arrived, across all lines of a reader. It is thread-safe."""

    def __init__(self, limit_bytes: int, counts: Counts) -> None:
        self._limit_bytes = limit_bytes
        self._counts = counts
        self._lock = threading.Lock()
        self._lines = self._asked_bytes = 0

    def enter(self) -> None:
        """Count one more line that shares the window."""
        with self._lock:
            self._lines += 1

    def leave(self, asked_bytes: int) -> None:
        """Remove a line, together with the `asked_bytes` that it had requested but not received."""
        with self._lock:
            self._lines -= 1
            self._asked_bytes -= asked_bytes

    @property
    def share_bytes(self) -> int:
        """Return the maximum number of bytes that each line may have requested."""
        return self._limit_bytes // max(1, self._lines)

    def take(self, nbytes: int, mine: int) -> bool:
        """Return whether a line with `mine` bytes due may request `nbytes` more, and count them if so.

        A line that has nothing due may always request one range.
        """
        with self._lock:
            most = min(self.share_bytes, self._limit_bytes - self._asked_bytes + mine)
            if mine and mine + nbytes > most:
                return False
            self._asked_bytes += nbytes
            self._counts.inflight_peak_bytes = max(self._counts.inflight_peak_bytes, self._asked_bytes)
            return True

    def give_back(self, nbytes: int) -> None:
        """Count `nbytes` bytes as arrived."""
        with self._lock:
            self._asked_bytes -= nbytes


@dataclass(slots=True, eq=False)
class StreamGroup:
    """Streams that are requested one after the other. Groups take turns."""

    arrived_at: float = 0.0
    """Value of `time.monotonic` when a range last arrived. Other threads read it."""


@dataclass(slots=True, eq=False)
class Incoming:
    """A stream opened on a line. `settle` may be called repeatedly and on any thread; only the first call counts."""

    arrival: Target
    group: StreamGroup
    number: int
    settle: Callable[[StreamOutcome, str], None]
    asked: int = 0
    """Offset of the first byte that has not been requested yet."""
    checking: int = 0
    """Number of bytes submitted to the checking thread."""
    is_over: bool = False


class StreamLine:
    """A bulk connection with its own thread. `add`, `cancel` and `close` may be called on any thread."""

    def __init__(self, opened: LineOpened, window: RequestWindow, checker: Executor, counts: Counts) -> None:
        """`checker` has one thread, on which received bytes are checked.

        Raises WireError unless the line id and the secret are hexadecimal digits of the right length.
        """
        self.line_id = opened.line_id
        self._endpoint = opened.endpoint
        self._id = _unhex(opened.line_id, bulk.LINE_ID_BYTES)
        secret = _unhex(opened.secret, SECRET_BYTES) if opened.secret else b""
        self._sealer = Seal(secret, self._id, TO_STORE) if secret else None
        self._opener = Seal(secret, self._id, TO_READER) if secret else None
        self._window, self._checker, self._counts = window, checker, counts
        self._scratch = memoryview(bytearray(bulk.MAX_RANGE_BYTES + bulk.TAG_BYTES))
        self._packed = memoryview(bytearray(bulk.HEAD_BYTES))
        self._socket: socket.socket | None = None
        self._poller = select.poll()
        self._low = 1
        self._orders: queue.SimpleQueue[tuple[Callable[[Incoming], None], Incoming] | None] = queue.SimpleQueue()
        self._ordering = threading.Lock()
        self._has_ended = False
        self._turns: OrderedDict[StreamGroup, deque[Incoming]] = OrderedDict()
        """Streams that have not been requested completely, by group."""
        self._due: deque[tuple[Incoming, int, int]] = deque()
        """Stream, offset and length of each range that was requested but has not arrived."""
        self._asked_bytes = 0
        self._log = structlog.get_logger("stream")
        self._thread = threading.Thread(target=self._run, name="stream-line", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return not self._has_ended

    def add(self, incoming: Incoming) -> None:
        """Begin to request the bytes that `incoming` lacks."""
        with self._ordering:
            if not self._has_ended:
                self._orders.put((self._begin, incoming))
                return
        incoming.settle(StreamOutcome.LOST, "its line had ended")

    def cancel(self, incoming: Incoming) -> None:
        """Stop receiving `incoming`. Settle it as LOST if it is not yet settled. After that, nothing more is written to
        it."""
        self._orders.put((self._drop, incoming))

    def close(self) -> None:
        """Close the line. Streams that are not complete are settled as LOST."""
        self._orders.put(None)
        line = self._socket
        if line is not None:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        self._thread.join(_JOIN_S)

    # ---- the thread

    def _run(self) -> None:
        outcome, why = StreamOutcome.LOST, "the line was closed"
        self._window.enter()
        try:
            line = self._connect()
            while self._obey():
                self._ask(line)
                if self._due:
                    self._receive(line)
        except WireError as error:
            self._counts.refused += 1
            why = str(error)
            if self._counts.refused <= 8:
                self._log.warning("bulk message refused", endpoint=self._endpoint, error=why)
        except (OSError, ValueError) as error:  # ValueError: an invalid host name
            why = f"{self._endpoint}: {error}"
        except Exception as error:
            self._log.error("line ended", exc_info=error)
            outcome, why = StreamOutcome.FAILED, f"the receiving thread ended with {error!r} (see the log)"
        finally:
            with self._ordering:
                self._has_ended = True
            if self._socket is not None:
                self._socket.close()
            self._window.leave(self._asked_bytes)
            left = [incoming for group in self._turns.values() for incoming in group]
            left += [incoming for incoming, _, _ in self._due]
            while not self._orders.empty():
                order = self._orders.get()
                left += [order[1]] if order is not None else []
            for incoming in left:
                incoming.settle(outcome, why)

    def _connect(self) -> socket.socket:
        line = self._socket = bulk_connection.connect(self._endpoint, _TICK_S)
        self._poller.register(line, select.POLLIN)
        hello = bulk.pack_head(Head(Kind.HELLO)) + self._id
        line.sendall(hello + self._tag(hello))
        return line

    def _obey(self) -> bool:
        """Carry out orders, and wait for one while nothing is due. Return False if the line must be closed."""
        idle_since = time.monotonic()
        while True:
            waits = not (self._due or self._turns)
            try:
                order = self._orders.get(waits, _TICK_S if waits else None)
            except queue.Empty:
                if not waits:
                    return True
                if time.monotonic() - idle_since > IDLE_S:
                    return False
                continue
            if order is None:
                return False
            carry_out, incoming = order
            carry_out(incoming)
            if self._orders.empty():
                if self._due or self._turns:
                    return True
                idle_since = time.monotonic()

    def _begin(self, incoming: Incoming) -> None:
        incoming.asked = incoming.checking = incoming.arrival.received
        self._turns.setdefault(incoming.group, deque()).append(incoming)

    def _drop(self, incoming: Incoming) -> None:
        """Cancel a stream. The ranges of the stream that are still due are received and discarded."""
        if incoming.is_over:
            return
        incoming.is_over = True
        streams = self._turns.get(incoming.group, deque())
        if incoming in streams:
            streams.remove(incoming)
            if not streams:
                del self._turns[incoming.group]
        if self._socket is not None:
            message = bulk.pack_head(Head(Kind.CLOSE, incoming.number))
            self._socket.sendall(message + self._tag(message))
        incoming.settle(StreamOutcome.LOST, "cancelled")

    def _tag(self, message: bytes) -> bytes:
        return self._sealer.tag(message) if self._sealer is not None else b""

    # ---- ranges

    def _ask(self, line: socket.socket) -> None:
        """Request as much as the window allows, taking one range of the first stream of each group in turn.

        Streams of a group therefore complete one at a time, and the next can be opened while others arrive.
        """
        if self._asked_bytes > self._window.share_bytes // 2:
            return  # too little space to be worth a message
        out = bytearray()
        while self._turns:
            group, streams = next(iter(self._turns.items()))
            incoming = streams[0]
            nbytes = min(bulk.MAX_RANGE_BYTES, incoming.arrival.total_bytes - incoming.asked)
            if not self._window.take(nbytes, self._asked_bytes):
                break
            message = bulk.pack_head(Head(Kind.READ, incoming.number, nbytes, incoming.asked))
            out += message
            out += self._tag(message)
            self._due.append((incoming, incoming.asked, nbytes))
            self._asked_bytes += nbytes
            incoming.asked += nbytes
            self._turns.move_to_end(group)
            if incoming.asked == incoming.arrival.total_bytes:
                streams.popleft()
                if not streams:
                    del self._turns[group]
        if out:
            line.sendall(out)

    def _receive(self, line: socket.socket) -> None:
        """Receive the next range that is due. Raises OSError and WireError."""
        incoming, offset, nbytes = self._due[0]
        self._fill(line, self._packed)
        head = bytes(self._packed)
        if bulk.unpack_head(head) != Head(Kind.DATA, incoming.number, nbytes, offset):
            raise WireError(f"bulk message {head.hex()}: {nbytes} bytes at {offset} of {incoming.number} are due")
        if self._opener is not None:
            sealed = self._scratch[: nbytes + bulk.TAG_BYTES]
            self._fill(line, sealed)
            place = memoryview(bytearray(nbytes)) if incoming.is_over else incoming.arrival.room(nbytes)
            self._opener.open(head, sealed, place)
        else:
            place = self._scratch[:nbytes] if incoming.is_over else incoming.arrival.room(nbytes)
            self._fill(line, place, incoming)
        self._due.popleft()
        self._asked_bytes -= nbytes
        self._window.give_back(nbytes)
        if incoming.is_over:
            return
        self._counts.chunks += 1
        self._counts.received_bytes += nbytes
        incoming.group.arrived_at = time.monotonic()
        incoming.arrival.received += nbytes
        here = incoming.arrival.received
        if here - incoming.checking >= CHECK_BYTES or here == incoming.arrival.total_bytes:
            incoming.checking = here
            self._checker.submit(self._check, incoming, here)

    def _fill(self, line: socket.socket, view: memoryview, owner: Incoming | None = None) -> None:
        """Fill `view`, which belongs to `owner`. If `owner` is cancelled in the meantime, discard the remaining
        bytes."""
        heard = time.monotonic()
        while view:
            try:
                received = line.recv_into(view, len(view), socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait(line, min(len(view), _LOW_BYTES))
                if time.monotonic() - heard > SILENT_S:
                    raise TimeoutError(f"nothing arrived for {SILENT_S:g} s") from None
                if not self._obey():
                    raise ConnectionAbortedError("closed by the reader") from None
                if owner is not None and owner.is_over:
                    view, owner = self._scratch[: len(view)], None
                continue
            if not received:
                raise ConnectionResetError("closed by the store")
            heard = time.monotonic()
            view = view[received:]

    def _wait(self, line: socket.socket, nbytes: int) -> None:
        """Sleep until `nbytes` of the bytes that are due can be read, or until a tick has passed."""
        if nbytes != self._low:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._low = nbytes
        self._poller.poll(_TICK_S * 1000)

    # ---- the checking thread

    def _check(self, incoming: Incoming, upto: int) -> None:
        if incoming.is_over:
            return
        try:
            incoming.arrival.check(upto)
        except WireError as error:
            incoming.settle(StreamOutcome.CORRUPT, str(error))
        except Exception as error:
            self._log.error("check ended", exc_info=error)
            incoming.settle(StreamOutcome.FAILED, f"received bytes could not be checked: {error!r} (see the log)")
        else:
            if upto == incoming.arrival.total_bytes:
                incoming.settle(StreamOutcome.COMPLETE, "")
            return
        self.cancel(incoming)


def _unhex(text: str, nbytes: int) -> bytes:
    """Return the bytes of `text`. Raises WireError unless it is exactly 2 * `nbytes` hexadecimal digits.

    The length is checked, too, because `fromhex` skips blanks: a secret that consists only of blanks would become an
    empty secret.
    """
    try:
        made = bytes.fromhex(text)
    except ValueError:
        made = b""
    if (len(made), len(text)) != (nbytes, 2 * nbytes):
        raise WireError(f"line id or secret of {len(text)} characters: {2 * nbytes} hexadecimal digits are expected")
    return made
