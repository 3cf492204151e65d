"""Messages to the batch store: room for puts, shard locations, and the collection of shards."""

from __future__ import annotations

from proto.messages.common import Ack
from proto.registry import Message, Record, Request, message


class PutTask(Record, frozen=True, array_like=True, gc=False):
    """One task in a put, with its fence."""

    task_id: str
    fence: int


@message(60)
class PutGrant(Message, frozen=True, kw_only=True):
    """The producer may write the file (section 9) and then seal it."""

    path: str  # path of the file


@message(61, reply=PutGrant)
class PutBegin(Request, frozen=True, kw_only=True):
    """A producer asks for room for one file with the shards of these tasks. Asking again returns the same path.

    Errors:
        bad_request: the put id or a task id is malformed, there are no tasks, a task occurs twice, or `nbytes` is at
            most 64 or exceeds the store's memory.
        busy: there is no room, no descriptor is left, or the mount is full.
        collected: tasks (`names`) are tombstoned at these fences. The whole put is refused.
        conflict: the put id is open with different tasks or a different size.
    """

    put_id: str  # 32 lower-case hexadecimal digits, chosen at random; a retry of the whole put uses the same id
    nbytes: int  # size of the file
    tasks: list[PutTask]  # the tasks, in file order
    full: bool = False  # the mount, or a quota, had no room for the bytes of the previous grant


@message(62)
class PutSealed(Message, frozen=True, kw_only=True):
    """The shards now survive the death of the store."""

    nbytes: int  # size of the file


@message(63, reply=PutSealed)
class PutSeal(Request, frozen=True, kw_only=True):
    """The producer has written the file. Sealing twice has the same effect as sealing once.

    After bad_request, collected or conflict, the grant no longer exists.

    Errors:
        bad_request: the file is malformed, or does not contain the granted tasks.
        busy: the mount has no room, or no descriptor is left. Nothing is sealed: ask again.
        collected: tasks (`names`) were tombstoned in the meantime. The whole put is refused.
        conflict: shards (`names`) are sealed with different bytes.
        missing: no such put (`names`) is open. Begin again.
    """

    put_id: str  # as in `PutBegin`


@message(64)
class Located(Message, frozen=True, kw_only=True):
    """The sealed files that hold the tasks."""

    files: list[str]  # paths
    places: list[list[int]]  # for each task in the request, the indices of the files that hold it


@message(65, reply=Located)
class Locate(Request, frozen=True, kw_only=True):
    """A reader asks which sealed files hold these tasks.

    Errors:
        collected: tasks (`names`) are tombstoned at these fences. This is checked before missing.
        missing: tasks (`names`) were never put with these fences.
    """

    tasks: list[PutTask]  # the tasks, with the fences that the scheduler accepted


@message(66, reply=Ack)
class Clear(Request, frozen=True, kw_only=True):
    """The scheduler tombstones tasks: every shard of such a task with the given fence or a lower one is deleted.

    Clearing twice has the same effect as clearing once. Later puts and reads under a tombstoned fence are refused.

    Errors:
        bad_request: a task id is malformed, or a fence is outside 0 to 2^63 - 1. In this case, nothing is cleared.
    """

    tasks: list[PutTask]  # the tasks, each with the highest fence to be cleared


@message(67)
class Inventory(Message, frozen=True, kw_only=True):
    """One page of the tasks whose shards are sealed."""

    tasks: list[PutTask]  # the tasks with their fences
    cursor: int  # cursor of the next page; 0: this is the last page
    files: list[int] = []  # for each task, the number of its files
    hashes: list[int] = []  # the content hash (section 8) of the shards in each of these files, task by task


@message(68, reply=Inventory)
class GetInventory(Request, frozen=True, kw_only=True):
    """The scheduler asks a store for its contents, page by page, to reconcile its own state with them.

    With `tasks`, the store reads the shards of these tasks again, drops shards whose checksums do not match, and lists
    the rest on one page.

    Errors:
        busy: no descriptor is left.
    """

    cursor: int = 0  # `Inventory.cursor` of the previous page; 0 for the first
    tasks: list[PutTask] = []  # the tasks to check; empty: list everything


@message(69)
class StoreStats(Message, frozen=True, kw_only=True):
    """Exact counts of a store."""

    bytes: int  # bytes held: sealed, granted, collected but still mapped, and kept for reuse
    limit_bytes: int  # maximum of `bytes`
    shards: int  # sealed shards
    tasks: int  # tasks with sealed shards
    files: int  # sealed files
    zombie_bytes: int  # bytes of collected files that are still mapped
    tombstones: int  # tasks with a tombstone
    puts: int  # puts sealed by this incarnation
    clears: int  # tasks cleared by this incarnation
    busy: int  # number of times that a producer had to wait for room, under the limit or on the mount
    spare_bytes: int = 0  # bytes of collected files that are kept for later puts
    lent: int = 0  # puts that reused a kept file


@message(70, reply=StoreStats)
class GetStoreStats(Request, frozen=True, kw_only=True):
    """Ask a store for exact counts."""
