"""Where shards lie, the room in each store, and the clears that stores have yet to acknowledge. The module is pure.

The room in different stores is not added up, because each put goes into a single store: rollouts, references and
trainer ranks put their shards into their host's store, and weights are put into `TRAINER_STORE`. The bytes counted here
are an upper bound on the bytes that a store holds.

A clear names `(task, fence)`: the store writes a tombstone and deletes every shard of the task up to that fence. No
clear is lost or reordered: each is kept until its store acknowledges it or is gone for good.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from proto.messages import PutTask, Register, ReleaseShards, WeightsRef
from services.scheduler.holds import Holds
from services.scheduler.leases import Holder
from services.scheduler.plan import Plan
from services.scheduler.registry import STORE, Registry
from services.scheduler.tasks import Task
from shared.rundir import parse_service_name, service_name
from shared.topology import TRAINER_STORE

FORERUNNERS = 2
"""Maximum number of stores that a store tries for a version before the trainer's store."""
MAX_CLEARS = 1000
"""Maximum number of clears in one message."""

QueuedClear = tuple[str, int, bool]
"""Task id, fence, and whether this is the last clear. The task is COLLECTED once all stores have acknowledged its last
clear."""


class ClearQueues:
    """Clears by store, oldest first."""

    def __init__(self) -> None:
        self.queues: dict[str, deque[QueuedClear]] = {}
        self._changed: dict[str, None] = {}
        """Stores whose next clears may have changed since the last call of `take_changed`."""

    def add_store(self, store: str) -> None:
        self.queues.setdefault(store, deque())

    def remove_store(self, store: str) -> None:
        """Remove the queue of a store that is gone. First call `pop` to take the remaining clears."""
        del self.queues[store]
        self._changed.pop(store, None)

    def take_changed(self) -> list[str]:
        """Return the stores whose next clears may have changed since the last call."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def push(self, entry: QueuedClear, stores: Iterable[str]) -> None:
        """Queue a clear for each of these stores. Unknown stores are skipped, because reconciliation clears what they
        hold."""
        for store in stores:
            if store in self.queues:
                self.queues[store].append(entry)
                self._changed[store] = None

    def head(self, store: str) -> list[PutTask]:
        """Return the clears to send next, at most MAX_CLEARS."""
        return [PutTask(task_id, fence) for task_id, fence, _ in islice(self.queues[store], MAX_CLEARS)]

    def pop(self, store: str, count: int) -> list[QueuedClear]:
        queue = self.queues[store]
        self._changed[store] = None
        return [queue.popleft() for _ in range(min(count, len(queue)))]

    def extend(self, store: str, entries: Iterable[QueuedClear]) -> None:
        """Append entries from a snapshot to the queue of a store."""
        self.add_store(store)
        self.queues[store].extend(entries)
        self._changed[store] = None


class StoredShards:
    """The stores of a run: what is registered, what lies where, what must be cleared, and what is waiting for a
    checkpoint."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.registry = Registry()
        self.clears = ClearQueues()
        self.holds = Holds()
        self.store_names: list[str] = []
        """The stores by the index with which tasks refer to them."""
        self.gone: dict[str, str] = {}
        """The `data_id` of each joined store that is gone for good."""
        self.uncovered: dict[str, int] = {}
        """Bytes of trained tasks that wait for a checkpoint, by store."""
        self.trainer_stores: tuple[str, ...] = (TRAINER_STORE,)
        """The stores into which trainer ranks put log-probs."""

    def saved(self) -> dict[str, Any]:
        """Return the values that a snapshot stores unchanged."""
        names = {"uncovered": self.uncovered, "gone": self.gone, "store_names": self.store_names}
        return names | {"holds": self.holds.saved()}

    def restore(self, saved: dict[str, Any], registry: Iterable[Register]) -> None:
        """Replace the whole content with that of a snapshot, except the clears."""
        self.uncovered, self.gone, self.store_names = saved["uncovered"], saved["gone"], saved["store_names"]
        self.holds.restore(saved["holds"])
        for row in registry:
            self.registry.put(row)
        self.trainer_stores = self._find_trainer_stores()

    # ---- stores

    def register(self, request: Register) -> bool:
        """Register a new life of an instance. Return whether it is a store that lacks data that the run still needs."""
        holder = (request.service, request.instance)
        name, old = service_name(*holder), self.registry.get(holder)
        self.registry.put(request)
        if request.service != STORE:
            return False
        if old is not None:
            return old.data_id != request.data_id
        return self.gone.pop(name, request.data_id) != request.data_id and name in self.uncovered

    def remove_store(self, store: str) -> Register | None:
        """Remove a joined store that is gone for good, and return its registration, or None if it is not registered.

        The caller first takes its pending clears.
        """
        row = self.registry.remove(parse_service_name(store))
        if row is not None:
            self.gone[store] = row.data_id
        return row

    def index(self, store: str) -> int:
        """Return the index by which tasks refer to a store."""
        if store not in self.store_names:
            self.store_names.append(store)
        return self.store_names.index(store)

    def stores_of(self, holder: Holder) -> list[str]:
        """Return the stores on the host of `holder`, or all stores if that host has none."""
        row = self.registry.get(holder)
        there = self.registry.on_host(row.host_id) if row is not None else []
        return [service_name(*other) for other in there if other[0] == STORE] or list(self.registry.stores)

    def holders_without_store(self, host_id: str) -> set[Holder]:
        """Return all holders on a host, or an empty set if the host has a store."""
        there = set(self.registry.on_host(host_id))
        return set() if any(service == STORE for service, _ in there) else there

    def _is_away(self, store: str) -> bool:
        """Return whether a store is, or might be, on a host other than the trainer's, and so might hold copies of
        versions."""
        home, row = self.registry.stores.get(TRAINER_STORE), self.registry.stores.get(store)
        return row is not None and row is not home and (home is None or row.host_id != home.host_id)

    def away_stores(self) -> list[str]:
        """Return the stores on hosts other than the trainer's."""
        return [store for store in self.registry.stores if self._is_away(store)]

    def upstream(self, store: Holder, is_present: Callable[[Holder], bool]) -> list[str]:
        """Return up to `FORERUNNERS` stores that `store` tries for weights before the trainer's store, nearest first.

        The stores on hosts other than the trainer's form a chain in the order of their numbers, so that each host sends
        a version once. A host with two successors would need twice as long to serve both (tests/bench/relay.py).
        """
        if not self._is_away(service_name(*store)):
            return []
        before = ((STORE, number) for number in range(store[1] - 1, -1, -1))
        names = (service_name(*holder) for holder in before if holder in self.registry and is_present(holder))
        return list(islice((name for name in names if self._is_away(name)), FORERUNNERS))

    def note_trainer_stores(self, trained: Iterable[Task]) -> None:
        """Bring `trainer_stores` up to date.

        If the stores have changed, recount the bytes of the `trained` tasks, which are waiting for a checkpoint.
        """
        stores = self._find_trainer_stores()
        if stores != self.trainer_stores:
            self.trainer_stores = stores
            self.uncovered = dict(self.held_by(trained))

    def _find_trainer_stores(self) -> tuple[str, ...]:
        if not self._plan.unleased_token_bytes:
            return (TRAINER_STORE,)
        hosts = {self.registry[rank].host_id for rank in self.registry.ranks}
        there = (holder for host in hosts for holder in self.registry.on_host(host) if holder[0] == STORE)
        return tuple(sorted({TRAINER_STORE, *(service_name(*holder) for holder in there)}))

    # ---- shards of tasks

    def lies_in(self, task: Task, store: str) -> bool:
        """Return whether the store holds shards of the task's accepted results."""
        for part in task.parts:  # noqa: SIM110  # called for every live task when a store is lost: a generator takes longer
            if part is not None and self.store_names[part.store] == store:
                return True
        return False

    def held_by(self, tasks: Iterable[Task]) -> Counter[str]:
        """Return the maximum number of bytes that trained tasks take up in each store. Any rank may have put the
        log-probs of a task."""
        plan = self._plan
        held: Counter[str] = Counter()
        for task in tasks:
            stores = {part.store for part in task.made}
            for part in task.made:
                held[self.store_names[part.store]] += part.nbytes
            for store in stores:
                held[self.store_names[store]] += plan.overhead_bytes
            for name in self.trainer_stores if plan.unleased_token_bytes else ():
                if all(self.store_names[store] != name for store in stores):
                    held[name] += plan.overhead_bytes
                held[name] += task.tokens * plan.unleased_token_bytes
        return held

    def count_uncovered(self, tasks: Iterable[Task], sign: int) -> None:
        """Add the bytes of trained tasks that no checkpoint covers yet, or subtract them if `sign` is -1."""
        for store, nbytes in self.held_by(tasks).items():
            self.uncovered[store] = self.uncovered.get(store, 0) + sign * nbytes
            if not self.uncovered[store]:
                del self.uncovered[store]

    @property
    def uncovered_bytes(self) -> int:
        """Bytes of trained tasks that are waiting for a checkpoint, across all stores."""
        return sum(self.uncovered.values())

    # ---- clears

    def clear(self, task: Task, holder: Holder | None, *, last: bool) -> int:
        """Clear the shards made under the task's fence, and return the number of acknowledgements to wait for.

        The clear goes to the stores that hold the task's results, to those of the `holder` of its lease, and to those
        of the trainer's ranks. Shards elsewhere (a late put from an earlier attempt) are strays, which reconciliation
        finds.
        """
        if len(self.clears.queues) > 1:
            may = dict.fromkeys([*self.trainer_stores, *(self.store_names[part.store] for part in task.made)])
            if holder is not None:
                may |= dict.fromkeys(self.stores_of(holder))
            stores = [store for store in may if store in self.clears.queues]
        else:
            stores = list(self.clears.queues)
        self.clears.push((task.task_id, task.fence, last), stores)
        return len(stores)

    def release(self, request: ReleaseShards) -> bool:
        """End a hold and clear its shards. Return False if nothing is held."""
        released = self.holds.release(request)
        for task in released:
            self.clears.push((task.task_id, task.fence, False), self.clears.queues)
        return bool(released)

    def clear_version(self, ref: WeightsRef) -> None:
        """Clear a version's shards and its copies."""
        self.clears.push((ref.task_id, ref.fence, False), [ref.store, *self.away_stores()])

    # ---- room

    @property
    def limit_bytes(self) -> int:
        """Sum of the limits of all stores, for display only: no single put can use all of it."""
        return sum(row.limit_bytes for row in self.registry.stores.values())

    def room(self, versions_bytes: int) -> Iterator[tuple[str, int]]:
        """Yield each store with the number of bytes within its limit that are not reserved.

        Bytes are reserved for weight versions, for samples to record and, in the stores of the trainer ranks, for a
        step that is replayed.
        """
        for store, row in self.registry.stores.items():
            reserved = self._plan.record_bytes + (self._plan.replay_bytes if store in self.trainer_stores else 0)
            if store == TRAINER_STORE or self._is_away(store):
                reserved += versions_bytes
            yield store, row.limit_bytes - reserved
