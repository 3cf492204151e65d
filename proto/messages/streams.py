"""Messages between the batch store and readers on other hosts: lines, streams, shared memory, and relayed weights."""

from __future__ import annotations

from proto.messages.store import PutTask
from proto.registry import Message, Request, message


@message(75)
class StorePlace(Message, frozen=True, kw_only=True):
    """A file that lets a process find out whether it shares memory with the store."""

    path: str  # path of a file
    token: str  # its content, as read by processes that share memory with the store


@message(76, reply=StorePlace)
class GetStorePlace(Request, frozen=True, kw_only=True):
    """A reader asks how to find out whether it can map the store's files.

    Errors:
        busy: the mount is full.
    """


@message(77)
class LineOpened(Message, frozen=True, kw_only=True):
    """A line is open: connect and send HELLO (section 11). The id is valid for one connection."""

    line_id: str  # 32 hexadecimal digits
    endpoint: str  # endpoint to which to connect
    secret: str = ""  # 64 hexadecimal digits, generated for this line only; empty: the line is not encrypted


@message(78, reply=LineOpened)
class OpenLine(Request, frozen=True, kw_only=True):
    """A reader on another host asks for a bulk connection.

    Errors:
        busy: the store has the maximum number of lines.
    """


@message(102)
class StreamOpened(Message, frozen=True, kw_only=True):
    """The ranges of a stream can be read over the line. Streams with the same head have the same bytes."""

    stream: int  # number of the stream on the line, 1 or more
    covered: int  # number of tasks in the stream, from the first requested one on; open another stream for the rest
    total_bytes: int  # size of the block file
    head_bytes: int  # length of its header and table
    head_checksum: int  # xxh3-64 of the header and table


@message(103, reply=StreamOpened)
class OpenStream(Request, frozen=True, kw_only=True):
    """A reader asks for a stream with the shards of these tasks.

    Errors:
        bad_request: there are no tasks, or a task or a key occurs twice.
        busy: the store has the maximum number of streams.
        collected: tasks (`names`) are tombstoned at these fences. This is checked before missing.
        lost: the line is not open.
        missing: tasks or shards (`names`) do not exist.
    """

    line_id: str  # the line over which the ranges will be sent
    tasks: list[PutTask]  # the tasks, in stream order
    keys: list[str] = []  # the keys of each task, in stream order; empty: all keys, in file order
    max_bytes: int = 1 << 26  # maximum total size of the shards, in bytes; the first task is always included


@message(38)
class Held(Message, frozen=True, kw_only=True):
    """The part of a version that the store has, as bytes of a stream with all shards of the version (section 11)."""

    total_bytes: int  # size of the stream
    held_bytes: int  # number of bytes that the store has, counted from the start of the stream
    digests: list[int] = []
    """xxh3-64 of each MiB of the stream, from `Hold.first` on, up to 512 of them. The last MiB may be shorter."""


@message(39, reply=Held)
class Hold(Request, frozen=True, kw_only=True):
    """A reader, or a store on another host, needs this version from this store.

    A store that lacks the version begins to fetch it. Readers get the bytes that have arrived, and wait for the rest.

    Errors:
        bad_request: the task is not a version of the weights, `first` is not the index of one of its chunks, or
            `origin` is not the name of a store.
        busy: there is no room for the version, or too many versions are being fetched.
        collected: the version (`names`) is tombstoned.
        missing: the version does not exist, or its bytes cannot be read from `origin`.
        not_ready: `origin` has not registered, or it does not answer.
    """

    task: PutTask  # the version
    origin: str  # the store into which the trainer put it
    whole: bool = False  # answer when the store has the whole version, or after a second
    first: int = -1  # index of the first MiB whose digest is wanted; -1: no digests
