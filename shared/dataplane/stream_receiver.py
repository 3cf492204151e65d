"""Receives chunks on a thread of its own: asks for them, puts each in its place, asks again for what got lost.

A second thread checks what is in its place: else the line would stand still meanwhile. It must never have more than
`inflight_bytes` asked for and not received, over all its streams, and never decrypt or hash on the event loop's thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from queue import SimpleQueue

import structlog

from proto import bulk
from proto.errors import WireError
from proto.messages import StreamOpened
from shared.dataplane import bulk_line
from shared.dataplane.bulk_line import BulkLine
from shared.dataplane.stream_arrival import Arrival
from shared.dataplane.stream_seal import REKEY_BYTES, TO_READER, TO_STORE, Opener, Sealer

STREAM_CHUNKS = 16
"""Most chunks of one stream asked for at a time."""
AHEAD_CHUNKS = 2 * STREAM_CHUNKS
"""No chunk so far behind one that has not come is asked for: what cannot be checked yet stays little."""
STALL_S = 1.0
STALLS = 3
"""Asked so often in vain, a stream is given up: the store may have restarted."""
LINE_S = 10.0
"""A stream may wait so long behind others on a line that moves."""
KEEP_S = 5.0
"""A stream that waits for its turn asks for nothing so often, or the store would end it."""
RETRY_S, RETRY_MAX_S = 0.02, 0.5
_BURST_BYTES = 2 << 20
"""Then more is asked for: the store must not run dry meanwhile."""
_CHECK_BYTES = 2 << 20
_TICK_S = 0.1
_OUT_BYTES = 1 << 16


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
    """Chunks that nobody had asked for, or no more."""
    refused: int = 0
    stalls: int = 0
    inflight_peak_bytes: int = 0


@dataclass(slots=True, eq=False)
class Incoming:
    """One opened stream; `settle` is called once, on the receiving thread."""

    arrival: Arrival
    group: object
    """Streams of one group come one after the other; groups share the line."""
    endpoint: str
    stream_id: bytes
    opener: Opener | None
    sealer: Sealer | None
    settle: Callable[[Outcome, str], None]
    pending: deque[tuple[int, int]] = field(default_factory=deque)
    asked: set[int] = field(default_factory=set)
    heard: float = 0.0
    arrived_at: float = 0.0
    """When its last chunk came, by `time.monotonic`. Read by other threads."""
    spoken: float = 0.0
    """When credit was sent last."""
    stalls: int = 0
    reset: bool = False
    checking: int = 0
    """Bytes that the checking thread knows of."""
    over: bool = False

    @classmethod
    def of(
        cls,
        arrival: Arrival,
        group: object,
        opened: StreamOpened,
        settle: Callable[[Outcome, str], None],
        *,
        rekey_bytes: int = REKEY_BYTES,
    ) -> Incoming:
        """`rekey_bytes`: of credit that is sealed under one key.

        Raises WireError when ids are not hexadecimal digits of the right length."""
        try:
            stream_id, secret = bytes.fromhex(opened.stream_id), bytes.fromhex(opened.secret)
        except ValueError:
            raise WireError(f"stream id {opened.stream_id[:40]!r}: hexadecimal digits are expected") from None
        # fromhex takes blanks, and a secret of blanks would be none
        if (len(opened.stream_id), len(stream_id)) != (32, 16) or (len(opened.secret), len(secret)) not in (
            (0, 0),
            (64, 32),
        ):
            raise WireError(f"stream id of {len(stream_id)} bytes, secret of {len(secret)}: 16 and 32 are expected")
        opener = Opener(secret, stream_id, TO_READER) if secret else None
        sealer = Sealer(secret, stream_id, TO_STORE, rekey_bytes) if secret else None
        return cls(arrival, group, opened.endpoint, stream_id, opener, sealer, settle)


@dataclass(slots=True, eq=False)
class _Store:
    """The connection to one bulk endpoint, made again when it breaks."""

    endpoint: str
    line: BulkLine | None = None
    connected: bool = False
    filling: Incoming | None = None
    """Whose chunk is on its way in."""
    wanted: bool = False
    """That chunk was asked for when it began."""
    out: bytearray = field(default_factory=bytearray)
    """Credit that the kernel has not taken."""
    heard: float = 0.0
    retry_at: float = 0.0
    retry_s: float = RETRY_S


class Receiver:
    """One thread and one connection a store; `add` and `cancel` are safe from any thread."""

    def __init__(self, inflight_bytes: int) -> None:
        self.counts = Counts()
        self._inflight_bytes = inflight_bytes
        self._orders: deque[tuple[str, Incoming]] = deque()
        self._streams: dict[bytes, Incoming] = {}
        self._turns: deque[Incoming] = deque()
        self._stores: dict[str, _Store] = {}
        self._by_descriptor: dict[int, _Store] = {}
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._asked_bytes = 0
        self._turn = 0
        self._look_at = 0.0
        self._closing = self._failed = False
        self._ordering = threading.Lock()
        """Nobody gives an order once the thread is to end: the descriptor that wakes it is soon somebody else's."""
        self._log = structlog.get_logger("stream")
        self._thread: threading.Thread | None = None
        self._checks: SimpleQueue[tuple[Incoming, int] | None] = SimpleQueue()
        self._verdicts: deque[tuple[Incoming, Outcome, str]] = deque()

    def add(self, incoming: Incoming) -> None:
        """Begin to ask for what `incoming` lacks."""
        if not self._order("add", incoming):
            incoming.settle(Outcome.FAILED, "the receiving thread was closed, or ended with an error (see the log)")

    def cancel(self, incoming: Incoming) -> None:
        """Stop; `settle` is called with LOST unless it was called before, and nothing is written after that."""
        self._order("cancel", incoming)

    def close(self) -> None:
        """End the thread; streams that are not complete settle as LOST."""
        with self._ordering:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        self._epoll.close()
        os.close(self._wake)

    def _order(self, what: str, incoming: Incoming) -> bool:
        """False: nobody obeys any more, and streams that were added are settled, or will be without being told."""
        with self._ordering:
            if self._closing or self._failed:
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="stream-receiver", daemon=True)
                self._thread.start()
            self._orders.append((what, incoming))
            os.eventfd_write(self._wake, 1)
            return True

    # ---- the checking thread

    def _check_all(self) -> None:
        while self._check_next():  # of what it looked at nothing stays while it waits
            pass

    def _check_next(self) -> bool:
        """False: there will be no more."""
        work = self._checks.get()
        if work is None:
            return False
        incoming, upto = work
        if incoming.over:
            return True
        verdict = (Outcome.COMPLETE, "")
        try:
            incoming.arrival.check(upto)
        except WireError as error:
            verdict = (Outcome.CORRUPT, str(error))
        except Exception as error:
            self._log.error("check ended", exc_info=error)
            verdict = (Outcome.FAILED, f"what came could not be checked: {error!r} (see the log)")
        if verdict[0] is not Outcome.COMPLETE or upto == incoming.arrival.total_bytes:
            self._verdicts.append((incoming, *verdict))
            os.eventfd_write(self._wake, 1)
        return True

    def _to_check(self, incoming: Incoming) -> None:
        """Not every chunk by itself: the threads would wake each other up all the time."""
        here = incoming.arrival.here
        if here - incoming.checking >= _CHECK_BYTES or (incoming.arrival.complete and here > incoming.checking):
            incoming.checking = here
            self._checks.put((incoming, here))

    # ---- the receiving thread

    def _run(self) -> None:
        checker = threading.Thread(target=self._check_all, name="stream-checker", daemon=True)
        checker.start()
        try:
            while not self._closing:
                self._obey()
                self._connect()
                self._top_up()
                for descriptor, events in self._epoll.poll(_TICK_S if self._streams else None):
                    if descriptor == self._wake:
                        os.eventfd_read(self._wake)
                    elif descriptor in self._by_descriptor:
                        self._serve(self._by_descriptor[descriptor], events)
                self._look_for_stalls()
        except Exception as error:
            with self._ordering:
                self._failed = True
            self._log.error("receiver ended", exc_info=error)
        finally:
            self._checks.put(None)
            for incoming in list(self._streams.values()):
                self._end(incoming, Outcome.FAILED if self._failed else Outcome.LOST, "the receiver has ended")
            for what, incoming in list(self._orders):
                if what == "add":
                    incoming.settle(Outcome.FAILED if self._failed else Outcome.LOST, "the receiver has ended")
            for store in self._stores.values():
                if store.line is not None:
                    store.line.socket.close()
            checker.join()  # what it is at is short

    def _obey(self) -> None:
        while self._orders:
            what, incoming = self._orders.popleft()
            if what == "add":
                if incoming.stream_id in self._streams:
                    incoming.over = True
                    incoming.settle(Outcome.FAILED, "the store gave one stream id twice")
                    continue
                if incoming.endpoint not in self._stores:
                    self._forget_unused()
                    self._stores[incoming.endpoint] = _Store(incoming.endpoint)
                incoming.pending = deque(incoming.arrival.missing())
                incoming.heard = time.monotonic()
                self._streams[incoming.stream_id] = incoming
                self._turns.append(incoming)
                self._to_check(incoming)
            elif self._streams.get(incoming.stream_id) is incoming:
                self._end(incoming, Outcome.LOST, "cancelled")
        while self._verdicts:
            incoming, outcome, why = self._verdicts.popleft()
            if not incoming.over:
                self._end(incoming, outcome, why)

    # ---- connections

    def _forget_unused(self) -> None:
        """Endpoints of a former life of a store."""
        used = {incoming.endpoint for incoming in self._streams.values()}
        for endpoint in [each for each in self._stores if each not in used]:
            store = self._stores.pop(endpoint)
            if store.line is not None:
                self._hang_up(store, store.line)

    def _connect(self) -> None:
        """Where streams wait and there is no connection. Once broken, only after a pause that grows."""
        if all(store.line is not None for store in self._stores.values()):
            return
        now = time.monotonic()
        for endpoint in {incoming.endpoint for incoming in self._turns}:
            store = self._stores[endpoint]
            if store.line is not None or now < store.retry_at:
                continue
            store.retry_at, store.retry_s = now + store.retry_s, min(RETRY_MAX_S, 2 * store.retry_s)
            try:
                store.line = BulkLine(bulk_line.connect(endpoint), bulk.MAX_CHUNK_BYTES + bulk.TAG_BYTES)
            except (OSError, ValueError) as error:  # a WireError, or a name that no host can have
                self._log.warning("no connection", endpoint=endpoint, error=str(error))
                continue
            self._by_descriptor[store.line.socket.fileno()] = store
            self._epoll.register(store.line.socket, select.EPOLLIN | select.EPOLLOUT)

    def _serve(self, store: _Store, events: int) -> None:
        line = store.line
        if line is None:
            return
        try:
            if not store.connected:
                failed = line.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if failed:
                    raise OSError(failed, os.strerror(failed))
                if not events & select.EPOLLOUT:
                    return
                store.connected, store.heard = True, time.monotonic()
            if events & select.EPOLLOUT:
                self._flush(store, line)
            if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                got = line.receive(partial(self._room, store), partial(self._on_message, store), _BURST_BYTES)
                if got < 0:
                    raise ConnectionResetError(errno.ECONNRESET, "closed by the store")
                store.heard = time.monotonic()
                if store.filling is not None:
                    store.filling.heard = store.heard
        except WireError as error:
            self._refuse(error)
            self._lose(store, line)
        except OSError:
            self._lose(store, line)

    def _lose(self, store: _Store, line: BulkLine) -> None:
        """The connection is gone and what was asked for over it; what arrived stays."""
        self._hang_up(store, line)
        for incoming in self._turns:
            if incoming.endpoint == store.endpoint:
                self._ask_again(incoming)

    def _hang_up(self, store: _Store, line: BulkLine) -> None:
        self._by_descriptor.pop(line.socket.fileno(), None)
        line.socket.close()  # which takes it out of the epoll set
        store.line, store.filling, store.connected = None, None, False
        store.out.clear()

    def _flush(self, store: _Store, line: BulkLine) -> None:
        try:
            while store.out:
                del store.out[: line.socket.send(store.out)]
        except BlockingIOError:
            pass
        want = select.EPOLLIN | (select.EPOLLOUT if store.out else 0)
        self._epoll.modify(line.socket, want)

    def _refuse(self, error: WireError) -> None:
        self.counts.refused += 1
        if self.counts.refused <= 8:
            self._log.warning("bulk message refused", error=str(error))

    # ---- credit

    def _top_up(self) -> None:
        """Ask for more: every group its share of the bytes that may be under way, its streams one after the other.

        So one is complete, and its arrays are made and the next one opened, while others come.
        """
        groups: dict[object, list[Incoming]] = {}
        for incoming in self._turns:
            groups.setdefault(incoming.group, []).append(incoming)
        if not groups:
            return
        self._turn = (self._turn + 1) % len(groups)
        share = self._inflight_bytes // len(groups)
        shares = list(groups.values())
        for streams in shares[self._turn :] + shares[: self._turn]:
            asked = sum(len(incoming.asked) * incoming.arrival.chunk_bytes for incoming in streams)
            for incoming in streams:
                if incoming.pending and self._takes_credit(incoming):
                    asked += self._ask_within(incoming, share, asked)

    def _ask_within(self, incoming: Incoming, share: int, asked: int) -> int:
        """Ask for more of one stream, where its group's share is `share` bytes and `asked` of it are under way.

        Returns for how much: 0 if that was hardly worth a message yet.
        """
        chunk_bytes = incoming.arrival.chunk_bytes
        window = min(STREAM_CHUNKS, share // chunk_bytes)
        left = min(share - asked, self._inflight_bytes - self._asked_bytes)
        chunks = min(window - len(incoming.asked), left // chunk_bytes)
        if not self._asked_bytes:  # one chunk at least may be under way, however small the bound
            chunks = max(1, chunks)
        if chunks <= 0 or (asked and chunks < min(window // 2, sum(end - first for first, end in incoming.pending))):
            return 0
        return self._ask(incoming, chunks) * chunk_bytes

    def _takes_credit(self, incoming: Incoming) -> bool:
        store = self._stores[incoming.endpoint]
        return store.connected and len(store.out) < _OUT_BYTES

    def _ask(self, incoming: Incoming, chunks: int) -> int:
        """Returns for how many."""
        ranges: list[tuple[int, int]] = []
        pending = deque(incoming.pending)
        horizon = incoming.arrival.prefix + AHEAD_CHUNKS
        while pending and pending[0][0] < horizon and chunks and len(ranges) < bulk.MAX_RANGES:
            first, end = pending.popleft()
            while first < end and incoming.arrival.has(first):
                first += 1
            upto = max(first, min(end, first + chunks, horizon))
            if upto > first:
                ranges.append((first, upto - first))
                chunks -= upto - first
            if upto < end:
                pending.appendleft((upto, end))
        if not ranges:
            incoming.pending = pending
            return 0
        self._credit(incoming, ranges, bulk.FLAG_RESET if incoming.reset else 0)
        incoming.reset = False
        incoming.pending = pending
        for first, count in ranges:
            incoming.asked.update(range(first, first + count))
            self._asked_bytes += count * incoming.arrival.chunk_bytes
        self.counts.inflight_peak_bytes = max(self.counts.inflight_peak_bytes, self._asked_bytes)
        return sum(count for _, count in ranges)

    def _credit(self, incoming: Incoming, ranges: list[tuple[int, int]], flags: int) -> None:
        payload = bulk.pack_ranges(ranges)
        if incoming.sealer is None:
            head = bulk.pack_head(bulk.Head(bulk.CREDIT, flags, 0, 0, 0, incoming.stream_id, len(payload)))
        else:
            room = memoryview(bytearray(len(payload) + bulk.TAG_BYTES))
            head, _ = incoming.sealer.seal(bulk.CREDIT, flags, 0, payload, room)
            payload = bytes(room)
        incoming.spoken = time.monotonic()
        store = self._stores[incoming.endpoint]
        idle = not store.out
        store.out += head
        store.out += payload
        if idle and store.line is not None:
            with contextlib.suppress(OSError):  # the line is broken: reading says so next
                self._flush(store, store.line)

    # ---- chunks

    def _room(self, store: _Store, head: bulk.Head) -> memoryview | None:
        """Clear chunks go straight to their place; what is not wanted, and what is sealed, does not."""
        incoming = self._of(store, head)
        store.filling = incoming
        if head.kind == bulk.CREDIT:
            raise WireError("bulk message of kind credit: a reader takes chunks")
        store.wanted = incoming is not None and head.kind == bulk.CHUNK and head.chunk in incoming.asked
        if incoming is None or not store.wanted or incoming.opener is not None:
            return None
        return incoming.arrival.room(head.chunk)

    def _of(self, store: _Store, head: bulk.Head) -> Incoming | None:
        """Whom it is for, if they asked over this connection: once they are done, no other is kept from writing."""
        incoming = self._streams.get(head.stream_id)
        return incoming if incoming is not None and incoming.endpoint == store.endpoint else None

    def _on_message(self, store: _Store, head: bulk.Head, packed: bytes, payload: memoryview) -> None:
        store.filling = None
        incoming = self._of(store, head)
        if incoming is None:
            return  # cancelled or done
        if head.kind == bulk.GONE:
            # anyone could say so; then the stream is opened once more for nothing
            self._end(incoming, Outcome.LOST, "the store does not know the stream")
            return
        try:
            if head.chunk >= incoming.arrival.chunks:
                raise WireError(f"bulk chunk {head.chunk} of {incoming.arrival.chunks}")
            if not store.wanted or incoming.arrival.has(head.chunk):
                self.counts.duplicates += 1
                return
            if incoming.opener is not None:
                incoming.opener.open(packed, head, payload, incoming.arrival.room(head.chunk))
        except WireError as error:
            self._refuse(error)
            return
        store.retry_s = RETRY_S
        self._on_chunk(incoming, head.chunk, incoming.arrival.size(head.chunk))

    def _on_chunk(self, incoming: Incoming, index: int, nbytes: int) -> None:
        self.counts.chunks += 1
        self.counts.received_bytes += nbytes
        if index in incoming.asked:
            incoming.asked.discard(index)
            self._asked_bytes -= incoming.arrival.chunk_bytes
        incoming.heard = incoming.arrived_at = time.monotonic()
        incoming.stalls = 0
        incoming.arrival.arrived(index)
        self._to_check(incoming)

    def _look_for_stalls(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _TICK_S
        for incoming in list(self._turns):
            if incoming.arrival.complete:
                continue  # is being checked
            store = self._stores[incoming.endpoint]
            if not incoming.asked and incoming.pending and store.connected:
                incoming.heard = now  # waits for its turn, not for the store, which should know
                if now - incoming.spoken > KEEP_S:
                    self._credit(incoming, [], 0)
            # others' chunks on the same line may come first, but not for ever
            heard = max(incoming.heard, min(store.heard, incoming.heard + LINE_S))
            if now - heard <= STALL_S * 2**incoming.stalls:
                continue
            incoming.stalls += 1
            incoming.heard = now
            self.counts.stalls += 1
            if incoming.stalls > STALLS:
                self._end(incoming, Outcome.LOST, "no chunk came")
                continue
            if incoming.stalls > 1 and store.line is not None and now - store.heard > STALL_S:
                self._lose(store, store.line)  # a dead connection looks like a silent one
            self._ask_again(incoming)

    def _ask_again(self, incoming: Incoming) -> None:
        self._forget_asked(incoming)
        incoming.pending = deque(incoming.arrival.missing())
        incoming.reset = True

    def _forget_asked(self, incoming: Incoming) -> None:
        self._asked_bytes -= len(incoming.asked) * incoming.arrival.chunk_bytes
        incoming.asked.clear()

    def _end(self, incoming: Incoming, outcome: Outcome, why: str) -> None:
        incoming.over = True
        del self._streams[incoming.stream_id]
        self._turns.remove(incoming)
        self._forget_asked(incoming)
        store = self._stores[incoming.endpoint]
        if store.filling is incoming:  # from here on that memory is not ours
            store.filling = None
            if store.line is not None:
                store.line.discard()
        if store.connected:
            self._credit(incoming, [], bulk.FLAG_CLOSE)
        incoming.settle(outcome, why)
