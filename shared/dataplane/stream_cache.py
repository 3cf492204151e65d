"""Which shards of other hosts' stores are here or on their way. Bounded; it must never give out what was cleared.

Plain data of one event loop: no I/O, no clock. A shard is under way in a `Load` or here in an `Arrived`; whoever wants
one that another fetch has asked for waits for that one's load. Least recently fetched streams leave first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proto.messages import Cleared, PutTask
from shared.dataplane.stream_arrival import Arrived

if TYPE_CHECKING:
    from shared.dataplane.stream import Load

EVERY_KEY = "*"
"""Stands for all shards of a task in a fetch that names none."""


@dataclass(slots=True)
class StoreCopies:
    """What is here of one store, as of `serial` of its list of clears."""

    log: int = 0
    serial: int = 0
    tasks: dict[str, dict[int, dict[str, Load | Arrived]]] = field(default_factory=dict)
    """task id -> fence -> key -> where."""


class StreamCache:
    """Belongs to one event loop."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._stores: dict[str, StoreCopies] = {}
        self._kept: OrderedDict[Arrived, tuple[str, int]] = OrderedDict()
        """Oldest fetch first; with the store's name and how many of its tasks are not cleared."""
        self.nbytes = 0
        """Bytes that this cache keeps; those that only a fetch's arrays keep are not its own."""

    def store(self, name: str) -> StoreCopies:
        """The state of one store."""
        state = self._stores.get(name)
        if state is None:
            state = self._stores[name] = StoreCopies()
        return state

    def holds(self, name: str) -> bool:
        """Is anything of the store kept?"""
        return any(store == name for store, _ in self._kept.values())

    def shards(self, store: str, task: PutTask) -> dict[str, Load | Arrived]:
        """What is known of the shards of one task, by key."""
        return self.store(store).tasks.get(task.task_id, {}).get(task.fence, {})

    def expect(self, store: str, tasks: Iterable[PutTask], keys: Sequence[str], load: Load) -> None:
        """`load` is about to fetch these shards (no keys: all of each task)."""
        held = self.store(store).tasks
        for task in tasks:
            shards = held.setdefault(task.task_id, {}).setdefault(task.fence, {})
            for key in keys or (EVERY_KEY,):
                shards[key] = load

    def forget(self, store: str, tasks: Iterable[PutTask], load: Load) -> None:
        """`load` is over: what is still expected of it will not come."""
        for task in tasks:
            shards = self.shards(store, task)
            gone = [key for key, where in shards.items() if where is load]
            for key in gone:
                del shards[key]
            if gone and not shards:
                self._drop_fence(store, task)

    def keep(self, store: str, tasks: Sequence[PutTask], keys: Sequence[str], load: Load, arrived: Arrived) -> None:
        """`load` brought these tasks. What was cleared meanwhile is not kept."""
        if arrived.nbytes > self._limit_bytes:
            return
        alive = 0
        for task in tasks:
            shards = self.shards(store, task)
            mine = [key for key in keys or (EVERY_KEY,) if shards.get(key) is load]
            for key in mine:
                shards[key] = arrived
            alive += bool(mine)
        if not alive:
            return
        self._kept[arrived] = (store, alive)
        self.nbytes += arrived.nbytes
        while self.nbytes > self._limit_bytes:
            self._evict(next(iter(self._kept)))

    def used(self, arrived: Arrived) -> None:
        """A fetch took something from it."""
        if arrived in self._kept:
            self._kept.move_to_end(arrived)

    def apply(self, store: str, cleared: Cleared) -> None:
        """Drop what the store has cleared; all of it when the store cannot say."""
        state = self.store(store)
        if cleared.log == state.log and cleared.serial <= state.serial:
            return  # an older answer that came late
        if not cleared.whole or cleared.log != state.log:
            self.drop_store(store)
            state.log, state.serial = cleared.log, cleared.serial
            return
        state.serial = cleared.serial
        for task in cleared.tasks:
            fences = state.tasks.get(task.task_id, {})
            for fence in [fence for fence in fences if fence <= task.fence]:
                for where in set(fences.pop(fence).values()):
                    self._less(where)
            if not fences:
                state.tasks.pop(task.task_id, None)

    def drop_store(self, store: str) -> None:
        """Nothing of this store is known any more."""
        self.store(store).tasks.clear()
        for arrived in [arrived for arrived, (name, _) in self._kept.items() if name == store]:
            del self._kept[arrived]
            self.nbytes -= arrived.nbytes

    def _less(self, where: Load | Arrived) -> None:
        """One task less that `where` holds; without any it goes."""
        if isinstance(where, Arrived) and where in self._kept:
            store, alive = self._kept[where]
            self._kept[where] = (store, alive - 1)
            if alive == 1:
                del self._kept[where]
                self.nbytes -= where.nbytes

    def _evict(self, arrived: Arrived) -> None:
        store, _ = self._kept.pop(arrived)
        self.nbytes -= arrived.nbytes
        for task_id, fence in zip(arrived.table.task_ids, arrived.table.fences, strict=True):
            task = PutTask(task_id, fence)
            shards = self.shards(store, task)
            for key in [key for key, where in shards.items() if where is arrived]:
                del shards[key]
            if not shards:
                self._drop_fence(store, task)

    def _drop_fence(self, store: str, task: PutTask) -> None:
        tasks = self.store(store).tasks
        fences = tasks.get(task.task_id)
        if fences is not None:
            fences.pop(task.fence, None)
            if not fences:
                del tasks[task.task_id]
