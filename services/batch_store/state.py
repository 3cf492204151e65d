"""The index of a store: grants, sealed files, tombstones and bytes. The module uses no I/O and no clock. The bytes in
use never exceed the limits on memory and disk.

    grant --seal--> sealed --last task cleared--> zombie --last mapping gone--> nothing
      \\--expired, conflict, collected------------> zombie
    sealed in memory --copied--> sealed on disk, and its file in memory a zombie
    zombie that was sealed --last mapping gone--> spare --put of about its size--> grant; or --room wanted--> zombie

A zombie never becomes sealed again (`room.py`), and no file moves from disk back to memory.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from proto.blockfile import HEADER_BYTES, Table
from proto.errors import WireError
from proto.ids import check_task_id, revised_name
from proto.messages import ErrorCode, PutTask, StoreStats
from services.batch_store.room import Removal, Room, Tier, held_bytes
from shared.rpc.errors import RpcError
from shared.stages import WEIGHTS

GRANT_S = 5.0
"""Seconds after which a grant is withdrawn unless its producer is alive and holds the lock of its file."""
MAX_TOMBSTONES = 8192
"""Maximum number of tombstones; the oldest are forgotten. A put that arrives after its tombstone was forgotten is an
orphan, which no lease names and no reader locates, until the next reconciliation clears it. Tombstones that a file in
this store could contradict after a restart are kept."""
PAGE_TASKS = 4096
SCAN_FILES = 256
"""Maximum number of files, oldest first, that are examined to find one that fits in what is left of the spill."""
_PUT_ID = re.compile(r"[0-9a-f]{32}")
_WEIGHTS = f"{WEIGHTS}/"


@dataclass(slots=True)
class OpenPut:
    """Room reserved for a producer."""

    nbytes: int
    tasks: tuple[PutTask, ...]
    since: float


@dataclass(slots=True)
class Sealed:
    """A file that readers can find. `alive` holds the indices of its tasks that have not been cleared."""

    nbytes: int
    table: Table
    alive: set[int]
    place: Tier = Tier.MEMORY


@dataclass(slots=True)
class TaskFiles:
    """The files with shards of one task: fence -> put ids. `serial` orders the inventory."""

    serial: int
    files: dict[int, list[str]] = field(default_factory=dict)


class StoreState:
    """The index of one store. Its methods are events, which return effects or raise RpcError for the caller."""

    def __init__(self, name: str, memory_bytes: int, incarnation: int, spill_bytes: int = 0) -> None:
        """Takes the same arguments as `Room`."""
        self._name = name
        self.room = Room(name, memory_bytes, incarnation, spill_bytes)
        self.tombstones: dict[str, int] = {}
        """Task id -> highest cleared fence, oldest first, bounded by MAX_TOMBSTONES."""
        self._grants: dict[str, OpenPut] = {}
        self._sealed: dict[str, Sealed] = {}
        self._tasks: dict[str, TaskFiles] = {}
        self._spill_queues: tuple[OrderedDict[str, None], OrderedDict[str, None]] = (OrderedDict(), OrderedDict())
        """Sealed files in memory, oldest first: those of tasks, and those of weights, which are spilled last."""
        self._moving: dict[str, int] = {}
        self._serial = self._shards = 0
        self._puts = self._clears = 0

    # ---- puts

    def check(self, put_id: str, nbytes: int, tasks: Sequence[PutTask]) -> None:
        """Check whether a put could ever be granted, before files are moved for it.

        Raises RpcError(bad_request) or RpcError(collected) if not.
        """
        if not _PUT_ID.fullmatch(put_id):
            raise RpcError(ErrorCode.BAD_REQUEST, f"{self._name}: put id {put_id[:40]!r}: not 32 hexadecimal digits")
        if not tasks or len({task.task_id for task in tasks}) != len(tasks):
            raise RpcError(
                ErrorCode.BAD_REQUEST, f"{self._name}: put {put_id}: must name at least one task, each only once"
            )
        try:
            for task in tasks:
                check_task_id(task.task_id)
        except WireError as error:
            raise RpcError(ErrorCode.BAD_REQUEST, f"{self._name}: put {put_id}: {error}") from None
        if nbytes <= HEADER_BYTES:
            text = f"{self._name}: put {put_id} of {nbytes} bytes: must exceed the header of {HEADER_BYTES} bytes"
            raise RpcError(ErrorCode.BAD_REQUEST, text)
        if held_bytes(nbytes) > self.room.limits[Tier.MEMORY]:
            raise RpcError(
                ErrorCode.BAD_REQUEST,
                f"{self._name}: put of {nbytes} bytes can never fit in {self.room.limits[Tier.MEMORY]} bytes; "
                "put it in parts, or raise services.batch-store.memory",
            )
        self._refuse_collected(tasks)

    def begin(self, put_id: str, nbytes: int, tasks: Sequence[PutTask], now: float, spare: str | None = None) -> bool:
        """Reserve room for a put. Returns True if the caller must create the put's file, from `spare` if there is one,
        and False if the same grant is already open.

        Raises RpcError: bad_request, collected (with `names`), conflict or busy. The spare then remains unused.
        """
        self.check(put_id, nbytes, tasks)
        grant = self._grants.get(put_id)
        if grant is not None:
            if grant.nbytes != nbytes or grant.tasks != tuple(tasks):
                raise RpcError(ErrorCode.CONFLICT, f"{self._name}: put {put_id} is open for different tasks or bytes")
            grant.since = now
            return False
        self.room.reserve(nbytes, spare)
        self._grants[put_id] = OpenPut(nbytes, tuple(tasks), now)
        return True

    def spare(self, put_id: str, nbytes: int) -> str | None:
        """Return the spare whose pages this put should take, or None if there is none or the put has a file."""
        return self.room.spares.nearest(nbytes) if put_id not in self._grants else None

    def make_room(self, put_id: str, nbytes: int) -> list[str]:
        """Give up spares (but not the one that this put should take) to make room. The caller deletes them."""
        return self.room.free_spares(nbytes, self.spare(put_id, nbytes)) if put_id not in self._grants else []

    def to_seal(self, put_id: str) -> int | None:
        """Return the granted size of a file to be sealed, or None if it is sealed already.

        Raises RpcError(missing) for an unknown put, which the producer must begin again.
        """
        grant = self._grants.get(put_id)
        if grant is not None:
            return grant.nbytes
        if put_id in self._sealed:
            return None
        raise RpcError(ErrorCode.MISSING, f"{self._name}: no put {put_id} is open; put it again", names=[put_id])

    def has_new_shards(self, put_id: str, table: Table) -> bool:
        """Return whether a written file has shards that the store lacks. If it has, rename the file, then call `seal`.

        Raises RpcError: bad_request (not what was granted), collected, conflict (same fence, different bytes). If it
        raises or returns False, call `abandon`.
        """
        grant = self._grants[put_id]
        written = list(zip(table.task_ids, table.fences, strict=True))
        if written != [(task.task_id, task.fence) for task in grant.tasks]:
            raise RpcError(ErrorCode.BAD_REQUEST, f"{self._name}: put {put_id} contains tasks other than those granted")
        self._refuse_collected(grant.tasks)
        has_new = False
        for index, (task_id, fence) in enumerate(zip(table.task_ids, table.fences, strict=True)):
            entry = self._tasks.get(task_id)
            earlier = entry.files.get(fence, []) if entry is not None else []
            mine = table.checksums(index) if earlier else {}
            new = set(mine)
            for other in earlier:
                theirs = self._sealed[other].table
                for key, digest in theirs.checksums(theirs.index[task_id, fence]).items():
                    if mine.get(key, digest) != digest:
                        raise RpcError(
                            ErrorCode.CONFLICT,
                            f"{self._name}: put {put_id}: {task_id}#{key} is sealed under fence {fence} with "
                            "different bytes; a new attempt needs a new fence",
                            names=[f"{task_id}#{key}"],
                        )
                    new.discard(key)
            has_new = has_new or not earlier or bool(new)
        return has_new

    def seal(self, put_id: str, table: Table) -> None:
        """Index a file that already has its sealed name. Call `has_new_shards` before and `supersede` afterwards."""
        grant = self._grants.pop(put_id)
        self._puts += 1
        self._index(put_id, grant.nbytes, table, set(range(len(table.task_ids))))

    def supersede(self, put_id: str) -> list[Removal]:
        """Drop the shards that a sealed file replaces: shards of the same tasks in other files whose keys differ from
        this file's only in their revision.

        A task's entry in another file is removed if this file has all shards of that entry. Without this, a step that
        is replayed many times would fill the store with unread shards and wait for room forever. After a restart, this
        is called in seal order and keeps the same entries as before: if a file that covered an entry is gone, its
        shards were covered in turn by a later file, or cleared.
        """
        effects: list[Removal] = []
        table = self._sealed[put_id].table
        if not any(revised_name(key) for key in table.keys):
            return effects
        for index in sorted(self._sealed[put_id].alive):
            task_id, fence = table.task_ids[index], table.fences[index]
            if task_id.startswith(_WEIGHTS):  # its keys are parameter names, which may contain anything
                continue
            mine = table.checksums(index)
            names = {revised_name(key) for key in mine} - {None}
            files = self._tasks[task_id].files[fence]
            for other in [name for name in files if name != put_id]:
                theirs = self._sealed[other].table
                keys = theirs.checksums(theirs.index[task_id, fence])
                if all(revised_name(key) in names for key in keys):
                    self._remove_entry(task_id, fence, files, other)
                    effects.extend(self._drop_entry(other, task_id, fence))
        return effects

    def abandon(self, put_id: str) -> Removal:
        """Give up a grant. Its file becomes a zombie, because the producer may still write to it."""
        grant = self._grants.pop(put_id)
        return self.room.retire(f"{put_id}.tmp", grant.nbytes)

    def is_granted(self, put_id: str) -> bool:
        """Return whether a grant is open."""
        return put_id in self._grants

    def forget(self, put_id: str) -> None:
        """Forget a grant whose file could not be created."""
        self.room.remove(self._grants.pop(put_id).nbytes, Tier.MEMORY)

    def overdue(self, now: float) -> list[str]:
        """Return the grants old enough to be abandoned if their producers no longer hold the files' locks."""
        return [put_id for put_id, grant in self._grants.items() if now - grant.since > GRANT_S]

    # ---- reads

    def locate(self, tasks: Sequence[PutTask]) -> tuple[list[str], list[list[int]]]:
        """Return put ids and, for each task, the indices of the puts that hold it.

        Raises RpcError(collected) or RpcError(missing), with `names`.
        """
        self._refuse_collected(tasks)
        numbers: dict[str, int] = {}
        places: list[list[int]] = []
        missing: list[str] = []
        for task in tasks:
            entry = self._tasks.get(task.task_id)
            files = entry.files.get(task.fence) if entry is not None else None
            if not files:
                missing.append(task.task_id)
                continue
            places.append([numbers.setdefault(put_id, len(numbers)) for put_id in files])
        if missing:
            raise RpcError(
                ErrorCode.MISSING,
                f"{self._name}: {len(missing)} of {len(tasks)} tasks have no shards here: {', '.join(missing[:8])}",
                names=missing,
            )
        return list(numbers), places

    def sealed(self, put_id: str) -> Sealed:
        """Return a sealed file."""
        return self._sealed[put_id]

    def place_of(self, put_id: str) -> Tier | None:
        """Return where a sealed file is, or None if it is no longer sealed."""
        sealed = self._sealed.get(put_id)
        return sealed.place if sealed is not None else None

    def files_of(self, tasks: Iterable[PutTask]) -> dict[str, list[int]]:
        """Return the files that hold any of these tasks: put id -> indices of the tasks in that file."""
        by_file: dict[str, list[int]] = {}
        for task in tasks:
            entry = self._tasks.get(task.task_id)
            for put_id in entry.files.get(task.fence, ()) if entry is not None else ():
                by_file.setdefault(put_id, []).append(self._sealed[put_id].table.index[task.task_id, task.fence])
        return by_file

    def lose(self, put_id: str, tasks: Iterable[int] | None = None) -> list[Removal]:
        """Remove a sealed file whose bytes are gone, or only the given tasks from it. Their shards then count as
        missing."""
        table = self._sealed[put_id].table
        effects: list[Removal] = []
        for index in sorted(self._sealed[put_id].alive if tasks is None else self._sealed[put_id].alive & set(tasks)):
            task_id, fence = table.task_ids[index], table.fences[index]
            files = self._tasks[task_id].files
            self._remove_entry(task_id, fence, files[fence], put_id)
            if not files[fence]:
                del files[fence]
            if not files:
                del self._tasks[task_id]
            effects.extend(self._drop_entry(put_id, task_id, fence))
        return effects

    def inventory(self, cursor: int) -> tuple[list[PutTask], int]:
        """Return one page of sealed (task, fence) pairs and the cursor of the next page, or 0 at the end."""
        page: list[PutTask] = []
        last = 0
        for task_id, entry in self._tasks.items():
            if entry.serial <= cursor:
                continue
            if len(page) >= PAGE_TASKS:
                return page, last
            page.extend(PutTask(task_id, fence) for fence in entry.files)
            last = entry.serial
        return page, 0

    def content_hashes(self, task: PutTask) -> list[int]:
        """Return the content hash of a task's shards in each file that holds any; an empty list if no file does."""
        entry = self._tasks.get(task.task_id)
        tables = [self._sealed[put_id].table for put_id in entry.files.get(task.fence, ())] if entry is not None else []
        return [table.content_hash(table.index[task.task_id, task.fence]) for table in tables]

    def stats(self) -> StoreStats:
        """Return exact counts. Bytes are counted in whole pages and include memory and spill."""
        return StoreStats(
            bytes=sum(self.room.used),
            limit_bytes=self.room.limit_bytes,
            shards=self._shards,
            tasks=len(self._tasks),
            files=len(self._sealed),
            zombie_bytes=self.room.zombie_bytes,
            spare_bytes=self.room.spare_bytes,
            lent=self.room.lent,
            tombstones=len(self.tombstones),
            puts=self._puts,
            clears=self._clears,
            busy=self.room.busy,
        )

    # ---- the removal of tasks and files

    def entomb(self, tasks: Iterable[PutTask]) -> list[PutTask]:
        """Return the tombstones that are new. The caller makes them durable before `clear`."""
        return [task for task in tasks if not self.is_collected(task)]

    def is_collected(self, task: PutTask) -> bool:
        """Return whether a tombstone covers this fence of the task."""
        return self.tombstones.get(task.task_id, -1) >= task.fence

    def clear(self, tasks: Iterable[PutTask]) -> list[Removal]:
        """Set a tombstone for each (task, fence) and drop its shards with that fence or a lower one. Idempotent."""
        effects: list[Removal] = []
        for task in tasks:
            if not self.is_collected(task):
                self.tombstones.pop(task.task_id, None)  # becomes the youngest
                self.tombstones[task.task_id] = task.fence
                self._clears += 1
            entry = self._tasks.get(task.task_id)
            if entry is None:
                continue
            for fence in [fence for fence in entry.files if fence <= task.fence]:
                put_ids = entry.files.pop(fence)
                self._shards -= self._count_shards(task.task_id, fence, put_ids)
                for put_id in put_ids:
                    effects.extend(self._drop_entry(put_id, task.task_id, fence))
            if not entry.files:
                del self._tasks[task.task_id]
        self._forget_tombstones()
        return effects

    # ---- the spill

    def lacks_room(self, put_id: str, nbytes: int) -> bool:
        """Return whether this put would be refused for lack of memory that a spill could free."""
        if put_id in self._grants or held_bytes(nbytes) > self.room.limits[Tier.MEMORY]:
            return False
        return self.room.missing_bytes(nbytes, self.spare(put_id, nbytes)) > 0

    def begin_move(self) -> str | None:
        """Reserve room in the spill for the oldest sealed file that fits (weights last) and return it, or None."""
        free = self.room.limits[Tier.DISK] - self.room.used[Tier.DISK]
        if free <= 0:
            return None
        for order in self._spill_queues:
            for put_id in islice(order, SCAN_FILES):
                nbytes = held_bytes(self._sealed[put_id].nbytes)
                if nbytes <= free:
                    del order[put_id]
                    self._moving[put_id] = nbytes
                    self.room.add(nbytes, Tier.DISK)
                    return put_id
        return None

    def end_move(self, put_id: str) -> Removal:
        """Replace the file in memory, which becomes a zombie, with the copy on disk, which has its sealed name."""
        nbytes = self._sealed[put_id].nbytes
        del self._moving[put_id]
        self._sealed[put_id].place = Tier.DISK
        return self.room.retire(f"{put_id}.blk", nbytes, Tier.MEMORY)

    def give_up_move(self, put_id: str, *, retry: bool) -> None:
        """Release the room of a move that failed. If `retry` is true, the file may be moved later."""
        self.room.remove(self._moving.pop(put_id), Tier.DISK)
        if retry and put_id in self._sealed:
            order = self._spill_queue(self._sealed[put_id].table)
            order[put_id] = None
            order.move_to_end(put_id, last=False)

    # ---- after a restart

    def recall(self, tombstones: Iterable[PutTask]) -> None:
        """Restore the tombstones of earlier incarnations, oldest first, before any `recover`."""
        for task in tombstones:
            fence = max(self.tombstones.pop(task.task_id, -1), task.fence)
            self.tombstones[task.task_id] = fence

    def recover(self, put_id: str, nbytes: int, table: Table, place: Tier = Tier.MEMORY) -> list[Removal]:
        """Restore a sealed file of an earlier incarnation, without its cleared or superseded shards. Its checksums
        have been verified.

        Call this in seal order. If a file exists both on disk and in memory, one copy is recovered and the other is
        refused.
        """
        self.room.add(nbytes, place)
        alive = {
            i
            for i, (task_id, fence) in enumerate(zip(table.task_ids, table.fences, strict=True))
            if self.tombstones.get(task_id, -1) < fence
        }
        if not alive:
            return [self.room.retire(f"{put_id}.blk", nbytes, place)]
        self._index(put_id, nbytes, table, alive, place)
        return self.supersede(put_id)

    def recover_refuse(self, name: str, nbytes: int, place: Tier = Tier.MEMORY) -> Removal:
        """Retire an unsealed, damaged, dead or duplicate file of an earlier incarnation, which may still be mapped."""
        self.room.add(nbytes, place)
        return self.room.retire(name, nbytes, place)

    # ---- inside

    def _refuse_collected(self, tasks: Sequence[PutTask]) -> None:
        names = [task.task_id for task in tasks if self.is_collected(task)]
        if names:
            raise RpcError(
                ErrorCode.COLLECTED,
                f"{self._name}: {len(names)} of {len(tasks)} tasks were collected: {', '.join(names[:8])}",
                names=names,
            )

    def _index(self, put_id: str, nbytes: int, table: Table, alive: set[int], place: Tier = Tier.MEMORY) -> None:
        self._sealed[put_id] = Sealed(nbytes, table, alive, place)
        if place == Tier.MEMORY:
            self._spill_queue(table)[put_id] = None
        for index in sorted(alive):
            task_id, fence = table.task_ids[index], table.fences[index]
            entry = self._tasks.get(task_id)
            if entry is None:
                self._serial += 1
                entry = self._tasks[task_id] = TaskFiles(self._serial)
            files = entry.files.setdefault(fence, [])
            self._shards -= self._count_shards(task_id, fence, files)
            files.append(put_id)
            self._shards += self._count_shards(task_id, fence, files)

    def _drop_entry(self, put_id: str, task_id: str, fence: int) -> list[Removal]:
        sealed = self._sealed[put_id]
        index = sealed.table.index[task_id, fence]
        sealed.alive.discard(index)
        if sealed.alive:
            return []
        del self._sealed[put_id]
        self._spill_queue(sealed.table).pop(put_id, None)
        return [self.room.retire(f"{put_id}.blk", sealed.nbytes, sealed.place, lend=True)]

    def _remove_entry(self, task_id: str, fence: int, put_ids: list[str], put_id: str) -> None:
        """Remove a task's entry in one of its files. The other files may hold the same shards."""
        self._shards -= self._count_shards(task_id, fence, put_ids)
        put_ids.remove(put_id)
        self._shards += self._count_shards(task_id, fence, put_ids)

    def _count_shards(self, task_id: str, fence: int, put_ids: Sequence[str]) -> int:
        """Return the number of shards of one task in these files. A shard that was put twice counts once."""
        tables = [self._sealed[put_id].table for put_id in put_ids]
        keys = [table.keys for table in tables]
        if len(keys) == 1 or sum(map(len, keys)) == len(set[str]().union(*keys)):  # the usual case: no key occurs twice
            return sum(table.count(table.index[task_id, fence]) for table in tables)
        return len(set[str]().union(*[table.checksums(table.index[task_id, fence]) for table in tables]))

    def _spill_queue(self, table: Table) -> OrderedDict[str, None]:
        return self._spill_queues[all(task_id.startswith(_WEIGHTS) for task_id in table.task_ids)]

    def _forget_tombstones(self) -> None:
        """Limit the number of tombstones. Tombstones that a file could contradict after a restart are kept."""
        if len(self.tombstones) <= MAX_TOMBSTONES:
            return
        needed = {
            task_id
            for sealed in self._sealed.values()
            if len(sealed.alive) < len(sealed.table.task_ids)
            for index, task_id in enumerate(sealed.table.task_ids)
            if index not in sealed.alive
        }
        spare = [task_id for task_id in self.tombstones if task_id not in needed]
        # The slack avoids a sweep at every clear.
        for task_id in spare[: len(self.tombstones) - MAX_TOMBSTONES * 15 // 16]:
            del self.tombstones[task_id]
