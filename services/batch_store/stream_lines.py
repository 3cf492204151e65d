"""What the sending thread knows of each stream and of each connection, and what is counted. It does nothing itself."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from proto.tensors import Buffer
from services.batch_store.stream_places import Place
from services.batch_store.stream_source import StreamSource
from shared.dataplane.bulk_line import BulkLine
from shared.dataplane.stream_seal import Opener, Sealer


@dataclass(slots=True, eq=False)
class Stream:
    """One opened stream."""

    stream_id: bytes
    source: StreamSource
    sealer: Sealer | None
    opener: Opener | None
    used: float
    reader: Reader | None = None
    """Whose credit came last."""
    wanted: deque[tuple[int, int]] = field(default_factory=deque)
    """Ranges [from, end) asked for and not sent."""
    ready: bool = False
    """Stands in its reader's line."""


@dataclass(slots=True, eq=False)
class Reader:
    """One connection."""

    line: BulkLine
    place: Place
    turns: deque[Stream] = field(default_factory=deque)
    """Its streams that have something to send."""
    gone: deque[bytes] = field(default_factory=deque)
    """Ids of streams that it asked for and that are not here."""
    out: list[Buffer] = field(default_factory=list)
    """The rest of the message that is being sent."""
    left: int = 0
    """Bytes of `out`."""
    sending: Stream | None = None
    buffer: bytearray | None = None
    """Where `out` lies, unless in a mapped file."""
    writes: bool = False
    """Is waited for until it takes more."""


@dataclass(frozen=True, slots=True)
class StreamStats:
    """`queued_bytes`: of messages that are being sent; `buffer_bytes`: what copies for them take.

    `refused`: messages that were not in order; `unknown`: credit for streams that are not here. The last four count
    connections, see `Places`.
    """

    streams: int
    queued_bytes: int
    buffer_bytes: int
    sent_bytes: int
    refused: int
    unknown: int
    turned_away: int
    evicted: int
    unproven: int
    hung_up: int
