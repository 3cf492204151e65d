"""The batch store to readers on other hosts: streams, what was cleared, whether memory is shared."""

from __future__ import annotations

from typing import ClassVar

from proto.messages.store import PutTask
from proto.registry import Message, Request, message


@message(71)
class StreamOpened(Message, frozen=True, kw_only=True):
    """Answer to `OpenStream`: ask for chunks at `endpoint` as SPEC section 11 says; the files stay until it is closed.

    What is streamed is one block file of `total_bytes` with exactly the shards asked for. Chunk i is its bytes from
    i * `chunk_bytes` on. `head_bytes`, `head_checksum` (xxh3-64) are those of its header and table: the same head
    means the same bytes. `secret` (64 hexadecimal digits; empty: frames travel in clear) is for one stream only.
    """

    stream_id: str
    """32 hexadecimal digits."""
    endpoint: str
    covered: int
    """So many of the tasks asked for, from the first on; open another stream for the rest."""
    total_bytes: int
    chunk_bytes: int
    head_bytes: int
    head_checksum: int
    secret: str = ""


@message(72)
class OpenStream(Request, frozen=True, kw_only=True):
    """A reader on another host asks for the shards `keys` (none: all) of these tasks. Error: missing, collected, busy.

    Tasks are taken as long as `max_bytes` are not passed; the first one always is.
    """

    REPLY: ClassVar[type[Message]] = StreamOpened
    tasks: list[PutTask]
    keys: list[str] = []
    max_bytes: int = 1 << 26


@message(73)
class Cleared(Message, frozen=True, kw_only=True):
    """Answer to `GetCleared`: what was cleared after `serial` of the request, and where the list stands now.

    `whole` false: the store does not know so far back (it restarted); drop every copy of its shards.
    """

    log: int
    serial: int
    whole: bool
    tasks: list[PutTask] = []
    more: bool = False
    """There is more than one answer holds: ask again."""


@message(74)
class GetCleared(Request, frozen=True, kw_only=True):
    """A reader that keeps copies asks which of them must go. `wait`: held back until something is cleared."""

    REPLY: ClassVar[type[Message]] = Cleared
    log: int = 0
    serial: int = 0
    wait: bool = False


@message(75)
class StorePlace(Message, frozen=True, kw_only=True):
    """Answer to `GetStorePlace`: who can read `token` in the file `path` shares memory with the store."""

    path: str
    token: str


@message(76)
class GetStorePlace(Request, frozen=True, kw_only=True):
    """A reader asks how to find out whether the store's files can be mapped from where it runs."""

    REPLY: ClassVar[type[Message]] = StorePlace
