"""Messages between the batch store and readers on other hosts: lines, streams, and shared memory."""

from __future__ import annotations

from proto.messages.store import PutTask
from proto.registry import Message, Request, message


@message(75)
class StorePlace(Message, frozen=True, kw_only=True):
    """Answer to `GetStorePlace`: processes that read `token` in the file `path` share memory with the store."""

    path: str
    token: str


@message(76, reply=StorePlace)
class GetStorePlace(Request, frozen=True, kw_only=True):
    """A reader asks how to find out whether it can map the store's files."""


@message(77)
class LineOpened(Message, frozen=True, kw_only=True):
    """Answer to `OpenLine`: connect to `endpoint` and send HELLO with `line_id`, as SPEC section 11 says.

    The id is good for one connection, which must be made within 10 s.
    """

    line_id: str
    """32 hexadecimal digits."""
    endpoint: str
    secret: str = ""
    """64 hexadecimal digits, drawn for this line only; empty: what it carries travels in clear."""


@message(78, reply=LineOpened)
class OpenLine(Request, frozen=True, kw_only=True):
    """A reader on another host asks for a bulk connection. Error: busy (too many lines)."""


@message(102)
class StreamOpened(Message, frozen=True, kw_only=True):
    """Answer to `OpenStream`: the ranges of `stream` can be read over the line.

    A stream is one block file of `total_bytes` with exactly the shards asked for. `head_bytes` and `head_checksum`
    (xxh3-64) are those of its header and table: the same head means the same bytes.
    """

    stream: int
    """Its number on the line, 1 or more."""
    covered: int
    """Number of tasks in the stream: the first ones of those asked for. Open another stream for the rest."""
    total_bytes: int
    head_bytes: int
    head_checksum: int


@message(103, reply=StreamOpened)
class OpenStream(Request, frozen=True, kw_only=True):
    """A reader asks for the shards `keys` (none: all) of these tasks. Error: missing, collected, busy, lost (the line).

    Tasks are taken while their shards have `max_bytes` at most; the first task always is.
    """

    line_id: str
    tasks: list[PutTask]
    keys: list[str] = []
    max_bytes: int = 1 << 26
