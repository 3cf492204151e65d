"""Messages between the batch store and readers on other hosts: streams, cleared tasks, and shared memory."""

from __future__ import annotations

from typing import ClassVar

from proto.messages.store import PutTask
from proto.registry import Message, Request, message


@message(71)
class StreamOpened(Message, frozen=True, kw_only=True):
    """Answer to `OpenStream`: ask for chunks at `endpoint` as in SPEC section 11. The files remain until it is closed.

    The stream is one block file of `total_bytes` with exactly the requested shards. Chunk i begins at byte
    i * `chunk_bytes`. `head_bytes` and `head_checksum` (xxh3-64) are those of its header and table: equal heads mean
    equal bytes. `secret` (64 hexadecimal digits; empty: frames are sent unencrypted) is for one stream only.
    """

    stream_id: str
    """32 hexadecimal digits."""
    endpoint: str
    covered: int
    """Number of requested tasks in the stream, counted from the first. Open another stream for the rest."""
    total_bytes: int
    chunk_bytes: int
    head_bytes: int
    head_checksum: int
    secret: str = ""


@message(72)
class OpenStream(Request, frozen=True, kw_only=True):
    """A reader on another host asks for the shards `keys` (none: all) of these tasks. Error: missing, collected, busy.

    Tasks are added up to `max_bytes`, and the first one in any case.
    """

    REPLY: ClassVar[type[Message]] = StreamOpened
    tasks: list[PutTask]
    keys: list[str] = []
    max_bytes: int = 1 << 26


@message(73)
class Cleared(Message, frozen=True, kw_only=True):
    """Answer to `GetCleared`: the tasks cleared after the request's `serial`, and the present serial of the list.

    `whole` false: the store's list does not go back so far (it restarted). Drop every copy of its shards.
    """

    log: int
    serial: int
    whole: bool
    tasks: list[PutTask] = []
    more: bool = False
    """One answer cannot hold all: ask again."""


@message(74)
class GetCleared(Request, frozen=True, kw_only=True):
    """A reader that keeps copies asks which of them to drop. `wait`: deferred until something is cleared."""

    REPLY: ClassVar[type[Message]] = Cleared
    log: int = 0
    serial: int = 0
    wait: bool = False


@message(75)
class StorePlace(Message, frozen=True, kw_only=True):
    """Answer to `GetStorePlace`: processes that read `token` in the file `path` share memory with the store."""

    path: str
    token: str


@message(76)
class GetStorePlace(Request, frozen=True, kw_only=True):
    """A reader asks how to find out whether it can map the store's files."""

    REPLY: ClassVar[type[Message]] = StorePlace
