"""Which shards of other hosts' stores are here or on their way. Bounded; it must never give out what was cleared.

Plain data of one event loop: no I/O, no clock. A shard is under way in a `Load` or here in an `Arrived`; whoever wants
one that another fetch has asked for waits for that one's load. Least recently fetched streams leave first. Shards are
noted by the set that was fetched together, not one by one: a batch has tens of thousands.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from proto.messages import Cleared, PutTask
from shared.dataplane.stream_arrival import Arrived

if TYPE_CHECKING:
    from shared.dataplane.stream import Load


class Part(NamedTuple):
    """Shards of a task that came, or come, together. No keys: all there are, for a fetch that names none."""

    fence: int
    keys: tuple[str, ...]
    where: Load | Arrived


Source = tuple["Load | Arrived", tuple[str, ...]]
"""Where some keys of a wanted task are or will be."""
T = TypeVar("T")
_NOTHING: tuple[Part, ...] = ()


@dataclass(slots=True)
class StoreCopies:
    """What is here of one store, as of `serial` of its list of clears."""

    log: int = 0
    serial: int = 0
    tasks: dict[str, tuple[Part, ...]] = field(default_factory=dict)
    """What of each is here or comes; tasks that came together share one tuple."""


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

    def absent(
        self, store: str, tasks: Sequence[PutTask], keys: tuple[str, ...]
    ) -> list[tuple[str, ...] | None] | None:
        """Which of `keys` nobody has fetched or begun to fetch, for each task; None: none. No keys are themselves.

        None for the whole: all are absent of all tasks.
        """
        if self.store(store).tasks.keys().isdisjoint([task.task_id for task in tasks]):
            return None
        return self._of_each(store, tasks, lambda parts: _absent(parts, keys) if parts else keys)

    def sources(self, store: str, tasks: Sequence[PutTask], keys: tuple[str, ...]) -> list[list[Source]]:
        """For each task: where its `keys` are or will be, none being absent."""
        return self._of_each(store, tasks, lambda parts: _sources(parts, keys))

    def _of_each(self, store: str, tasks: Sequence[PutTask], of: Callable[[tuple[Part, ...]], T]) -> list[T]:
        """`of` what is known of each task; those that came together share it, and most of a batch did."""
        held = self.store(store).tasks
        known: dict[tuple[int, int], T] = {}
        found: list[T] = []
        for task in tasks:
            parts = held.get(task.task_id, _NOTHING)
            which = (id(parts), task.fence)
            if which not in known:
                known[which] = of(tuple([part for part in parts if part.fence == task.fence]))
            found.append(known[which])
        return found

    def expect(self, store: str, tasks: Sequence[PutTask], keys: tuple[str, ...], load: Load) -> None:
        """`load` is about to fetch these shards (no keys: all of each task)."""
        held = self.store(store).tasks
        alone = {fence: (Part(fence, keys, load),) for fence in {task.fence for task in tasks}}
        new = {task.task_id: alone[task.fence] for task in tasks}
        if len(new) == len(tasks) and held.keys().isdisjoint(new):
            held.update(new)
            return
        for task in tasks:
            held[task.task_id] = held.get(task.task_id, _NOTHING) + alone[task.fence]

    def forget(self, store: str, tasks: Sequence[PutTask], load: Load) -> None:
        """`load` is over: what is still expected of it will not come."""
        held = self.store(store).tasks
        names = [task.task_id for task in tasks]
        parts = list(map(held.get, names))
        first = parts[0]
        if first is not None and len(first) == 1 and first[0].where is load and parts.count(first) == len(set(names)):
            for name in names:  # nobody else has to do with any of them
                del held[name]
            return
        for name in names:
            _drop(held, name, load)

    def keep(self, store: str, tasks: Sequence[PutTask], keys: tuple[str, ...], load: Load, arrived: Arrived) -> bool:
        """`load` brought these tasks; False: they are not kept. What was cleared meanwhile is not.

        Of one load what comes first stays: it does not push out its own, for whoever repeats it begins there.
        """
        if load.kept_bytes + arrived.nbytes > self._limit_bytes:
            return False
        held = self.store(store).tasks
        alone = {fence: Part(fence, keys, arrived) for fence in {task.fence for task in tasks}}
        same: dict[tuple[int, int], tuple[tuple[Part, ...], tuple[Part, ...]]] = {}
        """By what was known of a task: that (so that nothing else gets its id) and what is known now."""
        alive = 0
        for task in tasks:
            parts = held.get(task.task_id, _NOTHING)
            which = (id(parts), task.fence)
            if which not in same:
                old = Part(task.fence, keys, load)
                same[which] = parts, tuple([alone[task.fence] if part == old else part for part in parts])
            now = same[which][1]
            if now != parts:
                alive += 1
                held[task.task_id] = now
        if not alive:
            return False
        self._kept[arrived] = (store, alive)
        self.nbytes += arrived.nbytes
        load.kept_bytes += arrived.nbytes
        while self.nbytes > self._limit_bytes:
            self._evict(next(iter(self._kept)))
        return True

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
            parts = state.tasks.get(task.task_id, _NOTHING)
            gone = {(part.fence, part.where) for part in parts if part.fence <= task.fence}
            if gone:
                _put(state.tasks, task.task_id, [part for part in parts if part.fence > task.fence])
            for _, where in gone:
                self._less(where)

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
        held = self.store(store).tasks
        for task_id in arrived.table.task_ids:
            _drop(held, task_id, arrived)


def _drop(held: dict[str, tuple[Part, ...]], task_id: str, where: Load | Arrived) -> None:
    """`where` has nothing of a task any more."""
    parts = held.get(task_id, _NOTHING)
    if len(parts) == 1 and parts[0].where is where:
        del held[task_id]
    elif parts:
        _put(held, task_id, [part for part in parts if part.where is not where])


def _put(held: dict[str, tuple[Part, ...]], task_id: str, parts: list[Part]) -> None:
    if parts:
        held[task_id] = tuple(parts)
    else:
        held.pop(task_id, None)


def _absent(parts: Sequence[Part], keys: tuple[str, ...]) -> tuple[str, ...] | None:
    """What of `keys` nobody has fetched or begun to fetch; None: nothing. No keys stand for themselves."""
    if any(part.keys == keys for part in parts):
        return None
    lacking = tuple(key for key in keys if not any(key in part.keys for part in parts))
    return lacking if lacking or not keys else None


def _sources(parts: Sequence[Part], keys: tuple[str, ...]) -> list[Source]:
    """Where each of `keys` is, none being absent."""
    for part in parts:
        if part.keys == keys:
            return [(part.where, keys)]
    by_part: dict[Part, list[str]] = {}
    for key in keys:
        by_part.setdefault(next(part for part in parts if key in part.keys), []).append(key)
    return [(part.where, tuple(mine)) for part, mine in by_part.items()]
