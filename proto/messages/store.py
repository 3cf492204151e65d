"""Messages to the batch store: room for puts, places of shards, and their collection."""

from __future__ import annotations

from proto.messages.common import Ack
from proto.registry import Message, Record, Request, message


class PutTask(Record, frozen=True, array_like=True, gc=False):
    """One task in a put, with its fence."""

    task_id: str
    fence: int


@message(60)
class PutGrant(Message, frozen=True, kw_only=True):
    """Answer to `PutBegin`: write the file of SPEC section 9 at `path`, then seal it."""

    path: str


@message(61, reply=PutGrant)
class PutBegin(Request, frozen=True, kw_only=True):
    """A producer asks for `nbytes` of room for one file with the shards of these tasks. Error: busy, collected.

    `put_id` is 32 hexadecimal digits chosen by the producer. A retry of the whole put uses the same one. `full`: the
    mount had no room for the previous grant.
    """

    put_id: str
    nbytes: int
    tasks: list[PutTask]
    full: bool = False


@message(62)
class PutSealed(Message, frozen=True, kw_only=True):
    """Answer to `PutSeal`: from here on, the shards survive the death of the store."""

    nbytes: int


@message(63, reply=PutSealed)
class PutSeal(Request, frozen=True, kw_only=True):
    """The producer has written the file. Sealing twice is one seal; other bytes under a sealed id are a conflict."""

    put_id: str


@message(64)
class Located(Message, frozen=True, kw_only=True):
    """Answer to `Locate`. `files[i]` is a path; `places[j]` lists the indices of the `files` that hold task `j`."""

    files: list[str]
    places: list[list[int]]


@message(65, reply=Located)
class Locate(Request, frozen=True, kw_only=True):
    """A reader asks which sealed files hold these tasks with these fences. Error: missing, collected."""

    tasks: list[PutTask]


@message(66, reply=Ack)
class Clear(Request, frozen=True, kw_only=True):
    """The scheduler tombstones each (task, fence): every shard of the task with that fence or a lower one is deleted.

    Idempotent. Later puts under a tombstoned fence are refused.
    """

    tasks: list[PutTask]


@message(67)
class Inventory(Message, frozen=True, kw_only=True):
    """Answer to `GetInventory`: one page of the sealed shards. `cursor` 0: this was the last page."""

    tasks: list[PutTask]
    cursor: int


@message(68, reply=Inventory)
class GetInventory(Request, frozen=True, kw_only=True):
    """The scheduler asks a store for its contents, page by page, to reconcile."""

    cursor: int = 0


@message(69)
class StoreStats(Message, frozen=True, kw_only=True):
    """Answer to `GetStoreStats`. `bytes`: sealed, granted, collected but mapped (zombies), kept for reuse (spares).

    `lent`: puts that were given a spare; `busy`: times that a producer had to wait for room under the limit or on the
    mount.
    """

    bytes: int
    limit_bytes: int
    shards: int
    tasks: int
    files: int
    zombie_bytes: int
    tombstones: int
    puts: int
    clears: int
    busy: int
    spare_bytes: int = 0
    lent: int = 0


@message(70, reply=StoreStats)
class GetStoreStats(Request, frozen=True, kw_only=True):
    """Anyone asks a store for exact counts."""
