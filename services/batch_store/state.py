"""What a store holds and what it owes: grants, sealed files, tombstones, bytes. No I/O, no clock; it must never let
the bytes it answers for pass the limit.

    grant --seal--> sealed --last task cleared--> zombie --last mapping gone--> nothing
      \\--expired, conflict, collected------------> zombie
    sealed in memory --copied--> sealed on disk, and its file in memory a zombie
    zombie that was sealed --last mapping gone--> spare --put of about its size--> grant; or --room wanted--> zombie

There is no way back from zombie to sealed (`room.py`), nor from disk to memory. Memory and disk have a limit each.
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
from services.batch_store.room import Place, Retire, Room, held_bytes
from shared.rpc.errors import RpcError
from shared.stages import WEIGHTS

GRANT_S = 5.0
"""A grant that nobody writes to is taken back after so long: its producer died."""
MAX_TOMBSTONES = 65536
"""The oldest are forgotten past these. A put that comes later still makes an orphan: no lease names it, nobody locates
it, and the next reconciliation clears it. A tombstone that a file here could contradict after a restart is kept."""
PAGE_TASKS = 4096
SCAN_FILES = 256
"""How many of the oldest files are looked at for one that fits the rest of the spill."""
_PUT_ID = re.compile(r"[0-9a-f]{32}")
_WEIGHTS = f"{WEIGHTS}/"


@dataclass(slots=True)
class Grant:
    """Room that a producer was promised."""

    nbytes: int
    tasks: tuple[PutTask, ...]
    since: float


@dataclass(slots=True)
class Sealed:
    """A file readers may find. `alive`: indices of its tasks that were not cleared."""

    nbytes: int
    table: Table
    alive: set[int]
    place: Place = Place.MEMORY


@dataclass(slots=True)
class Held:
    """Where the shards of one task are: fence -> put ids. `serial` orders the inventory."""

    serial: int
    files: dict[int, list[str]] = field(default_factory=dict)


class StoreState(Room):
    """The index of one store. Methods are events; they return effects or raise RpcError for the caller."""

    def __init__(self, name: str, memory_bytes: int, incarnation: int, spill_bytes: int = 0) -> None:
        """As of `Room`."""
        super().__init__(name, memory_bytes, incarnation, spill_bytes)
        self.tombstones: dict[str, int] = {}
        """task id -> highest fence that was cleared; oldest first, bounded by MAX_TOMBSTONES."""
        self._grants: dict[str, Grant] = {}
        self._sealed: dict[str, Sealed] = {}
        self._tasks: dict[str, Held] = {}
        self._movable: tuple[OrderedDict[str, None], OrderedDict[str, None]] = (OrderedDict(), OrderedDict())
        """Sealed files in memory, oldest first: those of tasks, those of weights (which spill last)."""
        self._moving: dict[str, int] = {}
        self._serial = self._shards = 0
        self._puts = self._clears = 0

    # ---- puts

    def check(self, put_id: str, nbytes: int, tasks: Sequence[PutTask]) -> None:
        """Before anything is moved for it: could this put ever be granted? Raises RpcError: bad_request, collected."""
        self._check_put(put_id, nbytes, tasks)
        self._refuse_collected(tasks)

    def begin(self, put_id: str, nbytes: int, tasks: Sequence[PutTask], now: float, spare: str | None = None) -> bool:
        """Reserve room. True: create the file, of `spare` if there is one; False: this very grant is open already.

        Raises RpcError: bad_request, collected (`names`), conflict, busy. The spare is one still after that.
        """
        self.check(put_id, nbytes, tasks)
        grant = self._grants.get(put_id)
        if grant is not None:
            if grant.nbytes != nbytes or grant.tasks != tuple(tasks):
                raise RpcError(ErrorCode.CONFLICT, f"{self._name}: put {put_id} is open with other tasks or sizes")
            grant.since = now
            return False
        self._reserve(nbytes, spare)
        self._grants[put_id] = Grant(nbytes, tuple(tasks), now)
        return True

    def spare(self, put_id: str, nbytes: int) -> str | None:
        """The spare whose pages this put should take, unless it has its file already."""
        return self._spares.nearest(nbytes) if put_id not in self._grants else None

    def make_room(self, put_id: str, nbytes: int) -> list[str]:
        """Spares in the way of this put, the one that it should take excepted: zombies now, delete them."""
        return self._free_spares(nbytes, self.spare(put_id, nbytes)) if put_id not in self._grants else []

    def to_seal(self, put_id: str) -> int | None:
        """Size of the granted file to check, or None: sealed already. Raises RpcError(missing): put it again."""
        grant = self._grants.get(put_id)
        if grant is not None:
            return grant.nbytes
        if put_id in self._sealed:
            return None
        raise RpcError(ErrorCode.MISSING, f"{self._name}: no put {put_id} is open; put it again", names=[put_id])

    def sealed_bytes(self, put_id: str) -> int:
        """Size of a sealed file."""
        return self._sealed[put_id].nbytes

    def adds(self, put_id: str, table: Table) -> bool:
        """What comes of a written file. True: rename it to its sealed name, then `seal`; False: all of it is here.

        Raises RpcError: bad_request (not what was granted), collected, conflict (same fence, other bytes). After False
        or an error the file must go: `abandon`.
        """
        grant = self._grants[put_id]
        written = list(zip(table.task_ids, table.fences, strict=True))
        if written != [(task.task_id, task.fence) for task in grant.tasks]:
            raise RpcError(ErrorCode.BAD_REQUEST, f"{self._name}: put {put_id} holds other tasks than were granted")
        self._refuse_collected(grant.tasks)
        return self._has_new(put_id, table)

    def seal(self, put_id: str, table: Table) -> None:
        """Make a file findable that `adds` and has its sealed name: a restart would find it. Then `supersede`."""
        grant = self._grants.pop(put_id)
        self._puts += 1
        self._index(put_id, grant.nbytes, table, set(range(len(table.task_ids))))

    def supersede(self, put_id: str) -> list[Retire]:
        """Drop what a sealed file takes the place of: shards of its tasks that differ in the revision only.

        A task's entry in another file goes when this one has all that is in it. Without this a step that is replayed
        again and again would fill the store with what nobody reads, and wait for room for ever. Called in the order of
        the seals after a restart, too, it leaves what it left before: what covered an entry and is gone was covered
        itself by something later, or was cleared.
        """
        effects: list[Retire] = []
        table = self._sealed[put_id].table
        if not any(revised_name(key) for key in table.keys):
            return effects
        for index in sorted(self._sealed[put_id].alive):
            task_id, fence = table.task_ids[index], table.fences[index]
            if task_id.startswith(_WEIGHTS):  # its keys are names of parameters, whatever is in them
                continue
            mine = table.checksums(index)
            names = {revised_name(key) for key in mine} - {None}
            files = self._tasks[task_id].files[fence]
            for other in [each for each in files if each != put_id]:
                theirs = self._sealed[other].table
                keys = theirs.checksums(theirs.index[task_id, fence])
                if all(revised_name(key) in names for key in keys):
                    self._unlist(task_id, fence, files, other)
                    effects.extend(self._kill(other, task_id, fence))
        return effects

    def abandon(self, put_id: str) -> Retire:
        """Give up a grant: its file becomes a zombie, because its producer may still write to it."""
        grant = self._grants.pop(put_id)
        return self._retire(f"{put_id}.tmp", grant.nbytes)

    def forget(self, put_id: str) -> None:
        """A grant whose file could not be made."""
        self._used[Place.MEMORY] -= held_bytes(self._grants.pop(put_id).nbytes)

    def overdue(self, now: float) -> list[str]:
        """Grants old enough to be abandoned, unless their producer still holds its lock."""
        return [put_id for put_id, grant in self._grants.items() if now - grant.since > GRANT_S]

    # ---- reads

    def locate(self, tasks: Sequence[PutTask]) -> tuple[list[str], list[list[int]]]:
        """Put ids, and for each task which of them hold it. Raises RpcError: collected, missing (`names`)."""
        self._refuse_collected(tasks)
        numbers: dict[str, int] = {}
        places: list[list[int]] = []
        missing: list[str] = []
        for task in tasks:
            held = self._tasks.get(task.task_id)
            files = held.files.get(task.fence) if held is not None else None
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

    def place(self, put_id: str) -> Place:
        """Where a sealed file lies."""
        return self._sealed[put_id].place

    def table(self, put_id: str) -> Table:
        """What a sealed file holds."""
        return self._sealed[put_id].table

    def lose(self, put_id: str) -> list[Retire]:
        """Somebody deleted this sealed file: what was in it is missing from here on."""
        table = self._sealed[put_id].table
        effects: list[Retire] = []
        for index in sorted(self._sealed[put_id].alive):
            task_id, fence = table.task_ids[index], table.fences[index]
            files = self._tasks[task_id].files
            self._unlist(task_id, fence, files[fence], put_id)
            if not files[fence]:
                del files[fence]
            if not files:
                del self._tasks[task_id]
            effects.extend(self._kill(put_id, task_id, fence))
        return effects

    def inventory(self, cursor: int) -> tuple[list[PutTask], int]:
        """One page of (task, fence) that are sealed, and the cursor of the next one (0: none)."""
        page: list[PutTask] = []
        last = 0
        for task_id, held in self._tasks.items():
            if held.serial <= cursor:
                continue
            if len(page) >= PAGE_TASKS:
                return page, last
            page.extend(PutTask(task_id, fence) for fence in held.files)
            last = held.serial
        return page, 0

    def stats(self) -> StoreStats:
        """Exact counts. Bytes in whole pages, of memory and spill together."""
        return StoreStats(
            bytes=sum(self._used),
            limit_bytes=self.limit_bytes,
            shards=self._shards,
            tasks=len(self._tasks),
            files=len(self._sealed),
            zombie_bytes=self._zombie_bytes,
            spare_bytes=self._spare_bytes,
            lent=self._lent,
            tombstones=len(self.tombstones),
            puts=self._puts,
            clears=self._clears,
            busy=self._busy,
        )

    # ---- the end of tasks and files

    def entomb(self, tasks: Iterable[PutTask]) -> list[PutTask]:
        """The tombstones that are new: make them durable before `clear`."""
        return [task for task in tasks if self.tombstones.get(task.task_id, -1) < task.fence]

    def clear(self, tasks: Iterable[PutTask]) -> list[Retire]:
        """Tombstone each (task, fence) and drop its shards with that fence or a lower one. Idempotent."""
        effects: list[Retire] = []
        for task in tasks:
            if self.tombstones.get(task.task_id, -1) < task.fence:
                self.tombstones.pop(task.task_id, None)  # to the young end
                self.tombstones[task.task_id] = task.fence
                self._clears += 1
            held = self._tasks.get(task.task_id)
            if held is None:
                continue
            for fence in [fence for fence in held.files if fence <= task.fence]:
                put_ids = held.files.pop(fence)
                self._shards -= self._different(task.task_id, fence, put_ids)
                for put_id in put_ids:
                    effects.extend(self._kill(put_id, task.task_id, fence))
            if not held.files:
                del self._tasks[task.task_id]
        self._forget_tombstones()
        return effects

    # ---- the spill

    def lacks_room(self, put_id: str, nbytes: int) -> bool:
        """Would this put be refused for want of memory that a spill could make?"""
        if put_id in self._grants or held_bytes(nbytes) > self.limits[Place.MEMORY]:
            return False
        return self._missing_bytes(nbytes, self.spare(put_id, nbytes)) > 0

    def begin_move(self) -> str | None:
        """Choose the oldest sealed file that fits the spill (weights last) and take its room there, or None."""
        free = self.limits[Place.DISK] - self._used[Place.DISK]
        if free <= 0:
            return None
        for order in self._movable:
            for put_id in islice(order, SCAN_FILES):
                nbytes = held_bytes(self._sealed[put_id].nbytes)
                if nbytes <= free:
                    del order[put_id]
                    self._moving[put_id] = nbytes
                    self._used[Place.DISK] += nbytes
                    return put_id
        return None

    def wanted(self, put_id: str) -> bool:
        """Is a file that is being moved still sealed? Its tasks may have been cleared meanwhile."""
        return put_id in self._sealed

    def end_move(self, put_id: str) -> Retire:
        """The copy on disk has its sealed name: it is the file from here on, the one in memory a zombie."""
        nbytes = self._sealed[put_id].nbytes
        del self._moving[put_id]
        self._sealed[put_id].place = Place.DISK
        return self._retire(f"{put_id}.blk", nbytes, Place.MEMORY)

    def give_up_move(self, put_id: str, *, retry: bool) -> None:
        """There is no copy on disk. `retry`: the file may be tried again."""
        self._used[Place.DISK] -= self._moving.pop(put_id)
        if retry and put_id in self._sealed:
            order = self._order_of(self._sealed[put_id].table)
            order[put_id] = None
            order.move_to_end(put_id, last=False)

    # ---- after a restart

    def recall(self, tombstones: Iterable[PutTask]) -> None:
        """Tombstones of the former life, oldest first; before any `recover`."""
        for task in tombstones:
            fence = max(self.tombstones.pop(task.task_id, -1), task.fence)
            self.tombstones[task.task_id] = fence

    def recover(self, put_id: str, nbytes: int, table: Table, place: Place = Place.MEMORY) -> list[Retire]:
        """A sealed file of the former life, its checksums verified. What was cleared or superseded stays so.

        In the order of the seals. A file that was found on disk and in memory is recovered once: the other is refused.
        """
        self._used[place] += held_bytes(nbytes)
        alive = {
            i
            for i, (task_id, fence) in enumerate(zip(table.task_ids, table.fences, strict=True))
            if self.tombstones.get(task_id, -1) < fence
        }
        if not alive:
            return [self._retire(f"{put_id}.blk", nbytes, place)]
        self._index(put_id, nbytes, table, alive, place)
        return self.supersede(put_id)

    def recover_refuse(self, name: str, nbytes: int, place: Place = Place.MEMORY) -> Retire:
        """An unsealed, damaged, dead or doubled file of the former life, which somebody may still map."""
        self._used[place] += held_bytes(nbytes)
        return self._retire(name, nbytes, place)

    # ---- inside

    def _check_put(self, put_id: str, nbytes: int, tasks: Sequence[PutTask]) -> None:
        if not _PUT_ID.fullmatch(put_id):
            raise RpcError(ErrorCode.BAD_REQUEST, f"{self._name}: put id {put_id[:40]!r}: 32 hexadecimal digits")
        if not tasks or len({task.task_id for task in tasks}) != len(tasks):
            raise RpcError(ErrorCode.BAD_REQUEST, f"{self._name}: put {put_id}: each task once, at least one")
        try:
            for task in tasks:
                check_task_id(task.task_id)
        except WireError as error:
            raise RpcError(ErrorCode.BAD_REQUEST, f"{self._name}: put {put_id}: {error}") from None
        if nbytes <= HEADER_BYTES:
            raise RpcError(ErrorCode.BAD_REQUEST, f"{self._name}: put {put_id} of {nbytes} bytes: a file has more")
        if held_bytes(nbytes) > self.limits[Place.MEMORY]:
            raise RpcError(
                ErrorCode.BAD_REQUEST,
                f"{self._name}: put of {nbytes} bytes can never fit in {self.limits[Place.MEMORY]}; "
                "put in parts or raise services.batch-store.memory",
            )

    def _refuse_collected(self, tasks: Sequence[PutTask]) -> None:
        names = [task.task_id for task in tasks if self.tombstones.get(task.task_id, -1) >= task.fence]
        if names:
            raise RpcError(
                ErrorCode.COLLECTED,
                f"{self._name}: {len(names)} of {len(tasks)} tasks were collected: {', '.join(names[:8])}",
                names=names,
            )

    def _has_new(self, put_id: str, table: Table) -> bool:
        """Does the file hold anything new? Raises RpcError(conflict) for other bytes under a known name."""
        adds = False
        for index, (task_id, fence) in enumerate(zip(table.task_ids, table.fences, strict=True)):
            held = self._tasks.get(task_id)
            known = held.files.get(fence, []) if held is not None else []
            mine = table.checksums(index) if known else {}
            new = set(mine)
            for other in known:
                theirs = self._sealed[other].table
                for key, digest in theirs.checksums(theirs.index[task_id, fence]).items():
                    if mine.get(key, digest) != digest:
                        raise RpcError(
                            ErrorCode.CONFLICT,
                            f"{self._name}: put {put_id}: {task_id}#{key} is sealed under fence {fence} with other "
                            "bytes; a new attempt needs a new fence",
                            names=[f"{task_id}#{key}"],
                        )
                    new.discard(key)
            adds = adds or not known or bool(new)
        return adds

    def _index(self, put_id: str, nbytes: int, table: Table, alive: set[int], place: Place = Place.MEMORY) -> None:
        self._sealed[put_id] = Sealed(nbytes, table, alive, place)
        if place == Place.MEMORY:
            self._order_of(table)[put_id] = None
        for index in sorted(alive):
            task_id, fence = table.task_ids[index], table.fences[index]
            held = self._tasks.get(task_id)
            if held is None:
                self._serial += 1
                held = self._tasks[task_id] = Held(self._serial)
            files = held.files.setdefault(fence, [])
            self._shards -= self._different(task_id, fence, files)
            files.append(put_id)
            self._shards += self._different(task_id, fence, files)

    def _kill(self, put_id: str, task_id: str, fence: int) -> list[Retire]:
        sealed = self._sealed[put_id]
        index = sealed.table.index[task_id, fence]
        sealed.alive.discard(index)
        if sealed.alive:
            return []
        del self._sealed[put_id]
        self._order_of(sealed.table).pop(put_id, None)
        effect = self._retire(f"{put_id}.blk", sealed.nbytes, sealed.place)
        if sealed.place == Place.MEMORY and self._spares.fits(sealed.nbytes):
            self._worth_keeping[effect.target] = sealed.nbytes
        return [effect]

    def _unlist(self, task_id: str, fence: int, put_ids: list[str], put_id: str) -> None:
        """A task's entry in one of its files goes; the others may hold the same shards."""
        self._shards -= self._different(task_id, fence, put_ids)
        put_ids.remove(put_id)
        self._shards += self._different(task_id, fence, put_ids)

    def _different(self, task_id: str, fence: int, put_ids: Sequence[str]) -> int:
        """How many shards of one task these files hold: one that was put twice, the same bytes, is one."""
        tables = [self._sealed[put_id].table for put_id in put_ids]
        keys = [table.keys for table in tables]
        if len(keys) == 1 or sum(map(len, keys)) == len(set[str]().union(*keys)):  # as they mostly are: no key twice
            return sum(table.count(table.index[task_id, fence]) for table in tables)
        return len(set[str]().union(*[table.checksums(table.index[task_id, fence]) for table in tables]))

    def _order_of(self, table: Table) -> OrderedDict[str, None]:
        return self._movable[all(task_id.startswith(_WEIGHTS) for task_id in table.task_ids)]

    def _forget_tombstones(self) -> None:
        """Keep the list bounded; a tombstone that a file on disk could contradict after a restart stays."""
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
        # some slack, so that this sweep is not needed at every clear
        for task_id in spare[: len(self.tombstones) - MAX_TOMBSTONES * 15 // 16]:
            del self.tombstones[task_id]
